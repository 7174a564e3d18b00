"""A `train_step` of the author's own: the numbers of one device, or a name."""

import gc
import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

import mgpu_tf
from mgpu_tf.engine import keras_internals
from tests import columns
from tests.tiers import tiered

ops = keras.ops


pytestmark = pytest.mark.usefixtures("float64")


def network(inputs, outputs):
    return keras.Sequential(
        [
            keras.Input((inputs,)),
            keras.layers.Dense(4, activation="tanh"),
            keras.layers.Dense(outputs),
        ]
    )


class Gan(keras.Model):
    """Two optimizers, a loss object beside a mean by hand, metrics."""

    def __init__(self):
        super().__init__()
        self.g, self.d = network(3, 5), network(5, 1)
        self.g_metric = keras.metrics.Mean(name="g_loss")
        self.d_metric = keras.metrics.Mean(name="d_loss")

    def compile(self, optimizers):
        super().compile()
        self.optimizers = optimizers
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)

    @property
    def metrics(self):
        return [self.d_metric, self.g_metric]

    def call(self, x):
        return self.g(x)

    def train_step(self, data):
        z, real = data
        zeros = ops.zeros((ops.shape(z)[0], 1))
        with tf.GradientTape() as tape:
            both = self.d(ops.concatenate([self.g(z), real], 0))
            labels = ops.concatenate([zeros + 1, zeros], 0)
            d_loss = self.loss_fn(labels, both)
        weights = self.d.trainable_weights
        self.optimizers["d"].apply_gradients(
            zip(tape.gradient(d_loss, weights), weights, strict=True)
        )
        with tf.GradientTape() as tape:
            judged = self.d(self.g(z))
            g_loss = ops.mean(-judged) + self.loss_fn(zeros, judged)
        weights = self.g.trainable_weights
        self.optimizers["g"].apply(tape.gradient(g_loss, weights), weights)
        self.d_metric.update_state(d_loss)
        self.g_metric.update_state(g_loss)
        return {
            "d_loss": self.d_metric.result(),
            "last": g_loss,
            "g_loss": self.g_metric.result(),
        }


def build_gan():
    model = Gan()
    model.compile(
        {
            "d": keras.optimizers.Adam(0.01, global_clipnorm=0.1),
            "g": keras.optimizers.SGD(
                0.05,
                momentum=0.9,
                clipnorm=0.2,
                gradient_accumulation_steps=2,
                use_ema=True,
                ema_overwrite_frequency=2,
            ),
        }
    )
    return model


class Regression(keras.Model):
    """One network, with a loss that is given."""

    def __init__(self, loss):
        super().__init__()
        self.body, self.loss_of = network(5, 1), loss

    def call(self, x):
        return self.body(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(x, y, self(x, training=True))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"value": loss}


def regression(loss, optimizer=None):
    def build():
        model = Regression(loss)
        model.compile(optimizer or keras.optimizers.Adam(0.01))
        return model

    return build


def arrays(columns=(5, 1), rows=22):
    """Rows that 2 and 3 replicas cut unevenly, and the last batch too."""
    generator = np.random.default_rng(0)
    return [generator.normal(size=(rows, n)) for n in columns]


FIT = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}


def by_keras(build, data):
    keras.utils.set_random_seed(0)
    model = build()
    return model, model.fit(*data, **FIT).history


def compare(build, data, strategy):
    """Fits with Keras and with the trainer; compares weights and logs."""
    model, history = by_keras(build, data)
    trainer = mgpu_tf.Trainer(build, strategy)
    ours = trainer.fit(*data, **FIT).history
    assert list(ours) == list(history)
    for name, values in history.items():
        np.testing.assert_allclose(ours[name], values, rtol=1e-9)
    for ref, own in zip(
        model.get_weights(), trainer.model.get_weights(), strict=True
    ):
        np.testing.assert_allclose(own, ref, rtol=1e-9, atol=1e-12)
    return model, trainer


COLUMNS = [*columns.EVERY, *columns.SPLIT]


@pytest.mark.parametrize("column", COLUMNS)
def test_gan_is_that_of_one_device(column, strategies):
    model, trainer = compare(build_gan, arrays((3, 5)), strategies[column])
    slots = [
        (ref, own)
        for name in ("d", "g")
        for ref, own in zip(
            model.optimizers[name].variables,
            trainer.model.optimizers[name].variables,
            strict=True,
        )
        # Of sums that wait each replica has a part.
        if "accumulator" not in ref.path
    ]
    for ref, own in slots:
        np.testing.assert_allclose(own.numpy(), ref.numpy(), atol=1e-12)


