"""Krizhevsky's scheme in small: data parallel below, in parts above.

    python experiments/one_weird_trick.py

Paper: A. Krizhevsky, One weird trick for parallelizing convolutional neural
networks, 2014, arXiv 1404.5997.

Convolutions have few weights and large activations, dense layers many weights
and small activations. Devices exchange the gradients of weights where layers
are data-parallel, and activations where layers are computed in parts. So each
kind of layer is split in the way that moves fewer bytes.

A network of the shape of AlexNet, five convolutions and three dense layers,
learns scikit-learn's digits on 4 devices in three ways, in float64:

    data      all layers data-parallel
    tensor    all layers in parts, every device has all rows
    mixed     convolutions data-parallel, dense layers in parts

The script compares the weights with those of one device, and the bytes that
devices send each other in a step with a formula. The bytes are counted in the
graph of the step: each tensor that an operation takes from another device, and
each sum of TensorFlow's collective operations.

Expected from the paper: mixed moves the fewest bytes. In AlexNet convolutions
have 6 % of the parameters and dense layers 94 %; here it is 35 % and 65 %.

It writes one_weird_trick.json and one_weird_trick.png. Hardware: any; on 2 CPU
cores that other work shared, about two minutes.
"""

import json
import math
import os

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags
from sklearn.datasets import load_digits

import mgpu_tf
from mgpu_tf.reports import figures

FLAGS = flags.FLAGS
flags.DEFINE_string("output_dir", "runs/one_weird_trick", "Where to write.")
flags.DEFINE_integer("devices", 4, "Into how many devices the CPU is split.")
flags.DEFINE_integer("batch_size", 64, "Global batch size.")
flags.DEFINE_integer("steps", 8, "Steps in an epoch.")
flags.DEFINE_integer("epochs", 2, "Passes over the rows.")
flags.DEFINE_integer("units", 256, "Units of the first two dense layers.")

SIDE, FILTERS, CLASSES = 16, (16, 32, 48, 48, 32), 10
# AlexNet of one tower: side of its outputs, window, filters.
ALEXNET = ((55, 11, 96), (27, 5, 256), (13, 3, 384), (13, 3, 384), (13, 3, 256))
ALEXNET_DENSE = (6 * 6 * 256, 4096, 4096, 1000)

LAYOUTS = {
    "tensor": {
        r".*conv\d/kernel": (None, None, None, "model"),
        r".*conv\d/bias": ("model",),
        ".*fc6/kernel": (None, "model"),
        ".*fc6/bias": ("model",),
        ".*fc7/kernel": ("model", None),
    },
    "mixed": {
        ".*fc6/kernel": (None, "batch"),
        ".*fc6/bias": ("batch",),
        ".*fc7/kernel": ("batch", None),
    },
}


