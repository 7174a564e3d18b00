"""Every structure of data that Keras's `fit` takes."""

import keras
import numpy as np
import scipy.sparse
import tensorflow as tf
from keras import layers

from tests.conformance import models
from tests.conformance.harness import BATCH_SIZE, Excuse, add, row

GROUP = "Structures of data"
COUNT = Excuse(
    "iteration", "a count of steps on a dataset of unknown length", True
)


def _named(left="left", right="right"):
    first = keras.Input((2,), name=left)
    second = keras.Input((2,), name=right)
    hidden = layers.Concatenate()([first, second])
    return first, second, layers.Dense(4, activation="tanh")(hidden)


def two_inputs(structure=list):
    """What builds a model of two inputs in a structure."""

    def build():
        first, second, hidden = _named()
        inputs = [first, second]
        if structure is dict:
            inputs = {"left": first, "right": second}
        elif structure is tuple:
            inputs = (first, second)
        return models.compiled(keras.Model(inputs, layers.Dense(1)(hidden)))

    return build


def two_outputs(structure=list, loss="mse", **options):
    def build():
        inputs = keras.Input((models.FEATURES,))
        hidden = layers.Dense(4, activation="tanh")(inputs)
        outputs = [
            layers.Dense(1, name="one")(hidden),
            layers.Dense(2, name="two")(hidden),
        ]
        if structure is dict:
            outputs = {"one": outputs[0], "two": outputs[1]}
        elif structure is tuple:
            outputs = tuple(outputs)
        model = keras.Model(inputs, outputs)
        return models.compiled(model, loss, **options)

    return build


def _halves():
    x = models.points()
    return x[:, :2], x[:, 2:]


def _targets():
    return models.numbers(), models.numbers(width=2, seed=12)


for _kind, _make in {
    "list": list,
    "tuple": tuple,
    "dict": lambda pair: dict(zip(("left", "right"), pair, strict=True)),
}.items():
    for _inputs in (list, tuple, dict):

        def _program(run, make=_make, inputs=_inputs):
            x = make(_halves())
            run.use(two_inputs(inputs), x, models.numbers())

        _name = f"x a {_kind}, inputs a {_inputs.__name__}"
        add(GROUP, _name, _program)

for _kind, _make in {
    "list": list,
    "tuple": tuple,
    "dict": lambda pair: dict(zip(("one", "two"), pair, strict=True)),
}.items():
    for _outputs in (list, tuple, dict):

        def _program(run, make=_make, outputs=_outputs):
            run.use(two_outputs(outputs), models.points(), make(_targets()))

        _name = f"y a {_kind}, outputs a {_outputs.__name__}"
        add(GROUP, _name, _program)


@row(GROUP)
def arrays(run):
    run.use(models.dense(), models.points(), models.numbers())


@row(GROUP)
def x_in_a_list_of_one(run):
    run.use(models.dense(), [models.points()], models.numbers())


@row(GROUP)
def y_in_a_list_of_one(run):
    run.use(models.dense(), models.points(), [models.numbers()])


@row(GROUP)
def y_in_a_tuple_of_one(run):
    run.use(models.dense(), models.points(), (models.numbers(),))


@row(GROUP)
def y_in_a_dict_of_one(run):
    def build():
        inputs = keras.Input((models.FEATURES,))
        outputs = {"out": layers.Dense(1, name="out")(inputs)}
        return models.compiled(keras.Model(inputs, outputs))

    run.use(build, models.points(), {"out": models.numbers()})


@row(GROUP)
def a_list_inside_of_a_dict_y(run):
    """One output by name, whose target is a list of one array."""

    def build():
        inputs = keras.Input((models.FEATURES,))
        outputs = {"out": [layers.Dense(1, name="out")(inputs)]}
        return models.compiled(keras.Model(inputs, outputs))

    run.use(build, models.points(), {"out": [models.numbers()]})


@row(GROUP)
def outputs_nested(run):
    def build():
        inputs = keras.Input((models.FEATURES,))
        outputs = {
            "pair": [layers.Dense(1)(inputs), layers.Dense(2)(inputs)],
            "one": layers.Dense(1)(inputs),
        }
        return models.compiled(keras.Model(inputs, outputs))

    first, second = _targets()
    y = {"pair": [first, second], "one": models.numbers(seed=13)}
    run.use(build, models.points(), y)


