"""Programs from outside: a trace, data or an optimizer that changes."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.conformance import models, outside
from tests.conformance.harness import row

GROUP = "Outside: what changes between steps"


class Callback(keras.callbacks.Callback):
    """Calls a function after each epoch."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def on_epoch_end(self, epoch, logs=None):
        self.function(self.model, epoch)


def regression(middle=None, optimizer=models.sgd, **options):
    """A network on vectors, around a layer."""

    def build():
        inputs = keras.Input((models.FEATURES,))
        hidden = layers.Dense(5, activation="tanh")(inputs)
        hidden = hidden if middle is None else middle()(hidden)
        model = keras.Model(inputs, layers.Dense(1)(hidden))
        return models.compiled(model, "mse", optimizer(), **options)

    return build


def trained(run, build, data, *more, **options):
    trainer = run.trainer(build)
    options = {"epochs": 3, "verbose": 0, "shuffle": False} | options
    run.see_history(trainer.fit(data, *more, **options))
    run.look(trainer)
    return trainer


class Scaled(layers.Layer):
    """A number that a trace takes as it is."""

    factor = 1.0

    def call(self, x):
        return x * self.factor


@row(GROUP)
def frozen_in_a_callback_and_traced_anew(run):
    """Gradual unfreezing."""

    def unfreeze(model, epoch):
        model.layers[1].trainable = epoch % 2 == 0
        model.make_train_function(force=True)

    callbacks = [Callback(unfreeze)]
    data = outside.points(), outside.numbers()
    trained(
        run, regression(), *data, batch_size=outside.BATCH, callbacks=callbacks
    )


@row(GROUP)
def an_attribute_and_a_function_set_to_none(run):
    def halve(model, epoch):
        model.layers[2].factor *= 0.5
        model.train_function = model.test_function = None
        model.make_train_function()
        model.make_test_function()

    x, y = outside.points(), outside.numbers()
    trainer = trained(
        *(run, regression(Scaled), x, y),
        batch_size=outside.BATCH,
        callbacks=[Callback(halve)],
    )
    trainer.model.layers[2].factor = 3.0
    trainer.model.predict_function = None
    found = trainer.predict(x, batch_size=outside.BATCH, verbose=0)
    run.see("predict", found)


@row(GROUP)
def a_frozen_layer_between_fits_without_a_compile(run):
    x, y = outside.points(), outside.numbers()
    options = {"batch_size": outside.BATCH, "shuffle": False, "verbose": 0}
    trainer = run.trainer(regression(optimizer=keras.optimizers.Adam))
    for frozen in (False, True, False):
        trainer.model.layers[1].trainable = not frozen
        trainer.model.make_train_function(force=True)
        run.see_history(trainer.fit(x, y, epochs=2, **options))
    run.look(trainer)


@row(GROUP)
def a_variable_that_a_dataset_reads(run):
    scale = tf.Variable(1.0, dtype="float64")
    data = outside.batches(outside.points(), outside.numbers())
    data = data.map(lambda x, y: (x * tf.cast(scale, x.dtype), y))
    halve = Callback(lambda model, epoch: scale.assign(scale * 0.5))
    trained(run, regression(), data, callbacks=[halve])


class Pieces(keras.utils.PyDataset):
    """Batches that a callback scales, more of them in each epoch."""

    def __init__(self):
        super().__init__()
        self.x, self.y = outside.points(), outside.numbers()
        self.scale, self.count = 1.0, 2

    def __len__(self):
        return self.count

    def __getitem__(self, place):
        rows = slice(place * outside.BATCH, (place + 1) * outside.BATCH)
        return self.x[rows] * self.scale, self.y[rows]


@row(GROUP)
def a_py_dataset_that_a_callback_scales(run):
    pieces = Pieces()

    def halve(model, epoch):
        pieces.scale *= 0.5

    trained(run, regression(), pieces, callbacks=[Callback(halve)])


class Growing(Pieces):
    def on_epoch_end(self):
        self.count = min(4, self.count + 1)


@row(GROUP)
def a_py_dataset_that_grows(run):
    trained(run, regression(), Growing())


class Shuffled(Pieces):
    """A new order in each epoch, as the guide to `PyDataset` has it."""

    def __init__(self):
        super().__init__()
        self.random = np.random.default_rng(3)

    def on_epoch_end(self):
        order = self.random.permutation(len(self.x))
        self.x, self.y = self.x[order], self.y[order]


