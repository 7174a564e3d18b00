"""A large model, killed while it saves, resumed: the same bits.

    python -m tests.checkpoints.killed_at_size 200 4    # 200 M weights, 4 times

Adam is the optimizer. One process trains to the end, and tells a digest of all
weights and slots. Another one is ended by SIGKILL when a save has written about
half of its bytes, and is started again. Needs, for each million weights and
replica, 16 MB of memory, and 24 MB of disk in all.
"""

import contextlib
import glob
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

LAYERS = 5
STEPS = 6
SAVE_EVERY = 2


def train(millions, replicas, folder, told):
    """Trains, and writes what the end is and where it began."""
    import keras
    import numpy as np

    import mgpu_tf

    keras.utils.set_random_seed(1)
    width = int((millions * 1e6 / LAYERS) ** 0.5)

    def build():
        model = keras.Sequential(
            [keras.Input((width,))]
            + [keras.layers.Dense(width, use_bias=False) for _ in range(LAYERS)]
        )
        model.compile(keras.optimizers.Adam(1e-4), "mse")
        return model

    strategy = mgpu_tf.create_mirrored_strategy(num_virtual_devices=replicas)
    trainer = mgpu_tf.Trainer(build, strategy, steps_per_execution=1)
    random = np.random.default_rng(0)
    x = random.normal(size=(2 * replicas * STEPS, width)).astype("float32")
    steps = []

    class Counted(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            steps.append(batch)

    trainer.fit(
        *(x, x[::-1].copy()),
        batch_size=2 * replicas,
        epochs=1,
        verbose=0,
        callbacks=[Counted()],
        checkpoint=mgpu_tf.SaveOptions(
            folder, save_every_steps=SAVE_EVERY, keep_checkpoints=2
        ),
    )
    digest = hashlib.sha256()
    variables = [*trainer.model.weights, *trainer.model.optimizer.variables]
    for variable in variables:
        digest.update(variable.numpy().tobytes())
    found = {
        "weights": trainer.model.count_params(),
        "steps": len(steps),
        "digest": digest.hexdigest(),
    }
    with open(told, "w") as file:
        json.dump(found, file)


def started(millions, replicas, folder, told):
    command = [sys.executable, "-m", "tests.checkpoints.killed_at_size"]
    return subprocess.Popen(
        [*command, str(millions), str(replicas), folder, told]
    )


def finished(*arguments):
    assert started(*arguments).wait() == 0
    with open(arguments[-1]) as file:
        return json.load(file)


def written(folder):
    """The bytes of the checkpoint that is not finished."""
    total = 0
    for path in glob.glob(f"{folder}/.unfinished-*/*"):
        with contextlib.suppress(FileNotFoundError):
            total += os.path.getsize(path)
    return total


def killed(millions, replicas, folder, told):
    """Ends a run within its second save."""
    half = int(1e6 * millions * 12 / 2)
    process = started(millions, replicas, folder, told)
    while not glob.glob(f"{folder}/step-*") or written(folder) < half:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return {"unfinished_bytes": written(folder), "left": os.listdir(folder)}


def main(millions, replicas):
    with tempfile.TemporaryDirectory(dir=os.getcwd()) as where:
        arguments = (millions, replicas, f"{where}/saved", f"{where}/told")
        found = {"whole": finished(*arguments)}
        shutil.rmtree(arguments[2])
        found["killed"] = killed(*arguments)
        found["resumed"] = finished(*arguments)
    found["equal"] = found["whole"]["digest"] == found["resumed"]["digest"]
    print(json.dumps(found))


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if len(sys.argv) > 3:
        train(float(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
    else:
        main(float(sys.argv[1]), int(sys.argv[2]))
