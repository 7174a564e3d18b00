"""What a trace raises that came upon what is to be traced in another way.

Whoever raises it has noted how. The engine then traces once more: nothing has
run yet.
"""

from __future__ import annotations

from mgpu_tf.errors import ConfigurationError


class TraceAgain(ConfigurationError):
    """A step is to be traced once more, for what this trace has found."""


def refusal_within(error: BaseException | None) -> ConfigurationError | None:
    """Returns the refusal that led to an error; None where none did.

    AutoGraph and conversions to tensors make other errors of what is raised in
    a `tf.function` of the author's, or where a variable is read.
    """
    while error is not None and not isinstance(error, ConfigurationError):
        error = error.__cause__ or error.__context__
    return error
