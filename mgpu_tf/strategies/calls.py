"""Calls that all workers of a cluster make, and how they fail.

call = Call(number, "fit")
failure = described(worker, error)       # kind and message, for the others
raise error_of(*failure)
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

import tensorflow as tf

from mgpu_tf.errors import CheckpointError, ConfigurationError, WorkerError
from mgpu_tf.strategies.replicas.mirrored import SILENCE_SECONDS

# Of operations of several workers that are not the same one.
_CROSSED = re.compile(
    r"Collective instance \S+ expected|ollective.*(size|shape|type) mismatch"
)
_ABORTED = "ollective ops is aborted"
# Of tasks that the coordination service has heard nothing from.
_UNHEARD = re.compile(
    r"stopped sending heartbeats\):\s*((/job:\w+/replica:\d+/task:\d+\s*)+)"
)
_TASK = re.compile(r"/job:(\w+)/replica:\d+/task:(\d+)")


@dataclasses.dataclass
class Call:
    """A call of `together`; all workers make the same ones.

    Attributes:
        number: Which one of the process.
        name: What is called.
        rounds: How often the workers have met in it.
        sections: How many things it did in which others take part.
        agreed: Whether all workers raise what this one is about to.
        apart: Whether the workers are known to be in different places.
    """

    number: int
    name: str
    rounds: int = 0
    sections: int = 0
    agreed: bool = False
    apart: bool = False

    def key(self, *parts: object) -> str:
        """Returns the name of a message in this call."""
        return "/".join(map(str, ("mgpu_tf", self.number, *parts)))


def described(worker: int, error: Exception) -> tuple[str, str]:
    """Returns a failure as others get it: its kind, and its message."""
    if isinstance(error, ConfigurationError):
        return "configuration", str(error)
    if isinstance(error, WorkerError):
        return "worker", str(error)
    if isinstance(error, CheckpointError):
        return "checkpoint", str(error)
    return "worker", f"worker {worker}: {type(error).__name__}: {error}"


def error_of(kind: str, message: str) -> Exception:
    """Returns what a worker raises that has heard of a failure."""
    if kind == "configuration":
        return ConfigurationError(message)
    if kind == "checkpoint":
        return CheckpointError(message)
    return WorkerError(message)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Returns an error, and those that it came from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def mistake_behind(error: Exception) -> ConfigurationError | None:
    """Returns the mistake that Keras may have wrapped into its own error."""
    for each in _chain(error):
        if isinstance(each, ConfigurationError):
            return each
    return None


def comes_from(error: Exception, kind: type[Exception]) -> bool:
    """Returns whether an error, or one that it came from, is of a kind."""
    return any(isinstance(each, kind) for each in _chain(error))


def is_abort(error: Exception) -> bool:
    """Returns whether the collectives of this process have ended for good."""
    return any(
        isinstance(each, tf.errors.OpError) and _ABORTED in str(each)
        for each in _chain(error)
    )


def crossed(
    worker: int, name: str, error: Exception
) -> ConfigurationError | None:
    """Returns the mistake behind a collective that met another one.

    Args:
        worker: This one.
        name: The call that it is in.
        error: What it failed with.
    """
    if not any(_CROSSED.search(str(each)) for each in _chain(error)):
        return None
    return ConfigurationError(
        "All workers must run the same operations in the same order. "
        f"Received: others on worker {worker}, in {name}, than on another "
        "worker. Call evaluate, predict and fit of the trainer, not of the "
        "model, and on every worker, in callbacks too."
    )


def unheard(error: Exception) -> WorkerError | None:
    """Returns what an error says of tasks that were silent for too long."""
    for each in _chain(error):
        found = _UNHEARD.search(str(each).replace("\\n", "\n"))
        if found is not None:
            names = ", ".join(" ".join(n) for n in _TASK.findall(found[1]))
            return WorkerError(
                "All tasks must reach each other. Received: nothing from "
                f"{names} for {SILENCE_SECONDS:.0f} seconds. Look at its log "
                "and its network, and start all tasks again."
            )
    return None


def ended(message: str) -> str:
    """Returns what every call says after the cluster has ended."""
    return (
        "A cluster whose workers were parted by a failure cannot go on, since "
        "its collectives are ended. Received: another call after "
        f"{message.rstrip('.')}. Start all workers again."
    )