class Recurrence(keras.Model):
    """It has no `call`, and reads a weight in each turn of a loop."""

    def __init__(self):
        super().__init__()
        self.begin = keras.layers.Dense(4)
        self.turn = self.add_weight(shape=(4, 4))

    def train_step(self, data):
        with tf.GradientTape() as tape:
            (state,) = tf.while_loop(
                lambda state: True,
                lambda state: [ops.tanh(ops.matmul(state, self.turn))],
                [self.begin(data[0])],
                maximum_iterations=3,
            )
            loss = ops.mean(ops.square(state - data[1]))
        variables = self.trainable_variables
        gradients = tape.gradient(loss, variables)
        self.apply(gradients, variables)
        return {"loss": loss}

    def apply(self, gradients, variables):
        self.optimizer.apply(gradients, variables)


class Sometimes(Recurrence):
    """It writes a weight in a branch."""

    def apply(self, gradients, variables):
        super().apply(gradients, variables)

        def halve():
            self.turn.assign(self.turn * 0.5)
            return 0

        tf.cond(ops.mean(variables[0]) < 9, halve, lambda: 0)


def recurrence(kind):
    def build():
        model = kind()
        model.compile(keras.optimizers.SGD(0.1))
        return model

    return build


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize(
    "column", tiered(["mirrored_x3", "fsdp_x3"], ["fsdp_x3"])
)
def test_a_model_without_a_call_is_trained(column, strategies):
    compare(recurrence(Recurrence), arrays((3, 1)), strategies[column])


def test_split_weights_are_not_written_in_a_branch(strategies):
    trainer = mgpu_tf.Trainer(recurrence(Sometimes), strategies["fsdp_x3"])
    with pytest.raises(mgpu_tf.ConfigurationError, match="within a branch"):
        trainer.fit(*arrays((3, 1)), **FIT)


def squares(x, y, p):
    return ops.square(p - y)


def average(x, y, p):
    return tf.nn.compute_average_loss(
        squares(x, y, p)[:, 0], global_batch_size=ops.shape(y)[0]
    )


def pairs(x, y, p):
    logits = -ops.square(p - ops.transpose(y))
    chosen = ops.log_softmax(logits, axis=-1)
    return -ops.mean(tf.linalg.diag_part(chosen))


@tf.function
def within_a_call(x, y, p):
    """A loss of neighbours, which a reader of the step does not see."""
    return tf.reduce_mean(tf.abs(p[1:] - p[:-1]))


def in_a_loop(x, y, p):
    return tf.reduce_mean(tf.scan(lambda a, b: 0.9 * a + b, p))


EQUAL = {
    "mean": lambda *a: ops.mean(squares(*a)),
    "object": lambda x, y, p: keras.losses.MeanSquaredError()(y, p),
    "both": lambda x, y, p: (
        keras.losses.MeanSquaredError()(y, p) + ops.mean(ops.abs(p))
    ),
    "declared mean": lambda *a: mgpu_tf.mean_over_batch(squares(*a)),
    "declared weights": lambda x, y, p: mgpu_tf.mean_over_batch(
        squares(x, y, p), weights=ops.cast(x[:, 0] > 0, "float64")
    ),
    "declared sum": lambda x, y, p: (
        mgpu_tf.sum_over_batch(squares(x, y, p)) + ops.mean(p)
    ),
    "sum": lambda *a: ops.sum(squares(*a)),
    "average": average,
    "ratio": lambda x, y, p: ops.sum(squares(x, y, p)) / ops.sum(ops.abs(y)),
    "pairs": pairs,
    "within a call": within_a_call,
    "in a loop": in_a_loop,
}


@pytest.mark.parametrize("name", tiered(list(EQUAL), ["both", "pairs"]))
def test_losses_are_those_of_the_global_batch(name, strategies):
    compare(regression(EQUAL[name]), arrays(), strategies["mirrored_x3"])


class Annealed(Regression):
    """It clips by itself, and a sum over rows grows from zero."""

    def __init__(self):
        super().__init__(None)
        self.weight = self.add_weight(
            shape=(), initializer="zeros", trainable=False, name="weight"
        )

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            p = self(x, training=True)
            loss = ops.mean(squares(x, y, p)) + self.weight * ops.sum(p**2)
        gradients = tape.gradient(loss, self.trainable_variables)
        gradients, _ = tf.clip_by_global_norm(gradients, 0.05)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.weight.assign_add(0.01)
        return {"loss": loss}


