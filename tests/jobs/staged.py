"""Pipelines whose stages are in several processes."""

import dataclasses
import os
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

import mgpu_tf
from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.exchange import noise_scale
from mgpu_tf.strategies.registry import topology_of
from tests.engine.pipeline import models, test_head, test_shared_weights
from tests.parity import cases

# 10 steps in 2 epochs; the last batch of each has 5 rows.
EXAMPLES, BATCH = 37, 8


def adam():
    return keras.optimizers.Adam(0.01, global_clipnorm=0.3)


def momentum():
    return keras.optimizers.SGD(0.05, momentum=0.9)


def lion():
    """Keras takes an update without elements for a bias."""
    return keras.optimizers.Lion(0.01)


def scaled():
    """Loss scaling over sums of the gradients of two steps."""
    inner = keras.optimizers.AdamW(
        0.01, clipnorm=0.3, gradient_accumulation_steps=2
    )
    return keras.optimizers.LossScaleOptimizer(inner, dynamic_growth_steps=3)


def words(model):
    generator = np.random.default_rng(3)
    shape = (EXAMPLES, *model.inputs[0].shape[1:])
    x = generator.integers(0, 6, shape).astype("int32")
    x[:, -2:] = 0
    return x, (x * 3 + 1) % 6


def numbers(model):
    return models.data_for(model, EXAMPLES)


def language():
    logits = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return {"loss": logits, "metrics": ["accuracy"]}


def squares():
    return {"loss": "mse", "metrics": ["mae"]}


def loss_alone():
    return {"loss": "mse"}


@dataclasses.dataclass(frozen=True)
class Row:
    """A model, and the pipeline that trains it."""

    model: Callable[[], keras.Model]
    options: dict
    optimizer: Callable[[], keras.optimizers.Optimizer] = adam
    data: Callable = numbers
    others: Callable[[], dict] = squares
    steps: dict = dataclasses.field(default_factory=dict)

    def build(self):
        keras.utils.set_random_seed(1)
        model = self.model()
        model.compile(self.optimizer(), **self.others())
        return model


def own_loss():
    inputs = keras.Input((6,))
    x = keras.layers.Dense(7, "tanh")(inputs)
    x = keras.layers.Dense(5, "tanh")(x)
    return test_head.OwnLoss(inputs, keras.layers.Dense(2)(x))


class Clips(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        weights = self.trainable_variables
        gradients = tape.gradient(loss, weights)
        gradients, norm = tf.clip_by_global_norm(gradients, 0.3)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return {"loss": loss, "norm": norm}


def own_step():
    inputs = keras.Input((6,))
    x = keras.layers.Dense(8, "tanh")(inputs)
    x = keras.layers.Dropout(0.3, seed=2)(x)
    return Clips(inputs, keras.layers.Dense(2)(x))


class Peaks(keras.Model):
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        found = super().compute_metrics(x, y, y_pred, sample_weight)
        return found | {"peak": keras.ops.max(y_pred)}


def measured():
    """Metrics of its own, and draws without a seed."""
    inputs = keras.Input((6,))
    x = keras.layers.Dense(8, "tanh")(inputs)
    x = Unseeded()(keras.layers.Dense(6, "tanh")(x))
    return Peaks(inputs, keras.layers.Dense(2)(x))


def unlike():
    """Stages that know each other's kernels by their shapes."""
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(31, "tanh"),
            keras.layers.Dense(29, "tanh"),
            keras.layers.Dense(23, "tanh"),
            keras.layers.Dense(2),
        ]
    )


