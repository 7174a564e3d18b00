"""Goyal et al. in small: large batches with and without warm-up.

    python experiments/large_batch.py

Paper: P. Goyal et al., Accurate, Large Minibatch SGD: Training ImageNet in 1
Hour, 2017, arXiv 1706.02677, tables 1 and 2.

A network learns a generated table of ten classes with SGD and momentum. One
base batch, and 8 and 32 times as much of it:

    unscaled           the learning rate of the base batch
    linear             times 8 or 32 from the first step
    constant warm-up   that of the base batch for two epochs, then times 8 or 32
    gradual warm-up    in two epochs from that of the base batch to times 8, 32

All decay by a cosine after warm-up. Each runs with five seeds; the seed decides
the initial weights and the order of the rows. Errors are those of 20,000 rows
that nobody trained on.

The learning rate of the base batch, 0.02, was chosen on one seed from 0.01,
0.02 and 0.05. With 0.05 the base batch was as good, and 32 times the batch
learned nothing with any linear scaling.

Expected from the paper, from the lowest error to the highest: base batch,
gradual warm-up, linear, constant warm-up, unscaled. Its errors, with 32 times
the batch: 23.60, 23.74, 24.84, 25.88 and 41.67 %.

It writes large_batch.json after each run and goes on from it, and draws
large_batch.png. Hardware: any; on 2 CPU cores that other work shared, three
minutes.
"""

import json
import os

import keras
import numpy as np
from absl import app, flags
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from sklearn.datasets import make_classification

import mgpu_tf
from mgpu_tf.optimizers import scale_learning_rate
from mgpu_tf.optimizers.large_batch import create_schedule
from mgpu_tf.reports import figures

FLAGS = flags.FLAGS
flags.DEFINE_string("output_dir", "runs/large_batch", "Where to write.")
flags.DEFINE_integer("seeds", 5, "Number of seeds.")
flags.DEFINE_integer("train_rows", 20480, "Number of rows to train on.")
flags.DEFINE_integer("test_rows", 20000, "Number of rows to test on.")
flags.DEFINE_integer("epochs", 12, "Passes over the rows.")
flags.DEFINE_float("learning_rate", 0.02, "That of the base batch.")

BASE_BATCH, WARMUP_EPOCHS = 32, 2
RULES = ("unscaled", "linear", "constant warm-up", "gradual warm-up")
# What is trained: the factor of the batch, and the rule.
RUNS = [(1, "unscaled"), *((k, rule) for k in (8, 32) for rule in RULES)]


@keras.saving.register_keras_serializable("mgpu_tf_experiments")
class ConstantWarmup(keras.optimizers.schedules.LearningRateSchedule):
    """One learning rate for some steps, then another schedule."""

    def __init__(self, learning_rate, warmup_steps, then):
        self.learning_rate, self.warmup_steps = learning_rate, warmup_steps
        self.then = then

    def __call__(self, step):
        step = keras.ops.cast(step, "float32")
        return keras.ops.where(
            step < self.warmup_steps,
            self.learning_rate,
            self.then(step - self.warmup_steps),
        )

    def get_config(self):
        return {
            "learning_rate": self.learning_rate,
            "warmup_steps": self.warmup_steps,
            "then": self.then,
        }