@pytest.mark.full
def test_a_step_may_clip_and_anneal(strategies):
    def build():
        model = Annealed()
        model.compile(keras.optimizers.SGD(0.1))
        return model

    compare(build, arrays(), strategies["mirrored_x3"])


@pytest.mark.full
def test_an_inner_tape_goes_through_a_call(strategies):
    """A penalty on gradients of the inputs, as in WGAN-GP."""

    class Penalized(Regression):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    p = self(x, training=True)
                slopes = inner.gradient(p, x)
                norms = tf.norm(slopes, axis=1)
                loss = ops.mean(squares(x, y, p)) + ops.mean((norms - 1) ** 2)
            variables = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, variables), variables)
            return {"loss": loss}

    def build():
        model = Penalized(None)
        model.compile(keras.optimizers.Adam(0.05))
        return model

    compare(build, arrays(), strategies["mirrored_x3"])


class Reading(keras.Model):
    """It looks rows up, and reads weights in graphs inside of the step."""

    def __init__(self):
        super().__init__()
        self.table = keras.layers.Embedding(7, 4)
        self.table.build((None, 3))
        self.body = network(4, 1)

    def call(self, x):
        return self.body(ops.mean(self.table(ops.cast(x, "int32")), axis=1))

    def train_step(self, data):
        x, y = data
        weights = self.trainable_variables

        @tf.function
        def sizes():
            return sum(tf.nn.l2_loss(w) for w in weights)

        with tf.GradientTape(persistent=True) as tape:
            loss = ops.mean(squares(x, y, self(x, training=True)))
            largest = tf.cond(
                loss > 0.5,
                lambda: tf.reduce_max(weights[1]),
                lambda: tf.reduce_min(weights[1]),
            )
            decay = 0.01 * sizes() + 0.1 * largest
        gradients = tape.gradient(loss, weights)
        others = tape.gradient(decay, weights)
        rows = sum(isinstance(g, tf.IndexedSlices) for g in gradients)
        self.optimizer.apply(gradients, weights)
        for weight, gradient in zip(weights, others, strict=True):
            weight.assign_sub(0.1 * tf.convert_to_tensor(gradient))
        return {"loss": loss, "after": sizes(), "rows": rows}


@pytest.mark.parametrize(
    "column",
    ["fsdp_x3", pytest.param("fsdp_2_tensor_2", marks=pytest.mark.full)],
)
def test_a_step_reads_whole_weights_where_they_are_split(column, strategies):
    def build():
        model = Reading()
        model.compile(
            keras.optimizers.Adam(
                0.01, global_clipnorm=0.1, gradient_accumulation_steps=2
            )
        )
        return model

    generator = np.random.default_rng(0)
    data = [generator.integers(0, 7, (22, 3)), generator.normal(size=(22, 1))]
    _, trainer = compare(build, data, strategies[column])
    assert any(map(keras_internals.is_split, trainer.model.variables))
    slots = trainer.model.optimizer.variables
    assert any(map(keras_internals.is_split, slots))


class Mixes(keras.layers.Layer):
    def call(self, x):
        return x - ops.mean(x, axis=0)


class Adds(keras.layers.Layer):
    def call(self, x):
        self.add_loss(0.1 * ops.sum(ops.square(ops.mean(x, axis=0))))
        return x


class Leaves(keras.layers.Layer):
    def call(self, x):
        self.aux = ops.sum(ops.square(ops.mean(x, axis=0)))
        return x


class Writes(keras.layers.Layer):
    def build(self, shape):
        self.kept = self.add_weight(
            shape=shape[1:], initializer="zeros", trainable=False, name="kept"
        )

    def call(self, x):
        self.kept.assign(0.9 * self.kept + 0.1 * ops.mean(x, axis=0))
        return x


def test_layers_that_mix_rows_are_computed_whole(strategies):
    """Each by one thing: its outputs, a loss, what it keeps, its state."""

    class Mixed(keras.Model):
        def __init__(self):
            super().__init__()
            self.first = keras.layers.Dense(4, activation="tanh")
            self.middle = [Adds(), Leaves(), Writes(), Mixes()]
            self.head = keras.layers.Dense(1)

        def call(self, x):
            x = self.first(x)
            for layer in self.middle:
                x = layer(x)
            return self.head(x)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                p = self(x, training=True)
                loss = ops.mean(squares(x, y, p)) + sum(self.losses)
                loss += 0.3 * self.middle[1].aux
            variables = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, variables), variables)
            return {"loss": loss, "after": sum(self.losses)}

    def build():
        model = Mixed()
        model.compile(keras.optimizers.SGD(0.1))
        return model

    compare(build, arrays(), strategies["mirrored_x3"])


