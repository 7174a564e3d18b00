"""Candidates, their order, and what is said of them."""

import dataclasses
import json

import pytest

from mgpu_tf.errors import ConfigurationError
from mgpu_tf.planner import Machines, plan
from mgpu_tf.planner.choice import page
from mgpu_tf.planner.choice.candidates import layouts
from mgpu_tf.planner.devices import Link, device, link
from mgpu_tf.planner.layout import Layout
from mgpu_tf.planner.memory.per_device import memory_of
from tests.planner.graphs import dense_graph

A100 = device("a100-40gb")
WIDE = (2048,) * 9
GRAPH = dense_graph(WIDE)


def machines(devices=4, nodes=1, **options):
    return Machines(A100, devices, nodes, link("100gbe"), **options)


def test_candidates_are_those_that_the_engine_takes():
    found = list(layouts(machines(8), 256, GRAPH))
    assert len(set(found)) == len(found)
    assert {layout.devices for layout in found} == {1, 2, 4, 8}
    axes = {(x.data, x.fsdp, x.tensor, x.pipeline) for x in found}
    assert {(8, 1, 1, 1), (1, 8, 1, 1), (2, 1, 4, 1), (1, 1, 1, 8)} <= axes
    assert (2, 2, 1, 2) in axes
    assert {(2, 1, 2, 2), (1, 2, 2, 2)} <= axes
    again = {x.tensor for x in found if x.recompute == "layers"}
    assert again == {1, 2, 4, 8}


def test_several_machines_have_long_pipelines_and_no_wide_tensor_axis():
    found = list(layouts(machines(2, 4), 256, GRAPH, all_devices=True))
    assert {layout.devices for layout in found} == {8}
    assert {layout.pipeline for layout in found} == {1, 2, 4, 8}
    assert max(layout.tensor for layout in found) == 2
    assert not {x.pipeline for x in found if x.tensor > 1} - {1}
    found = list(layouts(machines(4, 2), 256, GRAPH, all_devices=True))
    both = {(x.tensor, x.pipeline) for x in found if x.tensor > 1}
    assert both == {(2, 1), (2, 2), (4, 1)}
    # With 3 devices each, no machine has 2 stages of every pipeline.
    found = list(layouts(machines(3, 2), 256, GRAPH, all_devices=True))
    assert {layout.pipeline for layout in found} == {1, 3, 6}


def test_no_pipeline_has_more_stages_than_the_engine_can_cut():
    graph = dataclasses.replace(GRAPH, stages=2)
    found = list(layouts(machines(8), 64, graph))
    assert {layout.pipeline for layout in found} == {1, 2}


def test_machines_of_one_device_divide_layers_between_them():
    found = list(layouts(machines(1, 2), 64, GRAPH))
    axes = {(x.data, x.fsdp, x.tensor, x.pipeline) for x in found}
    assert axes == {
        *[(1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 1, 1)],
        *[(1, 1, 2, 1), (1, 1, 1, 2)],
    }


def test_every_replica_gets_a_row():
    assert {x.replicas for x in layouts(machines(8), 2, GRAPH)} == {1, 2}
    with pytest.raises(ConfigurationError, match="global_batch_size"):
        plan(GRAPH, 0, machines(8))


def test_the_fastest_that_fits_is_best():
    found = plan(GRAPH, 4096, machines())
    fitting = [each for each in found.candidates if each.fits]
    fastest = max(each.examples_per_second for each in fitting)
    assert found.best.fits
    assert found.best.examples_per_second >= 0.95 * fastest
    rest = [each.fits for each in found.candidates]
    assert rest == sorted(rest, reverse=True)


def test_what_does_not_fit_whole_is_split():
    whole = memory_of(GRAPH, Layout(4), 256).largest.total
    found = plan(GRAPH, 256, machines(), memory_bytes=0.7 * whole)
    assert found.best.fits
    assert found.best.layout.fsdp * found.best.layout.tensor > 1 or (
        found.best.layout.pipeline > 1
    )
    assert "lacks" in found.why or "; " in found.why
    mirrored = [
        each
        for each in found.candidates
        if each.layout == Layout(4) and not each.fits
    ]
    assert mirrored


def test_nothing_fits():
    found = plan(GRAPH, 256, machines(), memory_bytes=1000)
    assert not found.best.fits
    assert found.why.startswith("No layout of 4 devices fits")
    assert "lacks" in page.text(found)


def test_it_says_when_more_devices_do_not_pay():
    slow = Machines(A100, 1, 8, Link("slow", 1e6, 1e-3))
    found = plan(GRAPH, 64, slow)
    assert found.best.layout.devices == 1
    assert any(text.startswith("2 devices do only 0.") for text in found.advice)
    assert "of their speed" in found.advice[-1]


def test_machines_that_share_one_cpu_are_not_used():
    shared = Machines(device("cpu"), 4, sharing=4)
    assert plan(GRAPH, 64, shared).best.layout == Layout()


def test_json_has_what_is_promised():
    found = plan(GRAPH, 256, machines(price=2.0))
    value = json.loads(json.dumps(found.to_dict()))
    first = value["candidates"][0]
    assert {
        "strategy",
        "options",
        "memory_bytes_per_device",
        "fits",
        "examples_per_second",
        "speedup",
        "efficiency",
        "limited_by",
    } <= set(first)
    best = found.best
    assert first["price_per_million_examples"] == pytest.approx(
        2.0 * best.layout.devices / 3600 / best.examples_per_second * 1e6
    )
    parts = sum(first["memory_bytes_by_kind"].values())
    assert parts == pytest.approx(first["memory_bytes_per_device"], abs=20)
    alone = next(
        c for c in value["candidates"] if c["options"] == {"devices": 1}
    )
    assert alone["speedup"] == pytest.approx(1.0)


def test_the_page_is_whole_and_tells_the_reason():
    found = plan(GRAPH, 256, machines())
    html = page.page(found)
    assert html.count("<svg") == html.count("</svg>") == 2
    assert found.why.split(":")[0] in html
    assert "http" not in html.replace("http://www.w3.org/2000/svg", "")
    text = page.text(found)
    assert text.splitlines()[0].startswith("chain, ")
    assert found.why in text
