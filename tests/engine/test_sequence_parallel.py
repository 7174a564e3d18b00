"""Parts of a sequence between layers in parts, against Keras on one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import mgpu_tf
from mgpu_tf.errors import ConfigurationError
from tests import clusters
from tests.engine import tensor_models as models
from tests.engine.test_tensor_parallel import adam, compared, strategy_of
from tests.tiers import tiered

# Neither 2 nor 3 divides the length.
LENGTH, WIDTH, VOCABULARY = 7, 12, 24


class Attention(layers.Layer):
    """A block before whose layers is a norm; attention as authors write it."""

    def __init__(self, rate=0.1):
        super().__init__()
        self.query, self.key, self.value, self.mix = (
            layers.Dense(WIDTH) for _ in range(4)
        )
        self.first = layers.RMSNormalization()
        self.second = layers.LayerNormalization()
        self.gate, self.up = layers.Dense(24), layers.Dense(24)
        self.down = layers.Dense(WIDTH)
        self.drop = layers.SpatialDropout1D(rate)
        self.supports_masking = True

    def call(self, x, training=None):
        y = self.first(x)
        rows, length, _ = ops.shape(y)

        def heads(values):
            values = ops.reshape(values, (rows, length, 3, 4))
            return ops.transpose(values, (0, 2, 1, 3))

        query, key = heads(self.query(y)), heads(self.key(y))
        scores = ops.einsum("bhqd,bhkd->bhqk", query, key) / 2
        places = ops.arange(length)
        seen = places[:, None] >= places[None]
        weights = ops.softmax(ops.where(seen, scores, -1e9))
        mixed = ops.einsum("bhqk,bhkd->bhqd", weights, heads(self.value(y)))
        mixed = ops.transpose(mixed, (0, 2, 1, 3))
        mixed = self.mix(ops.reshape(mixed, (rows, length, WIDTH)))
        x = x + self.drop(mixed, training=training)
        y = self.second(x)
        return x + self.down(ops.silu(self.gate(y)) * self.up(y))


class PostNorm(layers.Layer):
    """A block after whose layers is a norm, with Keras's attention."""

    def __init__(self, rate=0.1):
        super().__init__()
        self.attention = layers.MultiHeadAttention(12, 2, dropout=rate)
        self.inner = layers.Dense(48, activation="relu")
        self.outer = layers.Dense(WIDTH)
        self.first = layers.LayerNormalization()
        self.second = layers.LayerNormalization()
        self.drop = layers.Dropout(rate)
        self.last = layers.Dropout(rate)
        self.supports_masking = True

    def call(self, x, context=None, training=None):
        context = x if context is None else context
        y = self.attention(x, context, training=training)
        x = self.first(x + self.drop(y, training=training))
        y = self.last(self.outer(self.inner(x)), training=training)
        return self.second(x + y)


class Positions(layers.Layer):
    """A vector for each position: the length is that of the whole sequence."""

    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(LENGTH, WIDTH)

    def call(self, x):
        return x + self.table(ops.arange(ops.shape(x)[1]))


class Asks(layers.Layer):
    def call(self, x):
        return x * 2.0 if x.shape[1] == LENGTH else x * 3.0


class AsksInGraph(layers.Layer):
    def call(self, x):
        return x * (ops.cast(tf.shape(x)[1], x.dtype) / LENGTH)


class AsksAfterBlock(PostNorm):
    def call(self, x, training=None):
        x = super().call(x, training=training)
        return x * 2.0 if x.shape[1] == LENGTH else x * 3.0


class ComparesLengths(layers.Layer):
    """A part and a whole tensor beside each other."""

    def __init__(self):
        super().__init__()
        self.norm = layers.LayerNormalization()
        self.mix = layers.Dense(WIDTH)
        self.wide, self.narrow = layers.Dense(24), layers.Dense(WIDTH)

    def call(self, x):
        y = self.norm(x + self.narrow(ops.relu(self.wide(x))))
        mixed = self.mix(y)
        known = y.shape[1] == mixed.shape[1]
        return (y * 2.0 if known else y * 3.0) + ops.mean(mixed)


class Centred(layers.Layer):
    def call(self, x):
        return x - ops.mean(x, axis=1, keepdims=True)


class AddsLoss(layers.Layer):
    def call(self, x):
        self.add_loss(0.01 * ops.mean(ops.square(x)))
        return x


class Writes(layers.Layer):
    def build(self, shape):
        self.means = self.add_weight(shape=(LENGTH,), trainable=False)

    def call(self, x):
        self.means.assign(ops.mean(x[:1], axis=(0, 2)))
        return x


