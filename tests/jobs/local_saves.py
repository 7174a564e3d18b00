"""Runs that are broken off, and whose machines then lose checkpoints.

Each worker has a folder that stands for the disk of its machine. Saves are at
each second of 30 steps, and each fifth of them is to the shared folder: at 10,
20, 30. A run ends within step 17, with steps 14 and 16 on the disks.
"""

import errno
import json
import logging
import os
import random
import shutil
import signal
import sys
import time
from unittest import mock

import keras
import numpy as np

import mgpu_tf
from mgpu_tf.checkpoints import parts, store
from mgpu_tf.checkpoints.manifest import MANIFEST
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.reports.report import weights_sha256
from mgpu_tf.runtime import quiet_import
from mgpu_tf.strategies.registry import topology_of
from tests.jobs import split

SIZE = 80
BATCH = 8
EPOCHS = 3
BREAKS_AT = 17
SHARED, OLDER, NEWEST = 10, 14, 16


class BrokenOff(Exception):
    pass


def steps_of(model):
    """The steps that a model was trained for."""
    return int(keras.ops.convert_to_numpy(model.optimizer.iterations))


class Breaks(keras.callbacks.Callback):
    """Raises in the middle of the training; never for None."""

    def __init__(self, at):
        super().__init__()
        self.at = at

    def on_train_batch_end(self, batch, logs=None):
        if steps_of(self.model) == self.at:
            raise BrokenOff


def arrays():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(SIZE, 6)).astype("float32")
    return x, generator.integers(0, 3, size=SIZE)


