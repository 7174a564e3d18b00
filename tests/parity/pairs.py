"""Pairs of options of `compile` and `fit`: programs that cover all of them.

`CASES` has, for any two values of different axes, a program with both, but for
those that Keras itself refuses. `compare` runs one with Keras's own `fit` on
one device and with the `Trainer` on its column.

    python -m tests.parity.pairs            # all of them
    python -m tests.parity.pairs 12 40      # these
    python -m tests.parity.pairs --seed=3   # others, that cover them too
"""

import argparse
import itertools
import random
import tempfile
import traceback

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import mgpu_tf
from tests import columns
from tests.parity.cases import (
    BATCH_SIZE,
    CLASSES,
    EPOCHS,
    MeanSquare,
    set_floatx,
)

FEATURES = 5
FLOAT64 = 1e-9
# Of metrics that Keras computes in float32.
FLOAT32 = 1e-6
# A difference is rounding if it is at most so many times what one device
# differs by from itself, with the initial weights one unit in the last place
# further.
TIMES_NOISE = 20

PIPELINE = "data_2_pipeline_2"
# Where a run that is moved goes on.
MOVES = {
    "mirrored_x3": "fsdp_x3",
    "fsdp_x3": "tensor_x3",
    "tensor_x3": "mirrored_x3",
    PIPELINE: "mirrored_x3",
}
OPTIMIZERS = {
    "sgd": lambda **o: keras.optimizers.SGD(momentum=0.9, nesterov=True, **o),
    "adam": keras.optimizers.Adam,
    "amsgrad": lambda **o: keras.optimizers.Adam(amsgrad=True, **o),
    "adamw": lambda **o: keras.optimizers.AdamW(weight_decay=0.1, **o),
    "adagrad": keras.optimizers.Adagrad,
    "rmsprop": lambda **o: keras.optimizers.RMSprop(centered=True, **o),
    "lion": keras.optimizers.Lion,
    "adafactor": keras.optimizers.Adafactor,
    "ftrl": keras.optimizers.Ftrl,
    "nadam": keras.optimizers.Nadam,
    "lamb": keras.optimizers.Lamb,
    "muon": keras.optimizers.Muon,
}
# What the optimizer takes beside.
OF_THE_OPTIMIZER = {
    "clip": {
        "none": {},
        "norm": {"clipnorm": 0.05},
        "value": {"clipvalue": 0.01},
        "global_norm": {"global_clipnorm": 0.1},
    },
    "ema": {
        "none": {},
        "ema": {"use_ema": True, "ema_momentum": 0.7},
        "overwrite": {
            "use_ema": True,
            "ema_momentum": 0.7,
            "ema_overwrite_frequency": 2,
        },
    },
    "accumulate": {
        "none": {},
        "2": {"gradient_accumulation_steps": 2},
        "3": {"gradient_accumulation_steps": 3},
    },
}
# What the first layer of weights takes.
OF_THE_LAYER = {
    "constraint": {
        "none": lambda: {},
        "non_neg": lambda: {"kernel_constraint": "non_neg"},
        "max_norm": lambda: {
            "kernel_constraint": keras.constraints.MaxNorm(0.5)
        },
        "unit_norm": lambda: {"kernel_constraint": "unit_norm"},
    },
    "regularizer": {
        "none": lambda: {},
        "l2": lambda: {"kernel_regularizer": keras.regularizers.L2(0.01)},
        "l1_of_bias": lambda: {"bias_regularizer": keras.regularizers.L1(0.01)},
        "activity": lambda: {
            "activity_regularizer": keras.regularizers.L2(0.01)
        },
    },
}
OF_THE_TRAINER = {
    "none": {},
    "keras_kernels": {"kernels": "keras"},
    "recompute": {"recompute": "layers"},
    "step_parts": {"step_parts": 2},
}
ROWS = {"whole": 48, "smaller": 55, "one": 49}
AXES = {
    "column": ["mirrored_x3", "fsdp_x3", "tensor_x3", PIPELINE],
    "optimizer": list(OPTIMIZERS),
    **{axis: list(values) for axis, values in OF_THE_OPTIMIZER.items()},
    "scale": ["none", "optimizer", "factor"],
    "rate": ["number", "schedule", "plateau", "scheduler"],
    **{axis: list(values) for axis, values in OF_THE_LAYER.items()},
    "layers": [
        *("dense", "lstm", "batch_norm", "dropout", "noise", "frozen"),
        *("shared", "spectral", "attention", "add_loss"),
    ],
    "loss": [
        *("mse", "sparse", "huber_sum", "ignore_class", "two_outputs"),
        *("weighted_mean", "own"),
    ],
    "weights": ["none", "sample", "zeros", "class"],
    "metric": ["none", "accuracy", "auc", "iou", "weighted", "f1"],
    "per_execution": ["1", "3"],
    "rows": list(ROWS),
    "validation": ["none", "weighted", "freq", "stopping"],
    "data": ["arrays", "tf_data", "py_dataset", "generator"],
    "trainer": list(OF_THE_TRAINER),
    "callback": ["none", "swap", "reads", "batch_rate"],
    "calls": ["fit", "two_fits", "on_batch"],
    "run": ["graph", "eagerly"],
    # In the second epoch; it goes on with another Trainer, or elsewhere too.
    "interrupted": ["no", "same", "moved"],
}
# What Keras refuses on one device. A test sees that it does.
KERAS_REFUSES = [
    {"weights": "class", "data": "generator"},
    {"weights": "class", "loss": "two_outputs"},
    {"scale": "factor", "layers": "lstm"},
    {"callback": "swap", "ema": "none"},
    # In float64 alone.
    {"optimizer": "muon", "rate": "schedule"},
    *(
        {"loss": loss, "metric": metric}
        for loss in ("sparse", "ignore_class")
        for metric in ("auc", "f1")
    ),
]
# docs/guarantees.md has these.
DOCUMENTED = [
    # Logs of each output's loss count each batch once.
    {"run": "eagerly", "loss": "two_outputs"},
    # Keras does more steps than it is asked for.
    *(
        {"per_execution": "3", "data": "generator", "rows": rows}
        for rows in ("smaller", "one")
    ),
]
# What the trainer refuses, and by which words.
REFUSED = [
    ({"column": PIPELINE, "layers": "spectral"}, "assign its own weights"),
    ({"column": PIPELINE, "layers": "batch_norm"}, "synchronized=True"),
    ({"column": PIPELINE, "trainer": "step_parts"}, "micro-batches already"),
    ({"layers": "batch_norm", "trainer": "step_parts"}, "other rows"),
    ({"layers": "spectral", "trainer": "step_parts"}, "other rows"),
    ({"loss": "ignore_class", "trainer": "step_parts"}, "rows add up to"),
    ({"run": "eagerly", "trainer": "step_parts"}, "all rows of a batch at"),
    ({"run": "eagerly", "column": PIPELINE}, "A pipeline proves in a graph"),
]
_LEFT_OUT = [*KERAS_REFUSES, *DOCUMENTED, *(pair for pair, _ in REFUSED)]


