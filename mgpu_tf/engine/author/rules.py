"""By which rule the values that replicas wrote to a variable become one.

    rule      the replicas wrote                      together they are
    agreed    what does not depend on their rows      any of them
    sum       what was there, plus something          what was there, plus all
    maximum   the larger of what was there and ...    the largest
    minimum   the smaller                             the smallest
    mean      a multiple of what was there, plus ...  their mean
    first     (declared)                              that of replica 0

An author declares a rule by Keras's own `aggregation`, or it is proven of what
was written (`row_proof.py`). Where several workers write when they like, what
was written is followed back to what was there.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from mgpu_tf.engine.author.contributions import BatchShare
from mgpu_tf.engine.row_proof import (
    FIXED,
    LARGEST,
    MEAN,
    NOTHING,
    SMALLEST,
    SUM,
    Held,
    Kind,
    RowProof,
)


class Rule(enum.Enum):
    """How the values of replicas become one; see the table above."""

    AGREED = "agreed"
    SUM = "sum"
    MAXIMUM = "maximum"
    MINIMUM = "minimum"
    MEAN = "mean"
    FIRST = "first"

    def joined(
        self, before: tf.Tensor, parts: Sequence[tf.Tensor]
    ) -> tf.Tensor:
        """Returns one value.

        Args:
            before: What was there before any replica wrote.
            parts: What the replicas wrote.
        """
        if self is Rule.SUM:
            return before + tf.add_n([part - before for part in parts])
        if self is Rule.MEAN:
            moved = tf.add_n([part - before for part in parts])
            return before + moved / len(parts)
        if self is Rule.MAXIMUM:
            return tf.reduce_max(tf.stack(parts), axis=0)
        if self is Rule.MINIMUM:
            return tf.reduce_min(tf.stack(parts), axis=0)
        return parts[0]


DECLARED = {
    "mean": Rule.MEAN,
    "sum": Rule.SUM,
    "only_first_replica": Rule.FIRST,
}

_EXTREMES = {LARGEST: Rule.MAXIMUM, SMALLEST: Rule.MINIMUM}


def rule_of_part(
    kind: Kind, dtype: tf.DType, *, of_metric: bool = False
) -> Rule | None:
    """Returns by which rule parts of replicas become one value.

    Args:
        kind: What is proven of the value that a replica wrote.
        dtype: Of the value.
        of_metric: Whether replicas held values of their own before.

    Returns:
        The rule of what `sent_of_part` makes of it; None where there is none.
    """
    added = kind.added if isinstance(kind, Held) else kind
    if isinstance(kind, Held) or not of_metric:
        if added in (NOTHING, SUM) and (
            isinstance(kind, Held) or dtype.is_floating
        ):
            return Rule.SUM
        if added in (FIXED, MEAN) and dtype.is_floating:
            return Rule.SUM
    if isinstance(kind, Held) and not of_metric:
        return _EXTREMES.get(added)
    return None


def sent_of_part(
    kind: Kind, before: tf.Tensor, now: tf.Tensor, share: BatchShare
) -> tf.Tensor:
    """Returns what a replica sends, to be brought together by the rule.

    A mean of a batch, and what is counted once a batch, is added once for all
    replicas: each adds its share.

    Args:
        kind: What is proven of the value.
        before: What the variable held.
        now: What the replica wrote.
        share: This replica's part of the global batch.
    """
    if isinstance(kind, Held) and kind.added not in (FIXED, MEAN):
        return now
    fraction = share.fraction(now.dtype)
    if kind == SUM:
        return now + before - before * fraction
    return before + (now - before) * fraction


_PASSING = frozenset(("Identity", "Cast", "StopGradient", "EnsureShape"))
_SUMS = frozenset(("Add", "AddV2", "AddN"))
_CHOICES = frozenset(("Select", "SelectV2"))
_EXTREME_OF = {"Maximum": Rule.MAXIMUM, "Minimum": Rule.MINIMUM}


def rule_of(
    written: tf.Tensor, before: tf.Tensor | None, proof: RowProof
) -> Rule | None:
    """Returns how a step that waits for no other has written a value.

    Args:
        written: What the step wrote.
        before: What was there, as a tensor of the same graph; None where it
            is not known.
        proof: Knows which values depend on the rows.

    Returns:
        The rule; None where it cannot be said.
    """
    if not tf.is_symbolic_tensor(written):
        return None
    on_before = _Dependence(before)
    if before is not None and _is_increment(written, before, on_before):
        return Rule.SUM
    if proof.of(written) == FIXED:
        return Rule.AGREED
    if before is None:
        return None
    for operation, rule in _EXTREME_OF.items():
        if _is_extreme(written, before, on_before, operation):
            return rule
    if _is_affine(written, before, proof, on_before):
        return Rule.MEAN
    return None


class _Dependence:
    """Which tensors are made of a value, with whatever else."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._known: dict[int, bool] = {}
        self._alive: list[Any] = []

    def __call__(self, tensor: tf.Tensor) -> bool:
        """Returns whether a tensor is."""
        stack = [tensor]
        while stack:
            each = stack[-1]
            sources = _sources(each.op)
            unknown = [s for s in sources if id(s) not in self._known]
            if each is not self._value and unknown:
                stack += unknown
                continue
            self._known[id(each)] = each is self._value or any(
                self._known[id(source)] for source in sources
            )
            self._alive.append(stack.pop())
        return self._known[id(tensor)]


