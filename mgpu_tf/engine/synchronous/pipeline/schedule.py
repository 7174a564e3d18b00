"""In which order the stages of a pipeline compute their micro-batches.

    orders("1f1b", stages=2, micro_batches=3)

    stage 0    F0 F1 B0 F2 B1 B2
    stage 1    F0 B0 F1 B1 F2 B2

F is a forward pass of a micro-batch, B its backward pass. Between the two a
stage keeps the activations of the micro-batch: with `gpipe` of all m, with
`1f1b` of p - s at most, for stage s of p.

Huang et al., "GPipe", NeurIPS 2019. Narayanan et al., "Memory-Efficient
Pipeline-Parallel DNN Training" (PipeDream-Flush), ICML 2021.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Pass(NamedTuple):
    """A pass of a micro-batch through a stage.

    Attributes:
        stage: The stage.
        micro: The micro-batch.
        backward: Whether it is the backward pass.
    """

    stage: int
    micro: int
    backward: bool


def orders(schedule: str, stages: int, micro_batches: int) -> list[list[Pass]]:
    """Returns the passes of each stage, in their order.

    Args:
        schedule: `1f1b` or `gpipe`.
        stages: Number of stages.
        micro_batches: Number of micro-batches.
    """
    every = []
    for stage in range(stages):
        ahead = micro_batches
        if schedule == "1f1b":
            ahead = min(micro_batches, stages - stage)
        forward = [Pass(stage, i, False) for i in range(micro_batches)]
        backward = [Pass(stage, i, True) for i in range(micro_batches)]
        order = forward[:ahead]
        for i in range(micro_batches):
            order += [backward[i], *forward[ahead + i : ahead + i + 1]]
        every.append(order)
    return every


def in_turn(every: Sequence[Sequence[Pass]]) -> Iterator[Pass]:
    """Yields the passes of all stages, each after what it needs.

    Args:
        every: The order of each stage.

    Raises:
        ValueError: A pass waits for one that comes after it.
    """
    places = [0] * len(every)
    done: set[Pass] = set()
    while any(p < len(o) for p, o in zip(places, every, strict=True)):
        before = len(done)
        for stage, order in enumerate(every):
            while places[stage] < len(order):
                each = order[places[stage]]
                if not done.issuperset(needed(each, len(every))):
                    break
                yield each
                done.add(each)
                places[stage] += 1
        if len(done) == before:
            raise ValueError("The passes of a schedule wait for each other.")


def needed(each: Pass, stages: int) -> list[Pass]:
    """Returns the passes of other stages whose results a pass needs."""
    if not each.backward:
        before = Pass(each.stage - 1, each.micro, False)
        return [before] if each.stage else []
    above = [Pass(each.stage, each.micro, False)]
    if each.stage + 1 < stages:
        above.append(Pass(each.stage + 1, each.micro, True))
    return above


@dataclasses.dataclass(frozen=True)
class Timing:
    """How passes run where each begins as soon as it can.

    Attributes:
        bubble: The part of the time that a stage has no work, the mean over
            stages.
        live: The most micro-batches whose activations a stage has kept, by
            stage.
    """

    bubble: float
    live: list[int]


def timing(
    every: Sequence[Sequence[Pass]], forward: float = 1.0, backward: float = 2.0
) -> Timing:
    """Plays the order of passes, planned or measured.

    Args:
        every: The order of each stage.
        forward: The time of a forward pass, in any unit.
        backward: The time of a backward pass.
    """
    stages = len(every)
    whole = max(_ends(every, forward, backward).values())
    work = sum(
        backward if each.backward else forward
        for order in every
        for each in order
    )
    return Timing(1 - work / (stages * whole), [live(o) for o in every])


def by_time(every: Sequence[Sequence[Pass]]) -> list[Pass]:
    """Returns the passes of all stages in the order in which they end.

    A pass comes after all that it needs.

    Args:
        every: The order of each stage.
    """
    ends = _ends(every, 1.0, 2.0)
    return sorted(ends, key=lambda each: (ends[each], each.stage))


def _ends(
    every: Sequence[Sequence[Pass]], forward: float, backward: float
) -> dict[Pass, float]:
    """Returns when passes end; see `timing`."""
    ends: dict[Pass, float] = {}
    free = [0.0] * len(every)
    for each in in_turn(every):
        waits = [ends[other] for other in needed(each, len(every))]
        begin = max([free[each.stage], *waits])
        ends[each] = begin + (backward if each.backward else forward)
        free[each.stage] = ends[each]
    return ends


def live(order: Sequence[Pass]) -> int:
    """Returns the most micro-batches that are between their two passes."""
    held = most = 0
    for each in order:
        held += -1 if each.backward else 1
        most = max(most, held)
    return most
