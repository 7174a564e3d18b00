"""What is killed: a small training with everything that a checkpoint holds.

    mgpu-tf launch --num_workers=2 -- python -m tests.soak.job FOLDER mirrored

It ends with a line "RESULT", the hash of the weights, and what was lost.
"""

import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

import mgpu_tf
from mgpu_tf.reports.report import weights_sha256
from tests.soak import injected
from tests.soak.harness import EPOCHS, SAVE_EVERY_STEPS

STRATEGIES = {
    "mirrored": lambda: mgpu_tf.create_mirrored_strategy(num_virtual_devices=2),
    "2_workers": mgpu_tf.create_multi_worker_mirrored_strategy,
    "2_workers_local": mgpu_tf.create_multi_worker_mirrored_strategy,
    "3_workers": mgpu_tf.create_multi_worker_mirrored_strategy,
    "3_machines": mgpu_tf.create_multi_worker_mirrored_strategy,
    "2_workers_fsdp": lambda: mgpu_tf.create_strategy("fsdp"),
    "fsdp": lambda: mgpu_tf.create_model_parallel_strategy(
        fsdp=2, num_virtual_devices=2
    ),
    "2_workers_tensor": lambda: mgpu_tf.create_model_parallel_strategy(
        tensor=2
    ),
    "data_2_tensor_2": lambda: mgpu_tf.create_model_parallel_strategy(
        data=2, tensor=2, num_virtual_devices=4
    ),
    "data_2_pipeline_2": lambda: mgpu_tf.create_model_parallel_strategy(
        data=2, pipeline=2, num_virtual_devices=4
    ),
    "parameter_server": mgpu_tf.create_parameter_server_strategy,
}


def build_model():
    model = keras.Sequential(
        [
            keras.layers.Dense(2048, activation="tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        keras.optimizers.Adam(
            0.001, global_clipnorm=1.0, gradient_accumulation_steps=2
        ),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def main(folder, strategy_name):
    mgpu_tf.enable_determinism()
    injected.install(os.path.dirname(folder), folder)
    local = {}
    if strategy_name.endswith("_local"):
        local = {
            "local_checkpoint_dir": os.path.join(
                os.path.dirname(folder), "local"
            ),
            "shared_every": 3,
        }
    strategy = STRATEGIES[strategy_name]()
    generator = np.random.default_rng(0)
    x = generator.normal(size=(750, 32)).astype("float32")
    y = generator.integers(0, 10, size=750)
    trainer = mgpu_tf.Trainer(build_model, strategy, steps_per_execution=3)
    trainer.fit(
        x,
        y,
        batch_size=24,
        epochs=EPOCHS,
        verbose=0,
        callbacks=[
            keras.callbacks.ReduceLROnPlateau("val_loss", patience=1),
            keras.callbacks.EarlyStopping(
                "loss", patience=9, restore_best_weights=True
            ),
        ],
        validation_data=(x[:50], y[:50]),
        checkpoint=mgpu_tf.SaveOptions(
            folder, save_every_steps=SAVE_EVERY_STEPS, **local
        ),
    )
    recovery = trainer.recovery
    print(
        "RESULT",
        weights_sha256(trainer.model.get_weights()),
        trainer.global_step,
        recovery.restarts,
        recovery.lost_steps,
        f"{recovery.lost_seconds:.1f}",
        flush=True,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
