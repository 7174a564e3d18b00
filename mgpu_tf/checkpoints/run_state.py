"""What a `fit` is made of between two executions, as values, and back.

run = RunState(trainer, engine, callbacks, first_epoch=0)
run.load((state, stored))      # from a checkpoint: the position
run.restore()                  # ... and all the rest, where it belongs
step, state, pieces = run.capture()
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import keras
import numpy as np

from mgpu_tf.checkpoints.callback_state import (
    changes,
    decode,
    encode,
    remembered,
    remind,
)
from mgpu_tf.checkpoints.keeping import SCORES
from mgpu_tf.data.sources.batches import RowOrder
from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.snapshot import Snapshot, Stored
from mgpu_tf.engine.step.base import NO_VOTES, Engine, Logs, Votes
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.mesh import Piece
from mgpu_tf.reports.report import LeftOut
from mgpu_tf.runtime import determinism
from mgpu_tf.strategies.replicas.topology import balance_of

_log = logging.getLogger("mgpu_tf")

# What data has besides its shapes and its length.
CONTENT = "data's content or order"
# Entries of a configuration that no run resumes without.
LAYERS = "layers of the model"
OPTIMIZERS = "optimizers of the model"
KINDS = (LAYERS, OPTIMIZERS)

State = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class EpochRecord:
    """What an epoch of training took.

    Attributes:
        epoch: Index of the epoch, from 0.
        steps: Steps done.
        examples: Examples seen, over all replicas.
        seconds: Time for the steps; evaluation and callbacks at the end of
            the epoch are not in it.
        logs: The logs of the epoch as `History` has them.
    """

    epoch: int
    steps: int
    examples: int
    seconds: float
    logs: Logs

    @property
    def examples_per_second(self) -> float:
        """Returns the rate over the whole epoch, tracing included."""
        return self.examples / self.seconds if self.seconds else 0.0


@dataclasses.dataclass
class Position:
    """Where a run is.

    Attributes:
        epoch: Index of the epoch.
        step: Steps done in it.
        examples: Examples seen in it.
        seconds: Time for them.
        logs: The last logs in it.
        votes: What workers asked for in the last execution.
        finished: The steps of each epoch since the run began.
        last_logs: The logs of the last of them.
        left_out: The batches that are read and not trained on. They count
            as steps of their epochs here.
    """

    epoch: int = 0
    step: int = 0
    examples: int = 0
    seconds: float = 0.0
    logs: Logs = dataclasses.field(default_factory=dict)
    votes: Votes = NO_VOTES
    finished: list[int] = dataclasses.field(default_factory=list)
    last_logs: Logs = dataclasses.field(default_factory=dict)
    left_out: list[LeftOut] = dataclasses.field(default_factory=list)

    @property
    def left_out_here(self) -> list[int]:
        """The steps of this epoch that are left out, from the position on."""
        return [step for step in self._left_out() if step >= self.step]

    @property
    def trained(self) -> int:
        """The steps of this epoch that were done, without those left out."""
        return self.step - sum(step < self.step for step in self._left_out())

    def _left_out(self) -> list[int]:
        return sorted(
            batch.batch - 1
            for batch in self.left_out
            if batch.epoch == self.epoch + 1
        )


class Counts(Protocol):
    """What a trainer counts."""

    global_step: int
    examples_seen: int
    records: list[EpochRecord]


class RunState:
    """The state of one `fit`.

    Args:
        counts: The trainer, for what it counts.
        model: Its model.
        engine: Its engine, prepared.
        data: What distinguishes its data.
        order: In which order its data is read; None where the data decides.
        callbacks: The user's.
        first_epoch: Index of the first epoch.
        epochs: Index of the last epoch, plus 1.
        configuration: How layers, optimizers and loss are configured, each
            entry by the place where it stands.

    Attributes:
        position: Where the run is.
        first_epoch: Index of the epoch at which the run began.
        resumed: Whether a checkpoint was loaded.
        stopped: Whether a callback had ended the run that was loaded, of as
            many epochs or more.
    """

    def __init__(
        self,
        counts: Counts,
        model: keras.Model,
        engine: Engine,
        data: Mapping[str, str],
        order: RowOrder | None,
        callbacks: Sequence[keras.callbacks.Callback],
        first_epoch: int,
        epochs: int,
        configuration: Mapping[str, str],
    ) -> None:
        self._configuration = dict(configuration)
        self._counts = counts
        self._model = model
        self._data = dict(data)
        self._order = order
        self._callbacks = list(callbacks)
        self.first_epoch = first_epoch
        self._epochs = epochs
        self._engine = engine
        self._snapshot = engine.snapshot()
        self._before: list[State] = []
        # What generators were as the run began, and whether data draws from
        # them.
        self._begun: State | None = None
        self._drawn = False
        self._loaded: tuple[State, Stored] | None = None
        # What has changed since, said once the run goes on with it.
        self._settings, self._notes = "", list[str]()
        self.position = Position(epoch=first_epoch)
        self.resumed = False
        self.stopped = False

    @property
    def snapshot(self) -> Snapshot:
        """The variables of the run."""
        return self._snapshot

    @property
    def goes_on_above(self) -> int:
        """Returns the epochs above which a run that is complete goes on."""
        return self._epochs if self.stopped else self.position.epoch

    def load(self, found: tuple[State, Stored] | None) -> None:
        """Takes the position from a checkpoint, and keeps the rest.

        Args:
            found: A state from `capture`, and the variables of its
                checkpoint; None changes nothing.

        Raises:
            ConfigurationError: It is the checkpoint of other data, or of
                other layers or optimizers.
        """
        if found is None:
            return
        state, _ = found
        if "data" not in state:
            raise ConfigurationError(
                "fit goes on from what a fit has saved. Received: a "
                "checkpoint_dir with a checkpoint of Loop.save. Use another "
                "checkpoint_dir."
            )
        for name, value in self._data.items():
            if name == CONTENT:
                self._note_other_data(state["data"].get(name, value))
            elif state["data"].get(name) != value:
                raise ConfigurationError(
                    f"A run resumes with the same {name}. Received: {value}, "
                    f"where the checkpoint has {state['data'].get(name)}. "
                    "Use another checkpoint_dir, or the data of before."
                )
        if self._order is not None:
            # Checkpoints of before it was kept have none.
            self._take_order(self._order, state.get("order") or {})
        self._compare_configuration(state.get("configuration"))
        position = dict(state["position"])
        for name in ("logs", "last_logs"):
            position[name] = decode(position[name])
        position["left_out"] = [
            LeftOut(**batch) for batch in position.get("left_out", ())
        ]
        self.position = Position(**position)
        self.first_epoch = state["first_epoch"]
        # Older checkpoints have none.
        before = state.get("epochs", self._epochs)
        self.stopped = state["stopped"] and self._epochs <= before
        if self.stopped:
            self._epochs = before
        if balance_of(self._model.distribute_strategy).measured:
            self._engine.take_shares(state.get("shares"))
        self._loaded = found
        self._begun = state.get("begun")
        self.resumed = True

    def _note_other_data(self, saved: str) -> None:
        if saved != self._data[CONTENT]:
            self._notes.append(
                "The data is of the same shapes as before the checkpoint, but "
                "its values or its order have changed. The run goes on with "
                "the new data, from the position of the checkpoint. Use "
                "another checkpoint_dir for a new run."
            )

    def _take_order(self, order: RowOrder, saved: Mapping[str, Any]) -> None:
        """Lets rows be read in the order of the run, whose epoch goes on."""
        for name, value in saved.items():
            mine = getattr(order, name)
            if mine != value:
                self._notes.append(
                    "A run goes on in the order of rows with which it began, "
                    f"{name}={value}. Received: {name}={mine}. Use another "
                    "checkpoint_dir for a new run."
                )
                setattr(order, name, value)

    def _compare_configuration(self, saved: Mapping[str, str] | None) -> None:
        """Refuses other layers and optimizers; notes other settings."""
        if saved is None:
            return  # Of a checkpoint from before they were kept.
        mine = self._configuration
        changed = [
            f"{name}: {saved.get(name, 'none')} -> {mine.get(name, 'none')}"
            for name in dict.fromkeys([*saved, *mine])
            if saved.get(name) != mine.get(name)
        ]
        kinds = [
            change for change in changed if change.partition(":")[0] in KINDS
        ]
        if kinds:
            raise ConfigurationError(
                "A run resumes with the same layers and optimizers. Received: "
                f"{kinds[0]}. Use another checkpoint_dir, or the model of "
                "before."
            )
        if changed:
            more = f", and {len(changed) - 3} more" if len(changed) > 3 else ""
            shown = "; ".join(change[:200] for change in changed[:3])
            self._settings = (
                f"Since the checkpoint was saved this changed: {shown}{more}."
            )
            self._notes.append(
                f"{self._settings} The run goes on with the new settings, but "
                "with the variables of the checkpoint, such as the learning "
                "rate. Use another checkpoint_dir for a new run."
            )

    def begin(self, restored_epoch: int | None) -> None:
        """Notes what callbacks know as training begins, and restores.

        What was saved within an epoch is restored by `begin_epoch`.

        Args:
            restored_epoch: The epoch that a callback went back to, if any.
        """
        if restored_epoch:
            self.first_epoch = self.position.epoch = restored_epoch
        if not self.resumed:
            self._begun = _own_generators()
        self._before = []
        for callback in self._every_callback():
            found: list[str] = []
            self._before.append(remembered(callback, self._model, found))
            if found:
                _log.warning(
                    "A resumed run has not all that %s knows: checkpoints "
                    "do not hold its %s. Keep it in numbers, containers, "
                    "arrays or variables",
                    type(callback).__name__,
                    ", ".join(found),
                )
        if self._loaded is not None and not self.position.step:
            self._restore(*self._loaded)

    @contextlib.contextmanager
    def reading_again(self) -> Iterator[None]:
        """Lets data that the run has read be read again, as it was.

        It begins with the generators of NumPy and Python as they were when
        the run began. If reading draws from them they go on from there, and
        else they are what they were before.
        """
        before, begun = _own_generators(), self._begun
        if begun is not None:
            _restore_own(begun)
        yield
        if begun is None:
            return  # Of a checkpoint from before it was kept.
        self._drawn = bool(changes(begun, _own_generators()))
        if not self._drawn:
            _restore_own(before)

    def begin_epoch(self) -> None:
        """Restores what was saved within the epoch."""
        if self._loaded is not None and self.position.step:
            self._restore(*self._loaded)

    def end_epoch(self, logs: Logs) -> None:
        """Moves on to the beginning of the next epoch."""
        at = self.position
        self.position = Position(
            epoch=at.epoch + 1,
            votes=at.votes,
            finished=[*at.finished, at.step],
            last_logs=logs,
            left_out=at.left_out,
        )

    def leave_out(self, batches: Sequence[LeftOut]) -> list[LeftOut]:
        """Leaves out batches besides those that the checkpoint names.

        Returns:
            All that are left out.
        """
        known = self.position.left_out
        known += [batch for batch in batches if batch not in known]
        return list(known)

    def capture(self) -> tuple[int, State, Iterator[Piece]]:
        """Returns the state at this moment.

        Returns:
            The global step, what JSON can hold besides arrays in the state
            of callbacks, and what this worker writes of the variables.
        """
        counts, position = self._counts, self.position
        strategy = self._model.distribute_strategy
        after = [
            remembered(callback, self._model)
            for callback in self._every_callback()
        ]
        state = {
            "position": {
                "epoch": position.epoch,
                "step": position.step,
                "examples": position.examples,
                "seconds": position.seconds,
                "logs": encode(_plain(position.logs)),
                "finished": list(position.finished),
                "last_logs": encode(_plain(position.last_logs)),
                "left_out": [vars(batch).copy() for batch in position.left_out],
            },
            "first_epoch": self.first_epoch,
            "epochs": self._epochs,
            "data": self._data,
            "order": self._order and vars(self._order).copy(),
            "configuration": self._configuration,
            "num_replicas": strategy.num_replicas_in_sync,
            "shares": balance_of(strategy).shares,
            "global_step": counts.global_step,
            "examples_seen": counts.examples_seen,
            "records": [
                encode(_plain(vars(record))) for record in counts.records
            ],
            SCORES: {} if position.step else _scores(position.last_logs),
            "stopped": bool(self._model.stop_training),
            "callbacks": [
                [type(callback).__name__, changes(before, now)]
                for callback, before, now in zip(
                    self._every_callback(), self._before, after, strict=True
                )
            ],
            "generators": generators(),
            "begun": self._begun,
            "environment": determinism.environment(),
            "variables": self._snapshot.paths(),
        }
        return counts.global_step, state, self._snapshot.pieces()

    def _restore(self, state: State, stored: Stored) -> None:
        self._loaded = None
        determinism.warn_of_other_environment(state["environment"])
        try:
            self._snapshot.put(stored)
        except ConfigurationError as error:
            words = f"{error} {self._settings}".rstrip()
            raise ConfigurationError(words) from None
        counts = self._counts
        counts.global_step = state["global_step"]
        counts.examples_seen = state["examples_seen"]
        counts.records[:] = [
            EpochRecord(**decode(record)) for record in state["records"]
        ]
        self._model.stop_training = self.stopped
        names = [type(callback).__name__ for callback in self._every_callback()]
        saved = [name for name, _ in state["callbacks"]]
        if names != saved:
            raise ConfigurationError(
                "A run resumes with the callbacks of its checkpoint, in their "
                f"order. Received: {', '.join(names[1:]) or 'none'}, where "
                f"the checkpoint has {', '.join(saved[1:]) or 'none'}."
            )
        for callback, (_, values) in zip(
            self._every_callback(), state["callbacks"], strict=True
        ):
            remind(callback, values)
        restore_generators(state["generators"], own=not self._drawn)
        for note in self._notes:
            _log.warning("%s", note)

    def _every_callback(self) -> list[keras.callbacks.Callback]:
        return [self._model.history, *self._callbacks]


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Copies a dict, and tensors in it to arrays."""
    return {
        name: value if _is_plain(value) else np.asarray(value)
        for name, value in values.items()
    }