def _sources(op: tf.Operation) -> list[tf.Tensor]:
    """What an operation takes, a captured tensor of another graph included."""
    if op.type != "Placeholder":
        return list(op.inputs)
    captures = getattr(op.graph, "captures", ())
    outer = [captured for captured, inner in captures if inner is op.outputs[0]]
    return list(filter(tf.is_symbolic_tensor, outer))


def _steps_back(tensor: tf.Tensor, before: tf.Tensor) -> tf.Tensor:
    """Goes back over what changes no number."""
    while tensor is not before and tensor.op.type in _PASSING:
        tensor = tensor.op.inputs[0]
    return tensor


def _is_increment(
    tensor: tf.Tensor, before: tf.Tensor, on_before: _Dependence
) -> bool:
    """Whether a tensor is `before` plus what does not depend on it."""
    tensor = _steps_back(tensor, before)
    if tensor is before:
        return True
    kind, inputs = tensor.op.type, list(tensor.op.inputs)
    if kind in _CHOICES and not on_before(inputs[0]):
        return all(_is_increment(t, before, on_before) for t in inputs[1:])
    if kind == "Sub":
        return not on_before(inputs[1]) and _is_increment(
            inputs[0], before, on_before
        )
    if kind not in _SUMS:
        return False
    moving = [each for each in inputs if on_before(each)]
    return len(moving) == 1 and _is_increment(moving[0], before, on_before)


def _is_extreme(
    tensor: tf.Tensor, before: tf.Tensor, on_before: _Dependence, kind: str
) -> bool:
    tensor = _steps_back(tensor, before)
    if tensor is before:
        return True
    inputs = list(tensor.op.inputs)
    if tensor.op.type in _CHOICES and not on_before(inputs[0]):
        return all(_is_extreme(t, before, on_before, kind) for t in inputs[1:])
    if tensor.op.type != kind:
        return False
    moving = [each for each in inputs if on_before(each)]
    return len(moving) == 1 and _is_extreme(moving[0], before, on_before, kind)


def _is_affine(
    tensor: tf.Tensor,
    before: tf.Tensor,
    proof: RowProof,
    on_before: _Dependence,
) -> bool:
    """Whether it is `before` times what all replicas have alike, plus ...."""
    tensor = _steps_back(tensor, before)
    if tensor is before:
        return True
    kind, inputs = tensor.op.type, list(tensor.op.inputs)
    if kind in _CHOICES and proof.of(inputs[0]) == FIXED:
        inputs = inputs[1:]
        moving = [each for each in inputs if on_before(each)]
        return all(_is_affine(t, before, proof, on_before) for t in moving)
    moving = [each for each in inputs if on_before(each)]
    if kind in _SUMS or kind == "Sub":
        return all(_is_affine(t, before, proof, on_before) for t in moving)
    if kind in ("Mul", "RealDiv") and len(moving) == 1:
        other = next(each for each in inputs if each is not moving[0])
        first = kind == "Mul" or moving[0] is inputs[0]
        return (
            first
            and proof.of(other) == FIXED
            and _is_affine(moving[0], before, proof, on_before)
        )
    return False
