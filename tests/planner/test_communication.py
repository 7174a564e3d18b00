"""Times of exchanges against hand calculations."""

import pytest

from mgpu_tf.errors import ConfigurationError
from mgpu_tf.planner.devices import DEVICES, LINKS, Efficiencies, Link, link
from mgpu_tf.planner.speed.communication import Network
from mgpu_tf.planner.speed.weak_scaling import efficiency

FAST, SLOW = Link("fast", 100e9, 0.0), Link("slow", 1e9, 0.0)


def network(per_node=4, nodes=1, fast=FAST, slow=SLOW):
    return Network(per_node, nodes, fast, slow, efficiency=1.0)


def test_a_sum_sends_twice_the_bytes_less_one_part():
    assert network().all_reduce(4e9, 4) == pytest.approx(2 * 3 / 4 * 4e9 / 1e11)
    assert network().all_gather(4e9, 4) == pytest.approx(3 / 4 * 4e9 / 1e11)
    assert network().all_reduce(4e9, 1) == 0


def test_the_slower_link_decides_between_machines():
    several = network(nodes=2)
    assert several.all_reduce(4e9, 8) == pytest.approx(2 * 7 / 8 * 4e9 / 1e9)
    assert several.all_reduce(4e9, 4) == network().all_reduce(4e9, 4)
    assert several.crosses(8) and not several.crosses(4)
    # Two devices, one in each machine; the other groups share the link.
    assert several.all_reduce(4e9, 2, stride=4) == pytest.approx(4 * 4e9 / 1e9)


def test_latency_counts_messages_of_a_ring_or_a_tree():
    late = Link("late", 1e30, 1e-3)
    times = {
        n: network(n, fast=late).all_reduce(1.0, n) for n in (2, 4, 8, 1024)
    }
    assert times[2] == pytest.approx(2e-3)
    assert times[4] == pytest.approx(6e-3)
    assert times[8] == pytest.approx(12e-3)
    assert times[1024] == pytest.approx(40e-3)


@pytest.mark.parametrize(
    ("name", "rate"),
    [("25gbe", 25e9 / 8), ("100mbit", 1e8 / 8), ("1.5Gbit", 1.5e9 / 8)],
)
def test_links_by_their_rate(name, rate):
    assert link(name).bytes_per_second == pytest.approx(rate)


@pytest.mark.parametrize("name", ["fast", "25", "0gbe", "-1gbe", "gbe"])
def test_what_is_no_link(name):
    with pytest.raises(ConfigurationError, match="interconnect must be"):
        link(name)


def test_every_device_has_its_link_and_rates():
    for device in DEVICES.values():
        assert device.inside in LINKS
        mixed = device.rate("mixed_bfloat16")
        assert mixed >= device.rate("float32") >= device.vector_rate() > 0
        assert device.memory_bytes > 1 << 30


def test_efficiency_of_weak_scaling():
    exact = Efficiencies(overlap=0.0, deviation=0.0)
    # 1 s of computing, and 2 x 3/4 x 1e9 bytes at 1e9 per second.
    slow = Network(1, 4, FAST, SLOW, efficiency=1.0)
    assert efficiency(1.0, 1e9, 4, slow, exact) == pytest.approx(1 / 2.5)
    hidden = Efficiencies(overlap=1.0, deviation=0.0)
    assert efficiency(1.0, 1e9, 4, slow, hidden) == pytest.approx(
        1 / (1 + 1.5 - 2 / 3)
    )
    assert efficiency(1.0, 1e9, 1, slow, exact) == 1