def _scores(logs: Logs) -> dict[str, float]:
    """Returns those of the logs that are numbers."""
    plain = {name: np.asarray(value) for name, value in logs.items()}
    return {
        name: float(value)
        for name, value in plain.items()
        if value.shape == () and value.dtype.kind in "biuf"
    }


def _is_plain(value: Any) -> bool:
    return isinstance(value, (int, float, str, bool, dict, list, np.ndarray))


def generators() -> State:
    """Returns the state of the generators of Python, NumPy and Keras."""
    seed = keras_internals.global_seed_state()
    if seed is not None:
        seed = np.array(keras.ops.convert_to_numpy(seed))
    return {
        **_own_generators(),
        "keras": encode(seed),
    }


def _own_generators() -> State:
    return {
        "python": encode(random.getstate()),
        "numpy": encode(np.random.get_state()),
    }


def restore_generators(states: State, *, own: bool = True) -> None:
    """Puts back what `generators` has returned.

    Args:
        states: What that was.
        own: Whether those of Python and NumPy, too.
    """
    if states["keras"] is not None:
        seed = keras_internals.global_seed_state(create=True)
        seed.assign(decode(states["keras"]))
    if own:
        _restore_own(states)


def _restore_own(states: State) -> None:
    random.setstate(decode(states["python"]))
    np.random.set_state(decode(states["numpy"]))