def build():
    model = keras.Sequential(
        [
            keras.layers.Dense(8, activation="tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(3),
        ]
    )
    model.compile(
        keras.optimizers.Adam(0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


class Machine:
    """A worker, its folder, and the one that all see."""

    def __init__(self, strategy, folder, case):
        self.strategy = strategy
        self.worker = topology_of(strategy).local.process
        self.shared = os.path.join(folder, case, "shared")
        self.local = os.path.join(folder, case, f"machine-{self.worker}")
        self.said = []

    def train(self, breaks_at=None, first=None, **options):
        """Trains to the end; what it ended with, None if it broke off.

        The first callback is one that breaks the run off, or that given.
        """
        keras.utils.set_random_seed(1)
        folder = os.path.dirname(self.shared)
        # The largest loss is that of the first epoch, before a run breaks off;
        # only the chief has seen it.
        best = keras.callbacks.ModelCheckpoint(
            os.path.join(folder, "best.keras"),
            "loss",
            mode="max",
            save_best_only=True,
        )
        early = keras.callbacks.EarlyStopping(
            "loss", patience=9, restore_best_weights=True
        )
        trainer = mgpu_tf.Trainer(build, self.strategy, steps_per_execution=1)
        logger, handler = logging.getLogger("mgpu_tf"), Kept(self.said)
        level = logger.level
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
        options = {"save_every_steps": 2, "shared_every": 5} | options
        try:
            history = trainer.fit(
                *arrays(),
                batch_size=BATCH,
                epochs=EPOCHS,
                verbose=0,
                callbacks=[first or Breaks(breaks_at), Draws(), best, early],
                checkpoint=mgpu_tf.SaveOptions(
                    self.shared, local_checkpoint_dir=self.local, **options
                ),
            )
        except BrokenOff:
            return None
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)
        return {
            "weights": weights_sha256(trainer.model.get_weights()),
            "slots": weights_sha256(
                list(
                    map(
                        keras.ops.convert_to_numpy,
                        trainer.model.optimizer.variables,
                    )
                )
            ),
            "history": history.history,
            "best": float(best.best) if self.worker == 0 else None,
            "early": float(early.best),
            "random": random.random() if self.worker == 0 else None,
        }

    def steps(self):
        """The steps on the disk of this machine, broken ones too."""
        return [
            entry.step
            for folder in store.folders(self.local)
            for entry in store.entries(folder, thorough=False)
        ]

    def file(self, step, name="arrays-0.bin"):
        (path,) = (
            entry.path
            for folder in store.folders(self.local)
            for entry in store.entries(folder, thorough=False)
            if entry.step == step
        )
        return os.path.join(path, name)


class Draws(keras.callbacks.Callback):
    """Moves the generator of Python, alike on all workers."""

    def on_train_batch_end(self, batch, logs=None):
        random.random()


class Kept(logging.Handler):
    """Keeps what is said of checkpoints."""

    def __init__(self, said):
        super().__init__()
        self._said = said

    def emit(self, record):
        self._said.append(record.getMessage())


def flip(path):
    """Changes a byte in the middle of a file."""
    with open(path, "r+b") as file:
        file.seek(os.path.getsize(path) // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def broken_off(machine, damage, **options):
    """Breaks a run off, damages what machines have, and goes on."""
    assert machine.train(BREAKS_AT, **options) is None
    before = machine.steps()
    damage(machine)
    found = machine.train(**options)
    return {
        "before": before,
        "ended": found,
        "said": list(machine.said),
        "left": os.path.exists(machine.local) and os.listdir(machine.local),
        "shared": [e.step for e in store.entries(machine.shared)],
    }


def nothing(machine):
    del machine


def lost(*workers):
    def damage(machine):
        if machine.worker in workers:
            shutil.rmtree(machine.local)

    return damage


def torn(*workers):
    """One file changed, and one cut off."""

    def damage(machine):
        if machine.worker not in workers:
            return
        path = machine.file(NEWEST)
        if machine.worker:
            os.truncate(path, os.path.getsize(path) // 2)
        else:
            flip(path)

    return damage


def no_manifest(machine):
    """As if all were killed before it was written, and one lost all."""
    if machine.worker:
        os.remove(machine.file(NEWEST, MANIFEST))
    else:
        shutil.rmtree(machine.local)


def moved_to_one(machine):
    """The first machine has what all had, the others have nothing."""
    if machine.worker == 0:
        for other in (1, 2):
            shutil.copytree(
                f"{machine.local[:-1]}{other}",
                machine.local,
                dirs_exist_ok=True,
            )
        open(machine.local + "-has-all", "w").close()
    while not os.path.exists(f"{machine.local[:-1]}0-has-all"):
        time.sleep(0.01)
    if machine.worker:
        shutil.rmtree(machine.local)


def failing(strategy, folder):
    """Worker 1 cannot write its last saves before the run breaks off.

    It has a part of the weights that nobody else has.
    """
    strategy = split.strategy_of(strategy, (1, 2, 1))
    machine = Machine(strategy, folder, "failing")
    write = parts.commit

    def commit(folder, step, *others):
        if step > SHARED + 2 and machine.worker and machine.local in folder:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(folder, step, *others)

    with mock.patch.object(parts, "commit", commit):
        assert machine.train(BREAKS_AT) is None
    before = machine.steps()
    return {"before": before, "ended": machine.train(), "said": machine.said}


def other_run(machine):
    """The checkpoints of a run with another shared folder, and a copy."""
    machine.shared += "-2"


def copied(machine):
    """The shared folder is a copy: what the disks have is of the first."""
    first, machine.shared = machine.shared, machine.shared + "-2"
    if machine.worker == 0:
        shutil.copytree(first, machine.shared)


DAMAGES = {
    "nothing": nothing,
    "lost_0": lost(0),
    "lost_1": lost(1),
    "lost_both": lost(0, 1),
    "torn_0": torn(0),
    "torn_1": torn(1),
    "torn_both": torn(0, 1),
    "no_manifest": no_manifest,
    "other_run": other_run,
    "copied": copied,
}


def moved(strategy, folder):
    return broken_off(Machine(strategy, folder, "moved"), moved_to_one)


def control(strategy, folder):
    machine = Machine(strategy, folder, "control")
    return machine.train()


def damaged(case):
    def job(strategy, folder):
        return broken_off(Machine(strategy, folder, case), DAMAGES[case])

    job.__name__ = case
    return job


def split_control(strategy, folder):
    strategy = split.strategy_of(strategy, (1, 2, 1))
    return Machine(strategy, folder, "split_control").train()


def split_lost(strategy, folder):
    """A part of the weights was on the lost disk only."""
    strategy = split.strategy_of(strategy, (1, 2, 1))
    return broken_off(Machine(strategy, folder, "split_lost"), lost(1))


def unwritable(strategy, folder):
    """A file stands where worker 1 would make its folder."""
    machine = Machine(strategy, folder, "unwritable")
    if machine.worker == 1:
        os.makedirs(os.path.dirname(machine.local), exist_ok=True)
        open(machine.local, "w").close()
    try:
        machine.train()
    except ConfigurationError as error:
        return str(error)
    return ""


def left_for_one(strategy, folder):
    """Broken off, for another number of workers to go on."""
    machine = Machine(strategy, folder, "left_for_one")
    machine.train(BREAKS_AT)
    return machine.steps()


JOBS = {
    job.__name__: job
    for job in (
        control,
        *map(damaged, DAMAGES),
        moved,
        failing,
        split_control,
        split_lost,
        unwritable,
        left_for_one,
    )
}


class Killed(keras.callbacks.Callback):
    """Kills its process once, and leaves a file that says so."""

    def __init__(self, at, told):
        super().__init__()
        self.at, self.told = at, told

    def on_train_batch_end(self, batch, logs=None):
        if steps_of(self.model) != self.at:
            return
        if not os.path.exists(self.told):
            open(self.told, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder):
    """A process of a job of its own, of which worker 1 is killed."""
    quiet_import.import_tensorflow()
    mgpu_tf.enable_determinism()
    strategy = mgpu_tf.create_multi_worker_mirrored_strategy()
    machine = Machine(strategy, folder, "killed")
    told = os.path.join(folder, "told")
    at = BREAKS_AT if machine.worker == 1 else None
    found = machine.train(first=Killed(at, told))
    for text in machine.said:
        print("SAID", text, flush=True)
    control = Machine(strategy, folder, "control").train(first=Killed(0, told))
    print("RESULT", json.dumps([found, control]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