@row(GROUP)
def inputs_nested(run):
    def build():
        a, b, c = (keras.Input((2,)) for _ in range(3))
        hidden = layers.Concatenate()([a, b, c])
        inputs = {"pair": [a, b], "one": c}
        return models.compiled(keras.Model(inputs, layers.Dense(1)(hidden)))

    left, right = _halves()
    x = {"pair": [left, right], "one": models.points(features=2, seed=9)}
    run.use(build, x, models.numbers())


@row(GROUP)
def validation_data_in_a_list(run):
    data = [models.points(13, seed=7), models.numbers(13, seed=8)]
    x, y = models.points(), models.numbers()
    run.use(models.dense(), x, y, validation_data=data)


@row(GROUP)
def validation_data_with_weights(run):
    data = (
        models.points(13, seed=7),
        models.numbers(13, seed=8),
        models.weights(13),
    )
    x, y = models.points(), models.numbers()
    run.use(models.dense(weighted_metrics=["mae"]), x, y, validation_data=data)


@row(GROUP)
def validation_data_of_two_inputs(run):
    data = (
        [models.points(13, 2), models.points(13, 2, seed=8)],
        models.numbers(13),
    )
    x, y = list(_halves()), models.numbers()
    run.use(two_inputs(), x, y, validation_data=data)


@row(GROUP)
def validation_data_a_dataset(run):
    arrays = models.points(13, seed=7), models.numbers(13, seed=8)
    data = tf.data.Dataset.from_tensor_slices(arrays).batch(5)
    x, y = models.points(), models.numbers()
    run.use(models.dense(), x, y, validation_data=data)


@row(GROUP)
def validation_split(run):
    x, y = models.points(), models.numbers()
    run.use(models.dense(), x, y, validation_split=0.3)


@row(GROUP)
def validation_split_of_two_inputs(run):
    x, y = list(_halves()), models.numbers()
    run.use(two_inputs(), x, y, validation_split=0.3)


@row(GROUP)
def predict_of_a_tuple(run):
    trainer = run.use(two_inputs(), list(_halves()), models.numbers())
    run.see("predict of a tuple", trainer.predict(_halves(), verbose=0))


@row(GROUP)
def predict_of_a_dataset_of_tuples(run):
    trainer = run.use(two_inputs(), list(_halves()), models.numbers())
    data = tf.data.Dataset.from_tensor_slices((_halves(), models.numbers()))
    run.see("predict of data", trainer.predict(data.batch(8), verbose=0))


@row(GROUP)
def targets_without_an_axis(run):
    """Targets `[n]` against predictions `[n, 1]`."""
    run.use(
        models.dense(metrics=["mae"]), models.points(), models.numbers()[:, 0]
    )


@row(GROUP)
def inputs_without_an_axis(run):
    def build():
        inputs = keras.Input(())
        hidden = layers.Dense(3)(layers.Reshape((1,))(inputs))
        return models.compiled(keras.Model(inputs, layers.Dense(1)(hidden)))

    run.use(build, models.points()[:, 0], models.numbers())


def _typed(dtype):
    def program(run):
        x = (10 * models.points()).astype(dtype)
        run.use(models.dense(), x, models.numbers())

    add(GROUP, f"inputs of {dtype}", program)


for _dtype in ("int64", "int32", "uint8", "float16", "float32", "bool"):
    _typed(_dtype)


@row(GROUP)
def targets_of_bool(run):
    build = models.dense(
        activation="sigmoid", loss="binary_crossentropy", metrics=["accuracy"]
    )
    run.use(build, models.points(), models.kinds()[:, None] > 1)


@row(GROUP)
def tensors(run):
    x = tf.constant(models.points())
    run.use(models.dense(), x, tf.constant(models.numbers()))


@row(GROUP)
def lists_of_numbers(run):
    x, y = models.points().tolist(), models.numbers().tolist()
    run.use(models.dense(), x, y)


@row(GROUP)
def a_sparse_matrix_of_scipy(run):
    x = scipy.sparse.csr_matrix(models.points())

    def build():
        inputs = keras.Input((models.FEATURES,), sparse=True)
        return models.compiled(keras.Model(inputs, layers.Dense(1)(inputs)))

    run.use(build, x, models.numbers())


@row(GROUP)
def strings(run):
    def build():
        inputs = keras.Input((1,), dtype="string")
        lookup = layers.StringLookup(vocabulary=["red", "green", "blue"])
        hidden = layers.Embedding(4, 3)(lookup(inputs))
        outputs = layers.Dense(1)(layers.Flatten()(hidden))
        return models.compiled(keras.Model(inputs, outputs))

    x = np.array(["red", "green", "blue"])[models.kinds()][:, None]
    run.use(build, tf.constant(x.astype(object)), models.numbers())


