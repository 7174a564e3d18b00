"""What the engine holds when: the numbers that change with the engine.

One value for all of them, so that a change of the engine is a change here.

This module does not import TensorFlow.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Rules:
    """When a step makes and forgets what it needs.

    Attributes:
        layers_ahead: How many layers have their weights gathered before they
            are needed, beside the one that computes.
        scatters_at_once: Whether gradients are scattered layer by layer, those
            of one while the next computes; if not, whole ones are held to the
            end of the backward pass.
        reduces_at_once: Whether replicas sum a gradient when it is made.
        updates_behind: How many gradients are held, and not yet applied,
            while the backward pass makes others. TensorFlow orders no update
            before the rest of the pass, and runs it when a thread is free.
        parts_behind: As `updates_behind`, where gradients are scattered.
        smallest_split: The elements of the smallest weight that is split.
        beside: How many operations run beside one another, so that buffers
            are freed later than in the order of the graph.
        batches_ahead: Batches that the feed holds for each replica, beside
            the one that is computed.
        reduction_copies: Copies of a gradient that a sum over replicas makes
            on each of them, where it is not scattered: not all wait at once.
    """

    layers_ahead: int = 1
    scatters_at_once: bool = True
    reduces_at_once: bool = False
    updates_behind: int = 16
    parts_behind: int = 2
    smallest_split: int = 1024
    beside: int = 2
    batches_ahead: int = 1
    reduction_copies: float = 0.5


RULES = Rules()
