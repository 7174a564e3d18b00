"""Evaluating the checkpoints of a run in a process of its own."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

import keras

from mgpu_tf.checkpoints import store
from mgpu_tf.checkpoints.manifest import DamagedError
from mgpu_tf.checkpoints.reading import Stored
from mgpu_tf.checkpoints.run_state import State
from mgpu_tf.checkpoints.saving.writer import Variables, read_state
from mgpu_tf.engine.snapshot import Snapshot
from mgpu_tf.engine.step.base import Engine, Logs
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.options import SaveOptions

_POLL_SECONDS = 0.5

_log = logging.getLogger("mgpu_tf")


def follow(
    engine: Engine,
    saving: SaveOptions | None,
    evaluate: Callable[[], Logs] | None,
    epochs: int,
) -> keras.callbacks.History:
    """Evaluates every new checkpoint until the run has ended.

    Args:
        engine: A prepared engine with the model of the run.
        saving: Where the run saves.
        evaluate: Evaluates the model; None where there is nothing to do so.
        epochs: How many epochs the run has.

    Returns:
        The scores, named `val_...`; an entry for each checkpoint that was
        seen, by the epoch that it belongs to.

    Raises:
        ConfigurationError: There is nothing to follow or to evaluate.
    """
    if saving is None or evaluate is None:
        raise ConfigurationError(
            "An evaluator evaluates checkpoints on validation data. Received: "
            f"checkpoint_dir={saving and saving.folder!r}, validation_data "
            f"{'given' if evaluate else 'not given'}. Pass both to fit()."
        )
    # As the coordinator keeps them: each variable once.
    snapshot = Engine.snapshot(engine)
    history = keras.callbacks.History()
    history.on_train_begin()
    for state in _states(saving.folder, epochs, snapshot):
        scores = evaluate()
        values = ", ".join(
            f"{name} {value:.4f}" for name, value in scores.items()
        )
        _log.info("evaluator: step %d: %s", state["global_step"], values)
        epoch = state["position"]["epoch"]
        history.epoch.append(epoch)
        for name, value in scores.items():
            history.history.setdefault(f"val_{name}", []).append(value)
    return history


def _states(folder: str, epochs: int, snapshot: Snapshot) -> Iterator[State]:
    """Loads the newest checkpoint whenever there is another, to the last."""
    seen = -1
    while True:
        # To check one is to read all of it.
        there = max(store.paths(folder), default=-1) > seen
        entry = store.newest(folder) if there else None
        if entry is None or entry.step <= seen:
            time.sleep(_POLL_SECONDS)
            continue
        try:
            stored = Stored(entry.path)
            state = read_state(stored)
            snapshot.put(Variables(stored))
        except DamagedError:  # Deleted meanwhile.
            continue
        seen = entry.step
        yield state
        if state["position"]["epoch"] >= epochs or state["stopped"]:
            return