TWO = {"pipeline": 2}
PARTS = {"data": 2, "tensor": 2}
ROWS = {
    "skip": Row(models.skip, TWO | {"micro_batches": 3}, lion),
    "gpipe": Row(models.skip, TWO | {"micro_batches": 2, "schedule": "gpipe"}),
    "drops": Row(models.drops, TWO | {"micro_batches": 3}),
    "normalizes": Row(models.normalizes, TWO | {"micro_batches": 1}, momentum),
    "scaled": Row(
        models.skip,
        TWO | {"micro_batches": 2},
        scaled,
        steps={"recompute": "stages"},
    ),
    "masked": Row(
        test_head.tagger, TWO | {"micro_batches": 2}, adam, words, language
    ),
    "own_loss": Row(own_loss, TWO | {"micro_batches": 2}),
    "shared_table": Row(
        test_shared_weights.language,
        TWO | {"micro_batches": 2, "stages": ["attention_1"]},
        adam,
        words,
        language,
    ),
    "shared_layer": Row(
        test_shared_weights.recurrent,
        TWO | {"micro_batches": 2, "stages": ["second"]},
    ),
    "transformer": Row(models.transformer, TWO),
    "of_3": Row(models.skip, {"pipeline": 3, "micro_batches": 4}, momentum),
    "transformer_of_3": Row(
        models.transformer, {"pipeline": 3, "micro_batches": 3}
    ),
    "of_4": Row(models.skip, {"pipeline": 4, "micro_batches": 4}),
    "drops_data_2": Row(
        models.drops, TWO | {"data": 2, "micro_batches": 2}, momentum
    ),
    "normalizes_data_2": Row(
        models.normalizes, TWO | {"data": 2, "micro_batches": 1}
    ),
    "skip_fsdp_2": Row(models.skip, TWO | {"fsdp": 2, "micro_batches": 2}),
    "transformer_data_2": Row(
        models.transformer, TWO | {"data": 2, "micro_batches": 2}, momentum
    ),
    # Each process has all stages.
    "own_step": Row(own_step, TWO | {"data": 4}, others=loss_alone),
    "muon_fsdp_2": Row(
        models.skip,
        TWO | {"fsdp": 2, "micro_batches": 2},
        lambda: keras.optimizers.Muon(0.01),
    ),
    "transformer_tensor_2": Row(
        models.transformer, TWO | {"tensor": 2, "micro_batches": 2}
    ),
    "transformer_data_2_tensor_2": Row(
        models.transformer, TWO | PARTS | {"micro_batches": 2}, momentum
    ),
    "own_step_data_2_tensor_2": Row(own_step, TWO | PARTS, others=loss_alone),
    "measured_data_2_tensor_2": Row(
        measured,
        TWO | PARTS | {"micro_batches": 2},
        steps={"noise_scale": True, "check_replicas_every": 2},
    ),
    "drops_fsdp_2_tensor_2": Row(
        models.drops, TWO | {"fsdp": 2, "tensor": 2, "micro_batches": 3}
    ),
}


def strategy_of(given, **options):
    return mgpu_tf.create_model_parallel_strategy(
        num_virtual_devices=topology_of(given).local.count,
        # Of the small weights of tests the large ones are split.
        smallest_split=4,
        **options,
    )


def file_of(folder, row):
    return os.path.join(folder, f"{row}.npz")


def values_of(model):
    variables = [*model.variables, *model.optimizer.variables]
    return [variable.numpy() for variable in variables]


def results(model, history, scores, predicted):
    """What a run ends with, as arrays by name."""
    return {
        "scores": scores,
        "predicted": predicted,
        **{f"curve {name}": curve for name, curve in history.items()},
        **{f"value {i}": v for i, v in enumerate(values_of(model))},
    }


def trained(row):
    """Returns a job that trains a row; the chief leaves the results."""

    def job(given, folder):
        cases.set_floatx("float64")
        strategy = strategy_of(given, **ROWS[row].options)
        found, model = run(row, strategy, **ROWS[row].steps)
        if topology_of(given).is_chief:
            np.savez(file_of(folder, row), **found)
        cases.set_floatx("float32")
        return {
            "sum": float(sum(np.sum(np.float64(v)) for v in found.values())),
            "holds": holds(model),
        }

    return job


def run(row, strategy, **options):
    """Trains a row on a strategy; returns what it ends with, and the model."""
    case = ROWS[row]
    trainer = mgpu_tf.Trainer(case.build, strategy, seed=None, **options)
    x, y = case.data(trainer.model)
    history = trainer.fit(
        x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0
    ).history
    scores = trainer.evaluate(x, y, batch_size=BATCH, verbose=0)
    predicted = trainer.predict(x, batch_size=BATCH, verbose=0)
    for name in noise_scale.NAMES:
        history.pop(name, None)  # Keras has none.
    found = results(trainer.model, history, scores, predicted)
    return found, trainer.model


def holds(model):
    """The elements of each variable of stages that are in this process."""
    found = {}
    for variable in [*model.variables, *model.optimizer.variables]:
        if keras_internals.is_split(variable):
            parts = keras_internals.stored(variable).values
            found[variable.path] = sum(p.shape.num_elements() for p in parts)
    return found


def by_hand(row):
    """What Keras makes of a row on one device."""
    model = ROWS[row].build()
    x, y = ROWS[row].data(model)
    options = {"shuffle": False, "verbose": 0}
    history = model.fit(x, y, BATCH, epochs=2, **options).history
    scores = model.evaluate(x, y, BATCH, verbose=0)
    predicted = model.predict(x, BATCH, verbose=0)
    return results(model, history, scores, predicted)


def plain(optimizer=adam, layers=unlike, **options):
    def build():
        keras.utils.set_random_seed(1)
        model = layers()
        model.compile(optimizer(), "mse", **options)
        return model

    return build


def data():
    x = np.random.default_rng(3).normal(size=(EXAMPLES, 6))
    return x, x[:, :2] * 0.3


def fit(trainer, epochs=2, **options):
    trainer.fit(
        *data(),
        batch_size=BATCH,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        **options,
    )
    return trainer


