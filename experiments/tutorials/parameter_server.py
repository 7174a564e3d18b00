"""TensorFlow's parameter-server tutorial on Keras 3.

    mgpu-tf launch --num_workers=3 --num_ps=2 -- \
        python experiments/tutorials/parameter_server.py

Heroes in words, looked up on the workers, embedded and averaged: does the
list please? In the tutorial the loop over closures, the joins and the counts
are written by hand, in Keras 2; here `Trainer` has them, and the table of
embeddings is spread over the parameter servers. Hardware: any; on 2 CPU cores
about a minute. Expected: AUC above 0.99, accuracy above 0.95.

References:
    https://www.tensorflow.org/tutorials/distribute/parameter_server_training
"""

import numpy as np
from absl import app, logging

import mgpu_tf
from mgpu_tf.runtime import quiet_import

quiet_import.import_tensorflow()
import keras  # noqa: E402

HEROES = [
    *("avenger", "ironman", "batman", "hulk"),
    *("spiderman", "kingkong", "wonder_woman"),
]
LABELS = ["yes", "no"]


def examples(count, seed):
    """Lists of three heroes; those with a majority of the first four please."""
    generator = np.random.default_rng(seed)
    numbers = generator.integers(0, len(HEROES), size=(count, 3))
    words = np.array(HEROES)[numbers]
    labels = np.where((numbers < 4).sum(axis=1) >= 2, *LABELS)
    return words, labels


def build_model():
    words = keras.Input((3,), dtype="string")
    ids = keras.layers.StringLookup(vocabulary=HEROES, mask_token=None)(words)
    rows = mgpu_tf.layers.ShardedEmbedding(len(HEROES) + 1, 16)(ids)
    mean = keras.layers.GlobalAveragePooling1D()(rows)
    outputs = keras.layers.Dense(1, activation="sigmoid")(mean)
    model = keras.Model(words, outputs)
    model.compile(
        keras.optimizers.RMSprop(0.02),
        keras.losses.BinaryCrossentropy(),
        metrics=[keras.metrics.AUC(name="auc"), "accuracy"],
    )
    return model


def main(argv):
    del argv
    logging.set_verbosity(logging.WARNING)
    strategy = mgpu_tf.create_strategy("auto")
    label_of = keras.layers.StringLookup(vocabulary=LABELS, num_oov_indices=0)
    train, test = (
        (words, 1 - np.array(label_of(labels), "float32")[:, None])
        for words, labels in (examples(6400, seed=0), examples(1000, seed=1))
    )
    trainer = mgpu_tf.Trainer(build_model, strategy)
    trainer.fit(*train, batch_size=64, epochs=3, validation_data=test)
    scores = trainer.evaluate(*test, batch_size=64, return_dict=True)
    if mgpu_tf.is_chief(strategy):
        words, _ = examples(4, seed=2)
        print(f"test AUC {scores['auc']:.4f}, accuracy", end=" ")
        print(f"{scores['accuracy']:.4f}, steps {trainer.global_step}")
        for line, score in zip(words, trainer.predict(words), strict=True):
            print(f"{', '.join(line):40s} {float(score[0]):.2f}")


if __name__ == "__main__":
    app.run(main)
