"""The trainings of `mgpu-tf test`, each run by processes of its own.

    python -m mgpu_tf.studies.setup_check replicas FOLDER
    mgpu-tf launch --num_workers=2 --max_restarts=1 -- \
        python -m mgpu_tf.studies.setup_check workers FOLDER

Both train one small model on the same numbers. `replicas` also trains it on one
device. `workers` is a cluster whose second worker is killed once. Each leaves
its weights, and a JSON file that says how it went.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import sys
from typing import Any

from mgpu_tf.launch.job import RESTARTS
from mgpu_tf.runtime import quiet_import

REPLICAS, WORKERS = "replicas", "workers"
_ONE_DEVICE = "one_device"
_ROWS, _COLUMNS, _BATCH, _EPOCHS = 96, 8, 18, 4


def main(stage: str, folder: str) -> int:
    """Runs a stage; returns the status of the process."""
    quiet_import.import_tensorflow()
    found = {REPLICAS: _replicas, WORKERS: _workers}[stage](folder)
    if found is not None:
        _report(stage, folder).write_text(json.dumps(found), encoding="utf-8")
    return 0


def found(stage: str, folder: str) -> dict[str, Any] | None:
    """Returns how a stage went; None where it did not come to its end."""
    path = _report(stage, folder)
    return json.loads(path.read_text("utf-8")) if path.exists() else None


def difference(stage: str, folder: str) -> float | None:
    """Returns the largest difference of a weight from one device.

    Args:
        stage: A stage that is done.
        folder: Where the stages left their weights.

    Returns:
        The difference; None where one device has left no weights.
    """
    import numpy as np

    one_device = os.path.join(folder, f"{_ONE_DEVICE}.npz")
    if not os.path.exists(one_device):
        return None
    with (
        np.load(one_device) as one,
        np.load(os.path.join(folder, f"{stage}.npz")) as other,
    ):
        return float(np.max([abs(one[k] - other[k]).max() for k in one.files]))


def _report(stage: str, folder: str) -> pathlib.Path:
    return pathlib.Path(folder, f"{stage}.json")


def _keep(model: Any, name: str, folder: str) -> None:
    import numpy as np

    np.savez(os.path.join(folder, f"{name}.npz"), *model.get_weights())


def _replicas(folder: str) -> dict[str, Any]:
    """Trains on one device and on replicas."""
    from mgpu_tf.runtime import devices
    from mgpu_tf.strategies.synchronous import (
        create_mirrored_strategy,
        create_one_device_strategy,
    )

    options = devices.several_here(2)
    strategy = create_mirrored_strategy(**options)
    _keep(_trained(create_one_device_strategy()), _ONE_DEVICE, folder)
    _keep(_trained(strategy), REPLICAS, folder)
    count = strategy.num_replicas_in_sync
    what = "GPU" if devices.gpus() else "CPU"
    parts = f"{count} parts of the {what}"
    return {"devices": parts if options else f"{count} GPUs"}


def _workers(folder: str) -> dict[str, Any] | None:
    """Trains as a worker of a cluster; the second is killed once."""
    import keras

    from mgpu_tf.strategies.registry import create_strategy, is_chief

    strategy = create_strategy("multi_worker_mirrored")
    chief = is_chief(strategy)

    class Killed(keras.callbacks.Callback):
        """Kills the process in its third epoch, unless it was restarted."""

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2 and not chief and os.environ[RESTARTS] == "0":
                os.kill(os.getpid(), signal.SIGKILL)

    trainer = _trainer(strategy)
    trainer.fit(
        *_numbers(),
        batch_size=_BATCH,
        epochs=_EPOCHS,
        verbose=0,
        callbacks=[Killed()],
        checkpoint_dir=os.path.join(folder, "checkpoints"),
    )
    if not chief:
        return None
    _keep(trainer.model, WORKERS, folder)
    return {
        "restarts": trainer.recovery.restarts,
        "steps": trainer.global_step,
    }


def _trained(strategy: Any) -> Any:
    trainer = _trainer(strategy)
    trainer.fit(*_numbers(), batch_size=_BATCH, epochs=_EPOCHS, verbose=0)
    return trainer.model


def _trainer(strategy: Any) -> Any:
    import keras

    from mgpu_tf.training.trainer import Trainer

    def build_model() -> keras.Model:
        model = keras.Sequential(
            [
                keras.Input((_COLUMNS,)),
                keras.layers.Dense(16, activation="relu"),
                keras.layers.Dense(1),
            ]
        )
        model.compile(keras.optimizers.Adam(0.01, global_clipnorm=1.0), "mse")
        return model

    return Trainer(build_model, strategy, seed=0)


def _numbers() -> tuple[Any, Any]:
    """Returns inputs and targets; the last batch is smaller than the rest."""
    import numpy as np

    x = np.random.default_rng(0).normal(size=(_ROWS, _COLUMNS))
    return x.astype("float32"), x.sum(1, keepdims=True).astype("float32")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
