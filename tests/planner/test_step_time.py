"""Times of steps against hand calculations."""

import dataclasses

import pytest

from mgpu_tf.planner.devices import Device, Efficiencies, Link
from mgpu_tf.planner.layout import Layout
from mgpu_tf.planner.speed.step_time import Machines, passes, step_time
from tests.planner.graphs import dense_graph

# Nothing is lost: one operation a second, bytes for nothing.
PERFECT = Efficiencies(
    products=1.0,
    memory=1.0,
    overhead_seconds=0.0,
    step_seconds=0.0,
    overlap=0.0,
    deviation=0.0,
    link=1.0,
)
DEVICE = Device("one", 1e12, 1e30, {"float32": 1.0}, efficiencies=PERFECT)
FREE = Link("free", 1e30, 0.0)


def machines(devices=1, between=FREE, nodes=1, **reached):
    device = dataclasses.replace(
        DEVICE, efficiencies=dataclasses.replace(PERFECT, **reached)
    )
    return Machines(device, devices, nodes, between, FREE)


def seconds(layout, batch=64, where=None, widths=(64,) * 5):
    where = where or machines(layout.devices)
    return step_time(dense_graph(widths), layout, batch, where)


def test_arithmetic_of_a_step():
    found = seconds(Layout())
    products = 2 * 64 * 64 * 64
    # Four layers: forward, gradients of weights, and of inputs but the first.
    assert found.computing == pytest.approx((4 + 4 + 3) * products, rel=1e-6)
    assert found.limited_by == "computing"


def test_replicas_divide_the_rows():
    one = seconds(Layout(), 64)
    four = seconds(Layout(4), 64)
    assert four.computing == pytest.approx(one.computing / 4, rel=1e-6)


def test_recomputing_adds_a_forward_pass():
    graph, where = dense_graph((64,) * 5), machines()
    forward, backward = passes(graph, Layout(), 64, where)
    again = step_time(graph, Layout(recompute="layers"), 64, where)
    expected = 2 * forward.seconds + backward.seconds
    assert again.computing == pytest.approx(expected, rel=0.01)


def test_recomputing_adds_sums_between_layers_in_parts():
    slow = Link("slow", 1.0, 0.0)
    where = dataclasses.replace(machines(2), inside=slow)
    once = seconds(Layout(tensor=2), 64, where)
    again = seconds(Layout(tensor=2, recompute="layers"), 64, where)
    assert once.communication > 0
    assert again.communication == pytest.approx(1.5 * once.communication)


def test_gradients_go_through_the_link_of_a_machine():
    slow = Link("slow", 1.0, 0.0)
    where = machines(1, slow, nodes=4)
    found = seconds(Layout(4), 64, where)
    assert found.communication == pytest.approx(
        2 * 3 / 4 * 4 * 64 * 64 * 4, rel=1e-6
    )


def test_what_is_exchanged_hides_behind_the_backward_pass():
    slow = Link("slow", 1.0, 0.0)
    where = machines(1, slow, nodes=4, overlap=1.0)
    wide = seconds(Layout(4), 64, where, (512,) * 5)
    # Kernels of 1 MiB go alone. Nothing is left to hide the last behind.
    each = 2 * 3 / 4 * 512 * 512 * 4
    assert wide.hidden == pytest.approx(3 * each, rel=1e-6)
    assert wide.communication == pytest.approx(each, rel=1e-6)
    assert seconds(Layout(4), 64, where).hidden == 0  # One pack for all.


def test_a_pipeline_waits():
    found = seconds(Layout(pipeline=4, micro_batches=4))
    work = found.computing + found.memory
    assert found.bubble == pytest.approx(work * 3 / 4, rel=1e-3)


def test_stages_of_several_machines_send_over_the_link_between_them():
    slow = Link("slow", 1.0, 0.0)
    layout = Layout(pipeline=2, micro_batches=4)
    within = seconds(layout, 64, machines(2, slow, nodes=2))
    across = seconds(layout, 64, machines(1, slow, nodes=2))
    # Layers make 64 numbers of 4 bytes for each of 16 rows.
    sent = 2 * (1 + 3) * 16 * 64 * 4
    assert within.communication < 1e-3 * sent
    assert across.communication == pytest.approx(sent, rel=1e-2)


def test_stragglers_input_and_parts_of_one_cpu():
    late = seconds(Layout(4), 64, machines(4, deviation=0.1))
    assert late.stragglers / late.computing == pytest.approx(0.1665, rel=1e-3)
    where = dataclasses.replace(machines(), input_examples_per_second=1e-9)
    assert seconds(Layout(), 64, where).limited_by == "input"
    shared = dataclasses.replace(machines(4), sharing=4)
    assert seconds(Layout(4), 64, shared).computing == pytest.approx(
        seconds(Layout()).computing, rel=1e-6
    )


def test_accumulation_exchanges_once():
    slow = Link("slow", 1.0, 0.0)
    where = machines(1, slow, nodes=4)
    once = seconds(Layout(4, accumulation=4), 64, where)
    assert once.communication == seconds(Layout(4), 64, where).communication


def test_more_devices_never_compute_longer():
    times = [
        seconds(Layout(2**power), 4096, machines(8, nodes=512)).computing
        for power in range(13)
    ]
    assert times == sorted(times, reverse=True)
    assert times[0] / times[-1] == pytest.approx(4096, rel=0.01)