def schedule_of(factor, rule):
    """Returns the learning rate of a run."""
    base, batch = FLAGS.learning_rate, factor * BASE_BATCH
    scaled = scale_learning_rate(base, BASE_BATCH, batch)
    per_epoch = -(-FLAGS.train_rows // batch)
    steps, warmup = FLAGS.epochs * per_epoch, WARMUP_EPOCHS * per_epoch
    if rule == "constant warm-up":
        then = create_schedule(
            scaled, start=scaled, steps=steps - warmup, decay="cosine"
        )
        return ConstantWarmup(base, warmup, then)
    return create_schedule(
        base if rule == "unscaled" else scaled,
        start=base,
        steps=steps,
        warmup_steps=warmup if rule == "gradual warm-up" else 0,
        decay="cosine",
    )


def data():
    """Returns rows to train on and rows to test on."""
    x, y = make_classification(
        FLAGS.train_rows + FLAGS.test_rows,
        20,
        n_informative=12,
        n_redundant=4,
        n_classes=10,
        n_clusters_per_class=2,
        class_sep=1.5,
        flip_y=0.02,
        random_state=0,
    )
    x = ((x - x.mean(0)) / x.std(0)).astype("float32")
    rows = FLAGS.train_rows
    return (x[:rows], y[:rows]), (x[rows:], y[rows:])


def compiled(optimizer):
    """Returns the network, with its loss."""
    hidden = [
        keras.layers.Dense(
            64, activation="relu", kernel_initializer="he_normal"
        )
        for _ in range(4)
    ]
    model = keras.Sequential(
        [keras.Input((20,)), *hidden, keras.layers.Dense(10)]
    )
    model.compile(
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def trained(make_optimizer, batch, seed, train, test):
    """Trains, and returns the test error and the loss of each epoch."""

    trainer = mgpu_tf.Trainer(
        lambda: compiled(make_optimizer()), "one_device", seed=seed
    )
    losses = trainer.fit(
        *train, batch_size=batch, epochs=FLAGS.epochs, verbose=0
    ).history["loss"]
    scores = trainer.evaluate(*test, batch_size=4096, verbose=0)
    keras.backend.clear_session()
    return {"error": 1 - scores[1], "losses": losses}


def key_of(factor, rule):
    return f"{factor}x {rule}" if factor > 1 else "base batch"


def summary(errors):
    """Returns mean and standard error, in percent."""
    values = 100 * np.array(errors)
    spread = values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return float(values.mean()), float(spread)


def main(argv):
    del argv
    os.makedirs(FLAGS.output_dir, exist_ok=True)
    path = os.path.join(FLAGS.output_dir, "large_batch.json")
    settings = {
        name: FLAGS[name].value
        for name in ("train_rows", "test_rows", "epochs", "learning_rate")
    }
    results = {"settings": settings, "runs": {}}
    if os.path.exists(path):
        with open(path) as file:
            results = json.load(file)
        if results["settings"] != settings:
            raise app.UsageError(
                "A study goes on with the same settings. Received: others than "
                f"in {path}. Give another output_dir."
            )
    runs = results["runs"]
    train, test = data()
    todo = [
        (factor, rule, seed)
        for seed in range(FLAGS.seeds)
        for factor, rule in RUNS
        if str(seed) not in runs.get(key_of(factor, rule), {})
    ]
    columns = (
        TextColumn("{task.description:>24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as progress:
        task = progress.add_task("", total=len(todo))
        for factor, rule, seed in todo:
            key = key_of(factor, rule)
            progress.update(task, description=key)
            schedule = schedule_of(factor, rule)
            found = trained(
                lambda rate=schedule: keras.optimizers.SGD(rate, momentum=0.9),
                factor * BASE_BATCH,
                seed,
                train,
                test,
            )
            runs.setdefault(key, {})[str(seed)] = found
            with open(path + ".new", "w") as file:
                json.dump(results, file, indent=1)
            os.replace(path + ".new", path)
            progress.advance(task)
    print(f"{'run':<24}  test error, percent (mean, standard error)")
    for factor, rule in RUNS:
        key = key_of(factor, rule)
        mean, spread = summary([run["error"] for run in runs[key].values()])
        print(f"{key:<24}  {mean:6.2f} +- {spread:.2f}")
    figures.draw_curves(
        {
            key: np.mean([run["losses"] for run in runs[key].values()], axis=0)
            for key in map(key_of, *zip(*RUNS, strict=True))
            if "8x" not in key
        },
        os.path.join(FLAGS.output_dir, "large_batch.png"),
        "training loss, mean of all seeds",
    )


if __name__ == "__main__":
    app.run(main)
