"""What is proven of the state that a call writes of the rows of a replica.

    before = held(scope, layer.variables, proof)
    mark = scope.mark()
    outputs = layer.call(rows)
    found = parts_of(scope, proof, before, scope.written_since(mark))
    keep(scope, found)

A replica writes its part only where it is proven how the parts of all replicas
become the value of the global batch: a count, a sum, a mean or an extreme, or
a moving average of means. What is made of sums, such as a deviation, is
computed from the sums of all. The caller computes anything else of all rows.
"""

from __future__ import annotations

from collections.abc import Iterable

import keras
import tensorflow as tf

from mgpu_tf.engine.author.global_sums import of_sums
from mgpu_tf.engine.author.rules import rule_of_part
from mgpu_tf.engine.author.step_scope import Part, StepScope
from mgpu_tf.engine.exchange.crossing import Exchange
from mgpu_tf.engine.row_proof import FIXED, Held, RowProof

# What is the same on all replicas after a call.
ALIKE = (FIXED, Held(alike=True), Held(alike=True, added=FIXED))
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
    exchange: Exchange | None = None,
) -> Parts | None:
    """Returns what is proven of what a call wrote.

    What is made of sums over the rows is computed from the sums of all
    replicas, and is the same on all of them then.

    Args:
        scope: The scope of the step.
        proof: Has looked at the call.
        before: From `held`.
        written: The variables that the call wrote to.
        exchange: Of the replicas; None where they add up nothing in a call.

    Returns:
        The parts; None where something is written that replicas cannot bring
        together.
    """
    found: Parts = {}
    of_sums_only = []
    proof.walk(tf.compat.v1.get_default_graph())
    if proof.writes_rows:
        return None
    for variable in written:
        key = id(variable)
        if key in scope.agreed or not scope.state.is_proven(variable):
            continue
        value = scope.value(variable)
        kind = proof.of(value)
        if kind in ALIKE:
            found[key] = None
            continue
        metric = scope.state.is_metric(variable)
        if metric and scope.state.is_whole(variable):
            return None
        rule = rule_of_part(kind, value.dtype, of_metric=metric)
        if rule is not None and key in before:
            found[key] = (variable, before[key], kind)
        elif metric:
            return None
        else:
            of_sums_only.append(variable)
    if of_sums_only:
        values = list(map(scope.value, of_sums_only))
        sums = of_sums(proof, values, scope.share, exchange)
        if sums is None or not set(sums.kinds) <= set(ALIKE):
            return None
        for variable, value in zip(of_sums_only, sums.values, strict=True):
            scope.add_update((variable, value))
            found[id(variable)] = None
    return found


def keep(scope: StepScope, parts: Parts) -> None:
    """Notes in the scope of a step what a call has written."""
    for key, part in parts.items():
        scope.parts.pop(key, None)
        if part is None:
            scope.agreed.add(key)
        else:
            scope.parts[key] = part
        value = scope.state_mapping[key]
        if part is None:
            scope.take_alike([value])
        else:
            scope.proof.take([value], part[2])