def dataset(*data, batch_size=BATCH_SIZE):
    """A dataset of global batches."""
    data = tf.data.Dataset.from_tensor_slices(data if data[1:] else data[0])
    return data.batch(batch_size)


@row(GROUP)
def dataset_of_pairs(run):
    run.use(models.dense(), dataset(models.points(), models.numbers()))


@row(GROUP)
def dataset_of_triples(run):
    data = dataset(models.points(), models.numbers(), models.weights())
    run.use(models.dense(weighted_metrics=["mae"]), data)


@row(GROUP)
def dataset_of_dicts(run):
    left, right = _halves()
    data = dataset({"left": left, "right": right}, models.numbers())
    run.use(two_inputs(dict), data)


@row(GROUP)
def dataset_of_two_targets(run):
    run.use(two_outputs(), dataset(models.points(), _targets()))


@row(GROUP, excuses=(COUNT,))
def dataset_of_unknown_length(run):
    data = dataset(models.points(), models.numbers())
    data = data.filter(lambda x, y: True)
    run.use(models.dense(), data)


@row(GROUP)
def dataset_without_end(run):
    data = dataset(models.points(), models.numbers()).repeat()
    run.use(models.dense(), data, steps_per_epoch=3)


@row(GROUP)
def dataset_that_ends_in_the_middle_of_an_epoch(run):
    data = dataset(models.points(), models.numbers())
    run.use(models.dense(), data, steps_per_epoch=3, epochs=1)


@row(GROUP)
def dataset_shuffled_by_a_seed(run):
    arrays = models.points(), models.numbers()
    data = tf.data.Dataset.from_tensor_slices(arrays)
    data = data.shuffle(29, seed=3, reshuffle_each_iteration=False)
    run.use(models.dense(), data.batch(BATCH_SIZE))


@row(GROUP, excuses=(COUNT,))
def dataset_of_batches_of_other_sizes(run):
    """Batches of 7, 2, 11, 1 and 8 examples."""
    x, y = models.points(), models.numbers()
    ends = np.cumsum([7, 2, 11, 1, 8])
    parts = [
        slice(end - size, end)
        for end, size in zip(ends, [7, 2, 11, 1, 8], strict=True)
    ]
    data = tf.data.Dataset.from_generator(
        lambda: ((x[part], y[part]) for part in parts),
        output_signature=(
            tf.TensorSpec((None, 4), x.dtype),
            tf.TensorSpec((None, 1), y.dtype),
        ),
    )
    run.use(models.dense(), data)


