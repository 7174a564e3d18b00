"""Workers of unequal speed, with equal and with measured shares.

    python experiments/balance.py [--output_dir=runs/balance]

Worker 1 of 2 is held to half of its time: SIGSTOP and SIGCONT, 25 ms each.
Each worker computes with one thread. Without shares the fast worker waits for
it in every step. Hardware: two CPU cores or more; expected on two quiet cores:
2 minutes, and 1.25 times the examples per second or more with balance=auto.
The losses are the same.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time

ROWS, BATCH, EPOCHS = 6144, 256, 6


def train(balance, folder):
    """Runs in each worker: trains, and writes what it took."""
    import keras
    import numpy as np
    import tensorflow as tf

    import mgpu_tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    strategy = mgpu_tf.create_strategy(
        "multi_worker_mirrored", balance=None if balance == "equal" else balance
    )
    index = mgpu_tf.ClusterConfig.from_environment().worker_index
    with open(os.path.join(folder, f"{index}.pid"), "w") as file:
        file.write(str(os.getpid()))

    def build():
        model = keras.Sequential(
            [
                keras.layers.Conv2D(16, 3, activation="gelu"),
                keras.layers.Conv2D(16, 3, activation="gelu"),
                keras.layers.GlobalAveragePooling2D(),
                keras.layers.Dense(10),
            ]
        )
        model.compile(
            keras.optimizers.Adam(0.01),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        return model

    generator = np.random.default_rng(0)
    x = generator.normal(size=(ROWS, 16, 16, 1))
    y = generator.integers(0, 10, size=ROWS)
    trainer = mgpu_tf.Trainer(build, strategy)
    history = trainer.fit(x, y, batch_size=BATCH, epochs=EPOCHS, verbose=0)
    if mgpu_tf.is_chief(strategy):
        rates = [record.examples_per_second for record in trainer.records]
        found = {
            "balance": balance,
            "shares": str(strategy.balance),
            "examples_per_second": rates,
            "losses": history.history["loss"],
        }
        with open(os.path.join(folder, "found.json"), "w") as file:
            json.dump(found, file)


def hold(pid, process):
    """Stops a process for half of the time, until the job has ended."""
    try:
        while process.poll() is None:
            for number in (signal.SIGSTOP, signal.SIGCONT):
                os.kill(pid, number)
                time.sleep(0.025)
    except ProcessLookupError:
        pass


def measure(balance, folder):
    """Runs one cluster; returns what its chief found."""
    os.makedirs(folder, exist_ok=True)
    pid_file = os.path.join(folder, "1.pid")
    if os.path.exists(pid_file):
        os.remove(pid_file)
    own = [sys.executable, __file__, f"--worker={balance}"]
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "mgpu_tf", "launch", "--num_workers=2"),
            *("--", *own, f"--output_dir={folder}"),
        ]
    )
    try:
        while not os.path.exists(pid_file) and process.poll() is None:
            time.sleep(0.1)
        if process.poll() is None:
            time.sleep(0.5)
            with open(pid_file) as file:
                hold(int(file.read()), process)
        if process.wait():
            raise SystemExit(process.returncode)
    finally:
        process.terminate()
        process.wait()
    with open(os.path.join(folder, "found.json")) as file:
        return json.load(file)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default=os.path.join("runs", "balance"))
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        train(arguments.worker, arguments.output_dir)
        return
    found = [
        measure(balance, os.path.join(arguments.output_dir, balance))
        for balance in ("equal", "auto")
    ]
    # The first epoch is traced; those after it have measured shares.
    last = [
        sorted(each["examples_per_second"][2:])[(EPOCHS - 2) // 2]
        for each in found
    ]
    for each, rate in zip(found, last, strict=True):
        print(
            f"{each['balance']:6} shares {each['shares']:8} "
            f"{rate:8.0f} examples/s, last loss {each['losses'][-1]:.12f}"
        )
    print(f"auto / equal: {last[1] / last[0]:.2f}")


if __name__ == "__main__":
    main()