def test_a_variable_of_tensorflow_in_a_call_is_refused(strategies):
    """What a replica makes of its rows would be read by the same call."""

    class Kept(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.kept = tf.Variable(0.0, dtype="float64", trainable=False)

        def call(self, x):
            self.kept.assign(tf.reduce_mean(x))
            return x - self.kept.read_value()

    class Keeps(Regression):
        def __init__(self):
            super().__init__(lambda *a: ops.mean(squares(*a)))
            self.keeping = Kept()

        def call(self, x):
            return self.body(self.keeping(x))

    def build():
        model = Keeps()
        model.compile(keras.optimizers.SGD(0.1))
        return model

    trainer = mgpu_tf.Trainer(build, strategies["mirrored_x3"])
    with pytest.raises(mgpu_tf.ConfigurationError, match="add_weight"):
        trainer.fit(*arrays(), **FIT)


def test_replicas_draw_the_same_outside_of_calls(strategies):
    """Each worker returns what its first replica has drawn, or all of them."""

    class Drawing(Regression):
        def train_step(self, data):
            drawn = tf.random.normal([4], dtype="float64")
            context = tf.distribute.get_replica_context()
            every = context.all_gather(drawn[tf.newaxis], axis=0)
            apart = ops.max(every, axis=0) - ops.min(every, axis=0)
            return {"apart": ops.max(apart), "mean": drawn[0]}

    def build():
        model = Drawing(None)
        model.compile(keras.optimizers.SGD(0.1))
        return model

    trainer = mgpu_tf.Trainer(build, strategies["mirrored_x3"])
    history = trainer.fit(*arrays(), **FIT).history
    assert history["apart"] == [0.0, 0.0]
    assert len(set(history["mean"])) == 2


def test_a_generator_of_tensorflow_is_refused(strategies):
    class Generated(Regression):
        def __init__(self):
            super().__init__(None)
            self.drawing = tf.random.Generator.from_seed(1)

        def train_step(self, data):
            x, _ = data
            return {"drawn": ops.sum(self.drawing.normal(tf.shape(x)))}

    def build():
        model = Generated()
        model.compile(keras.optimizers.SGD(0.1))
        return model

    trainer = mgpu_tf.Trainer(build, strategies["mirrored_x3"])
    with pytest.raises(mgpu_tf.ConfigurationError, match="SeedGenerator"):
        trainer.fit(*arrays(), **FIT)


class Largest(keras.metrics.Metric):
    """No sum over rows."""

    def __init__(self, name="largest"):
        super().__init__(name=name)
        self.held = self.add_variable((), "zeros", name="held")

    def update_state(self, y, p):
        self.held.assign(ops.maximum(self.held, ops.max(ops.abs(y - p))))

    def result(self):
        return self.held.value


class MeanOfBatches(keras.metrics.Mean):
    pass


class Keeping(Regression):
    """It keeps state of its own, and gives metrics numbers of the batch."""

    def __init__(self, write=None):
        super().__init__(None)
        self.write = write
        self.average_body = keras.models.clone_model(self.body)
        self.plain = tf.Variable(0.0, dtype="float64", trainable=False)
        for name, dtype in (
            ("seen", "int64"),
            ("weight", "float64"),
            ("average", "float64"),
            ("largest", "float64"),
        ):
            made = self.add_weight(
                shape=(),
                initializer="zeros",
                dtype=dtype,
                trainable=False,
                name=name,
            )
            setattr(self, name, made)
        self.last = self.add_weight(shape=(3, 5), trainable=False, name="last")
        self.largest_gap = Largest()
        self.plain_mean = keras.metrics.Mean(name="plain")
        self.weighted = keras.metrics.Mean(name="weighted")
        self.by_rows = keras.metrics.Mean(name="by_rows")
        self.own = MeanOfBatches(name="own")

    def train_step(self, data):
        x, y = data
        variables = self.body.trainable_variables
        with tf.GradientTape() as tape:
            p = self(x, training=True)
            loss = ops.mean(ops.square(y - p))
        gradients = tape.gradient(loss, variables)
        if self.write is not None:
            self.write(self, x, gradients)
        self.optimizer.apply(gradients, variables)
        rows = ops.shape(x)[0]
        self.seen.assign_add(ops.cast(rows, "int64"))
        self.weight.assign_add(ops.sum(x))
        self.average.assign(0.9 * self.average + 0.1 * loss)
        self.largest.assign(ops.maximum(self.largest, ops.max(x)))
        # Reads what the optimizer has just written.
        for mine, weight in zip(
            self.average_body.variables, self.body.variables, strict=True
        ):
            mine.assign(0.9 * mine + 0.1 * weight)
        self.largest_gap.update_state(y, p)
        self.plain_mean.update_state(loss)
        self.own.update_state(loss)
        self.weighted.update_state(loss, sample_weight=2.0)
        self.by_rows.update_state(loss, sample_weight=rows)
        results = {m.name: m.result() for m in self.metrics}
        return results | {"value": loss, "rows": rows}


def keeping(write=None):
    def build():
        model = Keeping(write)
        model.compile(keras.optimizers.SGD(0.1))
        return model

    return build


@pytest.mark.parametrize("column", COLUMNS)
def test_state_that_a_step_writes_is_that_of_the_global_batch(
    column, strategies, caplog
):
    with caplog.at_level(logging.WARNING, logger="mgpu_tf"):
        compare(keeping(), arrays(), strategies[column])
    # TensorFlow warns too, of what all tests of a process trace.
    assert "mgpu_tf" not in {record.name for record in caplog.records}


def within(model, x, gradients):
    def apply():
        model.optimizer.apply(gradients, model.body.trainable_variables)
        return 0

    tf.cond(tf.reduce_sum(x) > 0.0, apply, lambda: 0)


def within_a_function(model, x, gradients):
    @tf.function
    def write():
        model.weight.assign_add(ops.sum(x))

    write()


def as_autograph_branches(model, x, gradients):
    @tf.function
    def write():
        if tf.reduce_sum(x) > 0.0:
            model.weight.assign_add(ops.sum(x))

    write()


def by_hand(model, x, gradients):
    model.body.trainable_variables[0].assign_sub(0.1 * gradients[0])


WRITTEN = {
    "the last rows": lambda model, x, _: model.last.assign(
        ops.concatenate([x, model.last])[:3]
    ),
    "a weight by hand": by_hand,
    "state within a function": within_a_function,
    "state in a branch": as_autograph_branches,
    "a variable of TensorFlow": lambda model, x, _: model.plain.assign_add(
        tf.reduce_sum(x)
    ),
}


@pytest.mark.parametrize("name", tiered(list(WRITTEN), ["state in a branch"]))
def test_a_step_may_write_what_it_makes_of_all_rows(name, strategies):
    compare(keeping(WRITTEN[name]), arrays(), strategies["mirrored_x3"])


WRITES = {
    "an optimizer within a condition": (within, "gradient_accumulation_steps"),
}


@pytest.mark.parametrize("name", list(WRITES))
def test_what_cannot_be_made_one_is_refused(name, strategies):
    write, words = WRITES[name]
    trainer = mgpu_tf.Trainer(keeping(write), strategies["mirrored_x3"])
    with pytest.raises(mgpu_tf.ConfigurationError, match=words) as error:
        trainer.fit(*arrays(), **FIT)
    assert "\n" not in str(error.value)


class WithMore(keras.Model):
    """More rows without targets than with; a function of TensorFlow's."""

    def __init__(self):
        super().__init__()
        self.body = network(5, 1)

    def call(self, x):
        return self.body(x)

    @tf.function
    def train_step(self, data):
        (x, y), more = data
        with tf.GradientTape() as tape:
            both = self.body(ops.concatenate([x, more], 0))
            loss = ops.mean(ops.square(both[: ops.shape(x)[0]] - y))
            loss += 0.1 * ops.mean(ops.abs(self.body(more)))
        weights = self.body.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


@pytest.mark.full
@pytest.mark.parametrize("column", ["mirrored_x3", "fsdp_x3"])
def test_arrays_of_a_batch_may_have_other_numbers_of_rows(column, strategies):
    def build():
        model = WithMore()
        model.build((None, 5))
        model.compile(keras.optimizers.Adam(0.01))
        return model

    x, y, more = arrays((5, 1, 5))
    few = tf.data.Dataset.from_tensor_slices((x, y)).batch(5)
    many = tf.data.Dataset.from_tensor_slices(more).batch(8)
    data = tf.data.Dataset.zip((few, many))
    keras.utils.set_random_seed(0)
    model = build()
    fit = {"epochs": 2, "shuffle": False, "verbose": 0}
    theirs = model.fit(data, **fit).history
    trainer = mgpu_tf.Trainer(build, strategies[column])
    ours = trainer.fit(data, **fit).history
    np.testing.assert_allclose(ours["loss"], theirs["loss"], rtol=1e-9)
    for ref, own in zip(
        model.get_weights(), trainer.model.get_weights(), strict=True
    ):
        np.testing.assert_allclose(own, ref, rtol=1e-9, atol=1e-12)


def test_an_optimizer_around_the_step_is_refused(strategies):
    adam = keras.optimizers.Adam()

    class Around(Regression):
        def train_step(self, data):
            adam.apply([], [])
            return {}

    def build():
        model = Around(None)
        model.compile()
        return model

    trainer = mgpu_tf.Trainer(build, strategies["mirrored_x2"])
    with pytest.raises(mgpu_tf.ConfigurationError, match="'adam'"):
        trainer.fit(*arrays(), **FIT)


def test_what_was_made_outside_is_refused(strategies):
    adam = keras.optimizers.Adam(name="early")
    metric = keras.metrics.MeanAbsoluteError(name="early")
    dense = keras.layers.Dense(1, name="early")
    dense.build((None, 5))

    def with_optimizer():
        model = network(5, 1)
        model.compile(adam, "mse")
        return model

    def with_metric():
        model = network(5, 1)
        model.compile("adam", "mse", metrics=[metric])
        model.kept = metric
        return model

    def with_layer():
        model = keras.Sequential([keras.Input((5,)), dense])
        model.compile("adam", "mse")
        return model

    for kind, build in (
        ("optimizer", with_optimizer),
        ("metric", with_metric),
        ("layer", with_layer),
    ):
        with pytest.raises(
            mgpu_tf.ConfigurationError, match=f"{kind} 'early', made outside"
        ):
            mgpu_tf.Trainer(build, strategies["mirrored_x2"])
    with pytest.raises(mgpu_tf.ConfigurationError, match="optimizer 'early'"):
        mgpu_tf.Trainer(with_optimizer, strategies["one_device"])

    def with_compiled_metric():
        model = network(5, 1)
        model.compile("adam", "mse", metrics=[metric])
        return model

    trainer = mgpu_tf.Trainer(with_compiled_metric, strategies["mirrored_x2"])
    with pytest.raises(mgpu_tf.ConfigurationError, match="metric 'early'"):
        trainer.fit(*arrays(), **FIT)


def test_a_model_compiled_outside_of_the_scope_is_refused(strategies):
    def build():
        model = network(5, 1)
        model.compile("sgd", "mse")
        return model

    trainer = mgpu_tf.Trainer(build, strategies["one_device"])
    trainer.model.compile("adam", "mse")
    with pytest.raises(mgpu_tf.ConfigurationError, match="compile again"):
        trainer.fit(*arrays(), **FIT)


def test_models_are_called_in_a_callback(strategies):
    """As Keras's own model is, with rows that replicas share unevenly."""
    x, y = arrays()
    found = []

    def build():
        model = network(5, 1)
        model.compile("sgd", "mse")
        return model

    class Evaluates(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            model = self.model
            found.append(model.predict(x[:8], verbose=0))
            found.append(model.evaluate(x[:5], y[:5], verbose=0))
            found.append(model.predict_on_batch(x[:4]))
            found.append(model.test_on_batch(x[:5], y[:5]))
            found.append(model.train_on_batch(x[:5], y[:5]))
            found.extend(model.get_weights())

    keras.utils.set_random_seed(0)
    build().fit(x, y, callbacks=[Evaluates()], **FIT)
    expected, found = found, []
    trainer = mgpu_tf.Trainer(build, strategies["mirrored_x3"])
    trainer.fit(x, y, callbacks=[Evaluates()], **FIT)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_model_outlives_its_trainer(strategies):
    x, _ = arrays()

    def build():
        model = network(5, 1)
        model.compile("sgd", "mse")
        return model

    model = mgpu_tf.Trainer(build, strategies["mirrored_x3"]).model
    gc.collect()
    assert model.predict(x[:6], verbose=0).shape == (6, 1)


def test_a_stateful_layer_is_refused_on_replicas(strategies):
    def build():
        model = keras.Sequential(
            [
                keras.Input(batch_shape=(4, 3, 2)),
                keras.layers.LSTM(2, stateful=True, name="memory"),
            ]
        )
        model.compile("sgd", "mse")
        return model

    with pytest.raises(mgpu_tf.ConfigurationError, match="'memory'"):
        mgpu_tf.Trainer(build, strategies["mirrored_x2"])
    generator = np.random.default_rng(0)
    data = [generator.normal(size=(8, 3, 2)), generator.normal(size=(8, 2))]
    options = FIT | {"batch_size": 4}
    keras.utils.set_random_seed(0)
    model = build()
    model.fit(*data, **options)
    trainer = mgpu_tf.Trainer(build, strategies["one_device"])
    trainer.fit(*data, **options)
    for ref, own in zip(
        [*model.variables, *model.layers[0].states],
        [*trainer.model.variables, *trainer.model.layers[0].states],
        strict=True,
    ):
        if "seed" not in ref.path:
            np.testing.assert_allclose(own.numpy(), ref.numpy(), atol=1e-12)


def test_replicas_without_an_example(strategies):
    """The last batch has two rows for four replicas."""
    compare(
        regression(EQUAL["mean"]), arrays(rows=10), strategies["mirrored_x4"]
    )


@pytest.mark.parametrize(
    "column", tiered(["one_device", "tensor_x3"], ["one_device"])
)
def test_a_loss_counts_the_rows_of_the_first_input(column, strategies):
    """As in Keras, where one replica gets more atoms than molecules."""

    def build():
        atoms = keras.Input((3,))
        owner = keras.Input((), dtype="int64")
        sums = keras.layers.Lambda(
            lambda a: tf.math.segment_sum(*a), output_shape=(3,)
        )
        outputs = keras.layers.Dense(1)(sums([atoms, owner]))
        model = keras.Model([atoms, owner], outputs)
        model.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=False)
        return model

    def batches():
        for counts in ([1, 2, 3], [4, 1]):
            atoms = np.arange(3.0 * sum(counts)).reshape(-1, 3) / 10
            owner = np.repeat(np.arange(len(counts)), counts)
            yield (atoms, owner), np.ones((len(counts), 1))

    signature = (
        (
            tf.TensorSpec((None, 3), tf.float64),
            tf.TensorSpec((None,), tf.int64),
        ),
        tf.TensorSpec((None, 1), tf.float64),
    )
    data = tf.data.Dataset.from_generator(batches, output_signature=signature)
    data = data.apply(tf.data.experimental.assert_cardinality(2))
    keras.utils.set_random_seed(0)
    model = build()
    expected = model.fit(data, epochs=2, shuffle=False, verbose=0).history
    trainer = mgpu_tf.Trainer(build, strategies[column])
    found = trainer.fit(data, epochs=2, shuffle=False, verbose=0).history
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-12)


