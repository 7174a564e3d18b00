"""A training script of one's own: digits, a small network, any strategy.

    python experiments/train.py
    python experiments/train.py --strategy=mirrored --num_virtual_devices=4
    mgpu-tf launch --num_workers=2 -- python experiments/train.py

The same file runs by hand, under `mgpu-tf launch`, and on machines where
somebody else set TF_CONFIG. Hardware: any; on 2 CPU cores about 20 seconds.
Expected: test accuracy about 0.96 after 5 epochs, the same loss in each epoch
whatever the strategy.
"""

import keras
from absl import app, logging

import mgpu_tf
from mgpu_tf import datasets

mgpu_tf.flags.define()


def build_model():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        keras.optimizers.SGD(0.1, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def main(argv):
    del argv
    logging.set_verbosity(logging.WARNING)
    config = mgpu_tf.flags.config()
    strategy = mgpu_tf.create_strategy(
        config.strategy, num_virtual_devices=config.num_virtual_devices
    )
    splits = datasets.load(config.dataset, config.data_dir)
    trainer = mgpu_tf.Trainer(build_model, strategy, seed=config.seed)
    batch_size = config.global_batch_size
    trainer.fit(*splits.train, batch_size=batch_size, epochs=config.epochs)
    loss, accuracy = trainer.evaluate(*splits.test, batch_size=batch_size)
    if mgpu_tf.is_chief(strategy):
        print(f"test loss {loss:.6f}, test accuracy {accuracy:.4f}")


if __name__ == "__main__":
    app.run(main)
