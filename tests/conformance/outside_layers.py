"""Layers and models of others: scans, experts, spectra, states of one's own."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.conformance import models, outside
from tests.conformance.harness import row

GROUP = "Outside: layers of one's own"


def adam(rate=0.02, **options):
    return keras.optimizers.Adam(rate, **options)


def sparse():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def on_words(middle, head=layers.GlobalAveragePooling1D, mask_zero=False):
    """What builds a classifier of words around a function of embeddings."""

    def build():
        inputs = keras.Input((outside.LENGTH,), dtype="int32")
        x = layers.Embedding(outside.WORDS, 4, mask_zero=mask_zero)(inputs)
        x = head()(middle(x))
        model = keras.Model(inputs, layers.Dense(3)(x))
        return models.compiled(model, sparse(), adam(), metrics=["accuracy"])

    return build


def on_points(middle, width=1):
    """What builds a regression around a function of vectors."""

    def build():
        inputs = keras.Input((4,))
        x = layers.Dense(4, activation="tanh")(inputs)
        model = keras.Model(inputs, layers.Dense(width)(middle(x)))
        return models.compiled(model, "mse", adam())

    return build


def learn_words(run, *options, **named):
    build = on_words(*options, **named)
    outside.use(run, build, outside.words(), outside.kinds())


def learn_points(run, middle):
    outside.use(run, on_points(middle), outside.points(), outside.numbers())


class SelectiveScan(layers.Layer):
    """Mamba's block: a convolution, gates, a scan by doubling."""

    def build(self, shape):
        width = shape[-1]
        self.conv = layers.DepthwiseConv1D(2, padding="same")
        self.conv.build(shape)
        self.rates = layers.Dense(2 * width)
        self.rates.build(shape)
        self.log_decay = self.add_weight(
            shape=(width,), initializer="zeros", name="log_decay"
        )

    def call(self, x):
        x = ops.silu(self.conv(x))
        step, gate = ops.split(self.rates(x), 2, axis=-1)
        step = ops.softplus(step)
        kept = ops.exp(-step * ops.exp(self.log_decay))

        states, shift = step * x, 1
        while shift < x.shape[1]:
            before = ((0, 0), (shift, 0), (0, 0))
            states += kept * ops.pad(states[:, :-shift], before)
            kept = kept * ops.pad(kept[:, :-shift], before)
            shift *= 2
        return states * ops.sigmoid(gate)


@row(GROUP)
def a_selective_scan(run):
    learn_words(run, lambda x: x + SelectiveScan()(x))


class Recurrence(layers.Layer):
    """A state space whose steps `ops.scan` takes, its weights read in it."""

    def build(self, shape):
        width = shape[-1]
        options = {"shape": (width, width), "initializer": "orthogonal"}
        self.keep = self.add_weight(name="keep", **options)
        self.enter = self.add_weight(name="enter", **options)

    def call(self, x):
        def step(state, now):
            state = ops.tanh(
                ops.matmul(state, self.keep) + ops.matmul(now, self.enter)
            )
            return state, state

        first = ops.zeros_like(x[:, 0])
        _, states = ops.scan(step, first, ops.transpose(x, (1, 0, 2)))
        return ops.transpose(states, (1, 0, 2))


@row(GROUP)
def a_recurrence_by_a_scan(run):
    learn_words(run, lambda x: Recurrence()(x))


