"""Trains in a process whose memory has a limit; prints what became of it.

    python -m tests.training.limited LIMIT_MIB AUTO

LIMIT_MIB is what the process may take beside what it has when the model is
built; 0 is no limit. AUTO is 1 for auto_micro_batch.
"""

import hashlib
import json
import os
import resource
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

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


def taken():
    with open("/proc/self/status") as file:
        lines = [line for line in file if line.startswith("VmData")]
    return int(lines[0].split()[1]) << 10


def main():
    limit, auto = int(sys.argv[1]), sys.argv[2] == "1"
    generator = np.random.default_rng(0)
    x = generator.random((ROWS, 64), dtype="float32")
    y = generator.integers(0, 10, ROWS).astype("int32")
    trainer = mgpu_tf.Trainer(
        build, "one_device", seed=0, auto_micro_batch=auto
    )
    # What the first small step makes is not what has no room.
    trainer.evaluate(x[:64], y[:64], batch_size=64, verbose=0)
    if limit:
        most = taken() + (limit << 20)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
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
                "sum": float(np.abs(flat).sum(dtype="float64")),
                "some": flat[:: len(flat) // 50].tolist(),
                "digest": hashlib.sha256(flat.tobytes()).hexdigest(),
            }
        )
    )


if __name__ == "__main__":
    main()
