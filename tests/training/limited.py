"""Trains where the device has little memory; prints what became of it.

    python -m tests.training.limited LIMIT_MIB AUTO

LIMIT_MIB is what TensorFlow's allocator of the CPU may hand out; 0 is no
limit. AUTO is 1 for auto_micro_batch.
"""

import json
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
if int(sys.argv[1]):
    # Read when TensorFlow makes the allocator.
    os.environ["TF_MKL_ALLOC_MAX_BYTES"] = str(int(sys.argv[1]) << 20)

import keras
import numpy as np

import mgpu_tf

ROWS, WIDTH = 32_768, 1024


def build():
    inputs = keras.Input((64,))
    hidden = inputs
    for _ in range(4):
        hidden = keras.layers.Dense(WIDTH, activation="gelu")(hidden)
    model = keras.Model(inputs, keras.layers.Dense(10)(hidden))
    model.compile(
        keras.optimizers.SGD(0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def main():
    auto = sys.argv[2] == "1"
    generator = np.random.default_rng(0)
    x = generator.random((ROWS, 64), dtype="float32")
    y = generator.integers(0, 10, ROWS).astype("int32")
    trainer = mgpu_tf.Trainer(
        build, "one_device", seed=0, auto_micro_batch=auto
    )
    try:
        trainer.fit(x, y, batch_size=ROWS, epochs=2, verbose=0, shuffle=False)
    except mgpu_tf.OutOfMemoryError as error:
        print(json.dumps({"error": str(error)}))
        return
    weights = trainer.model.get_weights()
    flat = np.concatenate([weight.ravel() for weight in weights])
    print(
        json.dumps(
            {
                "parts": trainer.step_options.step_parts,
                "steps": trainer.global_step,
                "some": flat[:: len(flat) // 50].tolist(),
            }
        )
    )


if __name__ == "__main__":
    main()