class WholeStep(keras.Model):
    """Its step is one function of TensorFlow, as in TensorFlow's tutorials."""

    def __init__(self):
        super().__init__()
        self.body = network(5, 2)
        self.steps = self.add_weight(shape=(), trainable=False, name="steps")

    def call(self, x):
        return self.body(x)

    @tf.function
    def one_step(self, x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.abs(self(x, training=True) - y))
        weights = self.trainable_variables
        gradients = tape.gradient(loss, weights)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        self.steps.assign_add(1.0)
        return {"loss": loss}

    def train_step(self, data):
        return self.one_step(*data)


@pytest.mark.parametrize(
    "column",
    tiered(
        ["one_device", "mirrored_x3", "fsdp_x3", "data_2_tensor_2"],
        [],
    ),
)
def test_a_step_in_one_function_of_tensorflow(column, strategies):
    """What building has traced of it is not run in a step."""

    def build():
        model = WholeStep()
        model.compile(keras.optimizers.Adam(0.01))
        return model

    compare(build, arrays((5, 2)), strategies[column])


class Held(keras.Model):
    """Its optimizer is an attribute of its own; `compile` is given none."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_initializer="ones")

    def call(self, x):
        return self.dense(x)


class HeldStep(Held):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.ops.mean((self(x) - y) ** 2)
        weights = self.trainable_weights
        self.own.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def trained_without_an_optimizer(kind, fit):
    def build():
        model = kind()
        model.own = keras.optimizers.SGD(0.1)
        model(keras.ops.zeros((1, 4)))
        model.compile(optimizer=None, loss="mse")
        return model

    x = np.random.default_rng(0).normal(size=(10, 4)).astype("float32")
    made = fit(build)
    made.fit(
        x, x.sum(1, keepdims=True) + 1.0, batch_size=5, shuffle=False, verbose=0
    )
    return getattr(made, "model", made).get_weights()


def test_a_model_compiled_without_an_optimizer(strategies):
    def trainer(build):
        return mgpu_tf.Trainer(build, strategies["mirrored_x3"])

    expected = trained_without_an_optimizer(HeldStep, lambda build: build())
    found = trained_without_an_optimizer(HeldStep, trainer)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
    with pytest.raises(mgpu_tf.ConfigurationError, match="needs an optimizer"):
        trained_without_an_optimizer(Held, trainer)


class Counting(Regression):
    """Its step counts its traces, and returns more in later ones."""

    def __init__(self, later):
        super().__init__(lambda *a: ops.mean(squares(*a)))
        self.traces, self.later = 0, later

    def train_step(self, data):
        self.traces += 1
        logs = super().train_step(data)
        if self.later and self.traces > 1:
            logs["more"] = logs["value"] + 1.0
        return logs


@pytest.mark.parametrize("column", ["one_device", "mirrored_x3"])
@pytest.mark.parametrize("later", [False, True])
def test_a_step_is_traced_once(strategies, float64, column, later):
    """Beside the trace that makes variables, if it returned the same logs.

    What a replica leaves in an attribute is put back for the next one.
    """

    def build():
        model = Counting(later)
        model.compile(keras.optimizers.SGD(0.1))
        return model

    trainer = mgpu_tf.Trainer(build, strategies[column])
    history = trainer.fit(*arrays(), **FIT).history
    if not later:
        assert trainer.model.traces == 2
        return
    more = np.add(history["value"], 1.0)
    np.testing.assert_allclose(history["more"], more, rtol=1e-12)


class Reader(keras.layers.Layer):
    """Reads a weight of another layer, which is no layer of its own."""

    def __init__(self, other):
        super().__init__()
        object.__setattr__(self, "other", other)
        self.dense = keras.layers.Dense(4)

    def call(self, x):
        return ops.matmul(self.dense(x), ops.transpose(self.other.kernel))


class CatchingReader(Reader):
    def call(self, x):
        try:
            return super().call(x)
        except Exception:
            return self.dense(x)


class TwoCalls(keras.Model):
    """Two layers that a step calls beside each other, and others."""

    def __init__(self, reads=None, layers=1):
        super().__init__()
        self.first = keras.layers.Dense(4)
        self.first.build((None, 5))
        self.second = reads(self.first) if reads else network(5, 5)
        self.rest = [network(5, 5) for _ in range(layers)]

    def call(self, x):
        for layer in self.rest:
            x = layer(x)
        return self.first(self.second(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            near = self.first(x) + self.first(self.second(x))
            loss = ops.mean((ops.mean(near, 1, keepdims=True) - y) ** 2)
        weights = [
            *self.first.trainable_weights,
            *self.second.trainable_weights,
        ]
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def two_calls(reads=None, layers=1):
    def build():
        model = TwoCalls(reads, layers)
        model(ops.zeros((1, 5)))
        model.compile(keras.optimizers.Adam(0.01))
        model.optimizer.build(
            [*model.first.trainable_weights, *model.second.trainable_weights]
        )
        return model

    return build


@pytest.mark.parametrize("reads", [Reader, CatchingReader])
@pytest.mark.parametrize("column", ["mirrored_x3", "fsdp_x3"])
def test_a_call_reads_a_weight_of_another_layer(strategies, column, reads):
    """Its gradient is summed over replicas as that of its own weights."""
    compare(two_calls(reads), arrays(), strategies[column])


def test_a_call_is_lent_its_own_weights_alone(strategies):
    """So what a step adds to the graph does not grow with other layers."""
    lent = []
    for layers in (1, 4):
        build = two_calls(layers=layers)
        trainer = mgpu_tf.Trainer(build, strategies["mirrored_x3"])
        trainer.fit(*arrays(), **FIT)
        functions = trainer._distributed.engine._functions
        [train] = [f for key, f in functions.items() if key[0] == "train"]
        graphs = [
            concrete.graph for concrete in train._list_all_concrete_functions()
        ]
        graphs += [
            graph._get_function(name).graph
            for graph in list(graphs)
            for name in graph._functions
        ]
        lent.append(
            sum(
                op.type == "IdentityN"
                for graph in graphs
                for op in graph.get_operations()
            )
        )
    assert lent[0] == lent[1] > 0
