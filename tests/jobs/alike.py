"""Workers that differ, refused in a way that the cluster goes on from.

A job does what it refuses, then a training that must work as if nothing had
been. It returns what it was told, and the losses of that training.
"""

import contextlib
import os

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import mgpu_tf
from mgpu_tf.strategies import messages

SIZE, BATCH = 24, 4
X = np.random.default_rng(1).normal(size=(SIZE, 4)).astype("float32")
Y = (X[:, :1] > 0).astype("float32")


def me():
    return mgpu_tf.ClusterConfig.from_environment().worker_index


def model(activation="tanh", optimizer=None, loss="mse", first=()):
    made = keras.Sequential(
        [
            keras.Input((4,)),
            *first,
            layers.Dense(3, activation=activation),
            layers.Dense(1),
        ]
    )
    made.compile(optimizer or keras.optimizers.SGD(0.1), loss)
    return made


# Of each strategy, and the weights that it begins with.
_trainers = {}


def good(strategy):
    """Trains as if nothing had been; traced once for all jobs."""
    if strategy not in _trainers:
        trainer = mgpu_tf.Trainer(model, strategy)
        _trainers[strategy] = trainer, trainer.model.get_weights()
    trainer, begins = _trainers[strategy]
    trainer.model.set_weights(begins)
    history = trainer.fit(
        X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0
    )
    return history.history["loss"]


def told(act):
    """Returns what was raised, as `Type message`."""
    try:
        act()
    except mgpu_tf.ConfigurationError as error:
        return f"ConfigurationError {error}"
    except Exception as error:
        return f"{type(error).__name__} {error}"
    return "nothing"


def refused(strategy, act):
    return {"told": told(act), "losses": good(strategy)}


def fitting(strategy, build=model, x=X, y=Y, **options):
    options = {"batch_size": BATCH, "verbose": 0} | options
    mgpu_tf.Trainer(build, strategy).fit(x, y, **options)


def on_batches(strategy, data, **options):
    fitting(strategy, x=data, y=None, batch_size=None, **options)


def alike(strategy, folder):
    """Every worker meets the same mistake before any collective."""
    return refused(strategy, lambda: fitting(strategy, batch_size=0))


def by_one(strategy, folder):
    size = 0 if me() == 1 else BATCH
    return refused(strategy, lambda: fitting(strategy, batch_size=size))


def by_the_first(strategy, folder):
    size = 0 if me() == 0 else BATCH
    return refused(strategy, lambda: fitting(strategy, batch_size=size))


def other_exception(strategy, folder):
    """One that is not of this library, before any collective."""

    class Data(keras.utils.PyDataset):
        def __len__(self):
            return 6

        def __getitem__(self, index):
            if me() == 1:
                raise ArithmeticError("of the data")
            return X[:BATCH], Y[:BATCH]

    return refused(strategy, lambda: on_batches(strategy, Data()))


def batch_sizes(strategy, folder):
    return refused(strategy, lambda: fitting(strategy, batch_size=4 + me()))


def calls(strategy, folder):
    trainer = mgpu_tf.Trainer(model, strategy)

    def act():
        if me() == 1:
            trainer.evaluate(X, Y, verbose=0)
        else:
            trainer.fit(X, Y, verbose=0)

    return refused(strategy, act)


def paths(strategy, folder):
    trainer = mgpu_tf.Trainer(model, strategy)
    return refused(strategy, lambda: trainer.save(f"{folder}/{me()}.keras"))


def in_the_loop(strategy, folder):
    """Every worker meets the same mistake among the collectives."""
    return refused(strategy, lambda: fitting(strategy, y=None))