class RotaryAttention(layers.Layer):
    """Grouped queries, rotated by tables that are kept as weights."""

    def build(self, shape):
        _, length, width = shape
        self.query, self.out = layers.Dense(8), layers.Dense(width)
        self.both = layers.Dense(4)
        self.query.build(shape)
        self.both.build(shape)
        self.out.build((None, length, 8))
        angle = np.outer(np.arange(length), [1.0, 0.1])[:, None, :]
        options = {"trainable": False, "shape": (length, 1, 2)}
        self.cos = self.add_weight(
            name="cos",
            initializer=lambda shape, dtype: (
                ops.cast(np.cos(angle), dtype)[..., :1] * ops.ones(shape, dtype)
            ),
            **options,
        )
        self.length = length
        self.angle = angle

    def turned(self, x):
        half = x.shape[-1] // 2
        sin = ops.cast(np.sin(self.angle), x.dtype)[..., :half]
        one, two = x[..., :half], x[..., half:]
        cos = self.cos[..., :half]
        return ops.concatenate(
            [one * cos - two * sin, two * cos + one * sin], -1
        )

    def call(self, x):
        query = self.turned(ops.reshape(self.query(x), (-1, self.length, 4, 2)))
        key, value = ops.split(self.both(x), 2, axis=-1)
        key = self.turned(key[:, :, None, :])
        key = ops.repeat(key, 4, axis=2)
        value = ops.repeat(value[:, :, None, :], 4, axis=2)
        scores = ops.einsum("bqhd,bkhd->bhqk", query, key)
        causal = ops.tril(ops.ones((self.length, self.length), dtype="bool"))
        scores = ops.where(causal, scores, -1e9)
        found = ops.einsum("bhqk,bkhd->bqhd", ops.softmax(scores), value)
        return self.out(ops.reshape(found, (-1, self.length, 8)))


@row(GROUP)
def a_decoder_with_rotary_grouped_attention(run):
    """keras-hub's: tied embeddings, padding left out by sample weights."""

    def build():
        inputs = keras.Input((outside.LENGTH,), dtype="int32")
        table = layers.ReversibleEmbedding(
            outside.WORDS, 4, tie_weights=True, mask_zero=True
        )
        x = table(inputs)
        x = x + RotaryAttention()(layers.RMSNormalization()(x))
        y = layers.RMSNormalization()(x)
        gate = layers.Dense(6, activation="silu", use_bias=False)(y)
        x = x + layers.Dense(4)(gate * layers.Dense(6, use_bias=False)(y))
        model = keras.Model(inputs, table(x, reverse=True))
        accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")
        optimizer = keras.optimizers.AdamW(0.02, weight_decay=0.01)
        optimizer.exclude_from_weight_decay(var_names=["bias", "scale"])
        return models.compiled(
            model, sparse(), optimizer, weighted_metrics=[accuracy]
        )

    x = outside.words()
    weight = (x > 0).astype("float64")
    data = outside.batches(x, np.roll(x, -1, 1), weight)
    outside.on_batches(run, build, data, predict=False)


class Experts(layers.Layer):
    """Two of four experts, rows sent by scatter; biases balance the load."""

    def __init__(self, experts=4, capacity=9):
        super().__init__()
        self.count, self.capacity = experts, capacity
        self.load = keras.metrics.Mean(name="dropped")

    def build(self, shape):
        width = shape[-1]
        self.router = layers.Dense(self.count, use_bias=False)
        self.router.build(shape)
        self.bias = self.add_weight(
            shape=(self.count,),
            initializer="zeros",
            trainable=False,
            name="bias",
        )
        self.kernel = self.add_weight(
            shape=(self.count, width, width), name="kernel"
        )

    def call(self, x, training=False):
        width = x.shape[-1]
        tokens = ops.reshape(x, (-1, width))
        logits = self.router(tokens)
        self.add_loss(0.01 * ops.mean(ops.logsumexp(logits, axis=-1) ** 2))
        chances = ops.sigmoid(logits)
        _, chosen = ops.top_k(chances + self.bias, 2)
        gates = ops.take_along_axis(chances, chosen, axis=-1)
        gates = gates / ops.sum(gates, axis=-1, keepdims=True)
        flat = ops.reshape(chosen, (-1,))
        hot = ops.one_hot(flat, self.count, dtype="int32")
        place = ops.sum((ops.cumsum(hot, axis=0) - 1) * hot, axis=-1)
        kept = ops.cast(place < self.capacity, x.dtype)
        place = ops.minimum(place, self.capacity - 1)
        rows = ops.repeat(tokens, 2, axis=0) * kept[:, None]
        sent = ops.scatter(
            ops.stack([flat, place], axis=1),
            rows,
            (self.count, self.capacity, width),
        )
        made = ops.tanh(ops.einsum("ecd,edf->ecf", sent, self.kernel))
        back = tf.gather_nd(made, ops.stack([flat, place], axis=1))
        back = back * kept[:, None] * ops.reshape(gates, (-1, 1))
        if training:
            share = ops.mean(ops.cast(hot, x.dtype), axis=0)
            self.bias.assign_add(0.05 * ops.sign(1.0 / self.count - share))
            self.load.update_state(1.0 - kept)
        out = ops.sum(ops.reshape(back, (-1, 2, width)), axis=1)
        return ops.reshape(out, ops.shape(x))


