"""Making a model's variables before the first step, as Keras's `fit` would.

Keras builds a model from the outputs that its `call` has for a batch. A model
with a `train_step` of its own need not have a `call`, and takes batches of
any structure: it is built by tracing that step once, with optimizers that
make their variables and apply nothing. The code of a model that runs eagerly
may need values: where it cannot be traced, a batch of zeros is run.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.data import structures
from mgpu_tf.engine import keras_internals, throwaway
from mgpu_tf.engine.author.author_scope import AuthorScope
from mgpu_tf.engine.logs import flat_logs
from mgpu_tf.engine.trace_again import refusal_within
from mgpu_tf.engine.untracked import untracked_variables
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.strategies.registry import topology_of

_log = logging.getLogger("mgpu_tf")


class BuildContext(tf.distribute.ReplicaContext):
    """Stands for a replica while variables are made: there is no other.

    It is the first of this process: a process cannot read what another one
    holds.

    Args:
        strategy: The strategy of the model.
    """

    # What is split over processes is not gathered for it.
    is_abstract = True

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        super().__init__(strategy, topology_of(strategy).local.first)

    def all_reduce(
        self, reduce_op: Any, value: Any, options: Any = None
    ) -> Any:
        """Returns the value, which nothing will be computed from."""
        del reduce_op, options
        return value


@dataclasses.dataclass(frozen=True)
class StepFound:
    """What a trace of the author's `train_step` has found.

    Attributes:
        applied: The optimizers that it applies, each with its weights.
        returned: The specs of what it returns, by name; None where it was not
            traced, or did not return logs.
    """

    applied: keras_internals.Applied = ()
    returned: Mapping[str, tf.TensorSpec] | None = None


def build(
    model: keras.Model, example: Any, found: StepFound | None = None
) -> StepFound:
    """Creates the variables of a model, its metrics and its optimizers.

    Args:
        model: A compiled model.
        example: The specs of a batch.
        found: What `build_layers` has returned, where it came before.

    Returns:
        What a trace of the author's `train_step` has found, if there was one.

    Raises:
        ConfigurationError: The model cannot be built from such a batch.
    """
    found = found or StepFound()
    if not keras_internals.overrides(model, "train_step"):
        _build_from_call(model, example)
    elif not keras_internals.is_built(model):
        try:
            if not found.applied:
                found = _train_once(model, example)
            for optimizer, weights in found.applied:
                if not optimizer.built:
                    optimizer.build(weights)
        except Exception as error:
            _build_otherwise(model, example, error)
        _build_evaluation(model, example)
    return found


def build_layers(
    model: keras.Model, example: Any, *, training: bool = False
) -> StepFound:
    """Creates the variables of a model's layers, and nothing else.

    Args:
        model: A model.
        example: The specs of a batch.
        training: Whether the batch is one of `train_step`, which need not
            be one of `call`.

    Returns:
        What a trace of the author's `train_step` has found, if there was one.
    """
    if model.built:
        return StepFound()
    if training and keras_internals.overrides(model, "train_step"):
        try:
            return _train_once(model, example)
        except Exception:
            if not keras_internals.overrides(model, "call"):
                return StepFound()  # `build` says why.
    if keras_internals.overrides(model, "predict_step"):
        _run_once(model, model.predict_step, example)
        return StepFound()
    batch = structures.unpacked(example)
    if training:
        _build_in_training(model, batch)
    x, _, _ = batch

    def run() -> None:
        with keras.StatelessScope():
            model(structures.zeros(x))

    _traced_or_run(model, lambda: keras_internals.build_layers(model, x), run)
    return StepFound()


def _traced_or_run(
    model: keras.Model, trace: Callable[[], Any], run: Callable[[], Any]
) -> None:
    """Makes variables by a trace, or by a run where a model runs eagerly."""
    if not model.run_eagerly:
        trace()
        return
    try:
        trace()
    except Exception as error:
        _log.debug("%s is run to make its variables: %s", model.name, error)
        # Keras's scopes hold its own variables only.
        plain = [(v, v.value.numpy()) for v in untracked_variables(model)]
        try:
            run()
        finally:
            for variable, before in plain:
                variable.assign(before)


def _train_once(model: keras.Model, example: Any) -> StepFound:
    """Runs the author's step once."""
    specs: list[dict[str, tf.TensorSpec] | None] = [None]

    def step(data: Any) -> None:
        specs.append(_specs_of(model.train_step(data)))

    optimizers = keras_internals.optimizers_of(model)
    with keras_internals.not_applied(optimizers) as applied:
        _run_once(model, step, example)
    return StepFound(applied, specs[-1])