class WithClass(layers.Layer):
    """One more position, as of a vision transformer."""

    def build(self, shape):
        self.token = self.add_weight(shape=(1, 1, WIDTH))

    def call(self, x):
        shape = (ops.shape(x)[0], 1, WIDTH)
        return ops.concatenate([ops.broadcast_to(self.token, shape), x], 1)


class Tied(keras.Model):
    """One table for words that go in and come out."""

    def __init__(self, **options):
        super().__init__()
        self.table = layers.ReversibleEmbedding(VOCABULARY, WIDTH, **options)
        self.places = layers.Embedding(LENGTH, WIDTH)
        self.blocks = [Attention(), PostNorm()]
        self.norm = layers.LayerNormalization()

    def call(self, words, training=None):
        x = self.table(words) + self.places(ops.arange(LENGTH))
        for block in self.blocks:
            x = block(x, training=training)
        return self.table(self.norm(x), reverse=True)


class ReadsMask(layers.Layer):
    def call(self, x, mask=None):
        return x if mask is None else ops.where(mask[..., None], x, 0.5 * x)

    def compute_mask(self, x, mask=None):
        return mask


class TiedWithMask(Tied):
    def __init__(self):
        super().__init__(mask_zero=True)
        self.reads = [ReadsMask(), ReadsMask()]

    def call(self, words, training=None):
        x = self.places(ops.arange(LENGTH)) + self.reads[0](self.table(words))
        for block in self.blocks:
            x = block(self.reads[1](x), training=training)
        return self.table(self.norm(x), reverse=True)


class GradientInCall(keras.Model):
    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(VOCABULARY, WIDTH)
        self.block, self.norm = Attention(), layers.LayerNormalization()
        self.head = layers.Dense(VOCABULARY)

    def call(self, words, training=None):
        x = self.block(self.table(words), training=training)
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = ops.sum(ops.square(self.norm(x)))
        return self.head(x + 0.1 * tape.gradient(total, x))


class SharedNorm(keras.Model):
    """A norm of sequences, and of vectors; a block that is called twice."""

    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(VOCABULARY, WIDTH)
        self.block, self.norm = PostNorm(), layers.LayerNormalization()
        self.wide, self.head = layers.Dense(WIDTH), layers.Dense(VOCABULARY)

    def call(self, words, training=None):
        x = self.block(self.norm(self.table(words)), training=training)
        x = self.block(self.norm(x), training=training)
        vector = self.wide(self.norm(ops.mean(x, 1)))
        return self.head(self.norm(x) + vector[:, None])


class OwnStep(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = self.compute_loss(x, y, outputs)
            loss += 0.01 * ops.mean(ops.square(outputs))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(
            zip(gradients, self.trainable_variables, strict=True)
        )
        return self.compute_metrics(x, y, outputs) | {"loss": loss}


def compiled(model):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return models.compiled(
        model, adam(global_clipnorm=0.5), loss, metrics=["accuracy"]
    )


def language(*parts, table=None, kind=keras.Model):
    words = keras.Input((LENGTH,), dtype="int32")
    x = (table or layers.Embedding(VOCABULARY, WIDTH))(words)
    for part in parts:
        x = part(x)
    x = layers.LayerNormalization()(x)
    return compiled(kind(words, layers.Dense(VOCABULARY)(x)))


def masked():
    table = layers.Embedding(VOCABULARY, WIDTH, mask_zero=True)
    return language(PostNorm(), PostNorm(), table=table)


def functional():
    words = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, WIDTH)(words)
    for _ in range(2):
        y = layers.Dense(48, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dropout(0.1)(layers.Dense(WIDTH)(y))])
        y = layers.LeakyReLU()(layers.Dense(48)(layers.LayerNormalization()(x)))
        x = x + ops.tanh(layers.Dense(WIDTH)(y)) * 0.5
    return compiled(keras.Model(words, layers.Dense(VOCABULARY)(x)))


def translation():
    words = keras.Input((LENGTH,), dtype="int32")
    table = layers.Embedding(VOCABULARY, WIDTH)
    context, x = Attention()(table(words)), table(words)
    for _ in range(2):
        x = PostNorm()(x, context)
    return compiled(keras.Model(words, layers.Dense(VOCABULARY)(x)))


def vision():
    pixels = keras.Input((LENGTH * WIDTH,))
    x = layers.Dense(WIDTH)(layers.Reshape((LENGTH, WIDTH))(pixels))
    x = PostNorm()(Attention()(WithClass()(x)))
    return compiled(keras.Model(pixels, layers.Dense(VOCABULARY)(x[:, 0])))


