"""One line for a step that does not fit: what takes the memory, what helps.

    explain(build_model, layout, 256)

This module imports TensorFlow when a model is traced, and not before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from mgpu_tf.errors import ConfigurationError
from mgpu_tf.planner.layout import Layout
from mgpu_tf.planner.memory.per_device import graph_of, memory_of
from mgpu_tf.planner.operations import splits
from mgpu_tf.planner.operations.graph import Graph

if TYPE_CHECKING:
    import keras

_MIB = 1 << 20
_LISTED = 3
_MOST_PARTS = 8


@dataclasses.dataclass(frozen=True)
class Remedy:
    """Something that takes less memory.

    Attributes:
        words: What to write.
        saves: Bytes that it saves on each device.
    """

    words: str
    saves: float


def explain(
    build_model: Callable[[], keras.Model] | Graph,
    layout: Layout,
    global_batch_size: int,
) -> str:
    """Returns the line for a step that has run out of memory.

    Args:
        build_model: Returns a compiled model; or a graph of `trace`.
        layout: How it was laid out.
        global_batch_size: Rows of a step; 0 where they are not known.
    """
    known = (
        f"global_batch_size={global_batch_size}"
        if global_batch_size
        else ("a batch of unknown size")
    )
    try:
        if not global_batch_size:
            raise ConfigurationError("")
        graph = graph_of(build_model)
        largest = memory_of(graph, layout, global_batch_size).largest
    except (ConfigurationError, MemoryError, ValueError, RuntimeError):
        return (
            f"A device has no room for a step. Received: {known} on {layout}. "
            "Use --auto_micro_batch, a smaller batch, or mixed_bfloat16."
        )
    takers = sorted(
        largest.by_kind.items(), key=lambda pair: pair[1], reverse=True
    )
    taken = ", ".join(
        f"{kind} {_mib(size)}" for kind, size in takers[:_LISTED] if size >= 1
    )
    every = remedies(graph, layout, global_batch_size)
    ways = sorted(
        (remedy for remedy in every if remedy.saves > 0),
        key=lambda remedy: remedy.saves,
        reverse=True,
    )
    listed = "; ".join(
        f"{way.words} saves {_mib(way.saves)}" for way in ways[:_LISTED]
    )
    return (
        f"A device has no room for a step. Received: {known} on {layout}, "
        f"which takes about {_mib(largest.total)} of each device: {taken}. "
        f"Remedies: {listed}."
    )


def remedies(
    graph: Graph, layout: Layout, global_batch_size: int
) -> Iterator[Remedy]:
    """Yields what would take less memory, and how much less.

    Args:
        graph: A traced model.
        layout: How it was laid out.
        global_batch_size: Rows of a step.
    """
    now = memory_of(graph, layout, global_batch_size).largest

    def saved(other: Layout, batch: int = global_batch_size) -> float:
        return now.total - memory_of(graph, other, batch).largest.total

    rows = layout.rows(global_batch_size)
    # Parts are as many times fewer rows at a time, and no accumulator beside
    # the gradients themselves.
    parts = min(_MOST_PARTS, rows)
    if layout.pipeline == 1 and parts > 1:
        fewer = max(layout.replicas, global_batch_size // parts)
        yield Remedy(
            f"--auto_micro_batch (such as step_parts={parts})",
            saved(layout, fewer),
        )
    elif layout.pipeline > 1 and 2 * layout.parts <= rows:
        more = dataclasses.replace(layout, micro_batches=2 * layout.parts)
        yield Remedy(f"micro_batches={2 * layout.parts}", saved(more))
    if rows > 1:
        half = max(layout.replicas * layout.parts, global_batch_size // 2)
        yield Remedy(f"global_batch_size={half}", saved(layout, half))
    if not layout.recomputes and layout.recompute is None:
        kind = "stages" if layout.pipeline > 1 else "layers"
        again = dataclasses.replace(layout, recompute=kind)
        yield Remedy(f"recompute={kind!r}", saved(again))
    if layout.fsdp == 1 and layout.tensor == 1 and layout.pipeline == 1:
        count = layout.data if layout.data > 1 else 2
        split = dataclasses.replace(
            layout, data=1, fsdp=count, num_ps=0, central=False
        )
        batch = global_batch_size * split.replicas // layout.replicas
        name = f"the strategy 'fsdp' on {count} devices"
        yield Remedy(name, saved(split, batch))
    if (
        layout.tensor > 1
        and not layout.sequence_parallel
        and splits.sequence_tensors(graph)
    ):
        parts_of_it = dataclasses.replace(layout, sequence_parallel=True)
        yield Remedy("sequence_parallel=True", saved(parts_of_it))
    floating = sum(
        now.by_kind.get(kind, 0.0)
        for kind in ("activations", "micro-batches", "temporary")
    )
    if all(t.itemsize == 4 for t in graph.tensors if t.floating and t.has_rows):
        yield Remedy("the policy 'mixed_bfloat16'", floating / 2)


def layout_here(strategy: Any, options: Any) -> Layout:
    """Returns the layout of a strategy and options of steps.

    Args:
        strategy: A strategy that `create_strategy` made.
        options: `StepOptions`.
    """
    mesh = getattr(strategy, "mesh", None)
    if mesh is None:
        return Layout(
            strategy.num_replicas_in_sync, recompute=options.recomputes_all
        )
    return Layout(
        mesh.data,
        mesh.fsdp,
        mesh.tensor,
        mesh.pipeline,
        shard=getattr(strategy, "shard", "weights"),
        micro_batches=getattr(strategy, "micro_batches", None),
        schedule=getattr(strategy, "schedule", "1f1b"),
        recompute=options.recomputes_all,
        sequence_parallel=getattr(strategy, "sequence_parallel", False),
    )


def _mib(size: float) -> str:
    if size >= 10 * 1024 * _MIB:
        return f"{size / (1024 * _MIB):,.1f} GiB"
    return f"{size / _MIB:,.0f} MiB"
