"""Tasks of keras-hub, tiny and random, on raw text.

A job is a function from a strategy and a folder to what it observed: the
history, weights, slots of the optimizer, an evaluation and predictions.
Without a strategy the task's own `fit` trains, on one device. All in float64.
`keras_hub` takes seconds to import, in each process that collects tests.
"""

import contextlib

import keras
import numpy as np
import tensorflow as tf

import mgpu_tf
from tests.parity import cases

WORDS = [
    *("the", "a", "film", "story", "was", "not"),
    *("great", "lovely", "dull", "boring", "in", "town"),
]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LENGTH = 8
EXAMPLES = 23
BATCH = 8
EPOCHS = 2


def texts(seed=0):
    """Texts of one to nine words, so that some are cut."""
    generator = np.random.default_rng(seed)
    return [
        " ".join(generator.choice(WORDS, generator.integers(1, 10)))
        for _ in range(EXAMPLES)
    ]


def labels(seed=0):
    return np.random.default_rng(seed + 10).integers(0, 3, EXAMPLES)


def backbone(words):
    import keras_hub

    return keras_hub.models.BertBackbone(
        vocabulary_size=words,
        num_layers=1,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=12,
        max_sequence_length=LENGTH,
        dropout=0.0,
    )


def preprocessor():
    import keras_hub

    return keras_hub.models.BertTextClassifierPreprocessor(
        keras_hub.models.BertTokenizer(vocabulary=[*SPECIAL, *WORDS]),
        sequence_length=LENGTH,
    )


def classifier(preprocessed=False):
    import keras_hub

    task = keras_hub.models.BertTextClassifier(
        backbone(len(SPECIAL) + len(WORDS)),
        num_classes=3,
        preprocessor=None if preprocessed else preprocessor(),
        dropout=0.0,
    )
    compile_classifier(task, keras.optimizers.Adam(0.01, global_clipnorm=1.0))
    return task


def compile_classifier(task, optimizer):
    task.compile(
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )


def low_rank():
    """The backbone is frozen, but for what LoRA adds to its attention."""
    task = classifier()
    task.backbone.enable_lora(2)
    # Keras clips no gradients of several types by their common norm.
    compile_classifier(task, keras.optimizers.Adam(0.01))
    return task


class PaddedToLongest(keras.layers.Layer):
    """Words to the length of the longest text of a batch; sees all of it."""

    def __init__(self):
        import keras_hub

        super().__init__()
        self.tokenizer = keras_hub.models.BertTokenizer(
            vocabulary=[*SPECIAL, *WORDS]
        )

    def call(self, x):
        ids = self.tokenizer(x).to_tensor(self.tokenizer.pad_token_id)
        longest = tf.shape(ids)[1] * tf.ones_like(ids)
        return {
            "token_ids": ids[:, :LENGTH],
            # What would be another number for the rows of one replica.
            "segment_ids": longest[:, :LENGTH] % 2,
            "padding_mask": ids[:, :LENGTH] != self.tokenizer.pad_token_id,
        }


def padded():
    task = classifier(preprocessed=True)
    task.preprocessor = PaddedToLongest()
    return task


def language_model():
    import keras_hub

    vocabulary = {"<|endoftext|>": 0}
    merges = ["t h", "th e", "Ġ th", "i l", "f il", "fil m"]
    letters = [*"Ġabcdefghijklmnopqrstuvwxyz"]
    for word in [*letters, *(merge.replace(" ", "") for merge in merges)]:
        vocabulary[word] = len(vocabulary)
    task = keras_hub.models.GPT2CausalLM(
        keras_hub.models.GPT2Backbone(
            vocabulary_size=len(vocabulary),
            num_layers=1,
            num_heads=2,
            hidden_dim=8,
            intermediate_dim=12,
            max_sequence_length=LENGTH,
            dropout=0.0,
        ),
        preprocessor=keras_hub.models.GPT2CausalLMPreprocessor(
            keras_hub.models.GPT2Tokenizer(vocabulary, merges),
            sequence_length=LENGTH,
        ),
    )
    task.compile(
        keras.optimizers.Adam(0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=["accuracy"],
    )
    return task


def batches(*data):
    return tf.data.Dataset.from_tensor_slices(data).batch(BATCH)


# How a task is made, its training data, and what it predicts for.
PROGRAMS = {
    "lists": lambda: (
        classifier,
        {
            "x": texts(),
            "y": labels().tolist(),
            "validation_data": (texts(1), labels(1)),
        },
        texts(1),
    ),
    "pairs": lambda: (
        classifier,
        {
            "x": (np.array(texts(0)), np.array(texts(1), object)),
            "y": labels(),
            "sample_weight": np.linspace(0.5, 2.0, EXAMPLES),
        },
        (np.array(texts(2)), np.array(texts(3))),
    ),
    "dataset": lambda: (
        classifier,
        {
            "x": batches(texts(), labels()),
            "validation_data": batches(texts(1), labels(1)),
        },
        batches(texts(1)).map(lambda text: text),
    ),
    "padded": lambda: (
        padded,
        {
            "x": np.array(texts()),
            "y": labels(),
            "validation_split": 0.3,
            "class_weight": {0: 0.5, 2: 3.0},
        },
        tf.constant(texts(1)),
    ),
    "low_rank": lambda: (
        low_rank,
        {"x": texts(), "y": labels()},
        texts(1),
    ),
    "language_model": lambda: (
        language_model,
        {"x": texts(), "validation_data": (texts(1),)},
        texts(1),
    ),
}


@contextlib.contextmanager
def float64():
    cases.set_floatx("float64")
    try:
        yield
    finally:
        cases.set_floatx("float32")


def observe(name, strategy):
    """Trains, evaluates and predicts with one of the programs."""
    with float64():
        return _observe(name, strategy)


def _observe(name, strategy):
    build, data, new = PROGRAMS[name]()
    options = {"epochs": EPOCHS, "verbose": 0}
    size = {}
    if not isinstance(data["x"], tf.data.Dataset):
        size = {"batch_size": BATCH}
    if strategy is None:
        keras.utils.set_random_seed(0)
        with tf.device("CPU:0"):
            runner = model = build()
            before = values(model.variables)
            # Its data is never shuffled; it warns of the default.
            history = model.fit(**data, **options, **size, shuffle=False)
    else:
        runner = mgpu_tf.Trainer(build, strategy)
        model = runner.model
        before = values(model.variables)
        history = runner.fit(**data, **options, **size)
    known = {k: data[k] for k in ("x", "y", "sample_weight") if k in data}
    frozen = [v.path for v in model.non_trainable_variables]
    after = values(model.variables)
    return {
        "history": {
            name: [float(value) for value in found]
            for name, found in history.history.items()
        },
        "before": before,
        "weights": after,
        "trainable": [v.path not in frozen for v in model.variables],
        "slots": values(model.optimizer.variables),
        "evaluation": runner.evaluate(
            **known, **size, verbose=0, return_dict=True
        ),
        "predictions": np.asarray(
            runner.predict(new, **size, verbose=0)
        ).tolist(),
    }


def values(variables):
    return [np.asarray(v.numpy()).tolist() for v in variables]


JOBS = {
    name: lambda strategy, folder, name=name: observe(name, strategy)
    for name in PROGRAMS
}
