"""The time of a step against the rows of an embedding.

    python experiments/embeddings.py [--rows=1000000] [--output_dir=DIR]
    python experiments/embeddings.py --strategies=spread_x4 --rows=10000000

The strategies `mirrored_xN` and `N_workers` hold whole tables, `spread_xN` has
the rows of a `ShardedEmbedding` over N devices.

A step looks up 1,000 different rows of a table of 64 columns. Two tables take
turns in one process: one of 10,000 rows, one of `--rows`. Processor time is
that of all workers, since other work may run on the machine. Then tables of
`--checked_rows` are trained in float64, and all weights and slots are compared
with those of Keras's own `fit` on one device. Hardware: any, 4 GB of memory;
expected on 2 CPU cores: three minutes, ratios of 1.2 at most, and differences
of 1e-12 at most.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

SMALL, WIDTH, TOUCHED, LENGTH = 10_000, 64, 1_000, 10
BATCH = TOUCHED // LENGTH


def optimizer_of(name):
    import keras

    import mgpu_tf

    return {
        "sgd": lambda: keras.optimizers.SGD(0.1),
        "adagrad": lambda: keras.optimizers.Adagrad(0.1),
        "lazy_adam": lambda: mgpu_tf.optimizers.LazyAdam(0.01),
        "adam": lambda: keras.optimizers.Adam(0.01),
    }[name]()


def builder(strategy, rows, optimizer, initializer="zeros"):
    import keras

    import mgpu_tf

    spread = mgpu_tf.layers.ShardedEmbedding
    kind = spread if strategy.startswith("spread") else keras.layers.Embedding

    def build():
        model = keras.Sequential(
            [
                keras.Input((LENGTH,), dtype="int32"),
                kind(rows, WIDTH, initializer),
                keras.layers.GlobalAveragePooling1D(),
                keras.layers.Dense(1, kernel_initializer="ones"),
            ]
        )
        model.compile(optimizer_of(optimizer), "mse")
        return model

    return build


def data_of(rows, steps, dtype):
    """Batches of different rows each."""
    import numpy as np

    random = np.random.default_rng(0)
    x = [
        random.choice(rows, min(TOUCHED, rows), replace=False)
        for _ in range(steps)
    ]
    x = np.resize(np.array(x), (steps * BATCH, LENGTH))
    return x, random.normal(size=(len(x), 1)).astype(dtype)


def strategy_of(name):
    import mgpu_tf

    if name.endswith("workers"):
        return mgpu_tf.create_strategy("multi_worker_mirrored")
    kind, _, number = name.rpartition("_x")
    number = int(number)
    if kind == "spread":
        return mgpu_tf.create_model_parallel_strategy(
            data=number, num_virtual_devices=number
        )
    return mgpu_tf.create_mirrored_strategy(num_virtual_devices=number)


def clock():
    import keras

    class Clock(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.begun = time.process_time(), time.perf_counter()

        def on_epoch_end(self, epoch, logs=None):
            self.processor = time.process_time() - self.begun[0]
            self.wall = time.perf_counter() - self.begun[1]

    return Clock()


def measured(arguments, strategy, optimizer):
    """Milliseconds of a step for each round and table."""
    import mgpu_tf

    tables = []
    for rows in (SMALL, arguments.rows):
        trainer = mgpu_tf.Trainer(
            builder(arguments.worker, rows, optimizer),
            strategy,
            kernels=arguments.kernels,
        )
        tables.append((trainer, data_of(rows, arguments.steps, "float32")))
    found = []
    for _ in range(1 + arguments.rounds):
        times = []
        for trainer, (x, y) in tables:
            seen = clock()
            trainer.fit(
                *(x, y),
                batch_size=BATCH,
                shuffle=False,
                verbose=0,
                callbacks=[seen],
            )
            per_step = 1000 / arguments.steps
            times.append((seen.processor * per_step, seen.wall * per_step))
        found.append(times)
    return found[1:]  # The first round is traced.


def difference(arguments, strategy, optimizer):
    """The largest from one device, of weights and slots, in float64."""
    import keras
    import numpy as np

    import mgpu_tf

    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    normal = keras.initializers.RandomNormal(seed=1)
    rows = arguments.checked_rows
    build = builder(arguments.worker, rows, optimizer, normal)
    x, y = data_of(arguments.checked_rows, 8, "float64")
    fitted = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    trainer = mgpu_tf.Trainer(build, strategy)
    trainer.fit(x, y, **fitted)
    alone = builder("", rows, optimizer, normal)()
    alone.fit(x, y, **fitted)
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    ours = [*trainer.model.weights, *trainer.model.optimizer.variables]
    theirs = [*alone.weights, *alone.optimizer.variables]
    return max(
        float(np.max(np.abs(np.float64(mine.numpy()) - other.numpy())))
        for mine, other in zip(ours, theirs, strict=True)
    )


def work(arguments):
    """Runs in each worker."""
    import mgpu_tf

    strategy = strategy_of(arguments.worker)
    found = {}
    for optimizer in arguments.optimizers.split(","):
        found[optimizer] = {
            "times": measured(arguments, strategy, optimizer),
            "difference": difference(arguments, strategy, optimizer),
        }
    index = 0
    if arguments.worker.endswith("workers"):
        index = mgpu_tf.ClusterConfig.from_environment().worker_index
    with open(f"{arguments.output_dir}/{index}.json", "w") as file:
        json.dump(found, file)


def run(arguments, strategy, folder):
    """Runs a strategy; returns what each of its workers found."""
    command = [sys.executable, __file__, f"--worker={strategy}"]
    for name in ("rows", "checked_rows", "steps", "rounds", "optimizers"):
        command.append(f"--{name}={getattr(arguments, name)}")
    command += [f"--kernels={arguments.kernels}", f"--output_dir={folder}"]
    workers = 1
    if strategy.endswith("workers"):
        workers = int(strategy.split("_")[0])
        launch = [sys.executable, "-m", "mgpu_tf", "launch"]
        command = [*launch, f"--num_workers={workers}", "--", *command]
    os.makedirs(folder, exist_ok=True)
    subprocess.run(command, check=True, timeout=arguments.limit_seconds)
    every = []
    for index in range(workers):
        with open(f"{folder}/{index}.json") as file:
            every.append(json.load(file))
    return every


def summary(every, optimizer):
    """Medians over rounds: milliseconds, and ratios within a round."""
    rounds = zip(*(each[optimizer]["times"] for each in every), strict=True)
    processor, wall = [], []
    for of_workers in rounds:
        # Of all workers; they wait for each other.
        small, large = zip(*of_workers, strict=True)
        processor.append([sum(t[0] for t in one) for one in (small, large)])
        wall.append([max(t[1] for t in one) for one in (small, large)])
    return {
        "processor_ms": [
            statistics.median(each) for each in zip(*processor, strict=True)
        ],
        "processor_ratios": sorted(b / a for a, b in processor),
        "wall_ratios": sorted(b / a for a, b in wall),
        "difference": max(each[optimizer]["difference"] for each in every),
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--checked_rows", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--optimizers", default="sgd,adagrad,lazy_adam")
    parser.add_argument("--kernels", default="fused")
    parser.add_argument(
        "--strategies", default="mirrored_x2,mirrored_x4,2_workers"
    )
    parser.add_argument("--limit_seconds", type=float, default=900.0)
    parser.add_argument("--output_dir", default="")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments)
        return
    with tempfile.TemporaryDirectory() as temporary:
        output = arguments.output_dir or temporary
        for strategy in arguments.strategies.split(","):
            every = run(arguments, strategy, f"{output}/{strategy}")
            for optimizer in arguments.optimizers.split(","):
                found = summary(every, optimizer)
                small, large = found["processor_ms"]
                processor, wall = (
                    f"{statistics.median(ratios):.2f} "
                    f"({ratios[0]:.2f} - {ratios[-1]:.2f})"
                    for ratios in (
                        found["processor_ratios"],
                        found["wall_ratios"],
                    )
                )
                print(
                    f"| {strategy} | {optimizer} | {small:.2f} | {large:.2f} "
                    f"| {processor} | {wall} | {found['difference']:.0e} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
