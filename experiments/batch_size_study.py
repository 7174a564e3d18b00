r"""Shallue et al. in small: steps to a target error against the batch size.

    python experiments/batch_size_study.py
    python experiments/batch_size_study.py \
        --momentum=0 --learning_rate=0.2 --output_dir=runs/plain

Papers: C. Shallue et al., Measuring the Effects of Data Parallelism on Neural
Network Training, 2019, arXiv 1811.03600, figure 1 and section 4.1; S.
McCandlish et al., An Empirical Model of Large-Batch Training, 2018, arXiv
1812.06162, section 2.3.

The network of large_batch.py learns its generated table with SGD, momentum 0.9
and a constant learning rate, with batches of 8 to 4,096 rows. Counted are the
steps until the error of 10,000 rows that nobody trained on is 15 % or less. It
is looked at after every 2,048 rows, and after every step with larger batches. A
run ends without the target after 20 passes over 40,960 rows.

The learning rate is tuned at each batch, on one seed: five rates at most, each
double or half of another. The search begins with the best rate of the batch
before, 0.005 for the first, and tries the double and the half of the best so
far, until both are slower. A run ends as soon as it is slower than the best so
far. Steps are the median of three runs with other seeds.

Perfect scaling is read off as the batches that need at most 1.5 times the
fewest rows, up to the first that needs more; maximal data parallelism as the
batches that need at most 1.5 times the fewest steps. The critical batch is C in
steps = S (1 + C / batch), fitted to the logarithms: with this batch a training
takes twice the fewest steps and twice the fewest rows.

The noise scale is what `noise_scale=True` logs in one run with 64 rows, in two
micro-batches. Where it is n, a step makes 64 / (64 + n) of the progress of a
step without noise. The prediction of C is the mean of n over the progress, to
the target.

Expected from the papers, written before the first run: all three regimes, in
this order. The best rate grows with the batch in the first, and no longer in
the last. The noise scale predicts the critical batch in its order of magnitude.

The second command is without momentum. Expected from the first paper: with
small batches as many steps, and an earlier end of perfect scaling.

It writes batch_size_study.json after each run and goes on from it, and draws
batch_size_study.png. Hardware: any; on 2 CPU cores that other work shared, four
minutes, and six without momentum.
"""

import json
import os

import keras
import large_batch
import numpy as np
from absl import app, flags
from rich.progress import Progress

import mgpu_tf
from mgpu_tf.optimizers import scale_learning_rate
from mgpu_tf.reports import figures

FLAGS = flags.FLAGS
FLAGS.set_default("output_dir", "runs/batch_size_study")
FLAGS.set_default("seeds", 3)
FLAGS.set_default("train_rows", 40960)
FLAGS.set_default("test_rows", 10000)
FLAGS.set_default("epochs", 20)
flags.DEFINE_list(
    "batches", [str(2**k) for k in range(3, 13)], "Batch sizes, growing."
)
flags.DEFINE_float("momentum", 0.9, "That of SGD; 0 is plain SGD.")
flags.DEFINE_float("target_error", 0.15, "Error that ends a run.")
flags.DEFINE_integer("rates", 5, "Learning rates to try at each batch, most.")

TUNING_SEED = 100
# Rows between two looks at the error.
CHECK_ROWS = 2048
# What counts as the fewest steps, or rows.
WITHIN = 1.5


class Target(keras.callbacks.Callback):
    """Ends a run at the target error, or where the loss is no number.

    Args:
        every: Steps between two checks.

    Attributes:
        steps: To the target; None while it is not reached.
        error: At the last check.
    """

    def __init__(self, every):
        super().__init__()
        self.every, self.steps, self.error = every, None, None

    def on_epoch_end(self, epoch, logs=None):
        self.error = 1 - logs["val_accuracy"]
        if self.error <= FLAGS.target_error:
            self.steps = (epoch + 1) * self.every
        if self.steps or not np.isfinite(logs["loss"]):
            self.model.stop_training = True


