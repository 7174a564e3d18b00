"""Checks that an overridden `train_step` computes means over rows.

    probe = Probe(model, strategy, state)
    probe(data, total)      # raises, warns, or accepts the step

The losses of an overridden `train_step` must be means over rows. A mean does
not change when every row comes twice. So the probe runs the step on some rows
of the first batch, as a replica runs it, and on the same rows, each twice, as
one device runs it. Neither run writes anything. On several workers, the results
are summed, so that all of them judge alike. The gradients are compared:

    equal                             means: accepted
    different by one factor           sums, or divided by a number of
                                      examples or replicas: refused
    otherwise different, by more      a loss over pairs of examples, or a sum
    than with other random numbers    and a mean: warned
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.contributions import BatchShare
from mgpu_tf.engine.state import ReplicaState, Writes
from mgpu_tf.engine.synchronous.rehearsal import Applied, Rehearsal
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.strategies.own_gradient import sum_over_replicas
from mgpu_tf.strategies.registry import topology_of

_log = logging.getLogger("mgpu_tf")

# How often it is measured, with other random numbers each time.
_DRAWS = 4

# Elements of a gradient that are compared, at most.
_SAMPLES = 4096

# How far rounding may take two gradients apart, relative to their length.
_ROUNDING = 1e-2

# How many times as far apart as drawing anew takes them.
_NOISE = 4.0

# How many batches are looked at, where the first tell nothing.
_TRIES = 5

_VALUE = "the value"

_REMEDY = (
    "Take means over the rows, or declare a sum by "
    "mgpu_tf.sum_over_batch(values)"
)


class Probe:
    """Looks at the `train_step` of a model once.

    Args:
        model: A built model with a `train_step` of its own.
        strategy: Its strategy.
        state: What its steps write besides weights.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: tf.distribute.Strategy,
        state: ReplicaState,
    ) -> None:
        self._model = model
        self._strategy = strategy
        self._state = state
        self._rehearsal = Rehearsal(model, "train_step")
        self._generator: Any = None
        self._tries = _TRIES
        self._warned: set[str] = set()
        self._apart = topology_of(strategy).num_workers > 1
        # Layers whose outputs are made of all rows, as is documented.
        self._averages = keras_internals.moving_statistics(model)

    def __call__(self, data: Any, total: int) -> bool:
        """Looks at what the step makes of some rows.

        Args:
            data: A global batch, as replicas hold it.
            total: How many rows that are.

        Returns:
            Whether there were rows enough.

        Raises:
            ConfigurationError: The step does not compute means.
        """
        rows = total // self._strategy.num_replicas_in_sync
        if not rows:
            return False
        # Twice as many are no more than a replica can hold.
        rows = (rows + 1) // 2
        try:
            once, twice, other, mixed = self._measure(data, rows)
        # The author's code, in surroundings that it was not made for.
        except Exception as error:
            first = (str(error).strip().splitlines() or [""])[0]
            _log.warning(
                "train_step of %s: not checked whether its losses are means "
                "over rows (%s: %s)",
                type(self._model).__name__,
                type(error).__name__,
                first,
            )
            return True
        for name, values in once.items():
            self._tell(name, judge(values, twice[name]))
        gradients = [name for name in once if not name.startswith(_VALUE)]
        if not self._averages:
            for name in gradients:
                mean = (once[name] + other[name]) / 2
                if judge(mean, mixed[name]) != 1.0:
                    self._tell_of_parts(name)
        self._tries -= 1
        # Gradients of zeros tell nothing, such as those of a hinge.
        return not self._tries or all(once[name].any() for name in gradients)

    def _tell_of_parts(self, name: str) -> None:
        self._warn_once(
            "train_step of %s: %s for some rows and for others do not average "
            "to that for all of them, so updates depend on the number of "
            "replicas. Clip by the optimizer's clipnorm or global_clipnorm; a "
            "loss over pairs of examples sees the pairs of a replica",
            type(self._model).__name__,
            name,
        )

    def _tell(self, name: str, verdict: float | None) -> None:
        owner = type(self._model).__name__
        if verdict == 1.0:
            return
        if verdict is not None and not name.startswith(_VALUE):
            raise ConfigurationError(
                "On several replicas a train_step of one's own computes means "
                f"over its rows. Received: {owner}, where {name} is "
                f"{1 / verdict:.3g} times as large when every row comes "
                f"twice. {_REMEDY}."
            )
        self._warn_once(
            "train_step of %s: %s differs when every row comes twice, so it "
            "is no mean over rows and depends on the number of replicas. %s; "
            "a loss over pairs of examples sees the pairs of a replica",
            owner,
            name,
            _REMEDY,
        )

    def _warn_once(self, text: str, *arguments: str) -> None:
        if text % arguments not in self._warned:
            _log.warning(text, *arguments)
        self._warned.add(text % arguments)

    def _measure(
        self, data: Any, rows: int
    ) -> tuple[Mapping[str, np.ndarray], ...]:
        """Returns what there is of some rows.

        Of rows that come once, of the same twice, of other rows, and of both
        together.

        Each by name, `[draws, elements]`.
        """

        def run(data: Any, draw: tf.Tensor) -> Any:
            held = tf.nest.map_structure(
                lambda t: self._strategy.experimental_local_results(t)[0],
                data,
            )
            some = tf.nest.map_structure(lambda t: t[:rows], held)
            others = tf.nest.map_structure(lambda t: t[-rows:], held)
            doubled, both = (
                tf.nest.map_structure(
                    lambda t, u: tf.concat([t, u], 0), some, second
                )
                for second in (some, others)
            )
            self._generator = keras_internals.global_seed_generator()
            with self._rehearsal.caught():
                once = self._strategy.run(
                    self._of_replica, args=(some, rows, draw)
                )
                other = self._strategy.run(
                    self._of_replica, args=(others, rows, draw)
                )
                twice, mixed = (
                    self._of(each, 2 * rows, rows, self._drawn(draw))
                    for each in (doubled, both)
                )
            once, other = tf.nest.map_structure(
                lambda t: self._strategy.experimental_local_results(t)[0],
                (once, other),
            )
            found = once, twice, other, mixed
            return self._of_all_workers(found) if self._apart else found

        function = tf.function(run, autograph=False)
        concrete = function.get_concrete_function(
            data, tf.constant(0, tf.int64)
        )
        own = keras_internals.parts_of(self._every_variable())
        others = [v for v in concrete.graph.variables if id(v) not in own]
        before = [tf.identity(variable) for variable in others]
        found = [
            function(data, tf.constant(n, tf.int64)) for n in range(_DRAWS)
        ]
        for variable, value in zip(others, before, strict=True):
            variable.assign(value)
        return tuple(
            {
                name: np.stack([draw[side][name].numpy() for draw in found])
                for name in found[0][side]
            }
            for side in range(4)
        )

    def _of_all_workers(self, found: Any) -> Any:
        """Returns sums over workers, so that all of them judge alike.

        A factor between two vectors is that between their sums.
        """

        def on_replica(values: list[tf.Tensor]) -> list[tf.Tensor]:
            return sum_over_replicas([tf.identity(v) for v in values])

        flat = tf.nest.flatten(found)
        sums = self._strategy.run(on_replica, args=(flat,))
        first = [
            self._strategy.experimental_local_results(each)[0] for each in sums
        ]
        return tf.nest.pack_sequence_as(found, first)

    def _every_variable(self) -> list[keras.Variable]:
        optimizers = keras_internals.optimizers_of(self._model)
        return [
            *self._model.variables,
            *self._state.variables,
            *(v for optimizer in optimizers for v in optimizer.variables),
        ]

    def _of_replica(
        self, data: Any, rows: int, draw: tf.Tensor
    ) -> dict[str, tf.Tensor]:
        keras_internals.lend_global_seed(self._generator)
        given = self._drawn(draw, dict_of(self._state.replica_seeds()))
        return self._of(data, rows, rows, given)

    def _of(
        self, data: Any, local: int, total: int, given: Writes
    ) -> dict[str, tf.Tensor]:
        share = BatchShare(
            tf.constant(local, tf.int64), tf.constant(total, tf.int64), 1
        )
        applied, values = self._rehearsal(data, share, given)
        if not self._model.run_eagerly:
            # The engine reads them from the graph.
            values = {}
        return _named(applied) | {
            f"{_VALUE} {name!r}": tf.cast([value], tf.float64)
            for name, value in values.items()
            if _is_number(value)
        }

    def _drawn(
        self, draw: tf.Tensor, seeds: Mapping[int, tf.Tensor] | None = None
    ) -> Writes:
        """Returns seeds of which each draw has its own."""
        offset = tf.stack([draw * 7919, tf.zeros([], tf.int64)])
        return [
            (
                state,
                (seeds or {}).get(id(state), state.value)
                + tf.cast(offset, state.dtype),
            )
            for state in self._state.seeds
        ]