class Batches(keras.utils.PyDataset):
    """Batches of arrays."""

    def __init__(self, *data, **options):
        super().__init__(**options)
        self.data = data

    def __len__(self):
        return -(-len(self.data[0]) // BATCH_SIZE)

    def __getitem__(self, index):
        part = slice(index * BATCH_SIZE, (index + 1) * BATCH_SIZE)
        return tuple(array[part] for array in self.data)


@row(GROUP)
def py_dataset(run):
    run.use(models.dense(), Batches(models.points(), models.numbers()))


@row(GROUP)
def py_dataset_with_weights(run):
    data = Batches(models.points(), models.numbers(), models.weights())
    run.use(models.dense(weighted_metrics=["mae"]), data)


@row(GROUP)
def py_dataset_with_threads(run):
    data = Batches(models.points(), models.numbers(), workers=2)
    run.use(models.dense(), data)


def _batches(*data):
    while True:
        yield from (Batches(*data)[index] for index in range(4))


@row(GROUP)
def generator_with_steps(run):
    data = _batches(models.points(), models.numbers())
    run.use(models.dense(), data, steps_per_epoch=4)


@row(GROUP)
def steps_that_are_half_a_pass(run):
    run.fit(
        models.dense(),
        Batches(models.points(), models.numbers()),
        steps_per_epoch=2,
        epochs=4,
    )


OF_ENDED_DATA = Excuse(
    "", "`steps_per_epoch` that is no divisor", everywhere=True
)


@row(GROUP, excuses=(OF_ENDED_DATA,))
def steps_that_are_less_than_a_pass(run):
    run.fit(
        models.dense(),
        models.points(),
        models.numbers(),
        steps_per_epoch=3,
        epochs=4,
    )


@row(GROUP, excuses=(COUNT,))
def generator_of_one_pass(run):
    batches = Batches(models.points(), models.numbers())
    data = (batches[index] for index in range(4))
    run.use(models.dense(), data, epochs=1)


@row(GROUP)
def generator_of_batches_with_none(run):
    data = _batches(models.points(), models.numbers())
    given = ((*batch, None) for batch in data)
    run.fit(models.dense(), given, steps_per_epoch=4)


@row(GROUP)
def generator_of_dicts(run):
    left, right = _halves()
    y = models.numbers()

    def batches():
        while True:
            for start in range(0, 29, 8):
                part = slice(start, start + 8)
                yield {"left": left[part], "right": right[part]}, y[part]

    run.use(two_inputs(dict), batches(), steps_per_epoch=4)


class MeanOfRows(keras.Model):
    """The mean of rows of different lengths."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)

    def call(self, x):
        return self.dense(tf.reduce_mean(x, axis=1)[:, None])


@row(GROUP)
def ragged_rows(run):
    values = models.points(29, 5)
    rows = [values[i, : 1 + i % 5] for i in range(29)]
    x = tf.ragged.constant([r.tolist() for r in rows], dtype=values.dtype)
    data = tf.data.Dataset.from_tensor_slices((x, models.numbers()))
    run.use(lambda: models.compiled(MeanOfRows()), data.batch(BATCH_SIZE))


def of_any_length(width=1):
    """An LSTM on words of any length."""

    def build():
        model = keras.Sequential(
            [
                keras.Input((None,), dtype="int32"),
                layers.Embedding(models.WORDS, 3, mask_zero=True),
                layers.LSTM(4),
                layers.Dense(width),
            ]
        )
        return models.compiled(model)

    return build


def _lines():
    x = models.words()
    return [row[row > 0] for row in x], models.numbers()


@row(GROUP, excuses=(COUNT,))
def padded_batches_into_an_lstm(run):
    lines, y = _lines()
    data = tf.data.Dataset.from_generator(
        lambda: zip(lines, y, strict=True),
        output_signature=(
            tf.TensorSpec((None,), "int32"),
            tf.TensorSpec((1,), y.dtype),
        ),
    ).padded_batch(BATCH_SIZE)
    run.use(of_any_length(), data)


@row(GROUP, excuses=(COUNT,))
def buckets_by_length_into_an_lstm(run):
    lines, y = _lines()
    data = tf.data.Dataset.from_generator(
        lambda: zip(lines, y, strict=True),
        output_signature=(
            tf.TensorSpec((None,), "int32"),
            tf.TensorSpec((1,), y.dtype),
        ),
    ).bucket_by_sequence_length(
        lambda x, _: tf.shape(x)[0], [3], [BATCH_SIZE, BATCH_SIZE]
    )
    run.use(of_any_length(), data)


@row(GROUP)
def generator_of_batches_of_other_lengths(run):
    def batches():
        while True:
            for length in (5, 3, 4):
                x = models.words(8, seed=length, padded=False)[:, :length]
                yield x, models.numbers(8, seed=length)

    run.use(of_any_length(), batches(), steps_per_epoch=3)


@row(GROUP)
def a_last_batch_of_one(run):
    x, y = models.points(25), models.numbers(25)
    run.use(models.dense(metrics=["mae"]), x, y)


@row(GROUP)
def fewer_examples_than_a_batch(run):
    run.use(models.dense(), models.points(5), models.numbers(5))


@row(GROUP)
def one_example(run):
    run.use(models.dense(), models.points(1), models.numbers(1))


@row(GROUP)
def class_weight_of_integers(run):
    build = models.dense(
        width=3, activation="softmax", loss="sparse_categorical_crossentropy"
    )
    weight = {0: 0.5, 1: 2.0, 2: 3.0}
    run.fit(
        build,
        models.points(),
        models.kinds(),
        class_weight=weight,
    )


@row(GROUP)
def class_weight_of_one_hot(run):
    build = models.dense(
        width=3, activation="softmax", loss="categorical_crossentropy"
    )
    weight = {0: 0.5, 1: 2.0, 2: 3.0}
    run.fit(
        build,
        models.points(),
        models.one_hot(),
        class_weight=weight,
    )


@row(GROUP)
def class_weight_with_a_class_left_out(run):
    build = models.dense(
        width=3, activation="softmax", loss="sparse_categorical_crossentropy"
    )
    run.fit(
        build,
        models.points(),
        models.kinds(),
        class_weight={1: 2.0},
    )


@row(GROUP)
def class_weight_above_the_largest_class(run):
    build = models.dense(
        width=3, activation="softmax", loss="sparse_categorical_crossentropy"
    )
    weight = {0: 0.5, 1: 2.0, 7: 9.0}
    run.fit(
        build,
        models.points(),
        models.kinds(),
        class_weight=weight,
    )


for _kind, _make in {
    "list": list,
    "dict": lambda pair: dict(zip(("one", "two"), pair, strict=True)),
}.items():

    def _program(run, make=_make):
        structure = dict if make is not list else list
        pair = models.weights(), models.weights(seed=14)
        run.fit(
            two_outputs(structure),
            models.points(),
            make(_targets()),
            sample_weight=make(pair),
        )

    _name = f"sample weights in a {_kind}"
    add(GROUP, _name, _program)


@row(GROUP)
def one_sample_weight_for_two_outputs(run):
    run.fit(
        two_outputs(),
        models.points(),
        list(_targets()),
        sample_weight=models.weights(),
    )


@row(GROUP)
def no_targets(run):
    def build():
        inputs = keras.Input((models.FEATURES,))
        outputs = layers.Dense(1)(inputs)
        model = keras.Model(inputs, outputs)
        return models.compiled(
            model, lambda y, prediction: tf.square(prediction)
        )

    run.use(build, models.points(), models.numbers())


@row(GROUP)
def positional_arguments(run):
    """`fit(x, y, batch_size, epochs)`, as people write it."""
    x, y = models.points(), models.numbers()
    run.use(models.dense(), x, y, 8, 3)


@row(GROUP)
def positional_arguments_of_evaluate_and_predict(run):
    x, y = models.points(), models.numbers()
    trainer = run.use(models.dense(), x, y)
    run.see("evaluate by place", trainer.evaluate(x, y, 8, 0))
    run.see("predict by place", trainer.predict(x, 8, 0))


@row(GROUP)
def batch_size_by_default(run):
    x, y = models.points(70), models.numbers(70)
    run.use(models.dense(), x, y, batch_size=None)


@row(GROUP)
def validation_freq_of_epochs(run):
    x, y = models.points(), models.numbers()
    data = models.points(13, seed=7), models.numbers(13, seed=8)
    run.use(
        models.dense(),
        x,
        y,
        epochs=4,
        validation_data=data,
        validation_freq=[1, 3],
    )


@row(GROUP)
def validation_freq_of_two(run):
    x, y = models.points(), models.numbers()
    data = models.points(13, seed=7), models.numbers(13, seed=8)
    run.use(
        models.dense(),
        x,
        y,
        epochs=4,
        validation_data=data,
        validation_freq=2,
    )


@row(GROUP)
def validation_steps_and_batch_size(run):
    x, y = models.points(), models.numbers()
    data = models.points(13, seed=7), models.numbers(13, seed=8)
    run.use(
        models.dense(),
        x,
        y,
        validation_data=data,
        validation_batch_size=3,
        validation_steps=2,
    )


@row(GROUP)
def initial_epoch(run):
    x, y = models.points(), models.numbers()
    run.use(models.dense(), x, y, initial_epoch=1, epochs=3)


@row(GROUP)
def fit_twice(run):
    x, y = models.points(), models.numbers()
    trainer = run.trainer(
        models.dense(optimizer=lambda: keras.optimizers.Adam(0.05))
    )
    trainer.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    run.use(None, x, y, trainer=trainer)


@row(GROUP)
def evaluate_as_a_dict(run):
    x, y = models.points(), models.numbers()
    trainer = run.use(models.dense(metrics=["mae"]), x, y)
    scores = trainer.evaluate(x, y, return_dict=True, verbose=0)
    run.see("names", sorted(scores))
    run.see("scores", [scores[name] for name in sorted(scores)])


@row(GROUP)
def evaluate_of_some_steps(run):
    x, y = models.points(), models.numbers()
    trainer = run.use(models.dense(), x, y)
    run.see("evaluate 2", trainer.evaluate(x, y, 8, steps=2, verbose=0))
    run.see("predict 2", trainer.predict(x, 8, steps=2, verbose=0))


@row(GROUP)
def batches_by_hand(run):
    """`train_on_batch` and its like with global batches."""
    x, y = models.points(), models.numbers()
    trainer = run.trainer(models.dense(metrics=["mae"]))
    for start in range(0, 29, 8):
        part = slice(start, start + 8)
        logs = trainer.train_on_batch(x[part], y[part])
        run.see(f"train {start}", logs)
    run.see("test", trainer.test_on_batch(x[:7], y[:7]))
    run.see("predict", trainer.predict_on_batch(x[:7]))
    run.look(trainer)
