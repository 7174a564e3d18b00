"""What is proven of the state that a call writes of the rows of a replica.

    before = held(scope, layer.variables, proof)
    mark = scope.mark()
    outputs = layer.call(rows)
    found = parts_of(scope, proof, before, scope.written_since(mark))
    keep(scope, found)

A replica writes its part only where it is proven how the parts of all replicas
become the value of the global batch: a count, a sum, a mean, an extreme, or
what was there times a constant plus one of these. The caller computes anything
else of the rows of all.
"""

from __future__ import annotations

from collections.abc import Iterable

import keras
import tensorflow as tf

from mgpu_tf.engine.row_proof import FIXED, Held, RowProof
from mgpu_tf.engine.rules import Rule, rule_of_part
from mgpu_tf.engine.step_scope import Part, StepScope

# By the identity of a variable; None for what all replicas write alike.
Parts = dict[int, Part | None]


def held(
    scope: StepScope, variables: Iterable[keras.Variable], proof: RowProof
) -> dict[int, tf.Tensor]:
    """Lets a proof know what state holds before a call.

    Args:
        scope: The scope of the step.
        variables: What the call may write.
        proof: Looks at the call.

    Returns:
        What variables held before the step, by identity. Without those that a
        step has written alike on all replicas: of these a replica may write
        no part any more.
    """
    found = {}
    for variable in variables:
        key = id(variable)
        if not scope.state.is_proven(variable) or key in found:
            continue
        value = scope.hold(variable)
        if key in scope.parts:
            _, found[key], kind = scope.parts[key]
        elif key in scope.agreed:
            kind = FIXED
        else:
            kind = Held(alike=not scope.state.is_metric(variable))
            found[key] = value
        proof.take([value], kind)
    for key, (_, _, kind) in scope.parts.items():
        if key not in found:
            proof.take([scope.state_mapping[key]], kind)
    return found


def parts_of(
    scope: StepScope,
    proof: RowProof,
    before: dict[int, tf.Tensor],
    written: list[keras.Variable],
) -> Parts | None:
    """Returns what is proven of what a call wrote.

    Args:
        scope: The scope of the step.
        proof: Has looked at the call.
        before: From `held`.
        written: The variables that the call wrote to.

    Returns:
        The parts; None where something is written that replicas cannot bring
        together.
    """
    found: Parts = {}
    proof.walk(tf.compat.v1.get_default_graph())
    if proof.writes_rows:
        return None
    for variable in written:
        key = id(variable)
        if key in scope.agreed or not scope.state.is_proven(variable):
            continue
        value = scope.value(variable)
        kind = proof.of(value)
        if kind in (FIXED, Held(alike=True)):
            found[key] = None
            continue
        metric = scope.state.is_metric(variable)
        if metric and scope.state.rule(variable) is Rule.AGREED:
            return None
        rule = rule_of_part(kind, value.dtype, of_metric=metric)
        if rule is None or key not in before:
            return None
        found[key] = (variable, before[key], kind)
    return found


def keep(scope: StepScope, parts: Parts) -> None:
    """Notes in the scope of a step what a call has written."""
    for key, part in parts.items():
        scope.parts.pop(key, None)
        if part is None:
            scope.agreed.add(key)
        else:
            scope.parts[key] = part
