"""Tasks of keras-hub, which preprocess raw data such as texts.

    preprocess = preprocess_of(model)        None for any other model
    arrays = arrays_of(["a text", "another"])
    source = PreprocessedSource(source, preprocess, "bert_text_classifier")

A task's own `fit` maps its `preprocess_samples` over global batches. This
module does the same before a batch is split for the replicas. Padding to the
longest text of a batch, or mixing its images, then has the result of one
device. keras-hub is never imported: a task is recognized by the name of its
class.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from mgpu_tf.data import structures
from mgpu_tf.data.sources.batches import Arrays, BatchSource, Source
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.strategies.replicas.topology import LocalReplicas

Preprocess = Callable[..., Any]

_WHOLE = LocalReplicas(0, 1, 1)

# Keras's errors show the message of a layer in bold, among other text.
_BOLD = re.compile(r"\x1b\[1m(.*?)\x1b\[0m", re.DOTALL)


def is_task(model: Any) -> bool:
    """Returns whether a model is one of keras-hub with a pipeline."""
    return any(
        base.__name__ == "PipelineModel"
        and base.__module__.partition(".")[0] == "keras_hub"
        for base in type(model).__mro__
    )


def preprocess_of(model: Any) -> Preprocess | None:
    """Returns the function by which a model preprocesses raw data.

    Args:
        model: Any model.

    Returns:
        A function of `x`, `y` and `sample_weight`; None for a model that does
        not preprocess, such as a task without a preprocessor.
    """
    if not is_task(model) or getattr(model, "preprocessor", model) is None:
        return None
    return model.preprocess_samples


def arrays_of(data: Any) -> Any:
    """Converts arrays by keras-hub's rule: a list is one array.

    Args:
        data: An array, a list of texts or numbers, or None; for several
            inputs, a tuple or dict of these.

    Returns:
        The same structure with tensors.

    Raises:
        ConfigurationError: A value cannot be converted to an array.
    """
    if isinstance(data, tuple):
        return tuple(map(arrays_of, data))
    if isinstance(data, dict):
        return {name: arrays_of(value) for name, value in data.items()}
    if data is None or isinstance(data, (tf.Tensor, tf.RaggedTensor)):
        return data
    if isinstance(data, (str, bytes)):
        raise ConfigurationError(
            "A task takes its texts in a list or an array. Received: the text "
            f"{data[:40]!r}. Pass [text]."
        )
    if not isinstance(data, list):
        if not hasattr(data, "__array__"):
            return data
        # A series of pandas too: texts have no column.
        data = np.asarray(data)
    try:
        with tf.device("CPU:0"):
            return tf.convert_to_tensor(data)
    except (TypeError, ValueError) as error:
        kind = getattr(data, "dtype", "list")
        raise ConfigurationError(
            "A list or array of a task must hold texts alone, or numbers of "
            f"one shape. Received: {kind} that TensorFlow does not take: "
            f"{error} Pass several inputs as a tuple."
        ) from None


def kept_order(shuffle: bool | str) -> bool:
    """Returns that the arrays of a task are not shuffled, as in its own `fit`.

    Args:
        shuffle: As for `fit`, where True is the default.

    Raises:
        ConfigurationError: `shuffle` is neither True nor False.
    """
    if shuffle not in (True, False):
        raise ConfigurationError(
            "A task keeps the order of its arrays, as its own fit does. "
            f"Received: shuffle={shuffle!r}. Shuffle them, or pass a "
            "tf.data.Dataset with shuffle(..., seed=1)."
        )
    return False


class PreprocessedSource(BatchSource):
    """The batches of another source, preprocessed by a task.

    Every worker preprocesses whole global batches and keeps its rows.

    Args:
        source: The raw batches.
        preprocess: From `preprocess_of`.
        name: The name of the task.

    Raises:
        ConfigurationError: The task cannot preprocess such batches.
    """

    portable = False

    def __init__(
        self, source: Source, preprocess: Preprocess, name: str
    ) -> None:
        self._source, self._name = source, name
        # Traced once, and not again in every pass.
        self._preprocess = tf.function(preprocess)
        self.steps, self.endless = source.steps, source.endless
        self.seekable = source.seekable
        self.totals_known = source.totals_known
        self.repeats = source.repeats
        self.epochs, self.row_order = source.epochs, source.row_order
        try:
            spec = self.batches(0).element_spec
        except Exception as error:  # A preprocessor may raise anything.
            raise ConfigurationError(
                f"The preprocessor of the task {name!r} must take the data. "
                f"Received: {source.example()}; it says: {_said(error)} Pass "
                "raw data as to the task's own fit, or set preprocessor=None "
                "in build_model for data that is preprocessed."
            ) from error
        structures.check_batched(spec)
        self._spec = structures.specs_of_elements(spec)

    def broken(self) -> str:
        """Returns that of the source."""
        return self._source.broken()

    def anew(self) -> Source:
        """Returns the source anew, preprocessed."""
        return PreprocessedSource(
            self._source.anew(), self._preprocess, self._name
        )

    @property
    def arrays(self) -> Arrays | None:
        """Returns that of the source."""
        return self._source.arrays

    def batches(self, index: Any) -> tf.data.Dataset:
        """Returns the batches of pass `index`, preprocessed."""
        return self.batches_from(index, 0)

    def batches_from(self, index: Any, start: int) -> tf.data.Dataset:
        """Returns the batches from `start` on; skips the others unprocessed."""
        if isinstance(self._source, BatchSource):
            raw = self._source.batches_from(index, start)
        else:
            passed = self._source.pass_from(index, _WHOLE, start)
            raw = passed.map(lambda data, local, total: data)
        return self._mapped(raw)

    def _mapped(self, raw: tf.data.Dataset) -> tf.data.Dataset:
        def preprocess(batch: Any) -> Any:
            return self._preprocess(*structures.unpacked(batch))

        return raw.map(
            structures.whole(raw.element_spec, preprocess),
            num_parallel_calls=tf.data.AUTOTUNE,
        )

    def shards(self, count: int) -> list[tf.data.Dataset]:
        """Returns the shards of the source, preprocessed."""
        return [self._mapped(shard) for shard in self._source.shards(count)]

    def example(self) -> Any:
        """Returns the spec of a preprocessed batch."""
        return self._spec

    @property
    def unrepeatable(self) -> str:
        """Returns that of the source."""
        return self._source.unrepeatable

    def length(self) -> str:
        """Returns that of the source."""
        return self._source.length()

    def fingerprint(self) -> str:
        """Returns that of the source."""
        return self._source.fingerprint()


def _said(error: Exception) -> str:
    """Returns the message of a preprocessor's error in one line."""
    bold = _BOLD.findall(str(error))
    lines = [li for li in str(error).splitlines() if li.strip()]
    said = " ".join(bold[-1:] or lines[-1:]).strip() or type(error).__name__
    said = " ".join(said.split())
    return said if said.endswith(".") else f"{said}."