def _specs_of(logs: Any) -> dict[str, tf.TensorSpec] | None:
    """Returns the specs of logs, None for what are none."""
    if not isinstance(logs, Mapping):
        return None
    flat = flat_logs(logs)
    try:
        values = {name: tf.convert_to_tensor(v) for name, v in flat.items()}
    except (TypeError, ValueError):
        return None
    return {n: tf.TensorSpec(v.shape, v.dtype) for n, v in values.items()}


def _build_in_training(model: keras.Model, batch: Any) -> None:
    """Creates first what the author's code makes in training, as `fit` does."""
    if not keras_internals.has_own_code(model):
        return

    def run() -> None:
        with keras.StatelessScope():
            model(structures.zeros(batch[0]), training=True)

    def trace() -> None:
        keras_internals.build_in_training(model, batch)

    try:
        _traced_or_run(model, trace, run)
    except Exception as error:
        # What it makes otherwise is made next, or the reason is named there.
        _log.debug("%s is not built in training: %s", model.name, error)


def _build_from_call(model: keras.Model, example: Any) -> None:
    batch = structures.unpacked(example)
    _build_in_training(model, batch)

    def run() -> None:
        keras_internals.build_eagerly(model, structures.zeros(batch))

    try:
        _traced_or_run(model, lambda: keras_internals.build(model, batch), run)
    except Exception as error:
        refusal = refusal_within(error)
        if refusal is not None and refusal is not error:
            raise refusal from error
        own = keras_internals.has_own_loss(model)
        if refusal or not (own or model.built):
            raise
        # Keras builds without the losses that layers have added, and by
        # shapes which some of its layers have in training only.
        try:
            _train_once(model, example)
        except Exception:
            raise error from None
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)


def _build_evaluation(model: keras.Model, example: Any) -> None:
    """Builds what the author's step leaves out and Keras's evaluation uses."""
    if keras_internals.overrides(model, "test_step") or (
        keras_internals.compiled_parts_are_built(model)
    ):
        return
    try:
        _run_once(model, model.test_step, example)
    except Exception as error:
        _log.debug("%s is not evaluated on such batches: %s", model.name, error)


def _build_otherwise(
    model: keras.Model, example: Any, error: Exception
) -> None:
    """Builds from `call` where the author's step runs on replicas only."""
    try:
        _build_from_call(model, example)
    except Exception:
        raise ConfigurationError(
            "The variables of a model must be there before its train_step "
            "runs on replicas. Received: a train_step of "
            f"{type(model).__name__!r} that failed when it was traced to find "
            f"them: {type(error).__name__}: {error}. Correct it, or build "
            "layers and optimizers in build_model: layer.build(shape), "
            "optimizer.build(variables)."
        ) from error


def _run_once(
    model: keras.Model, step: Callable[[Any], Any], example: Any
) -> None:
    """Runs a step for the variables that it makes; nothing is written."""

    def alone(data: Any) -> None:
        with BuildContext(model.distribute_strategy):
            step(data)

    def run() -> None:
        _traced_or_run(
            model,
            lambda: throwaway.graph_of(alone, example),
            lambda: alone(structures.zeros(example)),
        )

    while True:
        known = len(model.variables)
        try:
            with AuthorScope([]):
                return run()
        except AttributeError:
            # Weights made in a scope have no gradient before it ends: what
            # was reached is there in the next run, which gets further.
            if len(model.variables) == known:
                raise