# Models, and whether some layer computes with a part of a sequence.
CASES = {
    "norms before": (lambda: language(Positions(), Attention()), True),
    "norms after": (lambda: language(PostNorm(), PostNorm()), True),
    "a functional model": (functional, True),
    "a tied table": (lambda: compiled(Tied()), True),
    "a vision transformer": (vision, True),
    "two sequences": (translation, True),
    "a step of its own": (
        lambda: language(Attention(), PostNorm(), kind=OwnStep),
        True,
    ),
    "masks": (masked, True),
    "masks of a tied table": (lambda: compiled(TiedWithMask()), True),
    "a recurrent layer between": (
        lambda: language(
            Attention(), layers.LSTM(WIDTH, return_sequences=True), PostNorm()
        ),
        True,
    ),
    "noise": (
        lambda: language(
            Attention(), layers.GaussianDropout(0.2), layers.GaussianNoise(0.0)
        ),
        True,
    ),
    "code that asks for a length": (
        lambda: language(Attention(), Asks(), Attention()),
        True,
    ),
    "a block that asks for a length": (
        lambda: language(AsksAfterBlock(), PostNorm()),
        True,
    ),
    "code that compares lengths": (
        lambda: language(ComparesLengths(), PostNorm()),
        True,
    ),
    "a mask of features": (
        lambda: language(PostNorm(), layers.Masking(), PostNorm()),
        True,
    ),
    "code that asks in the graph": (
        lambda: language(PostNorm(), AsksInGraph(), PostNorm()),
        True,
    ),
    "a mean over positions": (
        lambda: language(PostNorm(), Centred(), PostNorm()),
        True,
    ),
    "a loss of a layer": (
        lambda: language(PostNorm(), AddsLoss(), PostNorm()),
        True,
    ),
    "a regularized output": (
        lambda: language(
            PostNorm(), layers.LayerNormalization(activity_regularizer="l2")
        ),
        True,
    ),
    "state of positions": (
        lambda: language(PostNorm(), Writes(), PostNorm()),
        True,
    ),
    "a gradient in the call": (lambda: compiled(GradientInCall()), True),
    "a norm that is shared": (lambda: compiled(SharedNorm()), True),
}


def data_of(name):
    generator = np.random.default_rng(2)
    words = generator.integers(1, VOCABULARY, (models.ROWS, LENGTH))
    if name == "a vision transformer":
        x = generator.normal(size=(models.ROWS, LENGTH * WIDTH))
        return x, words[:, 0]
    if name.startswith("masks"):
        lengths = generator.integers(2, LENGTH + 1, (models.ROWS, 1))
        x = np.where(np.arange(LENGTH) < lengths, words, 0)
        return x, np.roll(words, -1, 1)
    return words, np.roll(words, -1, 1)


def has_parts(caplog):
    found = [r for r in caplog.records if "sequence_parallel" in r.msg]
    assert len(found) == 1
    return found[0].levelname == "INFO"


@pytest.mark.parametrize(
    "name",
    tiered(
        list(CASES),
        ["norms before", "norms after"],
        [
            "a tied table",
            "masks",
            "masks of a tied table",
            "a vision transformer",
            "state of positions",
            "a block that asks for a length",
            "code that compares lengths",
        ],
    ),
)
def test_three_devices_have_the_numbers_of_one(name, caplog):
    caplog.set_level("INFO", "mgpu_tf")
    build, in_parts = CASES[name]
    strategy = strategy_of(tensor=3, sequence_parallel=True)
    _, difference = compared(build, data_of(name), strategy)
    assert difference < 1e-9
    assert has_parts(caplog) == in_parts


FOUR = {"num_virtual_devices": 4}
MESHES = {
    "data_2_tensor_2": {"data": 2, "tensor": 2, **FOUR},
    "fsdp_2_tensor_2": {"fsdp": 2, "tensor": 2, **FOUR},
    "tensor_2_pipeline_2": {"tensor": 2, "pipeline": 2, **FOUR},
    "ring": {"tensor": 3, "communication": "ring", "num_virtual_devices": 3},
}


@pytest.mark.parametrize(
    ("mesh", "name"),
    tiered(
        [
            (mesh, name)
            for mesh in MESHES
            for name in ("norms after", "a functional model", "masks")
        ],
        [],
        [
            ("fsdp_2_tensor_2", "a functional model"),
            ("ring", "norms after"),
        ],
    ),
)
def test_other_meshes(mesh, name, caplog):
    caplog.set_level("INFO", "mgpu_tf")
    strategy = mgpu_tf.create_model_parallel_strategy(
        **MESHES[mesh], smallest_split=4, sequence_parallel=True
    )
    build, _ = CASES[name]
    _, difference = compared(build, data_of(name), strategy)
    assert difference < 1e-9
    assert has_parts(caplog)


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.full
def test_blocks_are_computed_again(parallel, caplog):
    caplog.set_level("INFO", "mgpu_tf")
    strategy = strategy_of(tensor=3, sequence_parallel=parallel)
    _, difference = compared(
        lambda: language(PostNorm(), Attention()),
        data_of(""),
        strategy,
        recompute=lambda layer: isinstance(layer, PostNorm | Attention),
    )
    assert difference < 1e-9
    assert "not computed again" not in caplog.text


