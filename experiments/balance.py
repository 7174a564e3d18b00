"""Workers of unequal speed, with equal and with measured shares.

    python experiments/balance.py [--slow=device|process] [--rounds=3]

Worker 1 of 2 has half the speed of worker 0. One cluster trains the same model
twice, with equal shares and with balance=auto, an epoch or two of each in turn:
what else the machine does meanwhile slows both. Two ways to be slow:

device   A layer waits 2.5 ms for each row, 5 ms on worker 1, as for a device.
         No processor is needed for that, so that other work changes little.
process  Each worker computes with one thread. A control group holds worker 1 to
         half a core. Needs Linux, root and two free cores.

By arithmetic measured shares give at most 1.5 times the examples per second.
Expected: 1.25 times or more, and the same losses. Takes 2 minutes on two cores.
"""

import argparse
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import time

EPOCHS = 2
ROWS = {"device": 768, "process": 6144}
BATCH = {"device": 128, "process": 256}
ROW_SECONDS = 0.0025
GROUPS = pathlib.Path("/sys/fs/cgroup")


def build(slow, index):
    """Returns a compiled model that takes its time, as `slow` says."""
    import keras
    import tensorflow as tf

    class Waits(keras.layers.Layer):
        """Waits for each row, and returns it."""

        def call(self, x):
            seconds = ROW_SECONDS * (1 + index)

            def wait(x):
                time.sleep(seconds * len(x))
                return x

            y = tf.numpy_function(wait, [x], x.dtype, stateful=True)
            y.set_shape(x.shape)
            return x + tf.stop_gradient(y - x)

    if slow == "device":
        layers = [Waits(), keras.layers.Flatten()]
    else:
        layers = [
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.GlobalAveragePooling2D(),
        ]
    model = keras.Sequential([*layers, keras.layers.Dense(10)])
    model.compile(
        keras.optimizers.Adam(0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def train(slow, rounds, folder):
    """Runs in each worker: trains both ways in turn, writes what it took."""
    import keras
    import numpy as np
    import tensorflow as tf

    import mgpu_tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    index = mgpu_tf.ClusterConfig.from_environment().worker_index
    strategies = {
        name: mgpu_tf.create_strategy("multi_worker_mirrored", balance=balance)
        for name, balance in (("equal", None), ("auto", "auto"))
    }
    with open(os.path.join(folder, f"{index}.pid"), "w") as file:
        file.write(str(os.getpid()))
    generator, rows = np.random.default_rng(0), ROWS[slow]
    x = generator.normal(size=(rows, 16, 16, 1))
    y = generator.integers(0, 10, size=rows)
    trainers = {
        name: mgpu_tf.Trainer(lambda: build(slow, index), strategy)
        for name, strategy in strategies.items()
    }
    # In the first epochs steps are traced and shares chosen.
    for begin in range(0, EPOCHS * (rounds + 1), EPOCHS):
        for trainer in trainers.values():
            trainer.fit(
                *(x, y),
                batch_size=BATCH[slow],
                initial_epoch=begin,
                epochs=begin + EPOCHS,
                verbose=0,
            )
    if index:
        return
    found = {
        name: {
            "shares": str(strategies[name].balance),
            "losses": [record.logs["loss"] for record in trainer.records],
            "seconds": [record.seconds for record in trainer.records],
        }
        for name, trainer in trainers.items()
    }
    with open(os.path.join(folder, "found.json"), "w") as file:
        json.dump(found, file)


@contextlib.contextmanager
def half_a_core(pid):
    """Holds a process to half a core: 5 ms of each 10 ms."""
    several = (GROUPS / "cpu").is_dir()  # Version 1 has a tree for each limit.
    group = (GROUPS / "cpu" if several else GROUPS) / f"half_a_core_{pid}"
    limits = {"cpu.max": "5000 10000"}
    if several:
        limits = {"cpu.cfs_period_us": "10000", "cpu.cfs_quota_us": "5000"}
    try:
        group.mkdir()
        for name, limit in limits.items():
            (group / name).write_text(limit)
        (group / "cgroup.procs").write_text(str(pid))
    except OSError as error:
        raise SystemExit(
            "--slow=process needs Linux's control groups and root. Received: "
            f"{error}. Use --slow=device."
        ) from None
    try:
        yield
    finally:
        group.rmdir()


def measure(slow, rounds, folder):
    """Runs the cluster; returns what its chief found."""
    os.makedirs(folder, exist_ok=True)
    pid_file = os.path.join(folder, "1.pid")
    if os.path.exists(pid_file):
        os.remove(pid_file)
    with contextlib.ExitStack() as ends:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "mgpu_tf", "launch", "--num_workers=2"),
                *("--", sys.executable, __file__, "--worker"),
                *(f"--slow={slow}", f"--rounds={rounds}"),
                f"--output_dir={folder}",
            ],
            env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"},
        )
        try:
            while not os.path.exists(pid_file) and process.poll() is None:
                time.sleep(0.1)
            if slow == "process" and process.poll() is None:
                time.sleep(0.5)
                with open(pid_file) as file:
                    ends.enter_context(half_a_core(int(file.read())))
            if process.wait():
                raise SystemExit(process.returncode)
        finally:
            process.terminate()
            process.wait()
    with open(os.path.join(folder, "found.json")) as file:
        return json.load(file)


def tell(found, slow, rounds):
    """Prints the examples per second of each round, and their ratio."""
    ratios = []
    for index in range(1, rounds + 1):
        part = slice(EPOCHS * index, EPOCHS * (index + 1))
        equal, auto = (
            ROWS[slow] * EPOCHS / sum(found[name]["seconds"][part])
            for name in ("equal", "auto")
        )
        ratios.append(auto / equal)
        print(
            f"round {index}: {equal:.0f} examples/s with equal shares, "
            f"{auto:.0f} with measured ones: {auto / equal:.2f} times"
        )
    largest = max(
        abs(a / b - 1)
        for a, b in zip(
            found["auto"]["losses"], found["equal"]["losses"], strict=True
        )
    )
    print(f"shares {found['auto']['shares']}")
    print(f"median: {sorted(ratios)[rounds // 2]:.2f} times")
    print(f"largest relative difference of losses: {largest:.1e}")
    print(f"load of the machine: {os.getloadavg()[0]:.1f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--slow", default="device", choices=sorted(BATCH))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output_dir", default=os.path.join("runs", "balance"))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    given = (arguments.slow, arguments.rounds, arguments.output_dir)
    if arguments.worker:
        train(*given)
        return
    tell(measure(*given), arguments.slow, arguments.rounds)


if __name__ == "__main__":
    main()