@row(GROUP)
def a_py_dataset_that_shuffles_itself(run):
    pieces = Shuffled()
    trained(run, regression(), pieces, validation_data=Shuffled())


@row(GROUP)
def a_teacher_in_the_map_of_a_dataset(run):
    teacher = outside.mlp(1)
    generator = np.random.default_rng(0)
    teacher.set_weights(
        [generator.normal(size=w.shape) for w in teacher.get_weights()]
    )
    data = tf.data.Dataset.from_tensor_slices(outside.points())
    data = data.batch(outside.BATCH)
    data = data.map(lambda x: (x, teacher(x, training=False)))
    outside.on_batches(run, regression(), data)


class Clipped(keras.optimizers.SGD):
    """Adaptive gradient clipping, of each weight by its own norm."""

    def _clip_gradients(self, grads):
        found = []
        for gradient, weight in zip(
            grads, self._trainable_variables, strict=True
        ):
            most = 0.02 * ops.maximum(ops.norm(weight), 1e-3)
            factor = ops.minimum(1.0, most / (ops.norm(gradient) + 1e-9))
            found.append(gradient * factor)
        return found


@row(GROUP)
def gradients_clipped_by_the_norm_of_their_weight(run):
    def clipped():
        return Clipped(0.1, clipnorm=1.0)

    data = outside.points(), outside.numbers()
    outside.train(run, regression(optimizer=clipped), *data)


class Warm(keras.optimizers.Adam):
    """A rate, a decay and a last write of the author's own."""

    def _get_current_learning_rate(self):
        steps = ops.cast(self.iterations, "float32") + 1
        rate = super()._get_current_learning_rate()
        return rate * ops.minimum(1.0, steps / 6)

    def _apply_weight_decay(self, variables):
        for variable in variables:
            if "kernel" in variable.path:
                variable.assign(variable * 0.99)

    def finalize_variable_values(self, var_list):
        super().finalize_variable_values(var_list)
        for variable in var_list:
            if "bias" in variable.path:
                variable.assign(variable * 0.5)


@row(GROUP)
def an_optimizer_with_a_rate_and_a_decay_of_its_own(run):
    def warm():
        return Warm(0.05, weight_decay=0.1)

    data = outside.points(), outside.numbers()
    outside.train(run, regression(optimizer=warm), *data)


class Scores(keras.Sequential):
    """Makes a metric of others."""

    def get_metrics_result(self):
        found = super().get_metrics_result()
        precision, recall = found["precision"], found["recall"]
        both = precision + recall + 1e-9
        return found | {"f1": 2 * precision * recall / both}


@row(GROUP)
def a_metric_that_is_made_of_others(run):
    def build():
        model = Scores(outside.mlp(1, activation="sigmoid").layers)
        metrics = [
            keras.metrics.Precision(name="precision"),
            keras.metrics.Recall(name="recall"),
        ]
        return models.compiled(
            *(model, "binary_crossentropy", models.sgd()), metrics=metrics
        )

    y = (outside.kinds() > 0).astype("float64")[:, None]
    outside.use(run, build, outside.points(), y)


class Seen(layers.Layer):
    """States that are an `or`, a product and whole numbers."""

    def build(self, shape):
        def state(shape, dtype, initializer="zeros"):
            return self.add_weight(
                shape=shape,
                dtype=dtype,
                initializer=initializer,
                trainable=False,
            )

        self.seen = state((shape[-1],), "bool")
        self.product = state((shape[-1],), None, "ones")
        self.counts = state((4,), "int32")

    def call(self, x, training=False):
        if training:
            large = ops.any(x > 0.9, axis=0)
            self.seen.assign(ops.logical_or(self.seen, large))
            self.product.assign(self.product * ops.prod(1 + 0.01 * x, axis=0))
            places = ops.clip(ops.floor(x[:, 0] * 2) + 2, 0, 3)
            counted = ops.bincount(ops.cast(places, "int32"), minlength=4)
            self.counts.assign_add(ops.cast(counted, "int32"))
        counts = ops.cast(ops.sum(self.counts), x.dtype)
        return (
            x * self.product
            + 0.1 * ops.cast(self.seen, x.dtype)
            + (0.001 * counts)
        )

    def compute_output_shape(self, shape):
        return shape


