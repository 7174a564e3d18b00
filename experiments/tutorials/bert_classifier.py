"""A small BERT that classifies sentences, on Keras 3.

    python experiments/tutorials/bert_classifier.py --replicas=2
    mgpu-tf launch --num_workers=2 -- \
        python experiments/tutorials/bert_classifier.py

The job of TensorFlow's "Classify text with BERT", with a small encoder made
of Keras's layers and trained from nothing: text is split into words in the
model, words and places are embedded, padding is masked, the first place's
vector is classified, and AdamW warms up and decays. What changed: the model
is made in `build_model`, `fit` is the trainer's, and the sentences are
generated, so that nothing is downloaded.

Hardware: any; on 2 quiet CPU cores about a minute. Expected: test accuracy
above 0.95 after 4 epochs. Each replica draws dropout masks of its own; with
--dropout=0 the weights are the same whatever the number of replicas.

References:
    https://www.tensorflow.org/text/tutorials/classify_text_with_bert
"""

import argparse

import keras
import numpy as np
from keras import layers, ops

import mgpu_tf

LENGTH = 10
WIDTH = 16
BATCH_SIZE = 32
FILLERS = [
    *("the", "film", "was", "a", "story", "of", "people"),
    *("in", "some", "town", "with", "music"),
]
GOOD = ["great", "lovely", "moving", "brilliant"]
BAD = ["dull", "awful", "boring", "clumsy"]


def reviews(count, seed):
    """Returns texts and whether they praise; `not` turns a word around."""
    generator = np.random.default_rng(seed)
    texts, labels = [], []
    for _ in range(count):
        label, turned = generator.integers(0, 2, 2)
        words = list(generator.choice(FILLERS, generator.integers(2, 7)))
        judged = generator.choice(GOOD if label != turned else BAD)
        place = generator.integers(0, len(words) + 1)
        words[place:place] = ["not", judged] if turned else [judged]
        texts.append(" ".join(["start", *words]))
        labels.append(label)
    return np.array(texts, dtype=object), np.array(labels)


class Embeddings(layers.Layer):
    """Words and their places, added up."""

    def __init__(self, vocabulary_size, **options):
        super().__init__(**options)
        self.words = layers.Embedding(vocabulary_size, WIDTH, mask_zero=True)
        self.places = layers.Embedding(LENGTH, WIDTH)
        self.norm = layers.LayerNormalization(epsilon=1e-6)

    def call(self, ids):
        return self.norm(self.words(ids) + self.places(ops.arange(LENGTH)))

    def compute_mask(self, ids, mask=None):
        return self.words.compute_mask(ids)


class EncoderBlock(layers.Layer):
    """Attention and a network for each word, each added to its input."""

    def __init__(self, dropout, **options):
        super().__init__(**options)
        self.attention = layers.MultiHeadAttention(2, WIDTH // 2)
        self.wide = layers.Dense(2 * WIDTH, activation="gelu")
        self.narrow = layers.Dense(WIDTH)
        self.first = layers.LayerNormalization(epsilon=1e-6)
        self.second = layers.LayerNormalization(epsilon=1e-6)
        self.dropout = layers.Dropout(dropout)
        self.supports_masking = True

    def call(self, x, training=None):
        attended = self.attention(x, x, training=training)
        x = self.first(x + self.dropout(attended, training=training))
        return self.second(x + self.narrow(self.wide(x)))


def build_model(dropout=0.1, steps=400):
    vectorize = layers.TextVectorization(output_sequence_length=LENGTH)
    vectorize.adapt(np.array([" ".join(["start not", *FILLERS, *GOOD, *BAD])]))
    inputs = keras.Input((), dtype="string")
    x = Embeddings(vectorize.vocabulary_size())(vectorize(inputs))
    for _ in range(2):
        x = EncoderBlock(dropout)(x)
    x = layers.Dropout(dropout)(x[:, 0])
    outputs = layers.Dense(1)(layers.Dense(WIDTH, activation="tanh")(x))
    model = keras.Model(inputs, outputs)
    rate = keras.optimizers.schedules.CosineDecay(
        0.0, steps, warmup_target=0.005, warmup_steps=max(steps // 10, 1)
    )
    model.compile(
        keras.optimizers.AdamW(rate, weight_decay=0.01, global_clipnorm=1.0),
        keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[keras.metrics.BinaryAccuracy(threshold=0.0)],
    )
    return model


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, help="parts of the CPU")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.1)
    arguments = parser.parse_args()
    strategy = mgpu_tf.create_strategy(
        "auto", num_virtual_devices=arguments.replicas
    )
    trainer = mgpu_tf.Trainer(lambda: build_model(arguments.dropout), strategy)
    x, y = reviews(3200, seed=0)
    trainer.fit(x, y, batch_size=BATCH_SIZE, epochs=arguments.epochs)
    loss, accuracy = trainer.evaluate(*reviews(800, seed=1), verbose=0)
    if mgpu_tf.is_chief(strategy):
        print(f"test loss {loss:.4f}, test accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
