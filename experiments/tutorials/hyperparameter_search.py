"""A search with KerasTuner in which each trial is a cluster of its own.

    pip install '.[tuner]'
    python experiments/tutorials/hyperparameter_search.py --num_workers=2

A trial is a launch of new processes and not a `Trainer` in the process of the
search, since devices, ports and a cluster are taken once in a process, and the
search then outlives a trial that runs out of memory or is killed. KerasTuner
keeps the results in `--output_dir`.

Hardware: any. A trial costs the start of its processes, about 6 s of processor
time each, besides the training. Expected: a line for
each trial, the best first.

References:
    https://keras.io/keras_tuner/api/tuners/base_tuner/
"""

import argparse

import keras
import keras_tuner

import mgpu_tf


def space():
    found = keras_tuner.HyperParameters()
    found.Int("units", 32, 128, step=32)
    found.Float("learning_rate", 1e-4, 1e-1, sampling="log")
    return found


def train(values, epochs):
    """What each process of a trial does; returns the trial's result."""

    def build_model():
        model = keras.Sequential(
            [
                keras.layers.Flatten(),
                keras.layers.Dense(values["units"], activation="gelu"),
                keras.layers.Dense(10),
            ]
        )
        model.compile(
            keras.optimizers.Adam(values["learning_rate"]),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        return model

    strategy = mgpu_tf.create_strategy("auto")  # before anything is computed
    x, y = mgpu_tf.datasets.load("digits").train
    trainer = mgpu_tf.Trainer(build_model, strategy)
    history = trainer.fit(
        *(x, y),
        batch_size=64,
        epochs=epochs,
        validation_split=0.2,
        verbose=2,
    )
    return {"val_loss": history.history["val_loss"][-1]}


class Search(keras_tuner.RandomSearch):
    """Launches each trial."""

    def run_trial(self, trial, epochs, **job):
        values = trial.hyperparameters.values
        return mgpu_tf.launch_from_notebook(train, values, epochs, **job)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--num_workers", type=int, default=1)
    parser.add_argument("--max_trials", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--output_dir", default="runs/search")
    arguments = parser.parse_args()
    search = Search(
        objective=keras_tuner.Objective("val_loss", "min"),
        hyperparameters=space(),
        max_trials=arguments.max_trials,
        seed=0,
        directory=arguments.output_dir,
        project_name="digits",
    )
    search.search(arguments.epochs, num_workers=arguments.num_workers)
    for trial in search.oracle.get_best_trials(arguments.max_trials):
        print("loss", trial.score, trial.hyperparameters.values)


if __name__ == "__main__":
    main()