@row(GROUP)
def two_of_four_experts_sent_by_scatter(run):
    learn_words(run, lambda x: x + Experts()(x))


class FourierOperator(layers.Layer):
    """A spectral convolution: complex weights of two real ones."""

    def build(self, shape):
        _, length, width = shape
        modes = length // 2 + 1
        options = {"shape": (modes, width, width), "initializer": "normal"}
        self.real = self.add_weight(name="real", **options)
        self.imaginary = self.add_weight(name="imaginary", **options)
        self.length = length

    def call(self, x):
        spectrum = tf.signal.rfft(ops.transpose(x, (0, 2, 1)))
        kernel = tf.complex(
            ops.convert_to_tensor(self.real),
            ops.convert_to_tensor(self.imaginary),
        )
        made = tf.einsum("bim,mio->bom", spectrum, kernel)
        out = tf.signal.irfft(made, fft_length=[self.length])
        return ops.transpose(out, (0, 2, 1))


@row(GROUP)
def a_fourier_neural_operator(run):
    learn_words(run, lambda x: layers.Activation("gelu")(FourierOperator()(x)))


class FourierMixing(layers.Layer):
    """FNet's: the real part of a transform over places and features."""

    def call(self, x):
        real, _ = ops.fft2((x, ops.zeros_like(x)))
        return real


@row(GROUP)
def mixing_by_a_fourier_transform(run):
    def middle(x):
        x = layers.LayerNormalization()(x + FourierMixing()(x))
        return x + layers.Dense(4, activation="gelu")(x)

    learn_words(run, middle)


@row(GROUP)
def spectrograms_of_sound(run):
    """`STFTSpectrogram` in the model, then a convolution over frames."""

    def build():
        inputs = keras.Input((24, 1))
        x = layers.STFTSpectrogram(
            mode="log", frame_length=8, frame_step=4, fft_length=8
        )(inputs)
        x = layers.Conv1D(4, 2, activation="relu")(x)
        x = layers.GlobalAveragePooling1D()(x)
        return models.compiled(
            keras.Model(inputs, layers.Dense(3)(x)), sparse(), adam()
        )

    sound = outside.points(24)[:, :, None]
    outside.use(run, build, sound, outside.kinds())


class NodeClassifier(keras.Model):
    """keras.io's citations: a graph in the model, its nodes as inputs."""

    def __init__(self, nodes=20):
        super().__init__()
        random = models.random(7)
        self.features = ops.convert_to_tensor(random.normal(size=(nodes, 4)))
        edges = random.integers(0, nodes, size=(2, 60))
        self.source, self.target = edges.astype("int32")
        self.nodes = nodes
        self.prepare, self.update = layers.Dense(4), layers.Dense(4)
        self.post = layers.Dense(3)

    def call(self, node):
        x = ops.gelu(self.prepare(self.features))
        message = ops.take(x, self.source, axis=0)
        total = ops.segment_sum(message, self.target, self.nodes)
        x = x + ops.tanh(self.update(ops.concatenate([x, total], axis=1)))
        return self.post(ops.take(x, node, axis=0))


@row(GROUP)
def nodes_of_a_graph_that_the_model_has(run):
    def build():
        return models.compiled(
            NodeClassifier(), sparse(), adam(), metrics=["accuracy"]
        )

    nodes = models.random(8).integers(0, 20, size=outside.EXAMPLES)
    outside.use(run, build, nodes, nodes % 3)