def build_model():
    layers = [keras.Input((SIDE, SIDE, 1))]
    for place, filters in enumerate(FILTERS, 1):
        layers.append(
            keras.layers.Conv2D(
                filters,
                5 if place == 1 else 3,
                padding="same",
                activation="relu",
                name=f"conv{place}",
            )
        )
        if place in (1, 2, 5):
            layers.append(keras.layers.MaxPooling2D())
    layers += [
        keras.layers.Flatten(),
        keras.layers.Dense(FLAGS.units, activation="relu", name="fc6"),
        keras.layers.Dense(FLAGS.units, activation="relu", name="fc7"),
        keras.layers.Dense(CLASSES, name="fc8"),
    ]
    model = keras.Sequential(layers)
    model.compile(
        keras.optimizers.SGD(0.02, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def data():
    images, labels = load_digits(return_X_y=True)
    images = np.kron(images.reshape(-1, 8, 8, 1) / 16.0, np.ones((1, 2, 2, 1)))
    rows = FLAGS.steps * FLAGS.batch_size
    dataset = tf.data.Dataset.from_tensor_slices((images[:rows], labels[:rows]))
    return dataset.batch(FLAGS.batch_size, drop_remainder=True)


def strategy_of(way):
    options = {"num_virtual_devices": FLAGS.devices}
    if way == "data":
        return mgpu_tf.create_strategy("mirrored", **options)
    axis = "data" if way == "mixed" else "tensor"
    return mgpu_tf.create_model_parallel_strategy(
        **{axis: FLAGS.devices}, layout=LAYOUTS[way], **options
    )


def elements(convolutions, dense):
    """Returns what devices exchange in each way, in elements.

    With n devices an element that is summed, or gathered in one direction of
    the step and scattered in the other, moves 2 (n - 1) times.

    Args:
        convolutions: Of each the elements of its outputs of a row, and its
            weights.
        dense: The inputs of the first dense layer, and the units of all.

    Returns:
        For each way the elements of weights, and those of activations of a
        row.
    """
    inputs, units, last, classes = dense
    weights = sum(size for _, size in convolutions)
    # What no way splits: the bias that is added to sums, and the last layer.
    whole = last + last * classes + classes
    split = inputs * units + units + units * last
    return {
        "data": (weights + split + whole, 0),
        # Sums of activations are two exchanges: outputs, and gradients.
        "tensor": (whole, sum(out for out, _ in convolutions) + 2 * last),
        "mixed": (weights + whole, inputs + last),
    }


def formula(way_elements, batch_size, item_bytes, devices):
    """Returns the bytes that all devices together receive in a step."""
    weights, activations = way_elements
    moved = weights + activations * batch_size
    return 2 * (devices - 1) * item_bytes * moved


def small_model():
    """Returns the arguments of `elements` of the model of this script."""
    sides = (SIDE, SIDE // 2, SIDE // 4, SIDE // 4, SIDE // 4)
    convolutions, channels = [], 1
    for place, (side, filters) in enumerate(zip(sides, FILTERS, strict=True)):
        window = 3 if place else 5
        weights = window * window * channels * filters + filters
        convolutions.append((side * side * filters, weights))
        channels = filters
    flat = (SIDE // 8) ** 2 * channels
    return convolutions, (flat, FLAGS.units, FLAGS.units, CLASSES)


def alexnet():
    """Returns the same of AlexNet."""
    convolutions, channels = [], 3
    for side, window, filters in ALEXNET:
        weights = window * window * channels * filters + filters
        convolutions.append((side * side * filters, weights))
        channels = filters
    return convolutions, ALEXNET_DENSE


def counted(trainer, rows):
    """Returns the bytes that devices take from each other in a step.

    Args:
        trainer: Has trained.
        rows: The rows of a device. The graph does not know how many they are;
            no activation that is exchanged has other rows.
    """
    seen, total = set(), 0
    for op in step_of(trainer).get_operations():
        here = device(op)
        for tensor in op.inputs:
            if not tensor.dtype.is_floating:
                continue
            there = device(tensor.op)
            shape = [rows if n is None else n for n in tensor.shape]
            size = math.prod(shape) * tensor.dtype.size
            crosses = here != there and None not in (here, there)
            if crosses and (tensor.name, here) not in seen:
                seen.add((tensor.name, here))
                total += size
            if op.type.startswith("CollectiveReduce"):
                # A ring: each of n devices receives 2 (n - 1) / n of it.
                total += 2 * (FLAGS.devices - 1) * size / FLAGS.devices
    return round(total)


def device(op):
    return tf.DeviceSpec.from_string(op.device).device_index


def step_of(trainer):
    """Returns the graph of one step, the body of the loop of an execution."""
    functions = trainer._distributed.engine._functions
    [train] = [each for key, each in functions.items() if key[0] == "train"]
    [concrete] = train._list_all_concrete_functions()
    [loop] = [
        op
        for op in concrete.graph.get_operations()
        if op.type in ("While", "StatelessWhile")
    ]
    return concrete.graph._get_function(loop.get_attr("body").name).graph


def main(argv):
    del argv
    os.makedirs(FLAGS.output_dir, exist_ok=True)
    strategies = {way: strategy_of(way) for way in ("data", "tensor", "mixed")}
    keras.config.set_floatx("float64")
    with tf.device("CPU:0"):
        keras.utils.set_random_seed(0)
        reference = build_model()
        reference.fit(data(), epochs=FLAGS.epochs, verbose=0)
    ways, item_bytes = elements(*small_model()), 8
    results = {}
    print(f"{FLAGS.devices} devices, {FLAGS.batch_size} rows in a step")
    print("way     by formula     counted   difference from one device")
    for way, strategy in strategies.items():
        keras.utils.set_random_seed(0)
        trainer = mgpu_tf.Trainer(build_model, strategy)
        trainer.fit(data(), epochs=FLAGS.epochs, verbose=0)
        rows = FLAGS.batch_size
        if way != "tensor":
            rows //= FLAGS.devices
        found = {
            "formula": formula(
                ways[way], FLAGS.batch_size, item_bytes, FLAGS.devices
            ),
            "counted": counted(trainer, rows),
            "difference": max(
                float(np.abs(ours - theirs).max())
                for ours, theirs in zip(
                    trainer.model.get_weights(),
                    reference.get_weights(),
                    strict=True,
                )
            ),
        }
        results[way] = found
        print(
            f"{way:<6} {found['formula']:>11,} {found['counted']:>11,}"
            f"   {found['difference']:.1e}"
        )
    large = {
        way: formula(each, 128, 4, FLAGS.devices)
        for way, each in elements(*alexnet()).items()
    }
    print("AlexNet in float32, 128 rows in a step, by formula:")
    for way, size in large.items():
        print(f"{way:<6} {size / 1e6:>9,.0f} MB")
    sizes = [2**power for power in range(4, 12)]
    lines = {
        way: {size: formula(each, size, 4, FLAGS.devices) for size in sizes}
        for way, each in elements(*alexnet()).items()
    }
    figures.draw_points(
        {
            way: {size: moved / 1e6 for size, moved in line.items()}
            for way, line in lines.items()
        },
        os.path.join(FLAGS.output_dir, "one_weird_trick.png"),
        ("rows in a step", f"MB in a step, AlexNet on {FLAGS.devices} devices"),
        logarithmic=True,
    )
    path = os.path.join(FLAGS.output_dir, "one_weird_trick.json")
    with open(path, "w") as file:
        json.dump({"small": results, "alexnet": large}, file, indent=1)


if __name__ == "__main__":
    app.run(main)
