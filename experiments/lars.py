"""SGD, LARS and Lamb over growing batches, in small.

    python experiments/lars.py

Papers: Y. You et al., Large Batch Training of Convolutional Networks, 2017,
arXiv 1708.03888; Y. You et al., Large Batch Optimization for Deep Learning,
2020, arXiv 1904.00962.

The network and the data of large_batch.py. Batches of 128 and 4,096 rows,
gradual warm-up from 0 for two of twelve epochs, cosine decay. For each
optimizer and batch the learning rate is the one of four with the least training
loss in a run with seed 100; then three runs with other seeds are tested on
20,000 rows.

Expected from the papers: with small batches all are alike, or SGD is ahead.
With the largest batches LARS and Lamb lose less than SGD.

It writes lars.json after each run and goes on from it, and draws lars.png.
Hardware: any; on 2 CPU cores that other work shared, four minutes.
"""

import json
import os

import keras
import large_batch
import numpy as np
from absl import app, flags
from rich.progress import Progress

from mgpu_tf.optimizers import LARS
from mgpu_tf.optimizers.large_batch import create_schedule

FLAGS = flags.FLAGS
FLAGS.set_default("output_dir", "runs/lars")
FLAGS.set_default("seeds", 3)
flags.DEFINE_list("batches", "128,4096", "Global batch sizes.")

TUNING_SEED = 100
# The optimizer and the four learning rates.
OPTIMIZERS = {
    "SGD": (
        lambda rate: keras.optimizers.SGD(rate, momentum=0.9),
        (0.02, 0.08, 0.32, 1.28),
    ),
    "LARS": (
        lambda rate: LARS(rate, trust_coefficient=0.1),
        (0.02, 0.08, 0.32, 1.28),
    ),
    "Lamb": (keras.optimizers.Lamb, (0.002, 0.008, 0.032, 0.128)),
}


def optimizer_of(name, rate, batch):
    """Returns an optimizer with its schedule."""
    per_epoch = -(-FLAGS.train_rows // batch)
    schedule = create_schedule(
        rate,
        start=0.0,
        steps=FLAGS.epochs * per_epoch,
        warmup_steps=large_batch.WARMUP_EPOCHS * per_epoch,
        decay="cosine",
    )
    return OPTIMIZERS[name][0](schedule)


class Study:
    """Runs by their key, kept in a file.

    Args:
        path: Of the file.
    """

    def __init__(self, path):
        self._path = path
        self._data = large_batch.data()
        self.runs = {}
        if os.path.exists(path):
            with open(path) as file:
                self.runs = json.load(file)["runs"]

    def run(self, name, batch, rate, seed):
        """Returns a run, trained if it is not in the file."""
        key = f"{name} {batch} {rate} {seed} {FLAGS.epochs} {FLAGS.train_rows}"
        if key not in self.runs:
            self.runs[key] = large_batch.trained(
                lambda: optimizer_of(name, rate, batch),
                batch,
                seed,
                *self._data,
            )
            self.write({})
        return self.runs[key]

    def write(self, summary):
        """Writes all runs and what was made of them."""
        with open(self._path + ".new", "w") as file:
            json.dump({"summary": summary, "runs": self.runs}, file, indent=1)
        os.replace(self._path + ".new", self._path)


def loss_of(run):
    """Returns the last training loss; infinite where there is none."""
    loss = run["losses"][-1]
    return loss if np.isfinite(loss) else np.inf


def main(argv):
    del argv
    os.makedirs(FLAGS.output_dir, exist_ok=True)
    study = Study(os.path.join(FLAGS.output_dir, "lars.json"))
    batches = list(map(int, FLAGS.batches))
    summary = {}
    with Progress() as progress:
        work = [(name, batch) for batch in batches for name in OPTIMIZERS]
        each = len(OPTIMIZERS["SGD"][1]) + FLAGS.seeds
        task = progress.add_task("runs", total=len(work) * each)
        for name, batch in work:
            losses = {}
            for rate in OPTIMIZERS[name][1]:
                run = study.run(name, batch, rate, TUNING_SEED)
                losses[rate] = loss_of(run)
                progress.advance(task)
            best = min(losses, key=losses.get)
            errors = []
            for seed in range(FLAGS.seeds):
                errors.append(study.run(name, batch, best, seed)["error"])
                progress.advance(task)
            mean, spread = large_batch.summary(errors)
            summary.setdefault(name, {})[str(batch)] = [best, mean, spread]
    study.write(summary)
    print("test error, percent (mean, standard error), and learning rate")
    for name, found in summary.items():
        for batch, (rate, mean, spread) in found.items():
            print(f"{name:<5}{batch:>6}  {mean:6.2f} +- {spread:.2f}  {rate}")
    draw(summary, os.path.join(FLAGS.output_dir, "lars.png"))


def draw(summary, path):
    """Draws a group of bars for each batch size: nothing lies between them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6))
    axes = figure.subplots()
    batches = list(next(iter(summary.values())))
    width = 0.8 / len(summary)
    for number, (name, found) in enumerate(summary.items()):
        places = [k + (number - 1) * width for k in range(len(batches))]
        errors = [found[batch][1] for batch in batches]
        bars = axes.bar(
            places,
            errors,
            width,
            yerr=[found[batch][2] for batch in batches],
            capsize=3,
            label=name,
        )
        axes.bar_label(bars, fmt="%.1f", fontsize=8, padding=3)
    axes.set_xticks(range(len(batches)), batches)
    axes.set_xlabel("global batch size")
    axes.set_ylabel("test error, percent")
    axes.margins(y=0.15)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    app.run(main)
