"""Every kind of data, of which each example must be seen once an epoch.

A job is a function from a strategy and a folder to what it observed: the loss
of each epoch, and how far the count of each example was from one.
"""

import itertools
import os

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import mgpu_tf

SIZE = 26
BATCH = 8
EPOCHS = 2
STEPS = -(-SIZE // BATCH)


class Missed(keras.metrics.Metric):
    """How far the count of each target, an index, is from one."""

    def __init__(self, name="missed"):
        super().__init__(name=name)
        self.counts = self.add_weight(shape=(SIZE,), initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        index = tf.reshape(tf.cast(y_true, tf.int32), [-1])
        self.counts.assign_add(tf.reduce_sum(tf.one_hot(index, SIZE), 0))

    def result(self):
        return tf.reduce_sum(tf.abs(self.counts - 1.0))


def numbers():
    x = np.random.default_rng(3).normal(size=(SIZE, 4)).astype("float32")
    return x, np.arange(SIZE)


def words():
    generator = np.random.default_rng(4)
    vocabulary = np.array(["red", "green", "blue", "grey", "pink"])
    texts = [
        " ".join(vocabulary[generator.integers(0, 5, size=1 + i % 4)])
        for i in range(SIZE)
    ]
    return np.array(texts, dtype=object), np.arange(SIZE)


def scaled_loss(y, prediction):
    """A squared error whose target is the index, as a fraction."""
    y = tf.reshape(tf.cast(y, tf.float32), [-1])
    return tf.square(y / SIZE - prediction[:, 0])


def compiled(model):
    model.compile(keras.optimizers.SGD(0.1), scaled_loss, metrics=[Missed()])
    return model


def dense():
    return compiled(
        keras.Sequential([keras.Input((4,)), layers.Dense(3), layers.Dense(1)])
    )


def of_dict():
    left, right = (
        keras.Input((2,), name="left"),
        keras.Input((2,), name="right"),
    )
    joined = layers.Concatenate()([left, right])
    return compiled(
        keras.Model({"left": left, "right": right}, layers.Dense(1)(joined))
    )


def of_text():
    """Text as it comes; the vocabulary is learned in `build_model`."""
    vectorize = layers.TextVectorization(output_sequence_length=4)
    vectorize.adapt(words()[0])
    inputs = keras.Input((), dtype="string")
    hidden = layers.Embedding(vectorize.vocabulary_size(), 3)(vectorize(inputs))
    hidden = layers.GlobalAveragePooling1D()(hidden)
    return compiled(keras.Model(inputs, layers.Dense(1)(hidden)))


def of_normalized():
    """Numbers that a preprocessing layer has adapted to."""
    normalize = layers.Normalization()
    normalize.adapt(numbers()[0])
    return compiled(
        keras.Sequential([keras.Input((4,)), normalize, layers.Dense(1)])
    )


class OfRagged(keras.Model):
    """Takes the mean of rows of different lengths."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)

    def call(self, x):
        return self.dense(tf.reduce_mean(x, axis=1)[:, None])


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        x, y = numbers()
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return x[rows], y[rows]


def fit(strategy, build, *data, **options):
    trainer = mgpu_tf.Trainer(build, strategy)
    history = trainer.fit(*data, epochs=EPOCHS, verbose=0, **options)
    examples = EPOCHS * SIZE
    assert trainer.examples_seen == examples, trainer.examples_seen
    return {
        "losses": history.history["loss"],
        "missed": history.history["missed"],
    }


def dataset(*data):
    return tf.data.Dataset.from_tensor_slices(data)


def arrays(strategy, folder):
    return fit(strategy, dense, *numbers(), batch_size=BATCH)


def dicts(strategy, folder):
    x, y = numbers()
    x = {"left": x[:, :2], "right": x[:, 2:]}
    return fit(strategy, of_dict, x, y, batch_size=BATCH, shuffle=False)


def finite_dataset(strategy, folder):
    data = dataset(*numbers()).shuffle(SIZE, seed=1).batch(BATCH)
    return fit(strategy, dense, data)


def dataset_of_unknown_length(strategy, folder):
    data = dataset(*numbers()).filter(lambda *_: True).batch(BATCH)
    return fit(strategy, dense, data)


def infinite_dataset(strategy, folder):
    data = dataset(*numbers()).batch(BATCH).repeat()
    return fit(strategy, dense, data, steps_per_epoch=STEPS)


def py_dataset(strategy, folder):
    return fit(strategy, dense, Batches())


def py_dataset_with_threads(strategy, folder):
    return fit(strategy, dense, Batches(workers=3, max_queue_size=2))


def generator(strategy, folder):
    batches = (Batches()[index] for index in itertools.cycle(range(STEPS)))
    return fit(strategy, dense, batches, steps_per_epoch=STEPS)


def dataset_fn(strategy, folder):
    """The function shards by itself; batches are not the global ones."""

    def function(context):
        data = dataset(*numbers()).shard(
            context.num_input_pipelines, context.input_pipeline_id
        )
        return data.batch(context.get_per_replica_batch_size(BATCH))

    return fit(strategy, dense, function)


def strings(strategy, folder):
    return fit(strategy, of_text, *words(), batch_size=BATCH)


def normalized(strategy, folder):
    return fit(strategy, of_normalized, *numbers(), batch_size=BATCH)


def ragged(strategy, folder):
    rows = [[float(j) for j in range(1 + i % 5)] for i in range(SIZE)]
    data = dataset(tf.ragged.constant(rows, dtype=tf.float32), numbers()[1])
    return fit(strategy, lambda: compiled(OfRagged()), data.batch(BATCH))


def records(strategy, folder):
    """TFRecord files, by pattern."""
    from mgpu_tf import datasets

    features = {
        "x": tf.io.FixedLenFeature([4], tf.float32),
        "y": tf.io.FixedLenFeature([], tf.int64),
    }

    def parse(record):
        example = tf.io.parse_single_example(record, features)
        return example["x"], example["y"]

    pattern = os.path.join(folder, "part-*.tfrecord")
    return fit(
        strategy, dense, datasets.records(pattern, parse, batch_size=BATCH)
    )


def write_records(folder, files=3):
    """Writes what `records` reads."""
    x, y = numbers()
    for k in range(files):
        path = os.path.join(folder, f"part-{k}.tfrecord")
        with tf.io.TFRecordWriter(path) as writer:
            for row in range(k, SIZE, files):
                feature = {
                    "x": tf.train.Feature(
                        float_list=tf.train.FloatList(value=x[row])
                    ),
                    "y": tf.train.Feature(
                        int64_list=tf.train.Int64List(value=[y[row]])
                    ),
                }
                example = tf.train.Example(
                    features=tf.train.Features(feature=feature)
                )
                writer.write(example.SerializeToString())


JOBS = {
    job.__name__: job
    for job in (
        arrays,
        dicts,
        finite_dataset,
        dataset_of_unknown_length,
        infinite_dataset,
        py_dataset,
        py_dataset_with_threads,
        generator,
        dataset_fn,
        strings,
        normalized,
        ragged,
        records,
    )
}
# A dataset_fn chooses its own batches, so only their union is the same.
OWN_BATCHES = {"dataset_fn"}
