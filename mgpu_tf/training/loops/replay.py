"""A step of a run that is over, done again, to find what is to blame.

    MGPU_TF_REPLAY=120 python train.py      # what `mgpu-tf replay` does

`fit` then goes to the last checkpoint before the step, and repeats the steps
up to it twice. It writes nothing, and ends the process with a verdict:

    data       the batch of the step has a number that is not finite
    model      the data is finite, and the loss or a weight is not
    hardware   the repeats differ, or differ from what the run has recorded
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import os
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from mgpu_tf import data as data_lib
from mgpu_tf.checkpoints import step_losses, store
from mgpu_tf.checkpoints.reading import Stored
from mgpu_tf.checkpoints.saving.saver import Found, Saver
from mgpu_tf.checkpoints.saving.writer import Variables, read_state
from mgpu_tf.data import structures
from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.step.base import Execution
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.launch.job import REPLAY, VERDICT
from mgpu_tf.mesh import Region
from mgpu_tf.options import SaveOptions, StepOptions
from mgpu_tf.reports.report import LeftOut
from mgpu_tf.strategies.peers import Peers
from mgpu_tf.strategies.registry import topology_of
from mgpu_tf.training import callbacks as callbacks_lib
from mgpu_tf.training.loops.loop import Training

# The exit status of a replay that blames something.
FOUND = 1


def asked() -> int | None:
    """Returns the step that this process is to replay, None for none.

    Raises:
        ConfigurationError: The environment has no step from 1 on.
    """
    text = os.environ.get(REPLAY)
    if text is None:
        return None
    if not text.isdecimal() or not int(text):
        raise ConfigurationError(
            f"{REPLAY} must be the number of a step, from 1. Received: "
            f"{text!r}."
        )
    return int(text)


class Reached(Exception):
    """The step was reached, and nothing more has to be done."""


def report_verdict(text: str) -> None:
    """Writes the verdict for `mgpu-tf replay`, where it has asked."""
    path = os.environ.get(VERDICT)
    if path:
        with contextlib.suppress(OSError), open(path, "w") as file:
            file.write(f"{text}\n")


def options_of(options: StepOptions) -> StepOptions:
    """Returns options of steps; of a replay those that note each loss."""
    if asked() is None:
        return options
    plain = StepOptions()
    return dataclasses.replace(
        options,
        on_nan="stop",
        max_loss=None,
        max_restores=plain.max_restores,
    )


def replay(
    step: int,
    folder: str,
    source: data_lib.Source,
    training: Callable[..., Replay],
) -> tuple[str, str]:
    """Repeats the steps up to one, and looks at what is wrong.

    Args:
        step: The step.
        folder: Where the run has saved.
        source: Its data.
        training: Returns a pass, from whether it looks and its data.

    Returns:
        What is to blame, "" for nothing, and the reason.
    """

    def run(looks: bool) -> Replay:
        one = training(looks, source.anew())
        with contextlib.suppress(Reached):
            one.run()
            raise ConfigurationError(
                "A replay goes to a step of its run. Received: "
                f"step={step}, after the end of the run. Choose an earlier "
                "step."
            )
        return one

    one, other = run(False), run(False)
    peers = one.peers
    verdicts = peers.of_all(verdict(step, folder, one, other))
    reason = next((text for text in verdicts if text), "")
    if reason:
        return "hardware", reason
    if not peers.any(one.broken):
        return "", "two repeats have the same bits, all of them finite"
    bad = run(True).bad
    if bad.data:
        return "data", f"{bad.data}, is not finite"
    where = bad.layer or "no layer can be named"
    return "model", f"the batch is finite; not finite first: {where}"


class ReplaySaver(Saver):
    """Finds the last checkpoint before a step, and writes nothing.

    Args:
        folder: The folder of the run.
        step: The step to replay.
        replicas: The number of replicas here.
    """

    def __init__(self, folder: str, step: int, replicas: int) -> None:
        super().__init__()
        self._folder, self._step, self._replicas = folder, step, replicas

    def find(self) -> Found:
        """Returns the state to begin at.

        Raises:
            ConfigurationError: No checkpoint is before the step, or it is one
                of another number of replicas.
        """
        before = [
            entry
            for entry in store.newest_first(
                self._folder, thorough=True, below=self._step
            )
            if entry.whole
        ]
        if not before:
            every = store.paths(self._folder)
            known = ", ".join(str(step) for step in every) or "none"
            raise ConfigurationError(
                "A replay begins at a checkpoint before its step. Received: "
                f"step={self._step}, where {self._folder!r} has checkpoints "
                f"of the steps: {known}. Choose a later step, or give the "
                "checkpoint_dir of the run. A run that saves more often "
                "(save_every_steps) and keeps more (keep_checkpoints) has "
                "earlier ones."
            )
        for entry in before:
            stored = Stored(entry.path)
            variables = Variables(stored)
            if _all_finite(variables):
                break
        else:
            raise ConfigurationError(
                "A replay begins at a checkpoint whose weights are finite. "
                f"Received: step={self._step}, where no checkpoint before it "
                "has such weights. Choose an earlier step."
            )
        state = read_state(stored)
        if state["num_replicas"] != self._replicas:
            raise ConfigurationError(
                "A replay repeats the bits of a run on as many replicas. "
                f"Received: {self._replicas} replicas, where the checkpoint "
                f"has {state['num_replicas']}. Use as many devices and "
                "workers as the run had."
            )
        return state, variables

    def room(self, step: int, wanted: int) -> int:
        """Returns how many of the wanted steps may run: the last alone."""
        return max(1, min(wanted, self._step - 1 - step))


@dataclasses.dataclass(frozen=True)
class Bad:
    """Where numbers are not finite.

    Attributes:
        data: An input or target and its row, "" if the batch is finite.
        layer: The first layer, "" if that is unknown.
    """

    data: str
    layer: str


def left_out_before(folder: str, step: int) -> list[LeftOut]:
    """Returns the batches that a run has left out before a step."""
    every: list[LeftOut] = []
    for entry in store.entries(folder, thorough=False):
        position = entry.state.get("position", {})
        every += [LeftOut(**batch) for batch in position.get("left_out", ())]
    return [batch for batch in dict.fromkeys(every) if batch.step < step]


class Replay(Training):
    """One pass from a checkpoint to a step.

    Args:
        step: The step, from 1.
        looks: Whether to look at the batch and the layers before the step,
            in place of the step itself.
        *arguments: Those of `Training`.

    Attributes:
        losses: The loss of each step by its number.
        digest: A hash of what this process would save after the step.
        bad: What was found, where it looks.
    """

    def __init__(self, step: int, looks: bool, *arguments: Any) -> None:
        self._step, self._looks = step, looks
        self.losses: dict[int, float] = {}
        self.digest = ""
        self.broken = False
        self.bad = Bad("", "")
        super().__init__(*arguments)

    @property
    def peers(self) -> Peers:
        """The workers that make the same pass."""
        return self._distributed.peers

    def _saver_of(
        self,
        options: SaveOptions | None,
        callbacks: list[keras.callbacks.Callback],
    ) -> Saver:
        super()._saver_of(options, callbacks)
        assert options is not None
        replicas = self._distributed.strategy.num_replicas_in_sync
        return ReplaySaver(options.folder, self._step, replicas)

    def _watched_by(
        self, callbacks: list[keras.callbacks.Callback]
    ) -> list[keras.callbacks.Callback]:
        return callbacks_lib.for_other_workers(callbacks)

    def _look_for_slow(self, epoch: int) -> None:
        pass

    def _begins(self, step: int) -> None:
        if self._looks and step == self._step - 1:
            self.bad = self._found()
            raise Reached

    def _check_loss(self, done: Execution) -> None:
        step = self._totals.global_step
        if done.watched is None:
            raise ConfigurationError(
                "A replay needs the loss of each step. Received: a model with "
                "a train_step of its own."
            )
        for number, loss in enumerate(done.watched.losses, step + 1):
            self.losses[number] = float(loss)
        if step + done.steps < self._step:
            return
        self.broken = done.watched.first_bad(None) >= 0
        digest = hashlib.sha256()
        for piece in self._engine.snapshot().pieces():
            for chunk in piece.chunks():
                digest.update(chunk)
                self.broken |= not _is_finite(piece.name, piece.dtype, chunk)
        self.digest = digest.hexdigest()
        raise Reached

    def _found(self) -> Bad:
        """Looks at the batch of the step, and at the layers."""
        distributed, at = self._distributed, self._run.position
        source = self._source.anew()
        chain = self._numbers.steps_per_epoch is not None or source.seekable
        feed = self._engine.feed(
            source, self._run.first_epoch, chain=chain, training=True
        )
        feed.resume(at.finished, at.step)
        iterator = feed.iterator(at.epoch)
        data, local, _ = data_lib.next_batch(
            iterator, source.form, distributed.strategy
        )
        del local
        batches = _by_replica(distributed.strategy, data)
        topology = topology_of(distributed.strategy).local
        here = ""
        for place, batch in enumerate(batches):
            here = here or _bad_row(batch, topology.first + place)
        every = distributed.peers.of_all(here)
        data_found = next((text for text in every if text), "")
        layer = "" if data_found else _bad_layer(distributed.model, batches)
        layers = distributed.peers.of_all(layer)
        return Bad(data_found, next((text for text in layers if text), ""))


def verdict(step: int, folder: str, one: Replay, other: Replay) -> str:
    """Returns why the hardware is to blame, "" if all bits repeat.

    Args:
        step: The step.
        folder: Where the run has recorded the loss of each step.
        one: A pass.
        other: Another pass.
    """
    for number, loss in one.losses.items():
        if not _alike(loss, other.losses[number]):
            return (
                f"two repeats of step {number} have loss {loss!r} and "
                f"{other.losses[number]!r}"
            )
    if one.digest != other.digest:
        return f"two repeats of step {step} end with other weights"
    recorded = step_losses.read(folder)
    for number, loss in one.losses.items():
        if (
            number == step
            and one.broken
            and np.isfinite(recorded.get(number, 0))
        ):
            continue  # A batch that was left out: another one took the number.
        if number in recorded and not _alike(recorded[number], loss):
            return (
                f"the run had loss {recorded[number]!r} in step {number}, and "
                f"two repeats have {loss!r}"
            )
    return ""


def _all_finite(variables: Variables) -> bool:
    """Returns whether the variables are finite, apart from metrics."""
    return all(
        _is_finite(
            name,
            dtype,
            variables.read(name, Region(0, math.prod(shape))).view(np.uint8),
        )
        for name, (dtype, shape) in variables.arrays.items()
        if name.startswith("shared/")
    )


def _is_finite(name: str, dtype: str, elements: Any) -> bool:
    """Returns whether elements are finite, or of a metric or of integers."""
    if not name.startswith("shared/") or not tf.as_dtype(dtype).is_floating:
        return True
    values = np.frombuffer(elements, tf.as_dtype(dtype).as_numpy_dtype)
    return bool(np.isfinite(values.astype(np.float64)).all())


def _alike(one: float, other: float) -> bool:
    return one == other or (one != one and other != other)


def _by_replica(strategy: tf.distribute.Strategy, data: Any) -> list[Any]:
    """Returns the rows of each replica of this process."""
    leaves = tf.nest.flatten(data)
    local = [
        strategy.experimental_local_results(leaf) if leaf is not None else None
        for leaf in leaves
    ]
    count = topology_of(strategy).local.count
    return [
        tf.nest.pack_sequence_as(
            data,
            [None if every is None else every[i] for every in local],
        )
        for i in range(count)
    ]


def _bad_row(batch: Any, replica: int) -> str:
    """Returns the first input and row that is not finite, "" for none."""
    for name, part in structures.parts_of(batch):
        for path, leaf in keras.tree.flatten_with_path(part):
            if leaf is None or not leaf.dtype.is_floating:
                continue
            values = np.asarray(leaf, np.float64)
            bad = ~np.isfinite(values).reshape(len(values), -1).all(axis=1)
            if bad.any():
                place = "".join(f"[{key!r}]" for key in path)
                return (
                    f"{name}{place}, row {int(bad.argmax())} of replica "
                    f"{replica}"
                )
    return ""


def _bad_layer(model: keras.Model, batches: list[Any]) -> str:
    """Returns the first layer whose output or gradient is not finite."""
    if not keras_internals.has_graph(model):
        return ""
    layers = [
        layer
        for layer in model.layers
        if isinstance(getattr(layer, "output", None), keras.KerasTensor)
    ]
    parts = keras.Model(model.inputs, [layer.output for layer in layers])
    last = len(layers) - 1
    for batch in batches:
        x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
        with tf.GradientTape() as tape:
            outputs = parts(x, training=True)
            predicted = model(x, training=True)
            loss = model.compute_loss(x, y, predicted, weight)
        for layer, output in zip(layers, outputs, strict=True):
            if not _finite(output):
                return f"the output of the layer {layer.name!r}"
        if not _finite(loss):
            return f"the loss, after the layer {layers[last].name!r}"
        weights = model.trainable_variables
        gradients = tape.gradient(loss, [v.value for v in weights])
        for variable, gradient in reversed(
            list(zip(weights, gradients, strict=True))
        ):
            if gradient is not None and not _finite(gradient):
                return f"the gradient of {variable.path!r}"
    return ""


def _finite(value: Any) -> bool:
    value = tf.convert_to_tensor(value)
    return bool(tf.reduce_all(tf.math.is_finite(value)))
