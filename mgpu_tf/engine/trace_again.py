"""What a trace raises that came upon what is to be traced in another way.

Whoever raises it has noted how. The engine then traces once more: nothing has
run yet.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from mgpu_tf.errors import ConfigurationError

# What AutoGraph notes on an error that it raises again as another.
_WRAPPED = "ag_error_metadata"


class TraceAgain(ConfigurationError):
    """A step is to be traced once more, for what this trace has found."""


class Attempts:
    """Calls of a trace that were given up, and made in another way.

    Python has run that runs once on one device: it may have counted, or left
    something in an object. So the trace is not kept; another one, in which
    nothing is tried that was given up here, is what one device does.
    """

    def __init__(self) -> None:
        self._given_up = False

    def give_up(self) -> None:
        """Notes that a call was given up."""
        self._given_up = True

    @contextlib.contextmanager
    def left_behind(self) -> Iterator[None]:
        """Around a trace, outside of replicas.

        Raises:
            TraceAgain: A call was given up in it. Errors that follow from
                that are errors of this trace alone.
        """
        self._given_up = False
        try:
            yield
        except Exception as error:
            if self._given_up:
                raise TraceAgain from error
            raise
        if self._given_up:
            raise TraceAgain


class ReadRefused(ConfigurationError):
    """What a step lends to layers is read where that cannot be."""


def refusal_within(error: BaseException | None) -> ConfigurationError | None:
    """Returns the refusal that an error stands for; None where there is none.

    That is the error itself, or what another was made of: AutoGraph makes
    other errors of what is raised in a `tf.function` of the author's, and
    conversions to tensors of what is raised where a variable is read. An error
    of the author's that was raised while a refusal was handled stands for
    itself.
    """
    found = error
    while found is not None and not isinstance(found, ConfigurationError):
        found = found.__cause__ or found.__context__
    made = isinstance(found, TraceAgain | ReadRefused)
    made |= hasattr(found, _WRAPPED)
    return found if found is error or made else None