class StandardizedConv2D(layers.Conv2D):
    """A convolution whose kernel is standardized in each call."""

    def convolution_op(self, inputs, kernel):
        mean = ops.mean(kernel, axis=(0, 1, 2), keepdims=True)
        spread = ops.std(kernel, axis=(0, 1, 2), keepdims=True)
        return super().convolution_op(inputs, (kernel - mean) / (spread + 1e-5))


@row(GROUP)
def standardized_kernels_with_group_normalization(run):
    def build():
        inputs = keras.Input((6, 6, 3))
        x = StandardizedConv2D(4, 3, padding="same")(inputs)
        x = layers.GroupNormalization(2)(x)
        x = layers.GlobalAveragePooling2D()(ops.relu(x))
        optimizer = adam(weight_decay=0.01)
        return models.compiled(
            keras.Model(inputs, layers.Dense(3)(x)), sparse(), optimizer
        )

    outside.use(run, build, outside.images(), outside.kinds())


class Equilibrium(layers.Layer):
    """A fixed point, found in a loop until the worst row has settled."""

    def build(self, shape):
        self.inner = layers.Dense(shape[-1], activation="tanh")
        self.inner.build(shape)

    def call(self, x):
        def unsettled(state, gap):
            return gap > 1e-3

        def step(state, gap):
            new = self.inner(0.5 * state + x)
            return new, ops.max(ops.abs(new - state))

        state, _ = ops.while_loop(
            unsettled,
            step,
            (ops.zeros_like(x), ops.ones((), x.dtype)),
            maximum_iterations=8,
        )
        return state


@row(GROUP)
def a_deep_equilibrium(run):
    learn_points(run, lambda x: Equilibrium()(x))


class Ode(layers.Layer):
    """Runge and Kutta's steps in a `fori_loop`."""

    def build(self, shape):
        self.field = layers.Dense(shape[-1], activation="tanh")
        self.field.build(shape)

    def call(self, x):
        def step(i, state):
            half = state + 0.1 * self.field(state)
            return state + 0.2 * self.field(half)

        return ops.fori_loop(0, 4, step, x)


@row(GROUP)
def a_neural_ode_by_a_fori_loop(run):
    learn_points(run, lambda x: Ode()(x))


class Conditional(layers.Layer):
    """Another branch by a mean of the batch, and one by a count of steps."""

    def build(self, shape):
        self.one, self.two = (layers.Dense(shape[-1]) for _ in range(2))
        self.one.build(shape)
        self.two.build(shape)
        self.steps = self.add_weight(
            shape=(), initializer="zeros", dtype="int32", trainable=False
        )

    def call(self, x, training=False):
        if training:
            self.steps.assign_add(1)
        x = ops.cond(
            ops.mean(x) > 0.0, lambda: self.one(x), lambda: self.two(x)
        )
        return ops.switch(
            self.steps % 3,
            [ops.tanh, ops.sin, lambda x: x * ops.sigmoid(x)],
            x,
        )


@row(GROUP)
def branches_by_the_batch_and_by_the_step(run):
    learn_points(run, lambda x: Conditional()(x))


class Filters(layers.Layer):
    """Each row makes a kernel of its own, by a `vectorized_map`."""

    def build(self, shape):
        self.make = layers.Dense(shape[-1] ** 2)
        self.make.build(shape)

    def call(self, x):
        width = x.shape[-1]
        kernels = ops.reshape(self.make(x), (-1, width, width))

        def one(of):
            row, kernel = of
            return ops.matmul(row[None], ops.softmax(kernel))[0]

        return ops.vectorized_map(one, (x, kernels))


@row(GROUP)
def kernels_of_rows_by_a_vectorized_map(run):
    learn_points(run, lambda x: Filters()(x))


class PairCell(layers.Layer):
    """The guide's cell of nested states, with layer normalization."""

    def __init__(self, units=3):
        super().__init__()
        self.units = units
        self.state_size = [units, units]
        self.norm = layers.LayerNormalization()

    def build(self, shape):
        self.enter, self.keep = (layers.Dense(2 * self.units) for _ in "12")
        self.enter.build(shape)
        self.keep.build((None, self.units))
        self.norm.build((None, self.units))

    def call(self, x, states, training=False):
        fast, slow = states
        gate, value = ops.split(self.enter(x) + self.keep(fast), 2, axis=-1)
        gate = ops.sigmoid(gate)
        slow = gate * slow + (1.0 - gate) * ops.tanh(value)
        return self.norm(slow), [ops.tanh(slow), slow]