def callback_of_all(strategy, folder):
    class Broken(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise ArithmeticError("of a callback")

    return refused(
        strategy, lambda: fitting(strategy, epochs=3, callbacks=[Broken()])
    )


def callbacks_of_a_checkpoint(strategy, folder):
    """Without a checkpoint, workers may have callbacks of their own."""
    stops = [keras.callbacks.EarlyStopping("loss", patience=9)]
    mine = stops if me() == 1 else []
    fitting(strategy, callbacks=mine)
    shared = os.path.join(folder, "callbacks")
    return refused(
        strategy,
        lambda: fitting(strategy, callbacks=mine, checkpoint_dir=shared),
    )


class OfTheLast(keras.callbacks.Callback):
    """Changes one number on the last worker while it trains."""

    def on_epoch_begin(self, epoch, logs=None):
        if me() and epoch == 1:
            kernel = self.model.layers[0].kernel.value
            (copy,) = strategy_values(kernel)
            copy.assign_add(tf.one_hot([0] * 4, 3) * 1e-6)


def strategy_values(variable):
    strategy = tf.distribute.get_strategy()
    return strategy.experimental_local_results(variable)


def diverged(strategy, folder):
    def act():
        trainer = mgpu_tf.Trainer(model, strategy, check_replicas_every=4)
        trainer.fit(
            *(X, Y),
            batch_size=BATCH,
            epochs=3,
            verbose=0,
            callbacks=[OfTheLast()],
        )

    return refused(strategy, act)


def bad_loss(strategy, folder):
    def act():
        x = X.copy()
        x[2 * BATCH + BATCH - 1] = np.nan
        trainer = mgpu_tf.Trainer(model, strategy, on_nan="stop")
        trainer.fit(x, Y, batch_size=BATCH, shuffle=False, verbose=0)

    return refused(strategy, act)


def weights(strategy, folder):
    trainer = mgpu_tf.Trainer(model, strategy)
    if me() == 1:
        trainer.model.layers[-1].set_weights([np.ones((3, 1)), np.ones(1)])
    return refused(
        strategy,
        lambda: trainer.fit(X, Y, batch_size=BATCH, verbose=0),
    )


def rate_of_one(strategy, folder):
    class Sets(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if me() == 1:
                self.model.optimizer.learning_rate = 0.5

    return refused(strategy, lambda: fitting(strategy, callbacks=[Sets()]))


def weights_in_build(strategy, folder):
    def build():
        made = model()
        made.set_weights([w + me() for w in made.get_weights()])
        return made

    return refused(strategy, lambda: mgpu_tf.Trainer(build, strategy))


def adapted(strategy, folder):
    def build():
        normalize = layers.Normalization()
        normalize.adapt(X + me())
        return model(first=[normalize])

    return refused(strategy, lambda: mgpu_tf.Trainer(build, strategy))


def vocabulary(strategy, folder):
    def build():
        words = layers.TextVectorization(output_sequence_length=4)
        words.adapt(["red green", "blue" if me() else "grey"])
        inputs = keras.Input((), dtype="string")
        hidden = layers.Embedding(8, 2)(words(inputs))
        made = keras.Model(inputs, layers.Flatten()(hidden))
        made.compile("sgd", "mse")
        return made

    return refused(strategy, lambda: mgpu_tf.Trainer(build, strategy))


def activation(strategy, folder):
    name = "relu" if me() == 1 else "tanh"
    return refused(
        strategy, lambda: mgpu_tf.Trainer(lambda: model(name), strategy)
    )


def optimizer(strategy, folder):
    def build():
        return model(optimizer=keras.optimizers.SGD(0.1, momentum=0.1 * me()))

    return refused(strategy, lambda: mgpu_tf.Trainer(build, strategy))


def loss(strategy, folder):
    def build():
        return model(loss="mae" if me() == 1 else "mse")

    return refused(strategy, lambda: mgpu_tf.Trainer(build, strategy))


def generator(count):
    return ((X[:BATCH], Y[:BATCH]) for _ in range(count))


def of_count(count):
    """A dataset whose number of batches nobody knows before."""
    return tf.data.Dataset.from_generator(
        lambda: generator(count),
        output_signature=(
            tf.TensorSpec((None, 4), tf.float32),
            tf.TensorSpec((None, 1), tf.float32),
        ),
    )


def generators(strategy, folder):
    data = generator(3 if me() == 1 else 6)
    return refused(strategy, lambda: on_batches(strategy, data))


def generators_of_steps(strategy, folder):
    data = generator(3 if me() == 1 else 6)
    return refused(
        strategy, lambda: on_batches(strategy, data, steps_per_epoch=6)
    )


def validation(strategy, folder):
    data = of_count(3 if me() == 0 else 6)
    return refused(strategy, lambda: fitting(strategy, validation_data=data))


def prediction(strategy, folder):
    data = of_count(3 if me() == 1 else 6).map(lambda x, y: x)
    trainer = mgpu_tf.Trainer(model, strategy)
    return refused(strategy, lambda: trainer.predict(data, verbose=0))


def unordered(strategy, folder):
    data = tf.data.Dataset.from_tensor_slices((X, Y)).map(
        lambda x, y: (x, y), num_parallel_calls=2, deterministic=False
    )
    return refused(strategy, lambda: on_batches(strategy, data.batch(BATCH)))


def other_names(strategy, folder):
    """No difference: a worker that has made layers before."""
    for _ in range(me()):
        layers.Dense(1)
    return refused(strategy, lambda: fitting(strategy))


def lambdas(strategy, folder):
    """No difference: functions, which have no bytes that repeat."""

    def build():
        return model(
            activation=lambda x: tf.tanh(x),
            loss=lambda y, p: tf.square(y - p),
            first=[layers.Lambda(lambda x: 1.0 * x)],
        )

    return refused(strategy, lambda: fitting(strategy, build))


def stops(strategy, folder):
    """No difference: data of unknown length that is the same."""
    return refused(strategy, lambda: on_batches(strategy, of_count(5)))


@contextlib.contextmanager
def counted():
    """Counts the messages that this process sends and looks for."""
    count = {"put": 0, "take": 0}
    before = {name: getattr(messages, name) for name in count}

    def counting(name):
        def call(*arguments):
            count[name] += 1
            return before[name](*arguments)

        return call

    for name in count:
        setattr(messages, name, counting(name))
    try:
        yield count
    finally:
        for name, function in before.items():
            setattr(messages, name, function)


def requests(strategy, folder):
    """How many messages it takes to compare models of many variables."""

    def build(depth):
        made = keras.Sequential(
            [keras.Input((4,)), *(layers.Dense(4) for _ in range(depth))]
        )
        made.compile("adam", "mse")
        return made

    found = {}
    for depth in (2, 20):
        with counted() as count:
            mgpu_tf.Trainer(lambda depth=depth: build(depth), strategy)
        found[str(depth)] = count
    return found


# What a worker that differs does, and what all must be told.
SAME = "ConfigurationError All workers must have the same "
REFUSED = {
    alike: ["ConfigurationError batch_size must be an integer of 1 or more"],
    by_one: ["ConfigurationError batch_size must be an integer of 1 or more"],
    by_the_first: ["ConfigurationError batch_size must be an integer"],
    other_exception: [
        "WorkerError worker 1: ArithmeticError: of the data",
        "ArithmeticError of the data",
    ],
    batch_sizes: [SAME + "data's length. Received: 24 examples in batches"],
    calls: [SAME + "call. Received: fit on worker 0, evaluate on worker 1."],
    paths: [SAME + "path. Received: "],
    in_the_loop: ["ConfigurationError The loss needs targets."],
    callback_of_all: ["ArithmeticError of a callback"],
    callbacks_of_a_checkpoint: [
        SAME + "callbacks, which a checkpoint has the state of. Received: none "
        "on worker 0, EarlyStopping on worker 1."
    ],
    diverged: [
        "DivergedError All replicas must hold the same weights and optimizer "
        "state. Received: others on replica 1 of worker 1 at step 8, in "
    ],
    bad_loss: [
        "DivergedError The loss must stay finite. Received: loss nan since "
        "step 3, first on worker 1."
    ],
    rate_of_one: [
        SAME + "learning rate at the end of an epoch. Received: [0.1"
    ],
    weights: [SAME + "weight (number 2, kernel). Received: float32 values"],
    weights_in_build: [SAME + "weight (number 0, kernel). Received: float32"],
    adapted: [SAME + "weight (number 0, mean). Received: float32 values"],
    vocabulary: [SAME + "model (TextVectorization, layer 2): vocabulary."],
    activation: [
        SAME + "model (Dense, layer 2): activation. "
        "Received: tanh on worker 0, relu on worker 1."
    ],
    optimizer: [SAME + "optimizer: momentum. Received: 0.0 on worker 0, 0.1"],
    loss: [SAME + "compile: loss. Received: mse on worker 0, mae on worker 1."],
    generators: [SAME + "number of batches. Received: more than 3 on worker 0"],
    generators_of_steps: [SAME + "number of batches. Received: more than 3"],
    validation: [SAME + "number of batches. Received: 3 on worker 0, more"],
    prediction: [SAME + "number of batches. Received: more than 3 on worker"],
    unordered: ["ConfigurationError Data that several workers read"],
}
WORK = [other_names, lambdas, stops]
JOBS = {job.__name__: job for job in (*REFUSED, *WORK, requests)}