def allowed(case):
    return not any(pair.items() <= case.items() for pair in _LEFT_OUT)


def covering(seed=0, tries=5):
    """Returns cases that have each allowed pair of values, by a greedy choice.

    Each begins with a pair that none has yet. Axis by axis, in a random order,
    it takes the value that adds most pairs; the best of some tries is kept.
    """
    generator = random.Random(seed)
    values = {a: [(a, value) for value in AXES[a]] for a in AXES}
    # The values that no case has yet with each value.
    left = {
        one: {
            other
            for axis in AXES
            if axis != one[0]
            for other in values[axis]
            if allowed(dict([one, other]))
        }
        for one in itertools.chain(*values.values())
    }

    def tried(first):
        items = list(first)
        new = 1
        others = [axis for axis in AXES if axis not in dict(first)]
        for axis in generator.sample(others, len(others)):
            allowing = [
                item for item in values[axis] if allowed(dict([*items, item]))
            ]
            gains = [len(left[item].intersection(items)) for item in allowing]
            most = max(gains)
            best = [i for i, gain in enumerate(gains) if gain == most]
            items.append(allowing[generator.choice(best)])
            new += most
        return new, items

    cases = []
    for one in left:
        while left[one]:
            first = one, min(left[one])
            _, items = max(tried(first) for _ in range(tries))
            for item in items:
                left[item].difference_update(items)
            case = dict(items)
            cases.append({axis: case[axis] for axis in AXES})
    return cases


