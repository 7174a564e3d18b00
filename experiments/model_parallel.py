"""A transformer whose state does not fit on one device, trained on several.

    python experiments/model_parallel.py --output_dir=runs/model_parallel

The script trains a small transformer on scikit-learn's digits, each image a
sequence of 8 rows. Every device has a budget for weights, optimizer state and
gradients. Strategies that need more are refused, with a strategy that fits.
The others train, and their losses are compared with those of one device
without a budget.

It writes memory.png, losses.png and results.json. Hardware: any; on 2 CPU
cores about 3 minutes. With 4 GPUs, add --num_virtual_devices=0.
"""

import json
import logging
import os

import keras
import numpy as np
from absl import app, flags
from sklearn.datasets import load_digits

import mgpu_tf
from mgpu_tf import planner
from mgpu_tf.reports import figures

FLAGS = flags.FLAGS
flags.DEFINE_string("output_dir", "runs/model_parallel", "Where to write.")
flags.DEFINE_integer("width", 128, "The width of the transformer.")
flags.DEFINE_integer("blocks", 2, "Its number of blocks.")
flags.DEFINE_integer("epochs", 3, "Passes over the data.")
flags.DEFINE_integer(
    "num_virtual_devices", 4, "Split the CPU into 4 devices; 0 takes 4 GPUs."
)
flags.DEFINE_float(
    "budget", 0.6, "Memory of a device, as a part of what one device needs."
)

# Name, and arguments of create_strategy.
MESHES = {
    "one_device": ("one_device", {}),
    "mirrored, 4 devices": ("mirrored", {}),
    "fsdp 4, optimizer": ("fsdp", {"shard": "optimizer"}),
    "fsdp 4": ("fsdp", {}),
    "data 2 x fsdp 2": ("model_parallel", {"data_parallel": 2}),
    "tensor 2": (
        "model_parallel",
        {"tensor_parallel": 2, "num_virtual_devices": 2, "devices": 2},
    ),
    "data 2 x tensor 2": ("model_parallel", {"tensor_parallel": 2}),
    "pipeline 2": (
        "model_parallel",
        {"pipeline_parallel": 2, "num_virtual_devices": 2, "devices": 2},
    ),
    "data 2 x pipeline 2": ("model_parallel", {"pipeline_parallel": 2}),
}
DEVICES = 4


def build_model():
    inputs = keras.Input((8, 8))
    width = FLAGS.width
    x = keras.layers.Dense(width)(inputs)
    for _ in range(FLAGS.blocks):
        attended = keras.layers.MultiHeadAttention(4, width // 4)(x, x)
        x = keras.layers.LayerNormalization()(x + attended)
        wide = keras.layers.Dense(4 * width, activation="gelu")(x)
        x = keras.layers.LayerNormalization()(
            x + keras.layers.Dense(width)(wide)
        )
    x = keras.layers.GlobalAveragePooling1D()(x)
    model = keras.Model(inputs, keras.layers.Dense(10)(x))
    model.compile(
        keras.optimizers.Adam(1e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def planned(name, parameters):
    """What a device needs, by the arithmetic of `mgpu-tf plan`."""
    kind, options = MESHES[name]
    pipeline = options.get("pipeline_parallel", 1)
    tensor = options.get("tensor_parallel", 1)
    splits = kind in ("fsdp", "model_parallel") and pipeline * tensor == 1
    fsdp = DEVICES // options.get("data_parallel", 1) if splits else 1
    shard = options.get("shard", "weights")
    return planner.StateMemory(
        parameters, "adam", fsdp, shard, tensor=tensor, pipeline=pipeline
    )


def train(strategy):
    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8) / 16.0).astype("float32")
    trainer = mgpu_tf.Trainer(build_model, strategy)
    history = trainer.fit(
        images,
        labels,
        batch_size=64,
        epochs=FLAGS.epochs,
        shuffle=False,
        verbose=0,
    )
    return history.history["loss"], trainer.memory()


def strategy_of(name):
    kind, options = MESHES[name]
    if kind == "one_device":
        return mgpu_tf.create_strategy("one_device")
    return mgpu_tf.create_strategy(kind, **options)


def main(argv):
    del argv
    logging.getLogger("tensorflow").setLevel(logging.WARNING)
    os.makedirs(FLAGS.output_dir, exist_ok=True)
    for kind, options in MESHES.values():
        if kind != "one_device" and FLAGS.num_virtual_devices:
            options.pop("devices", None)
            options.setdefault("num_virtual_devices", FLAGS.num_virtual_devices)
        else:
            options.pop("num_virtual_devices", None)
    strategies = {name: strategy_of(name) for name in reversed(MESHES)}
    with strategies["one_device"].scope():
        parameters = build_model().count_params()
    budget = int(FLAGS.budget * planned("one_device", parameters).total)
    print(f"{parameters:,} parameters, {budget / (1 << 20):.2f} MiB a device")
    curves, tables, refused = {}, {}, {}
    curves["one device, no budget"], tables["one device, no budget"] = train(
        strategies["one_device"]
    )
    for name in MESHES:
        needs = planned(name, parameters)
        if needs.total > budget:
            fits = planned("fsdp 4", parameters).fitting(budget)
            refused[name] = (
                f"needs {needs.total / (1 << 20):.2f} MiB; fsdp over {fits} "
                "devices fits"
            )
            print(f"{name}: refused: {refused[name]}")
            continue
        curves[name], tables[name] = train(strategies[name])
        # Gradients lie beside what is stored, as many bytes as are updated.
        held = tables[name].largest + needs.gradients
        if held > 1.01 * budget:
            raise SystemExit(f"{name} stored {held:,} bytes on a device")
        print(f"{name}: {curves[name][-1]:.6f}")
        print(tables[name].text())
    reference = np.array(curves["one device, no budget"])
    differences = {
        name: float(np.abs(np.array(curve) / reference - 1).max())
        for name, curve in curves.items()
    }
    print("largest relative difference of a loss from one device:")
    for name, difference in differences.items():
        print(f"  {name}: {difference:.1e}")
    figures.draw_memory(
        tables, os.path.join(FLAGS.output_dir, "memory.png"), budget
    )
    figures.draw_curves(curves, os.path.join(FLAGS.output_dir, "losses.png"))
    with open(os.path.join(FLAGS.output_dir, "results.json"), "w") as file:
        results = {
            "parameters": parameters,
            "budget": budget,
            "refused": refused,
            "losses": curves,
            "differences": differences,
            "largest_device": {n: t.largest for n, t in tables.items()},
        }
        json.dump(results, file, indent=1)


if __name__ == "__main__":
    app.run(main)
