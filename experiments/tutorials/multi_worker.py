"""Multi-worker training with Keras, on Keras 3.

    python experiments/tutorials/multi_worker.py            # one process
    mgpu-tf launch --num_workers=2 -- \
        python experiments/tutorials/multi_worker.py        # a cluster

The job of TensorFlow's tutorial "Multi-worker training with Keras": a small
convolutional network, a cluster described by TF_CONFIG, a model saved by the
chief, and training that goes on after an interruption. What changed:

- Keras 3's own `fit` refuses a MultiWorkerMirroredStrategy; `Trainer.fit`
  takes its place and the tutorial's `tf_keras` is not needed.
- The model is built by a function, which the trainer calls in the strategy's
  scope; there is no `with strategy.scope()` in the script.
- The batch size is the global one, and stays 64 whatever the number of
  workers, so that the result stays too. The tutorial multiplies it.
- No sharding policy: batches are cut so that each example is seen once.
- The chief alone writes. The tutorial has every worker save, the others into
  temporary folders that it then deletes.
- `checkpoint_dir` in place of BackupAndRestore: it has the optimizer, the
  generators and the place in the data as well. Start the script again after
  an interruption and it goes on with the next step.
- scikit-learn's digits in place of MNIST, so that nothing is downloaded.

Hardware: any. Expected: test accuracy above 0.95 after 5 epochs, the same
losses in one process and in two. On 2 quiet CPU cores about half a minute.
"""

import os

import keras
import tensorflow as tf
from absl import app, flags
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import mgpu_tf

GLOBAL_BATCH_SIZE = 64

_FOLDER = flags.DEFINE_string(
    "folder", None, "Gets checkpoints and the model; nothing by default."
)
_EPOCHS = flags.DEFINE_integer("epochs", 5, "Passes over the data.")


def datasets():
    """Returns datasets of global batches, with a shuffle that has a seed."""
    x, y = load_digits(return_X_y=True)
    x = x.reshape(-1, 8, 8, 1).astype("float32") / 16
    parts = train_test_split(x, y, test_size=0.2, random_state=0)
    train = tf.data.Dataset.from_tensor_slices((parts[0], parts[2]))
    test = tf.data.Dataset.from_tensor_slices((parts[1], parts[3]))
    train = train.shuffle(2000, seed=0).batch(GLOBAL_BATCH_SIZE)
    return train, test.batch(GLOBAL_BATCH_SIZE)


def build_model():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def main(argv):
    del argv
    strategy = mgpu_tf.create_strategy("auto")
    trainer = mgpu_tf.Trainer(build_model, strategy)
    train, test = datasets()
    folder = _FOLDER.value
    saving = None
    if folder:
        saving = mgpu_tf.SaveOptions(
            os.path.join(folder, "checkpoints"), save_every_steps=20
        )
    trainer.fit(train, epochs=_EPOCHS.value, checkpoint=saving)
    loss, accuracy = trainer.evaluate(test, verbose=0)
    if folder:
        trainer.save(os.path.join(folder, "model.keras"))
    if mgpu_tf.is_chief(strategy):
        print(f"test loss {loss:.6f}, test accuracy {accuracy:.4f}")


if __name__ == "__main__":
    app.run(main)