class Seen(layers.Layer):
    """Notes the number of positions that a device knows of."""

    def __init__(self):
        super().__init__()
        self.lengths = []

    def call(self, x):
        self.lengths.append(x.shape[1])
        return x


def of_any_length(seen):
    words = keras.Input((None,), dtype="int32")
    x = seen(PostNorm(0.0)(layers.Embedding(VOCABULARY, WIDTH)(words)))
    return compiled(keras.Model(words, layers.Dense(VOCABULARY)(x)))


def batches(length):
    """Data whose batches say that they have so many positions, or not."""
    words, following = data_of("")
    every = tf.data.Dataset.from_generator(
        lambda: zip(np.split(words, 7), np.split(following, 7), strict=True),
        output_signature=(tf.TensorSpec((None, length), tf.int32),) * 2,
    )
    return every.apply(tf.data.experimental.assert_cardinality(7))


@pytest.mark.parametrize(
    ("length", "parallel", "seen_by_a_device"),
    tiered(
        [(LENGTH, True, None), (LENGTH, False, LENGTH), (None, True, None)],
        [(LENGTH, True, None)],
    ),
)
def test_other_lengths(length, parallel, seen_by_a_device, caplog):
    """Predictions of shorter sequences, and training of unknown lengths."""
    caplog.set_level("INFO", "mgpu_tf")
    every = []

    def build():
        keras.utils.set_random_seed(1)
        every.append(Seen())
        return of_any_length(every[-1])

    strategy = strategy_of(tensor=2, sequence_parallel=parallel)
    trainer = mgpu_tf.Trainer(build, strategy)
    trainer.fit(batches(length), shuffle=False, verbose=0)
    assert every[-1].lengths[-1] == seen_by_a_device
    text = "sequence_parallel: no layer of"
    assert (text in caplog.text) == (length is None)
    with tf.device("CPU:0"):
        model = build()
        model.fit(batches(length), shuffle=False, verbose=0)
    x = data_of("")[0][:16, :5]
    np.testing.assert_allclose(
        trainer.predict(x, verbose=0),
        model.predict(x, verbose=0),
        rtol=1e-4,
        atol=1e-5,
    )
    whole = "sequences are whole on each device"
    assert (whole in caplog.text) == (length == LENGTH and parallel)


@pytest.mark.parametrize(
    ("task", "tolerance"),
    # Llama computes its norms and its attention in float32.
    [("bert", 1e-9), ("gpt2", 1e-9), ("llama", 1e-6)],
)
@pytest.mark.full
def test_models_of_keras_hub(task, tolerance, caplog):
    hub_tasks = pytest.importorskip("tests.engine.hub_tasks")
    caplog.set_level("INFO", "mgpu_tf")
    x, y, sample_weight = hub_tasks.data_of(task)
    data = tf.data.Dataset.from_tensor_slices((x, y, sample_weight)).batch(16)
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")

    def trained(fit, model):
        fit(data, shuffle=False, verbose=0)
        return model().get_weights()

    def build():
        keras.utils.set_random_seed(1)
        return hub_tasks.compiled(hub_tasks.TASKS[task]())

    try:
        with tf.device("CPU:0"):
            stock = build()
            expected = trained(stock.fit, lambda: stock)
        strategy = strategy_of(tensor=2, sequence_parallel=True)
        trainer = mgpu_tf.Trainer(build, strategy)
        found = trained(trainer.fit, lambda: trainer.model)
    finally:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")
    assert has_parts(caplog)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=tolerance)


@pytest.mark.full
def test_two_processes(tmp_path):
    from tests.jobs import sequences  # It takes the models from here.

    workers = clusters.run_jobs(sequences, 2, str(tmp_path))["trained"]
    keras.utils.set_random_seed(1)
    with tf.device("CPU:0"):
        model = language(PostNorm(), Attention())
        model.fit(*data_of(""), batch_size=17, shuffle=False, verbose=0)
    for found in workers:
        for ours, theirs in zip(found, model.get_weights(), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_it_goes_with_layers_in_parts():
    with pytest.raises(ConfigurationError, match="goes with tensor_parallel"):
        mgpu_tf.create_model_parallel_strategy(
            data=4, num_virtual_devices=4, sequence_parallel=True
        )
