"""A step on one GPU: `mgpu_tf`, Keras's `fit`, a loop by hand, PyTorch.

    python experiments/gpu_speed.py --models=resnet50,gpt2

All train the same model from data in the memory of the host, with the compute
dtype `--dtype`. The contestants of TensorFlow share a process and take turns;
those of PyTorch have one of their own. A contestant with "xla" is compiled
(`jit_compile=True`, or `torch.compile`).

It writes gpu_speed.json and prints a table: examples/s, the median of the
turns. Hardware: one GPU with 40 GB; ten minutes or more, since XLA tries
kernels for a minute for each model. Needs torch for the
rows of PyTorch and torchvision for its ResNet-50; without them they are left
out. Its rows of TensorFlow were tried on a CPU alone.
"""

import functools
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import time

import numpy as np
from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_string("output_dir", "runs/gpu_speed", "Where to write.")
flags.DEFINE_list("models", ["resnet50", "gpt2"], "resnet50 or gpt2.")
flags.DEFINE_string("dtype", "bfloat16", "float32 or bfloat16.")
flags.DEFINE_integer("turns", 5, "Turns of each contestant.")
flags.DEFINE_integer("batches", 8, "Different batches.")
flags.DEFINE_integer("passes", 10, "How often a turn has each of them.")
flags.DEFINE_string("contestants", ".", "A regular expression of their names.")
flags.DEFINE_string("only", "", "tensorflow or torch: a process of this.")

# Batch size, and the shape of an example. Tokens are of VOCABULARY.
SIZES = {"resnet50": (128, (224, 224, 3)), "gpt2": (16, (512,))}
VOCABULARY, WIDTH, BLOCKS, HEADS = 32_000, 768, 12, 12
CLASSES = 1000


def data(name):
    """Returns x and y for all batches."""
    batch, shape = SIZES[name]
    rows = batch * FLAGS.batches
    random = np.random.default_rng(0)
    if name == "gpt2":
        tokens = random.integers(VOCABULARY, size=(rows, shape[0] + 1))
        tokens = tokens.astype("int32")
        return tokens[:, :-1], tokens[:, 1:]
    x = random.standard_normal((rows, *shape), dtype="float32")
    return x, random.integers(CLASSES, size=rows).astype("int32")