class Study:
    """Runs by batch, rate and seed, kept in a file.

    Args:
        path: Of the file.

    Raises:
        app.UsageError: The file is of a study with other settings.
    """

    def __init__(self, path):
        self._path, self._data = path, None
        settings = {
            name: FLAGS[name].value
            for name in (
                *("train_rows", "test_rows", "epochs", "learning_rate"),
                *("momentum", "target_error", "rates", "batches"),
            )
        }
        self.results = {"settings": settings, "runs": {}}
        if os.path.exists(path):
            with open(path) as file:
                self.results = json.load(file)
            if self.results["settings"] != settings:
                raise app.UsageError(
                    "A study goes on with the same settings. Received: others "
                    f"than in {path}. Give another output_dir."
                )

    def run(self, batch, rate, seed, *, most=None, parts=1):
        """Returns a run, trained if it is not in the file.

        Args:
            batch: Rows of a step.
            rate: The learning rate.
            seed: Of the weights and of the order of rows.
            most: Steps that end it; by default those of all passes.
            parts: Micro-batches of a step; with several, the noise scale is
                measured.
        """
        key = f"batch {batch} rate {rate:g} seed {seed}"
        if parts > 1:
            key += " noise scale"
        runs = self.results["runs"]
        if key not in runs:
            most = most or FLAGS.epochs * FLAGS.train_rows // batch
            runs[key] = self._trained(batch, rate, seed, most, parts)
            self.write()
        return runs[key]

    def _trained(self, batch, rate, seed, most, parts):
        if self._data is None:
            self._data = large_batch.data()
        (x, y), test = self._data
        every = max(1, CHECK_ROWS // batch)
        target = Target(every)

        def build():
            accumulated = parts if parts > 1 else None
            return large_batch.compiled(
                keras.optimizers.SGD(
                    rate,
                    momentum=FLAGS.momentum,
                    gradient_accumulation_steps=accumulated,
                )
            )

        trainer = mgpu_tf.Trainer(
            build,
            "one_device",
            seed=seed,
            steps_per_execution=every * parts,
            noise_scale=parts > 1,
        )
        history = trainer.fit(
            x,
            y,
            batch_size=batch // parts,
            epochs=max(1, most // every),
            steps_per_epoch=every * parts,
            validation_data=test,
            validation_batch_size=4096,
            callbacks=[target],
            verbose=0,
        ).history
        keras.backend.clear_session()
        found = {"steps": target.steps, "error": target.error}
        if parts > 1:
            # Infinite where the noise hides the gradient, which JSON lacks.
            found["noise_scale"] = [
                float(n) if np.isfinite(n) else None
                for n in history["noise_scale"]
            ]
        return found

    def tune(self, batch, rate, advance):
        """Returns the best of a few rates.

        Args:
            batch: The batch size.
            rate: Where to begin.
            advance: Called after each run.
        """
        found = {}

        def best():
            return min(found, key=lambda rate: (steps_of(found[rate]), rate))

        while rate is not None and len(found) < FLAGS.rates:
            most = found[best()]["steps"] if found else None
            found[rate] = self.run(batch, rate, TUNING_SEED, most=most)
            advance()
            # Without any success the lowest rate is the best one so far.
            near = (best() * 2, best() / 2)
            if not np.isfinite(steps_of(found[best()])):
                near = near[1:]
            rate = next((r for r in near if r not in found), None)
        return best(), rate is None

    def write(self):
        """Writes what was found so far."""
        with open(self._path + ".new", "w") as file:
            json.dump(self.results, file, indent=1)
        os.replace(self._path + ".new", self._path)


def steps_of(run):
    """Returns the steps to the target; infinite where it was not reached."""
    return np.inf if run["steps"] is None else run["steps"]


def fitted(steps):
    """Returns the fewest steps and the critical batch of measured steps.

    Args:
        steps: To the target, by batch size.
    """
    batches = np.array(list(steps), float)
    measured = np.log(list(steps.values()))
    best = (np.inf, 0.0, 0.0)
    for critical in np.geomspace(1, 1e6, 6001):
        rest = measured - np.log1p(critical / batches)
        best = min(best, (rest.var(), float(np.exp(rest.mean())), critical))
    return best[1], float(best[2])


def regimes(steps):
    """Returns where perfect scaling ends and where maximal begins, or None.

    Args:
        steps: To the target, infinite where it was not reached, by growing
            batch size.
    """
    least = min(steps.values())
    least_rows = min(b * s for b, s in steps.items())
    perfect = maximal = None
    for batch, count in steps.items():
        if batch * count > WITHIN * least_rows:
            break
        perfect = batch
    for batch in reversed(steps):
        if steps[batch] > WITHIN * least:
            break
        maximal = batch
    return perfect, maximal


def predicted(scales, batch):
    """Returns the mean noise scale over the progress of a run.

    None where the noise always hid the gradient.

    Args:
        scales: At each check, None where it is infinite.
        batch: Of the run.
    """
    weights = [0.0 if n is None else 1 / (batch + n) for n in scales]
    # n / (batch + n) is 1 - batch / (batch + n), also for an infinite n.
    total = sum(1 - batch * weight for weight in weights)
    return total / sum(weights) if any(weights) else None


def main(argv):
    del argv
    os.makedirs(FLAGS.output_dir, exist_ok=True)
    study = Study(os.path.join(FLAGS.output_dir, "batch_size_study.json"))
    batches = list(map(int, FLAGS.batches))
    rate = scale_learning_rate(
        FLAGS.learning_rate, large_batch.BASE_BATCH, batches[0]
    )
    rows = {}
    with Progress() as progress:
        each = FLAGS.rates + FLAGS.seeds
        task = progress.add_task("runs", total=each * len(batches) + 1)
        for place, batch in enumerate(batches):
            rate, settled = study.tune(
                batch, rate, lambda: progress.advance(task)
            )
            runs = []
            for seed in range(FLAGS.seeds):
                runs.append(study.run(batch, rate, seed))
                progress.advance(task)
            steps = float(np.median([steps_of(run) for run in runs]))
            rows[batch] = {
                "steps": steps if np.isfinite(steps) else None,
                "of_seeds": [run["steps"] for run in runs],
                "rate": rate,
                "rate_settled": settled,
            }
            progress.update(task, completed=each * (place + 1))
        noise_batch = batches[len(batches) // 3]
        noise = study.run(
            noise_batch, rows[noise_batch]["rate"], TUNING_SEED, parts=2
        )["noise_scale"]
        progress.advance(task)
    study.results["summary"] = summary = summed_up(rows, noise, noise_batch)
    study.write()
    tell(summary)
    draw(summary)


def summed_up(rows, noise, noise_batch):
    """Returns what is read off, for people and the figure."""
    steps = {batch: steps_of(row) for batch, row in rows.items()}
    reached = {b: s for b, s in steps.items() if np.isfinite(s)}
    if len(reached) < 2:
        raise app.UsageError(
            "Two batches at least must reach the target error. Received: "
            f"{len(reached)} of {len(rows)} that reach {FLAGS.target_error:g}. "
            "Give a higher target_error, or more epochs."
        )
    perfect, maximal = regimes(steps)
    fewest, critical = fitted(reached)
    return {
        "batches": rows,
        "perfect_scaling_to": perfect,
        "maximal_from": maximal,
        "fewest_steps": fewest,
        "critical_batch": critical,
        "noise_scale_batch": noise_batch,
        "noise_scale": noise,
        "noise_scale_predicts": predicted(noise, noise_batch),
    }


def tell(summary):
    """Prints the table and what was read off."""
    print("batch  steps to target (of seeds)       best rate     rows")
    for batch, row in summary["batches"].items():
        steps, seeds = row["steps"], [s or "-" for s in row["of_seeds"]]
        shown = "not reached" if steps is None else f"{steps:g}"
        rate = f"{row['rate']:g}" + ("" if row["rate_settled"] else " (edge)")
        rows = "-" if steps is None else f"{batch * steps:,.0f}"
        shown += f" ({', '.join(map(str, seeds))})"
        print(f"{batch:5d}  {shown:<30} {rate:>11} {rows:>8}")
    perfect, maximal = summary["perfect_scaling_to"], summary["maximal_from"]
    print(f"perfect scaling up to a batch of {perfect or '- (not seen)'}")
    print(f"maximal data parallelism from {maximal or '- (not seen)'}")
    print(
        f"critical batch {summary['critical_batch']:.0f}, fewest steps "
        f"{summary['fewest_steps']:.1f}"
    )
    scales = summary["noise_scale"]
    first, last, mean = (
        "infinite" if n is None else f"{n:.0f}"
        for n in (scales[0], scales[-1], summary["noise_scale_predicts"])
    )
    print(
        f"noise scale {first} at the first check, {last} at the last; "
        f"predicts a critical batch of {mean}"
    )


def draw(summary):
    """Draws steps against the batch, with the fit and the ideal."""
    steps = {
        batch: row["steps"]
        for batch, row in summary["batches"].items()
        if row["steps"] is not None
    }
    fewest, critical = summary["fewest_steps"], summary["critical_batch"]
    first = min(steps)
    marks = {f"critical batch, {critical:.0f}": critical}
    scale = summary["noise_scale_predicts"]
    if scale is not None:
        marks[f"noise scale, {scale:.0f}"] = scale
    figures.draw_points(
        {
            "measured": steps,
            "perfect scaling": {b: steps[first] * first / b for b in steps},
            "fit": {b: fewest * (1 + critical / b) for b in steps},
        },
        os.path.join(FLAGS.output_dir, "batch_size_study.png"),
        ("batch size", f"steps to {FLAGS.target_error:.0%} error"),
        logarithmic=True,
        marks=marks,
    )


if __name__ == "__main__":
    app.run(main)
