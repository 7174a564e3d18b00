"""The same job synchronous and asynchronous, with and without a slow worker.

    python experiments/async_vs_sync.py --output_dir=runs/async_vs_sync

Trains scikit-learn's digits to a test accuracy on 3 workers: once in step
(MultiWorkerMirroredStrategy, 3 x 32 examples in a step) and once not
(parameter servers, 32 examples in a step), each with equal workers and with
one that is stopped for nine tenths of the time. Two more runs bound the
staleness. Writes table.md, results.json and figure.png. Needs matplotlib
(`pip install '.[plot]'`).

Hardware: any; on 2 CPU cores about 8 minutes. Expected: with a slow worker
the synchronous run takes several times as long, the asynchronous one does
not; docs/asynchronous.md has a run's figures.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

from absl import app, flags, logging

from mgpu_tf.cluster import ports
from mgpu_tf.cluster.config import ClusterConfig
from mgpu_tf.runtime import quiet_import

FLAGS = flags.FLAGS
flags.DEFINE_string("output_dir", "runs/async_vs_sync", "Gets what is made.")
flags.DEFINE_integer("num_workers", 3, "Workers, of which the last is slow.")
flags.DEFINE_integer("slowdown", 10, "How many times slower that one is.")
flags.DEFINE_float("target", 0.93, "The test accuracy to be reached.")
flags.DEFINE_integer("max_passes", 80, "Passes after which a run gives up.")
flags.DEFINE_string("job", "", "Used by the processes that this one starts.")

PER_WORKER = 32
PASSES = 4  # Between two looks at the test accuracy.
PERIOD_SECONDS = 0.1

# Name, whether in step, whether one is slow, and how late gradients may be.
RUNS = [
    ("sync", True, False, None, "hold"),
    ("async", False, False, None, "hold"),
    ("sync, slow worker", True, True, None, "hold"),
    ("async, slow worker", False, True, None, "hold"),
    ("async, slow worker, hold 8", False, True, 8, "hold"),
    ("async, slow worker, scale 8", False, True, 8, "scale"),
]


def train(synchronous, max_staleness, late_gradients):
    """What each process of a cluster does."""
    quiet_import.import_tensorflow()
    logging.set_verbosity(logging.WARNING)
    import keras

    import mgpu_tf
    from mgpu_tf import datasets

    if synchronous:
        strategy = mgpu_tf.create_multi_worker_mirrored_strategy()
    else:
        strategy = mgpu_tf.create_parameter_server_strategy(
            max_staleness=max_staleness, late_gradients=late_gradients
        )
    splits = datasets.load("digits")
    workers = FLAGS.num_workers if synchronous else 1
    chief = mgpu_tf.is_chief(strategy)

    def build_model():
        inputs = keras.Input((8, 8, 1))
        hidden = keras.layers.Flatten()(inputs)
        for _ in range(2):
            hidden = keras.layers.Dense(512, activation="gelu")(hidden)
        model = keras.Model(inputs, keras.layers.Dense(10)(hidden))
        model.compile(
            keras.optimizers.SGD(0.05 * workers**0.5),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        return model

    class Watch(keras.callbacks.Callback):
        began, points = None, []

        def on_train_batch_end(self, batch, logs=None):
            if self.began is None and batch > 2:
                self.began = time.monotonic()
                if chief:
                    print("READY", flush=True)

        def on_epoch_end(self, epoch, logs=None):
            if self.began is None:
                return
            accuracy = logs["val_accuracy"]
            seconds = time.monotonic() - self.began
            self.points.append((seconds, trainer.examples_seen, accuracy))
            self.model.stop_training = accuracy >= FLAGS.target

    trainer = mgpu_tf.Trainer(build_model, strategy, seed=0)
    x, y = (array[: 44 * PER_WORKER] for array in splits.train)
    watch = Watch()
    history = trainer.fit(
        x,
        y,
        batch_size=PER_WORKER * workers,
        epochs=FLAGS.max_passes // PASSES,
        steps_per_epoch=len(x) * PASSES // (PER_WORKER * workers),
        validation_data=splits.test,
        validation_batch_size=360,
        callbacks=[watch],
        verbose=0,
    )
    if chief:
        late = {
            name: values
            for name, values in history.history.items()
            if name.startswith("staleness")
        }
        text = json.dumps({"points": watch.points, "staleness": late})
        print("RESULT", text, flush=True)


def layout(synchronous, numbers):
    """The tasks of a cluster; the first prints, the last worker is slow."""
    addresses = [f"127.0.0.1:{number}" for number in numbers]
    tasks = {"worker": tuple(addresses[: FLAGS.num_workers])}
    if not synchronous:
        tasks["chief"] = (addresses[-1],)
        tasks["ps"] = (addresses[-2],)
    return [
        ClusterConfig(task_type=kind, task_index=index, **tasks)
        for kind in sorted(tasks)
        for index in range(len(tasks[kind]))
    ]


def measure(name, synchronous, slow, max_staleness, late_gradients):
    """Runs a cluster; returns what its chief or coordinator printed."""
    count = FLAGS.num_workers + (0 if synchronous else 2)
    job = json.dumps([synchronous, max_staleness, late_gradients])
    command = [sys.executable, __file__, f"--job={job}"]
    command += [f"--{n}={FLAGS[n].value}" for n in ("num_workers", "target")]
    command += [f"--max_passes={FLAGS.max_passes}"]
    processes = {}
    found = {"name": name, "points": []}
    with ports.reserved(count) as numbers, contextlib.ExitStack() as end:
        for task in layout(synchronous, numbers):
            first = task.is_chief
            processes[task.task_name] = subprocess.Popen(
                command,
                env=os.environ
                | ports.ENVIRONMENT
                # The servers are ended here.
                | {"TF_CONFIG": task.to_json(), "MGPU_TF_RESTARTS": "0"},
                stdout=subprocess.PIPE if first else subprocess.DEVNULL,
                text=True,
            )
            end.callback(processes[task.task_name].kill)
            if first:
                chief = processes[task.task_name]
        stop = threading.Event()
        end.callback(stop.set)
        for line in chief.stdout:
            if line.startswith("READY") and slow:
                last = processes[f"worker {FLAGS.num_workers - 1}"]
                threading.Thread(
                    target=slow_down, args=(last, stop), daemon=True
                ).start()
            result = re.match("RESULT (.*)", line)
            if result:
                found |= json.loads(result[1])
                break
        stop.set()
    return found


def slow_down(process, stop):
    """Lets a process run for one Nth of the time."""
    running = PERIOD_SECONDS / FLAGS.slowdown
    while not stop.is_set() and process.poll() is None:
        process.send_signal(signal.SIGSTOP)
        time.sleep(PERIOD_SECONDS - running)
        process.send_signal(signal.SIGCONT)
        time.sleep(running)


def row(found):
    """The figures of a run."""
    points = found["points"] or [(float("nan"), 0, 0.0)]
    seconds, examples, accuracy = points[-1]
    late = found.get("staleness", {})

    def over_epochs(name, reduce):
        values = late.get(f"staleness_{name}")
        return f"{reduce(values):.1f}" if values else "-"

    return {
        "run": found["name"],
        "test accuracy": f"{accuracy:.3f}",
        "seconds to target": f"{seconds:.1f}"
        if accuracy >= FLAGS.target
        else "not reached",
        "examples/s": f"{examples / seconds:,.0f}",
        "staleness mean": over_epochs("mean", lambda v: sum(v) / len(v)),
        "staleness max": over_epochs("max", max),
    }


def table(results):
    """The runs as a table in Markdown."""
    rows = [row(found) for found in results]
    names = list(rows[0])
    lines = [
        names,
        ["---"] * len(names),
        *([r[n] for n in names] for r in rows),
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def draw(results, path):
    """Draws test accuracy over time, and the time to the target."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(12, 4.5), layout="constrained"
    )
    for index, found in enumerate(results):
        style = {"color": f"C{index}", "marker": "o", "markersize": 3}
        seconds = [point[0] for point in found["points"]]
        accuracy = [point[2] for point in found["points"]]
        left.plot(seconds, accuracy, label=found["name"], **style)
        right.barh(found["name"], seconds[-1:] or [0], color=f"C{index}")
    left.axhline(FLAGS.target, color="grey", linestyle=":")
    left.set(xlabel="seconds", ylabel="test accuracy", xscale="log")
    figure.legend(fontsize=8, loc="outside lower center", ncols=3)
    right.invert_yaxis()
    right.set(
        xlabel=f"seconds to a test accuracy of {FLAGS.target}",
        title=f"{FLAGS.num_workers} workers; the slow one "
        f"{FLAGS.slowdown} times slower",
    )
    figure.savefig(path, dpi=120)


def main(argv):
    del argv
    if FLAGS.job:
        train(*json.loads(FLAGS.job))
        return
    os.makedirs(FLAGS.output_dir, exist_ok=True)
    results = []
    for run in RUNS:
        results.append(measure(*run))
        print(row(results[-1]), flush=True)
    with open(os.path.join(FLAGS.output_dir, "results.json"), "w") as file:
        json.dump(results, file)
    with open(os.path.join(FLAGS.output_dir, "table.md"), "w") as file:
        file.write(table(results))
    draw(results, os.path.join(FLAGS.output_dir, "figure.png"))
    print(table(results))


if __name__ == "__main__":
    app.run(main)