def keras_model(name, xla):
    """Returns a compiled Keras model."""
    import keras
    from keras import layers

    if name == "resnet50":
        model = keras.applications.ResNet50(
            weights=None, classifier_activation=None
        )
    else:
        tokens = keras.Input((SIZES[name][1][0],), dtype="int32")
        x = layers.Embedding(VOCABULARY, WIDTH)(tokens)
        for _ in range(BLOCKS):
            y = layers.LayerNormalization()(x)
            attention = layers.MultiHeadAttention(HEADS, WIDTH // HEADS)
            x = x + attention(y, y, use_causal_mask=True)
            y = layers.LayerNormalization()(x)
            y = layers.Dense(4 * WIDTH, "gelu")(y)
            x = x + layers.Dense(WIDTH)(y)
        x = layers.LayerNormalization()(x)
        model = keras.Model(tokens, layers.Dense(VOCABULARY)(x))
    model.compile(
        keras.optimizers.SGD(0.01, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=xla,
    )
    return model


class Fit:
    """Keras's `fit`, or that of a `Trainer`."""

    def __init__(self, name, trains):
        self._trains, self._batch = trains, SIZES[name][0]

    def turn(self, x, y):
        history = self._trains.fit(
            x,
            y,
            batch_size=self._batch,
            epochs=FLAGS.passes,
            verbose=0,
            shuffle=False,
        )
        return history.history["loss"][-1]


class Loop:
    """A `tf.function` with a gradient tape, as TensorFlow's guides have it."""

    def __init__(self, name, model, xla):
        import tensorflow as tf

        self._batch = SIZES[name][0]

        @tf.function(jit_compile=xla)
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = model.loss(y, model(x, training=True))
            gradients = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply(gradients, model.trainable_variables)
            return loss

        self._step = step

    def turn(self, x, y):
        import tensorflow as tf

        rows = tf.data.Dataset.from_tensor_slices((x, y))
        for batch in rows.batch(self._batch).repeat(FLAGS.passes).prefetch(2):
            loss = self._step(*batch)
        return float(loss)


def tensorflow_contestants(name):
    """Yields names, and what makes objects with `turn`."""
    import mgpu_tf

    strategies = {
        "one_device": mgpu_tf.create_one_device_strategy(0),
        "mirrored": mgpu_tf.create_mirrored_strategy(devices=1),
    }

    def trainer(strategy, xla):
        made = mgpu_tf.Trainer(lambda: keras_model(name, xla), strategy)
        return Fit(name, made)

    for xla in (False, True):
        suffix = ", xla" if xla else ""
        model = functools.partial(keras_model, name, xla)
        yield f"keras fit{suffix}", lambda model=model: Fit(name, model())
        yield (
            f"loop by hand{suffix}",
            lambda model=model, xla=xla: Loop(name, model(), xla),
        )
        for kind, strategy in strategies.items():
            yield (
                f"mgpu_tf {kind}{suffix}",
                functools.partial(trainer, strategy, xla),
            )


def torch_model(name):
    """Returns a module."""
    import torch

    if name == "resnet50":
        from torchvision import models

        return models.resnet50(num_classes=CLASSES)

    class Causal(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.words = torch.nn.Embedding(VOCABULARY, WIDTH)
            self.blocks = torch.nn.ModuleList(
                torch.nn.TransformerEncoderLayer(
                    WIDTH,
                    HEADS,
                    4 * WIDTH,
                    dropout=0.0,
                    activation="gelu",
                    batch_first=True,
                    norm_first=True,
                )
                for _ in range(BLOCKS)
            )
            self.norm = torch.nn.LayerNorm(WIDTH)
            self.head = torch.nn.Linear(WIDTH, VOCABULARY)
            mask = torch.nn.Transformer.generate_square_subsequent_mask(
                SIZES[name][1][0]
            )
            self.register_buffer("mask", mask)

        def forward(self, tokens):
            x = self.words(tokens)
            for block in self.blocks:
                x = block(x, src_mask=self.mask, is_causal=True)
            return self.head(self.norm(x)).transpose(1, 2)

    return Causal()


class Torch:
    """PyTorch's own loop, with autocast and a fused optimizer."""

    def __init__(self, name, compiled):
        import torch

        self._batch = SIZES[name][0]
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
        self._model = torch_model(name).cuda()
        if name == "resnet50":
            self._model = self._model.to(memory_format=torch.channels_last)
        self._run = torch.compile(self._model) if compiled else self._model
        self._optimizer = torch.optim.SGD(
            self._model.parameters(), 0.01, 0.9, fused=True
        )

    def turn(self, x, y):
        import torch

        dtype = getattr(torch, FLAGS.dtype)
        for start in list(range(0, len(x), self._batch)) * FLAGS.passes:
            part = slice(start, start + self._batch)
            batch = x[part].cuda(non_blocking=True)
            label = y[part].cuda(non_blocking=True).long()
            self._optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype, enabled=dtype.itemsize == 2):
                output = self._run(batch)
                loss = torch.nn.functional.cross_entropy(output, label)
            loss.backward()
            self._optimizer.step()
        return float(loss)


def torch_contestants(name):
    """Yields names, and what makes objects with `turn`."""
    for compiled in (False, True):
        yield (
            f"pytorch{', compile' * compiled}",
            functools.partial(Torch, name, compiled),
        )


def measured(name):
    """Runs the contestants of one framework; returns their rates."""
    x, y = data(name)
    if FLAGS.only == "torch":
        import torch

        x, y = (torch.from_numpy(part) for part in (x, y))
        if name == "resnet50":
            # From [n, h, w, c] in memory to its channels_last view.
            x = x.permute(0, 3, 1, 2)
        x, y = x.pin_memory(), y.pin_memory()
        found = torch_contestants(name)
    else:
        import keras

        if FLAGS.dtype != "float32":
            keras.config.set_dtype_policy(f"mixed_{FLAGS.dtype}")
        found = tensorflow_contestants(name)
    contestants = {
        each: make()
        for each, make in found
        if re.search(FLAGS.contestants, each)
    }
    seconds = {each: [] for each in contestants}
    rows = FLAGS.passes * len(x)
    for turn in range(FLAGS.turns + 1):
        for each, contestant in contestants.items():
            began = time.perf_counter()
            loss = contestant.turn(x, y)
            spent = time.perf_counter() - began
            if turn:
                seconds[each].append(spent)
                print(f"{name} {each}: {rows / spent:.0f}", flush=True)
            else:
                print(f"{name} {each}: first {spent:.0f} s, {loss:.4f}")
                sys.stdout.flush()
    return {
        each: sorted(rows / spent for spent in turns)
        for each, turns in seconds.items()
    }


def main(_):
    os.makedirs(FLAGS.output_dir, exist_ok=True)
    path = os.path.join(FLAGS.output_dir, "gpu_speed.json")
    if FLAGS.only:
        rates = {name: measured(name) for name in FLAGS.models}
        with open(path.replace(".json", f"_{FLAGS.only}.json"), "w") as file:
            json.dump(rates, file)
        return
    found = {name: {} for name in FLAGS.models}
    frameworks = ["tensorflow"]
    if all(map(importlib.util.find_spec, ("torch", "torchvision"))):
        frameworks.append("torch")
    for framework in frameworks:
        for name in FLAGS.models:
            command = [sys.executable, *sys.argv, f"--only={framework}"]
            done = subprocess.run([*command, f"--models={name}"], check=False)
            part = path.replace(".json", f"_{framework}.json")
            if done.returncode or not os.path.exists(part):
                print(f"{name}, {framework}: no result")
                continue
            with open(part) as file:
                found[name] |= json.load(file)[name]
    with open(path, "w") as file:
        json.dump(found, file, indent=1)
    for name, rates in found.items():
        print(f"\n{name}, batch {SIZES[name][0]}, {FLAGS.dtype}: examples/s")
        for each, values in rates.items():
            low, middle, high = values[0], statistics.median(values), values[-1]
            print(f"  {each:28} {middle:9.0f}  ({low:.0f} - {high:.0f})")


if __name__ == "__main__":
    app.run(main)
