"""What a trace raises that came upon what is to be traced in another way.

Whoever raises it has noted how. The engine then traces once more: nothing has
run yet.
"""

from __future__ import annotations

from mgpu_tf.errors import ConfigurationError


class TraceAgain(ConfigurationError):
    """A step is to be traced once more, for what this trace has found."""


def refusal_within(error: BaseException | None) -> ConfigurationError | None:
    """Returns a refusal of which an error was made; None where there is none.

    AutoGraph wraps what is raised in a `tf.function` of the author's.
    """
    while error is not None and not isinstance(error, ConfigurationError):
        error = error.__cause__ or error.__context__
    return error