@row(GROUP)
def stacked_cells_of_two_states(run):
    def middle(x):
        cells = [PairCell(), layers.GRUCell(3)]
        x = layers.RNN(cells, return_sequences=True, go_backwards=True)(x)
        return layers.TimeDistributed(layers.Dense(3))(x)

    learn_words(run, middle, mask_zero=True)


class DropPath(layers.Layer):
    """Stochastic depth, whose seeds another layer shares."""

    def __init__(self, seeds, rate=0.3):
        super().__init__()
        self.seeds, self.rate = seeds, rate

    def call(self, x, training=False):
        if not training:
            return x
        shape = (ops.shape(x)[0],) + (1,) * (len(x.shape) - 1)
        noise = keras.random.uniform(shape, dtype=x.dtype, seed=self.seeds)
        return x / (1.0 - self.rate) * ops.floor(1.0 - self.rate + noise)


@row(GROUP)
def stochastic_depth_with_shared_seeds(run):
    def middle(x):
        seeds = keras.random.SeedGenerator(5)
        x = x + DropPath(seeds)(layers.Dense(4, activation="tanh")(x))
        return x + DropPath(seeds, 0.1)(layers.Dense(4)(x))

    learn_words(run, middle)


class Gumbel(layers.Layer):
    """Codes by Gumbel's noise, at a temperature that a callback lowers."""

    def build(self, shape):
        self.book = self.add_weight(shape=(5, shape[-1]), name="book")
        self.heat = self.add_weight(
            shape=(), initializer="ones", trainable=False, name="heat"
        )
        self.choose = layers.Dense(5)
        self.choose.build(shape)
        self.seeds = keras.random.SeedGenerator(3)

    def call(self, x, training=False):
        logits = self.choose(x)
        chances = ops.softmax(logits)
        log = ops.log(5.0 * chances + 1e-9)
        self.add_loss(0.1 * ops.mean(ops.sum(chances * log, axis=-1)))
        if training:
            noise = keras.random.uniform(
                ops.shape(logits), 1e-3, 1.0, dtype=x.dtype, seed=self.seeds
            )
            logits = (logits - ops.log(-ops.log(noise))) / self.heat
        return ops.matmul(ops.softmax(logits), self.book)


