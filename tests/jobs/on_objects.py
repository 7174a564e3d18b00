"""Runs whose checkpoints are on object storage, one of which is killed.

    python -m tests.jobs.on_objects --address=s3://bucket/runs --once=FILE
    python -m tests.jobs.on_objects --address=s3://bucket/servers

The second worker kills itself, once, after some steps. What begins it again is
`mgpu-tf launch --max_restarts=1`. The second line is for parameter servers and
their evaluator.
"""

import argparse
import json
import os
import signal
import time

import keras
import numpy as np

import mgpu_tf
from mgpu_tf.checkpoints import store
from mgpu_tf.reports.report import weights_sha256
from mgpu_tf.runtime import quiet_import

SIZE = 75
BATCH = 8
EPOCHS = 3
EVERY = 4
STEP = 15  # Of 10 in an epoch.
BEST = {
    "keep_checkpoints": 1,
    "keep_every_steps": 7,
    "monitor": "loss",
    "monitor_mode": "max",
}


def arrays():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(SIZE, 6)).astype("float32")
    return x, generator.integers(0, 3, size=SIZE)


def build():
    model = keras.Sequential(
        [
            keras.layers.Dense(8, activation="tanh"),
            keras.layers.Dropout(0.2, seed=1),
            keras.layers.Dense(3),
        ]
    )
    model.compile(
        keras.optimizers.Adam(0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


class Kills(keras.callbacks.Callback):
    """Kills its own process after some steps, unless a file says it has.

    A checkpoint is there by then: uploads are behind on a busy machine.
    """

    def __init__(self, once, address):
        super().__init__()
        self._once, self._address, self._steps = once, address, 0

    def on_train_batch_end(self, batch, logs=None):
        self._steps += 1
        if self._steps == STEP and not os.path.exists(self._once):
            while not store.newest(self._address):
                time.sleep(0.05)
            open(self._once, "x").close()
            os.kill(os.getpid(), signal.SIGKILL)


def train(strategy, address, callbacks=(), **options):
    """Trains to the end; returns what there is to compare."""
    trainer = mgpu_tf.Trainer(
        build, strategy, steps_per_execution=1, seed=3, on_nan="stop"
    )
    history = trainer.fit(
        *arrays(),
        batch_size=BATCH,
        epochs=EPOCHS,
        verbose=0,
        checkpoint=mgpu_tf.SaveOptions(
            address, **{"save_every_steps": EVERY} | options
        ),
        callbacks=list(callbacks),
    )
    best = {}
    if "monitor" in options:
        best["best"] = trainer.restore(address, "best", *arrays())
        best["scores"] = trainer.evaluate(*arrays(), BATCH, 0)
    return best | {
        "loss": history.history["loss"],
        "sha256": weights_sha256(trainer.model.get_weights()),
        "restarts": trainer.recovery.restarts,
        "lost_steps": trainer.recovery.lost_steps,
    }


def serve(address):
    """Trains on parameter servers, or evaluates what they save."""
    trainer = mgpu_tf.Trainer(build, mgpu_tf.create_strategy("auto"))
    history = trainer.fit(
        *(*arrays(), BATCH, EPOCHS),
        verbose=0,
        validation_data=arrays(),
        checkpoint_dir=address,
    )
    task = mgpu_tf.ClusterConfig.from_environment().task_type
    found = history.epoch, history.history
    print(f"RESULT {task} {json.dumps(found)}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--once")
    arguments = parser.parse_args()
    quiet_import.import_tensorflow()
    if arguments.once is None:
        serve(arguments.address)
        return
    strategy = mgpu_tf.create_multi_worker_mirrored_strategy()
    worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    once = arguments.once if worker else os.devnull
    kills = Kills(once, f"{arguments.address}/killed")
    for name, callbacks, options in (
        ("whole", [], {}),
        ("killed", [kills], {}),
        ("in_memory", [], {"snapshot_in": "memory"}),
        ("best", [], BEST),
    ):
        address = f"{arguments.address}/{name}"
        found = train(strategy, address, callbacks, **options)
        print(f"RESULT {name} {json.dumps(found)}", flush=True)


if __name__ == "__main__":
    main()
