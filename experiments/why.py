"""Stock Keras 3 beside mgpu_tf: clipping on replicas, and several workers.

    python experiments/why.py

Trains one small model on two workers, by Keras's own `fit` and by a `Trainer`.
Then does so on two replicas, and prints how far weights are from those of one
device. Hardware: any; on 2 CPU cores about a minute. Expected: Keras's `fit`
fails on two workers and is off on two replicas; mgpu_tf trains on both, and
differs by rounding.
"""

import subprocess
import sys

from mgpu_tf.runtime import quiet_import

EPOCHS, BATCH = 3, 16
FEATURES = {
    "clipnorm": {"clipnorm": 0.1},
    "global_clipnorm": {"global_clipnorm": 0.1},
    "accumulation": {"gradient_accumulation_steps": 2},
}


def numbers():
    """Returns 64 rows of inputs and targets."""
    import numpy as np

    x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
    return x, x.sum(1, keepdims=True)


def model_in(strategy, options):
    """Returns a compiled model of fixed weights, made in a strategy's scope."""
    import keras

    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((8,)),
                keras.layers.Dense(16, activation="gelu"),
                keras.layers.Dense(1),
            ]
        )
        model.compile(keras.optimizers.SGD(0.1, **options), "mse")
    return model


def weights_after(fit):
    """Returns weights after training with the rows in their order."""
    model = fit(*numbers(), batch_size=BATCH, epochs=EPOCHS)
    return model.get_weights()


def keras_fit(strategy, options):
    """Trains with Keras's own `fit`."""
    model = model_in(strategy, options)

    def fit(x, y, **arguments):
        model.fit(x, y, shuffle=False, verbose=0, **arguments)
        return model

    return weights_after(fit)


def trainer_fit(strategy, options):
    """Trains with a `Trainer`."""
    import mgpu_tf

    trainer = mgpu_tf.Trainer(model_in(strategy, options))

    def fit(x, y, **arguments):
        trainer.fit(x, y, shuffle=False, verbose=0, **arguments)
        return trainer.model

    return weights_after(fit)


def apart(one, other):
    """Returns the largest difference of two lists of arrays."""
    return max(float(abs(a - b).max()) for a, b in zip(one, other, strict=True))


def told(train, strategy, options, one):
    """Returns the difference from one device, or the error."""
    try:
        return f"{apart(one, train(strategy, options)):.0e}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]:.60}"


def replicas():
    """Prints a line for each feature, on two replicas of one process."""
    import tensorflow as tf

    import mgpu_tf

    two = mgpu_tf.create_mirrored_strategy(num_virtual_devices=2)
    stock = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    one = tf.distribute.OneDeviceStrategy("CPU:0")
    for name, options in FEATURES.items():
        expected = keras_fit(one, options)
        print(
            f"{name:16} Keras's fit {told(keras_fit, stock, options, expected)}"
            f"   mgpu_tf {told(trainer_fit, two, options, expected)}",
            flush=True,
        )


def worker():
    """Trains as a worker, by Keras's own `fit` and by a `Trainer`."""
    import tensorflow as tf

    import mgpu_tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    model = model_in(strategy, {})
    for name, trainer in (
        ("Keras's fit", model),
        ("mgpu_tf", mgpu_tf.Trainer(model)),
    ):
        found = "trained"
        try:
            trainer.fit(*numbers(), batch_size=BATCH, verbose=0)
        except ValueError as error:
            found = f"ValueError: {str(error).splitlines()[0]}"
        print(f"two workers      {name:11} {found}", flush=True)


def main():
    """Compares on replicas, then tries two workers."""
    if sys.argv[1:] == ["worker"]:
        quiet_import.import_tensorflow()
        return worker()
    launch = [sys.executable, "-m", "mgpu_tf", "launch", "--num_workers=2"]
    done = subprocess.run(
        [*launch, "--", sys.executable, __file__, "worker"],
        capture_output=True,
        text=True,
        check=False,
    )
    for line in done.stdout.splitlines():
        task, _, text = line.partition("] ")
        if task == "[worker 0" and text.startswith("two workers"):
            print(text, flush=True)
    quiet_import.import_tensorflow()
    print("largest difference of a weight from one device, on two replicas:")
    return replicas()


if __name__ == "__main__":
    main()