def judge(once: np.ndarray, twice: np.ndarray) -> float | None:
    """Returns the factor between two measured vectors.

    Args:
        once: `[draws, elements]`, of rows that come once.
        twice: The same, of rows that come twice.

    Returns:
        1 where the vectors agree, or as far as random numbers let one tell;
        another factor where that is all the difference; None where they
        differ in other ways.
    """
    if not (np.isfinite(once).all() and np.isfinite(twice).all()):
        return 1.0
    a, b = once.mean(0), twice.mean(0)
    noise = (once.var(0, ddof=1) + twice.var(0, ddof=1)).sum() / len(once)
    length = max(a @ a, b @ b)
    if noise > _ROUNDING**2 * length:
        return _judge_noisy(once, twice, (a - b) @ (a - b), noise)
    if (a - b) @ (a - b) <= _ROUNDING**2 * length:
        return 1.0
    factor = (a @ b) / (b @ b) if b.any() else 0.0
    rest = a - factor * b
    if factor > 0 and rest @ rest <= _ROUNDING**2 * (a @ a):
        return float(factor)
    return None


def _judge_noisy(
    once: np.ndarray, twice: np.ndarray, apart: float, noise: float
) -> float | None:
    """Judges vectors of steps that draw random numbers.

    Noise shrinks in a mean over more rows, and grows in a sum: of means the
    first vector is the longer one, of sums it is shorter by the root of 2.
    """
    shorter = (once**2).sum() / (twice**2).sum() < 0.6
    return None if shorter or apart > _NOISE**2 * noise else 1.0


def dict_of(writes: Writes) -> dict[int, tf.Tensor]:
    """Returns values by the ids of their variables."""
    return {id(variable): value for variable, value in writes}


def _named(applied: list[Applied]) -> dict[str, tf.Tensor]:
    """Returns samples of gradients by what they were given to."""
    found: dict[str, tf.Tensor] = {}
    for one in applied:
        name = f"the gradient for the optimizer {one.optimizer.name!r}"
        while name in found:
            name += " again"
        samples = [_sample(g) for g in one.gradients if g is not None]
        found[name] = tf.concat(samples, 0)
    return found


def _sample(gradient: Any) -> tf.Tensor:
    flat = tf.reshape(tf.convert_to_tensor(gradient), [-1])
    stride = tf.maximum(1, tf.size(flat) // _SAMPLES)
    return tf.cast(flat[::stride], tf.float64)


def _is_number(value: Any) -> bool:
    value = tf.convert_to_tensor(value)
    return bool(value.dtype.is_floating and value.shape.rank == 0)