@row(GROUP)
def codes_by_gumbel_noise_that_cools(run):
    class Cool(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            heat = self.model.layers[2].heat
            heat.assign(ops.maximum(0.3, heat * 0.9))

    build = on_points(lambda x: Gumbel()(x), 4)
    data = outside.points(), outside.points()
    outside.use(run, build, *data, callbacks=[Cool()])


class Slots(layers.Layer):
    """Slot attention: slots drawn for each row, a cell called in a loop."""

    def __init__(self, slots=3):
        super().__init__()
        self.slots = slots
        self.seeds = keras.random.SeedGenerator(9)

    def build(self, shape):
        width = shape[-1]
        self.mean = self.add_weight(shape=(1, 1, width), name="mean")
        self.spread = self.add_weight(shape=(1, 1, width), name="spread")
        self.key, self.value, self.query = (layers.Dense(width) for _ in "123")
        for layer in (self.key, self.value, self.query):
            layer.build(shape)
        self.cell = layers.GRUCell(width)
        self.cell.build((None, width))

    def call(self, x):
        batch, width = ops.shape(x)[0], x.shape[-1]
        noise = keras.random.normal(
            (batch, self.slots, width), dtype=x.dtype, seed=self.seeds
        )
        slots = self.mean + ops.exp(self.spread) * noise
        key, value = self.key(x), self.value(x)
        for _ in range(2):
            scores = ops.einsum("bnd,bsd->bns", key, self.query(slots))
            share = ops.softmax(scores, axis=-1)
            share = share / (ops.sum(share, axis=1, keepdims=True) + 1e-6)
            update = ops.einsum("bns,bnd->bsd", share, value)
            rows, _ = self.cell(
                ops.reshape(update, (-1, width)),
                [ops.reshape(slots, (-1, width))],
            )
            slots = ops.reshape(rows, (-1, self.slots, width))
        return slots


@row(GROUP)
def slots_that_compete_for_words(run):
    learn_words(run, lambda x: Slots()(x))


class Whitening(layers.Layer):
    """Decorrelated normalization: a covariance of the batch, moved."""

    def build(self, shape):
        width = shape[-1]
        options = {"trainable": False}
        self.mean = self.add_weight(
            shape=(width,), initializer="zeros", name="mean", **options
        )
        self.covariance = self.add_weight(
            shape=(width, width),
            initializer="identity",
            name="covariance",
            **options,
        )

    def call(self, x, training=False):
        mean, covariance = self.mean, self.covariance
        if training:
            mean = ops.mean(x, axis=0)
            gap = x - mean
            size = ops.cast(ops.shape(x)[0], x.dtype)
            covariance = ops.matmul(ops.transpose(gap), gap) / size
            self.mean.assign(0.9 * self.mean + 0.1 * mean)
            self.covariance.assign(0.9 * self.covariance + 0.1 * covariance)
        root = ops.cholesky(covariance + 1e-2 * ops.eye(x.shape[-1]))
        gap = ops.transpose(x - mean)
        return ops.transpose(ops.solve_triangular(root, gap, lower=True))


@row(GROUP)
def whitening_by_a_covariance_of_the_batch(run):
    learn_points(run, lambda x: Whitening()(x))


class Splines(layers.Layer):
    """A Kolmogorov-Arnold layer; its grid follows the batch's quantiles."""

    def build(self, shape):
        width = shape[-1]
        grid = np.linspace(-1.0, 1.0, 5)[:, None] * np.ones((1, width))
        self.grid = self.add_weight(
            shape=(5, width),
            initializer=lambda shape, dtype: ops.cast(grid, dtype),
            trainable=False,
            name="grid",
        )
        self.heights = self.add_weight(shape=(5, width, 3), name="heights")

    def call(self, x, training=False):
        if training:
            at = np.linspace(0.0, 1.0, 5)
            wanted = ops.quantile(x, at, axis=0)
            self.grid.assign(0.8 * self.grid + 0.2 * wanted)
        bumps = ops.exp(-((x[:, None, :] - self.grid) ** 2))
        return ops.einsum("bgi,gio->bo", bumps, self.heights)


@row(GROUP)
def splines_whose_grid_follows_quantiles(run):
    learn_points(run, lambda x: Splines()(x))


class Residual(layers.Layer):
    """Residual codes; those that nobody chose are taken from the batch."""

    def build(self, shape):
        width = shape[-1]
        self.books = [
            self.add_weight(shape=(4, width), name=f"book_{i}", trainable=False)
            for i in range(2)
        ]
        self.usage = self.add_weight(
            shape=(2, 4), initializer="ones", name="usage", trainable=False
        )

    def call(self, x, training=False):
        left, total = x, ops.zeros_like(x)
        usage = []
        for index, book in enumerate(self.books):
            gap = ops.sum((left[:, None] - book[None]) ** 2, axis=-1)
            chosen = ops.one_hot(ops.argmin(gap, axis=1), 4, dtype=x.dtype)
            found = ops.matmul(chosen, book)
            if training:
                count = ops.sum(chosen, axis=0)
                used = 0.7 * self.usage[index] + 0.3 * count
                mean = ops.matmul(ops.transpose(chosen), left)
                mean = mean / ops.maximum(count, 1.0)[:, None]
                moved = ops.where(
                    count[:, None] > 0, 0.8 * book + 0.2 * mean, book
                )
                book.assign(ops.where(used[:, None] < 0.5, left[:1], moved))
                usage.append(used)
            total, left = total + found, left - found
        if training:
            self.usage.assign(ops.stack(usage))
        self.add_loss(ops.mean((x - ops.stop_gradient(total)) ** 2))
        return x + ops.stop_gradient(total - x)


@row(GROUP)
def residual_codes_that_the_batch_revives(run):
    learn_points(run, lambda x: Residual()(x))


class Endpoint(layers.Layer):
    """The guide's: a loss and a metric of targets that are inputs."""

    def __init__(self):
        super().__init__()
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)
        self.accuracy = keras.metrics.BinaryAccuracy(name="accuracy")

    def call(self, logits, targets=None, weight=None):
        if targets is not None:
            self.add_loss(self.loss_fn(targets, logits, weight))
            self.accuracy.update_state(targets, logits, weight)
        return ops.sigmoid(logits)