PLAIN = {axis: values[0] for axis, values in AXES.items()}


def _sparse(case):
    return case["loss"] in ("sparse", "ignore_class")


def _kind(case):
    """The targets of the first output."""
    return lambda y: y if _sparse(case) else np.eye(CLASSES)[y]


def rows_of(case, count, seed):
    """Returns inputs, targets and weights."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(count, FEATURES))
    y = generator.integers(0, CLASSES, size=count)
    size = x.sum(1, keepdims=True)
    if case["layers"] == "lstm":
        words = generator.integers(1, 9, size=(count, FEATURES))
        lengths = generator.integers(1, FEATURES + 1, size=(count, 1))
        x = np.where(np.arange(FEATURES) < lengths, words, 0)
    kind = _kind(case)(y)
    weight = generator.uniform(0.1, 3.0, size=count)
    if case["weights"] == "zeros":
        # All of a batch, and of some replicas.
        weight[: BATCH_SIZE + 9] = 0.0
    if case["loss"] == "two_outputs":
        return x, {"kind": kind, "size": size}, {"kind": weight, "size": weight}
    return x, kind, weight


def _hidden(case):
    """Returns the layers before the output."""
    given = {}
    for axis, values in OF_THE_LAYER.items():
        given |= values[case[axis]]()
    dense = layers.Dense(8, activation="tanh", **given)
    match case["layers"]:
        case "lstm":
            return [
                layers.Embedding(9, FEATURES, mask_zero=True),
                layers.LSTM(8, **given),
            ]
        case "batch_norm":
            return [dense, layers.BatchNormalization(synchronized=True)]
        case "dropout":
            return [dense, layers.Dropout(0.3, seed=1)]
        case "noise":
            return [layers.GaussianNoise(0.1, seed=2), dense]
        case "attention":
            attend = layers.MultiHeadAttention(2, 3)
            return [
                dense,
                layers.Reshape((2, 4)),
                lambda x: attend(x, x),
                layers.Flatten(),
            ]
        case "add_loss":
            return [dense, MeanSquare()]
        case "frozen":
            return [layers.Dense(7, trainable=False), dense]
        case "shared":
            twice = layers.Dense(FEATURES, activation="tanh", **given)
            return [twice, layers.Dense(FEATURES), twice]
        case "spectral":
            return [layers.SpectralNormalization(dense)]
    return [dense]


def _optimizer(case):
    options = {}
    for axis, values in OF_THE_OPTIMIZER.items():
        options |= values[case[axis]]
    if case["scale"] == "factor":
        options["loss_scale_factor"] = 64.0
    rate = 0.02
    if case["rate"] == "schedule":
        rate = keras.optimizers.schedules.CosineDecay(0.02, 8, alpha=0.1)
    made = OPTIMIZERS[case["optimizer"]](learning_rate=rate, **options)
    if case["scale"] == "optimizer":
        made = keras.optimizers.LossScaleOptimizer(
            made, initial_scale=256.0, dynamic_growth_steps=3
        )
    return made


def _metrics(case):
    metrics = keras.metrics
    return {
        "none": lambda: {},
        "accuracy": lambda: {"metrics": ["accuracy"]},
        "auc": lambda: {
            "metrics": [
                metrics.AUC(
                    multi_label=True,
                    num_labels=CLASSES,
                    from_logits=True,
                    name="auc",
                )
            ]
        },
        "iou": lambda: {
            "metrics": [
                metrics.MeanIoU(
                    CLASSES,
                    sparse_y_true=_sparse(case),
                    sparse_y_pred=False,
                    name="iou",
                )
            ]
        },
        "weighted": lambda: {"weighted_metrics": ["accuracy"]},
        "f1": lambda: {"weighted_metrics": [metrics.F1Score(average="macro")]},
    }[case["metric"]]()


def _own_loss(y_true, y_pred):
    return keras.ops.mean(keras.ops.abs(y_true - y_pred) ** 3, axis=-1)


def _loss(case):
    losses = keras.losses
    return {
        "mse": lambda: "mse",
        "sparse": lambda: losses.SparseCategoricalCrossentropy(
            from_logits=True
        ),
        "huber_sum": lambda: losses.Huber(reduction="sum"),
        "ignore_class": lambda: losses.SparseCategoricalCrossentropy(
            from_logits=True, ignore_class=1
        ),
        "weighted_mean": lambda: losses.CategoricalCrossentropy(
            from_logits=True, reduction="mean_with_sample_weight"
        ),
        "own": lambda: _own_loss,
        "two_outputs": lambda: losses.CategoricalCrossentropy(from_logits=True),
    }[case["loss"]]()


def build(case):
    """Returns the compiled model."""
    words = case["layers"] == "lstm"
    inputs = keras.Input((FEATURES,), dtype="int32" if words else None)
    outputs = inputs
    for layer in _hidden(case):
        outputs = layer(outputs)
    kind = layers.Dense(CLASSES, name="kind")(outputs)
    loss, given = _loss(case), _metrics(case)
    if case["loss"] == "two_outputs":
        size = layers.Dense(1, name="size")(outputs)
        model = keras.Model(inputs, {"kind": kind, "size": size})
        loss = {"kind": loss, "size": "mse"}
        given = {name: {"kind": value} for name, value in given.items()}
        given["loss_weights"] = {"kind": 1.0, "size": 0.3}
    else:
        model = keras.Model(inputs, kind)
    model.compile(
        _optimizer(case),
        loss,
        steps_per_execution=int(case["per_execution"]),
        jit_compile=False,
        run_eagerly=case["run"] == "eagerly",
        **given,
    )
    return model


class Rows(keras.utils.PyDataset):
    """Batches of rows."""

    def __init__(self, rows):
        super().__init__()
        self.rows = rows

    def __len__(self):
        return -(-len(self.rows[0]) // BATCH_SIZE)

    def __getitem__(self, index):
        part = slice(index * BATCH_SIZE, (index + 1) * BATCH_SIZE)
        return tf.nest.map_structure(lambda array: array[part], self.rows)


class Reads(keras.callbacks.Callback):
    """Logs sums of the weights at the ends of epochs, and changes them."""

    def on_epoch_end(self, epoch, logs=None):
        weights = self.model.get_weights()
        logs["read"] = float(sum(np.sum(np.abs(w)) for w in weights))
        self.model.set_weights([w * 1.01 for w in weights])


class Interrupted(Exception):
    """The end of a run that is resumed."""


class Interrupts(keras.callbacks.Callback):
    """Ends the run within its second epoch, if it acts."""

    def __init__(self, acts):
        super().__init__()
        self.acts = acts

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if self.acts and self.epoch == 1 and batch >= 1:
            raise Interrupted


class BatchRate(keras.callbacks.Callback):
    """Changes the rate after each execution."""

    def on_train_batch_end(self, batch, logs=None):
        rate = self.model.optimizer.learning_rate
        if isinstance(rate, keras.Variable):
            rate.assign(rate * 0.95)


def _fed(case, rows, steps="steps_per_epoch"):
    """Returns the arguments of `fit` or `evaluate` that give it rows."""
    batches = Rows(rows)
    match case["data"]:
        case "tf_data":
            data = tf.data.Dataset.from_tensor_slices(rows)
            return {"x": data.batch(BATCH_SIZE)}
        case "py_dataset":
            return {"x": batches}
        case "generator":
            endless = (
                batches[index % len(batches)] for index in itertools.count()
            )
            return {"x": endless, steps: len(batches)}
    names = ("x", "y", "sample_weight")
    return dict(zip(names, rows, strict=False)) | {"batch_size": BATCH_SIZE}


def _fit(case, train):
    arguments = _fed(case, train)
    if case["weights"] == "class":
        arguments["class_weight"] = {0: 0.2, 1: 3.0, 2: 1.0, 3: 0.5}
    callbacks = []
    if case["rate"] == "plateau":
        callbacks.append(
            keras.callbacks.ReduceLROnPlateau(
                "loss", factor=0.5, patience=0, min_delta=10.0
            )
        )
    if case["rate"] == "scheduler":
        callbacks.append(
            keras.callbacks.LearningRateScheduler(
                lambda epoch, rate: rate * 0.8
            )
        )
    if case["validation"] != "none":
        held = rows_of(case, 21, 4)
        if case["validation"] != "weighted":
            held = held[:2]
        if case["data"] == "tf_data":
            data = tf.data.Dataset.from_tensor_slices(held)
            arguments["validation_data"] = data.batch(BATCH_SIZE)
        elif case["data"] == "py_dataset":
            arguments["validation_data"] = Rows(held)
        else:
            arguments["validation_data"] = held
            arguments["validation_batch_size"] = 8
        if case["validation"] == "freq":
            arguments["validation_freq"] = 2
        if case["validation"] == "stopping":
            callbacks.append(
                keras.callbacks.EarlyStopping(
                    "val_loss",
                    patience=1,
                    min_delta=10.0,
                    restore_best_weights=True,
                )
            )
    match case["callback"]:
        case "swap":
            callbacks.append(keras.callbacks.SwapEMAWeights(swap_on_epoch=True))
        case "reads":
            callbacks.append(Reads())
        case "batch_rate":
            callbacks.append(BatchRate())
    return arguments | {"callbacks": callbacks}


def _train(case):
    """Returns the rows that a program trains on."""
    train = rows_of(case, ROWS[case["rows"]], 3)
    return train if case["weights"] in ("sample", "zeros") else train[:2]


FIT = {"epochs": EPOCHS, "shuffle": False, "verbose": 0}


def _trained(case, trains, model_of, **options):
    """Returns what a program ends with, by name."""
    train = _train(case)
    arguments = _fit(case, train)
    if options:
        arguments["callbacks"].append(Interrupts(acts=False))
    history = trains.fit(**arguments, **FIT, **options)
    found = {}
    if case["calls"] == "two_fits":
        again = trains.fit(
            **_fit(case, train), epochs=2, shuffle=False, verbose=0
        )
        for name, values in again.history.items():
            found[f"second log {name}"] = values
    if case["calls"] == "on_batch":
        batch = tf.nest.map_structure(lambda array: array[:BATCH_SIZE], train)
        for turn in range(2):
            scores = trains.train_on_batch(*batch, return_dict=True)
            for name, value in scores.items():
                found[f"on_batch {turn} {name}"] = value
    model = model_of(trains)
    for index, value in enumerate(model.get_weights()):
        found[f"weight {index} {value.shape}"] = value
    for index, variable in enumerate(model.optimizer.variables):
        # Sums in the middle of an accumulation are each replica's own.
        if "gradient_accumulator" not in variable.path:
            found[f"optimizer {index} {variable.shape}"] = variable.numpy()
    for name, values in history.history.items():
        found[f"log {name}"] = values
    scores = trains.evaluate(
        **_fed(case, train, "steps"), return_dict=True, verbose=0
    )
    for name, value in scores.items():
        found[f"evaluate {name}"] = value
    data = _fed(case, train[:1], "steps")
    predictions = trains.predict(**data, verbose=0)
    for index, value in enumerate(tf.nest.flatten(predictions)):
        found[f"predict {index}"] = value
    return {
        name: np.asarray(value, np.float64) for name, value in found.items()
    }


def stock(case, nudged=False):
    """Trains with `keras.Model.fit` on one device.

    Args:
        case: The program.
        nudged: Whether each initial weight is its next larger number.
    """
    keras.utils.set_random_seed(0)
    with tf.device(columns.ONE):
        model = build(case)
        if nudged:
            model.set_weights(
                [
                    np.nextafter(w, np.inf) if w.dtype.kind == "f" else w
                    for w in model.get_weights()
                ]
            )
        return _trained(case, model, lambda model: model)


def run(case, strategies):
    """Trains with the `Trainer` on the strategy of its column."""
    options = OF_THE_TRAINER[case["trainer"]]
    if case["column"] == PIPELINE and "recompute" in options:
        options = {"recompute": "stages"}

    def made(column):
        strategy = strategies[column]
        return mgpu_tf.Trainer(lambda: build(case), strategy, **options)

    trainer = made(case["column"])
    if case["interrupted"] == "no":
        return _trained(case, trainer, lambda trainer: trainer.model)
    with tempfile.TemporaryDirectory() as folder:
        saving = {
            "checkpoint": mgpu_tf.SaveOptions(
                checkpoint_dir=folder, save_every_steps=2
            )
        }
        arguments = _fit(case, _train(case))
        arguments["callbacks"].append(Interrupts(acts=True))
        with pytest.raises(Interrupted):
            trainer.fit(**arguments, **FIT, **saving)
        if case["interrupted"] == "moved":
            options = {k: v for k, v in options.items() if k != "recompute"}
            trainer = made(case.get("moves_to", MOVES[case["column"]]))
        else:
            trainer = made(case["column"])
        return _trained(case, trainer, lambda trainer: trainer.model, **saving)


def _limit(name):
    """The largest difference that something may have."""
    single = ("auc", "iou", "f1_score")
    return FLOAT32 if any(part in name for part in single) else FLOAT64


def differences(ours, theirs):
    """Returns what differs and by how much: relative where it is above 1."""
    if ours.keys() != theirs.keys():
        return dict.fromkeys(ours.keys() ^ theirs.keys(), np.inf)
    found = {}
    for name, value in theirs.items():
        if ours[name].shape != value.shape:
            found[name] = np.inf
            continue
        scale = np.maximum(np.abs(value), 1.0)
        largest = float(np.max(np.abs(ours[name] - value) / scale, initial=0))
        # Written so that NaN differs.
        if not largest <= _limit(name):
            found[name] = largest
    return found


def compare(case, strategies):
    """Returns what differs by more than rounding, and by how much.

    Raises:
        ConfigurationError: The strategy refuses the program.
    """
    set_floatx("float64")
    theirs = stock(case)
    found = differences(run(case, strategies), theirs)
    if found:
        noise = differences(stock(case, nudged=True), theirs)
        found = {
            name: by
            for name, by in found.items()
            if not by <= TIMES_NOISE * noise.get(name, 0.0)
        }
    return found


CASES = covering()


def main():
    """Prints what differs; how many programs do is the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("numbers", type=int, nargs="*")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    strategies = columns.strategies()
    cases = covering(seed=arguments.seed)
    print(len(cases), "cases", flush=True)
    for number in arguments.numbers or range(len(cases)):
        case = cases[number]
        shown = {k: v for k, v in case.items() if v != PLAIN[k]}
        try:
            found = compare(case, strategies)
        except mgpu_tf.ConfigurationError as error:
            print(number, "REFUSED", error, shown, flush=True)
            continue
        except Exception:
            print(
                number,
                "ERROR",
                shown,
                traceback.format_exc()[-1500:],
                flush=True,
            )
            continue
        if found:
            print(number, "DIFFERS", shown, flush=True)
            for name, by in list(found.items())[:12]:
                print("   ", name, f"{by:.1e}", flush=True)
        else:
            print(number, "same", flush=True)
        tf.keras.backend.clear_session()


if __name__ == "__main__":
    main()