@row(GROUP)
def states_that_are_no_sums(run):
    data = outside.points(), outside.numbers()
    outside.use(run, regression(Seen), *data)


class Sampled(keras.Sequential):
    """Classes that are drawn by an operation with a state of its own."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            hidden = self.layers[0](x)
            kernel = tf.transpose(tf.convert_to_tensor(self.layers[1].kernel))
            loss = tf.reduce_mean(
                tf.nn.sampled_softmax_loss(
                    tf.cast(kernel, "float32"),
                    tf.zeros(9),
                    y[:, None],
                    tf.cast(hidden, "float32"),
                    *(3, 9),
                    seed=3,
                )
            )
        outside.learn(self.optimizer, tape, loss, self.trainable_variables[:3])
        return {"value": loss}


@row(GROUP)
def classes_that_tensorflow_samples(run):
    def build():
        model = Sampled(outside.mlp(9).layers)
        return models.compiled(model, None, models.sgd())

    outside.train(run, build, outside.points(), outside.kinds(9))


class Head(keras.Sequential):
    @property
    def trainable_weights(self):
        return self.layers[-1].trainable_weights


@row(GROUP)
def a_model_that_says_what_is_trained(run):
    def build():
        model = Head(outside.mlp(1).layers)
        return models.compiled(model, "mse", models.sgd())

    outside.train(run, build, outside.points(), outside.numbers())


class Printing(layers.Layer):
    """A layer that its author looks into."""

    def call(self, x):
        tf.print(
            "rows", tf.shape(x), x[:1, 0], output_stream="file:///dev/null"
        )
        return ops.tanh(x)


@row(GROUP)
def a_layer_that_prints_several_values(run):
    data = outside.points(), outside.numbers()
    trained(run, regression(Printing), *data, batch_size=outside.BATCH)


@row(GROUP)
def weights_left_out_of_weight_decay_by_a_list(run):
    def build():
        network = outside.mlp(1)
        optimizer = keras.optimizers.AdamW(0.02, weight_decay=0.2)
        optimizer.exclude_from_weight_decay(var_list=network.layers[-1].weights)
        return models.compiled(network, "mse", optimizer)

    outside.train(run, build, outside.points(), outside.numbers())


class PolicyGradient(keras.Model):
    """A step that takes state, target, advantage, weight and a mask apart."""

    def train_step(self, data):
        state, target, advantage, weight, done = data
        with tf.GradientTape() as tape:
            value = self(state, training=True)
            error = ops.square(value - target) * weight * (1 - done)
            loss = ops.mean(error) - 0.1 * ops.mean(advantage * value)
        outside.learn(self.optimizer, tape, loss, self.trainable_variables)
        return {"loss": loss}


@row(GROUP)
def batches_of_five_parts(run):
    def build():
        layered = outside.mlp(1)
        model = PolicyGradient(layered.inputs, layered.outputs)
        return models.compiled(model, None, models.sgd())

    x, y = outside.points(), outside.numbers()
    generator = np.random.default_rng(5)
    parts = [generator.normal(size=y.shape) for _ in range(2)]
    done = generator.integers(0, 2, size=y.shape).astype("float64")
    arrays = (x, y, *parts, done)
    dataset = tf.data.Dataset.from_tensor_slices(arrays).batch(outside.BATCH)
    trained(run, build, dataset)


class ExpertsFirst(layers.Layer):
    """Each expert has a word of each example; the mean of all is a loss."""

    def build(self, shape):
        self.experts = layers.EinsumDense("ebd,edh->ebh", (None, 5))
        self.experts.build((3, None, shape[-1]))

    def call(self, x):
        words = ops.stack([x, ops.sin(x), ops.cos(x)])
        made = self.experts(words)
        mean = ops.mean(made, 1)
        self.add_loss(0.1 * ops.sum(mean * mean))
        return ops.mean(made, 0)


class TakesLosses(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = ops.mean(ops.square(outputs - y)) + sum(self.losses)
        outside.learn(self.optimizer, tape, loss, self.trainable_variables)
        return {"loss": loss}


@row(GROUP)
def experts_first_in_a_step_of_ones_own(run):
    def build():
        inputs = keras.Input((models.FEATURES,))
        outputs = layers.Dense(1)(ExpertsFirst()(inputs))
        model = TakesLosses(inputs, outputs)
        return models.compiled(model, None, models.sgd())

    outside.train(run, build, outside.points(), outside.numbers())