@row(GROUP)
def an_endpoint_with_weighted_targets(run):
    def build():
        inputs = keras.Input((4,), name="inputs")
        targets = keras.Input((1,), name="targets")
        weight = keras.Input((), name="weight")
        logits = layers.Dense(1)(layers.Dense(4, activation="tanh")(inputs))
        out = Endpoint()(logits, targets, weight)
        model = keras.Model([inputs, targets, weight], out)
        model.compile(adam(), jit_compile=False)
        return model

    data = {
        "inputs": outside.points(),
        "targets": (outside.numbers() > 0).astype("float64"),
        "weight": outside.weights(),
    }
    outside.use(run, build, data)


class Late(keras.Model):
    """Layers in lists and dicts, and one that its first call makes."""

    def __init__(self):
        super().__init__()
        self.towers = {"a": [layers.Dense(3)], "b": [layers.Dense(3)]}
        self.last = None

    def call(self, inputs, training=False):
        made = []
        for name in sorted(inputs):
            x = inputs[name]
            for layer in self.towers[name]:
                x = ops.tanh(layer(x))
            made.append(x)
        if self.last is None:
            self.last = layers.Dense(sum(x.shape[-1] for x in made) // 6)
        return {"out": self.last(ops.concatenate(made, axis=-1))}


@row(GROUP)
def a_model_whose_first_call_makes_a_layer(run):
    def build():
        return models.compiled(Late(), {"out": "mse"}, adam())

    data = {"a": outside.points(), "b": outside.points(3, 7)}
    outside.use(run, build, data, {"out": outside.numbers()})


class LowRank(layers.Layer):
    """keras.io's LoRA, with DoRA's lengths of columns, around a layer."""

    def __init__(self, original, rank=2):
        super().__init__()
        self.original, self.rank = original, rank
        original.trainable = False

    def build(self, shape):
        units = self.original.units
        self.down = self.add_weight(shape=(shape[-1], self.rank), name="down")
        self.up = self.add_weight(
            shape=(self.rank, units), initializer="zeros", name="up"
        )
        self.length = self.add_weight(
            shape=(units,), initializer="ones", name="length"
        )

    def call(self, x):
        kernel = self.original.kernel + ops.matmul(self.down, self.up)
        norm = ops.sqrt(ops.sum(ops.square(kernel), axis=0) + 1e-6)
        kernel = kernel * (self.length / ops.stop_gradient(norm))
        return ops.matmul(x, kernel) + self.original.bias


@row(GROUP)
def a_layer_wrapped_by_low_ranks(run):
    def build():
        network = outside.mlp(1)
        x = LowRank(network.layers[0])(network.inputs[0])
        model = keras.Model(network.inputs, network.layers[1](ops.tanh(x)))
        return models.compiled(model, "mse", adam())

    outside.use(run, build, outside.points(), outside.numbers())


class FakeQuant(layers.Layer):
    """Quantized activations, their range moved by the batch's extremes."""

    def build(self, shape):
        options = {"shape": (), "trainable": False}
        self.low = self.add_weight(name="low", initializer="zeros", **options)
        self.high = self.add_weight(name="high", initializer="ones", **options)

    def call(self, x, training=False):
        if training:
            self.low.assign(0.9 * self.low + 0.1 * ops.min(x))
            self.high.assign(0.9 * self.high + 0.1 * ops.max(x))
        scale = (self.high - self.low) / 15.0
        steps = ops.round((ops.clip(x, self.low, self.high) - self.low) / scale)
        return x + ops.stop_gradient(steps * scale + self.low - x)


@row(GROUP)
def quantization_whose_range_moves(run):
    learn_points(run, lambda x: FakeQuant()(x))


@ops.custom_gradient
def _reversed(x):
    def gradient(*args, upstream=None):
        if upstream is None:
            (upstream,) = args
        return -0.5 * upstream

    return x, gradient


class Reversal(layers.Layer):
    def call(self, x):
        return _reversed(x)


@row(GROUP)
def domains_by_a_reversed_gradient(run):
    def build():
        inputs = keras.Input((4,))
        x = layers.Dense(5, activation="tanh")(inputs)
        kind = layers.Dense(3, name="kind")(x)
        domain = layers.Dense(1, activation="sigmoid", name="domain")(
            layers.Dense(4, activation="relu")(Reversal()(x))
        )
        return models.compiled(
            keras.Model(inputs, {"kind": kind, "domain": domain}),
            {"kind": sparse(), "domain": "binary_crossentropy"},
            keras.optimizers.Adamax(0.02),
            loss_weights={"kind": 1.0, "domain": 0.3},
            metrics={"kind": ["accuracy"], "domain": ["AUC"]},
            weighted_metrics={"kind": ["accuracy"]},
        )

    y = {
        "kind": outside.kinds(),
        "domain": outside.kinds(2, 5)[:, None].astype("float64"),
    }
    weight = {"kind": outside.weights(), "domain": outside.weights(6)}
    outside.use(run, build, outside.points(), y, sample_weight=weight)


class Again(layers.Layer):
    """`keras.remat` around two layers of a block."""

    def build(self, shape):
        self.one, self.two = layers.Dense(6, activation="gelu"), layers.Dense(4)
        self.one.build(shape)
        self.two.build((None, 6))

    def call(self, x):
        return x + keras.remat(lambda x: self.two(self.one(x)))(x)


@row(GROUP)
def a_block_that_is_computed_again(run):
    learn_points(run, lambda x: Again()(x))


@row(GROUP)
def attention_whose_scores_are_penalized(run):
    """Causal scores of Keras's attention, covered by an added loss."""

    class Covered(layers.Layer):
        def __init__(self):
            super().__init__()
            self.attention = layers.MultiHeadAttention(2, 3)

        def build(self, shape):
            self.attention.build(shape, shape)

        def call(self, x):
            out, scores = self.attention(
                x, x, use_causal_mask=True, return_attention_scores=True
            )
            covered = ops.cumsum(scores, axis=2) - scores
            self.add_loss(ops.mean(ops.minimum(scores, covered)))
            return x + out

    learn_words(run, lambda x: Covered()(x), mask_zero=True)


@row(GROUP)
def a_feature_space_in_the_model(run):
    """keras.io's: hashed, discretized and crossed features, encoded inside."""
    random = models.random(17)
    raw = {
        "age": random.uniform(20, 70, outside.EXAMPLES),
        "city": random.choice(["a", "b", "c"], outside.EXAMPLES),
        "code": random.integers(0, 5, outside.EXAMPLES),
    }

    def build():
        space = keras.utils.FeatureSpace(
            features={
                "age": keras.utils.FeatureSpace.float_discretized(num_bins=4),
                "city": keras.utils.FeatureSpace.string_categorical(),
                "code": keras.utils.FeatureSpace.integer_hashed(num_bins=4),
            },
            crosses=[
                keras.utils.FeatureSpace.cross(("city", "code"), crossing_dim=5)
            ],
            output_mode="concat",
        )
        space.adapt(tf.data.Dataset.from_tensor_slices(raw))
        encoded = space.get_encoded_features()
        inputs = space.get_inputs()
        x = layers.Dense(4, activation="relu")(encoded)
        return models.compiled(
            keras.Model(inputs, layers.Dense(1)(x)), "mse", adam()
        )

    outside.on_batches(run, build, outside.batches(raw, outside.numbers()))
