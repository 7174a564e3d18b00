"""How steps are made, beside what the model's `compile` says.

StepOptions(gradient_dtype="bfloat16", embedding_gradients="summed")
"""

from __future__ import annotations

import dataclasses

from mgpu_tf.errors import ConfigurationError, unknown_name
from mgpu_tf.names import EMBEDDING_GRADIENTS, GRADIENT_DTYPES


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """How steps are made; handed from the trainer to the engine as it is.

    Attributes:
        gradient_dtype: "bfloat16" or "float16" sends gradients between
            replicas with half the bytes; None as they are.
        embedding_gradients: "keras" hands the optimizer one row for each
            time that an embedding was looked up, as Keras does; "summed"
            adds up the rows of one index first.

    Raises:
        ConfigurationError: A value is none of these.
    """

    gradient_dtype: str | None = None
    embedding_gradients: str = "keras"

    def __post_init__(self) -> None:
        for name, value, known in (
            ("gradient_dtype", self.gradient_dtype, (None, *GRADIENT_DTYPES)),
            (
                "embedding_gradients",
                self.embedding_gradients,
                EMBEDDING_GRADIENTS,
            ),
        ):
            if value not in known:
                names = [each for each in known if each is not None]
                raise ConfigurationError(unknown_name(name, value, names))

    @property
    def sums_rows(self) -> bool:
        """Whether the rows of one index are added up."""
        return self.embedding_gradients == "summed"