def stored(given, folder):
    """What a process stores, and the shapes of what it computes."""
    strategy = strategy_of(given, pipeline=2, micro_batches=2)
    trainer = fit(mgpu_tf.Trainer(plain(), strategy))
    trainer.save(os.path.join(folder, "staged.keras"))
    trainer.save_weights(os.path.join(folder, "staged.weights.h5"))
    left = values_of(trainer.model)
    if topology_of(given).is_chief:
        np.savez(os.path.join(folder, "staged.npz"), *left)
    shapes = set()
    for graph in trainer._distributed.engine.step_graphs:
        shapes |= shapes_in(graph)
    return {
        "holds": holds(trainer.model),
        "shapes": sorted(shapes),
        "memory": [row.name for row in trainer.memory().rows],
        "mesh": str(strategy.mesh),
    }


def shapes_in(graph):
    """The shapes of matrices in a graph and in what it calls."""
    found = set()
    called = graph._functions if hasattr(graph, "_functions") else {}
    for name in called:
        function = graph._get_function(name)
        if hasattr(function, "graph"):
            found |= shapes_in(function.graph)
    for op in graph.get_operations():
        for tensor in op.outputs:
            if tensor.shape.rank == 2 and tensor.shape.is_fully_defined():
                found.add(tuple(tensor.shape.as_list()))
    return found


def checkpointed(given, folder, **options):
    """A run of two epochs in one go, and in two with an end between."""
    cases.set_floatx("float64")
    strategy = strategy_of(given, pipeline=2, micro_batches=2, **options)
    path = os.path.join(folder, "checkpoints")
    for epochs in (1, 2):
        resumed = mgpu_tf.Trainer(plain(), strategy)
        fit(resumed, epochs, checkpoint_dir=path)
    whole = fit(mgpu_tf.Trainer(plain(), strategy))
    left = values_of(whole.model)
    same = [
        bool(np.array_equal(ours, theirs))
        for ours, theirs in zip(values_of(resumed.model), left, strict=True)
    ]
    if topology_of(given).is_chief:
        np.savez(os.path.join(folder, "whole.npz"), *left)
    cases.set_floatx("float32")
    return {"same": same, "step": resumed.global_step}


def checkpointed_in_parts(given, folder):
    """As `checkpointed`, with layers in parts, where processes have copies."""
    return checkpointed(given, folder, **PARTS)


def sentences():
    """Batches of other lengths, some words of which count."""
    generator = np.random.default_rng(1)
    for length in (3, 4, 6, 4):
        x = generator.integers(0, 9, (BATCH, length)).astype("int32")
        x[:, 0] = 1
        yield x, generator.normal(size=(BATCH, 2))


def reader():
    words = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(9, 4, mask_zero=True)(words)
    x = keras.layers.LSTM(3)(keras.layers.Dense(5, "tanh", name="cut")(x))
    return keras.Model(words, keras.layers.Dense(2)(x))


def lengths(given, folder):
    """Losses of sentences, here and on one device.

    Another model is trained before on the same strategy: its messages are of
    other types and of other sizes.
    """
    del folder
    cases.set_floatx("float64")
    strategy = strategy_of(given, pipeline=2, micro_batches=2, stages=["cut"])
    fit(mgpu_tf.Trainer(plain(layers=named_cut), strategy), epochs=1)
    specs = (
        tf.TensorSpec((None, None), tf.int32),
        tf.TensorSpec((None, 2), tf.float64),
    )
    # Keras counts a step at the end of such data, which Adam would see.
    build = plain(momentum, reader)
    curves = [
        model.fit(
            tf.data.Dataset.from_generator(sentences, output_signature=specs),
            epochs=2,
            verbose=0,
        ).history["loss"]
        for model in (mgpu_tf.Trainer(build, strategy, seed=None), build())
    ]
    cases.set_floatx("float32")
    return curves


def named_cut():
    inputs = keras.Input((6,))
    x = keras.layers.Dense(9, name="cut")(keras.layers.Dense(5)(inputs))
    return keras.Model(inputs, keras.layers.Dense(2)(x))


class OwnStep(keras.Sequential):
    def train_step(self, data):
        return super().train_step(data)


class Unseeded(keras.layers.Layer):
    def call(self, x):
        return x + keras.random.normal((6,))


def with_own_step():
    model = unlike()
    return OwnStep([keras.Input((6,)), *model.layers])


def unseeded():
    return keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(6), Unseeded()]
        + [keras.layers.Dense(2)]
    )


REFUSED = {
    "own train_step": (plain(layers=with_own_step), {}),
    "Muon": (plain(lambda: keras.optimizers.Muon(0.01)), {}),
    "noise": (plain(), {"noise_scale": True}),
    "eager": (plain(run_eagerly=True), {}),
    "unseeded": (plain(layers=unseeded), {}),
}


def refused(given, folder):
    """What is told of what does not go with several processes."""
    del folder
    told = {}
    for name, (build, options) in REFUSED.items():
        strategy = strategy_of(given, pipeline=2, micro_batches=2)
        try:
            fit(mgpu_tf.Trainer(build, strategy, **options))
        except mgpu_tf.ConfigurationError as error:
            told[name] = str(error)
    return told


JOBS = {row: trained(row) for row in ROWS}
JOBS |= {
    job.__name__: job
    for job in (stored, checkpointed, checkpointed_in_parts, lengths, refused)
}
