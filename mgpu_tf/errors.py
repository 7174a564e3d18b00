"""The mistakes a user can make, each told in one line.

    ConfigurationError (ValueError)   an argument, flag or environment
    |                                 variable breaks a rule
    `-- ClusterError                  TF_CONFIG does not describe a cluster

Every message says the rule, what was received, and the remedy. The command
line prints it without a traceback and exits with status 2.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConfigurationError(ValueError):
    """An argument, flag or environment variable breaks a rule."""


class ClusterError(ConfigurationError):
    """`TF_CONFIG` does not describe a usable cluster."""


def unknown_name(kind: str, received: object, valid: Iterable[str]) -> str:
    """Returns the message for a name that is not among the valid ones.

    Example:
        >>> unknown_name("strategy", "miror", ["mirrored", "tpu"])
        "Unknown strategy. Received: 'miror'. Did you mean 'mirrored'? \
Valid: mirrored, tpu."

    Args:
        kind: What the name stands for, such as "strategy".
        received: The name as it came.
        valid: The names that would have been right.

    Returns:
        One line: the rule, what was received, the nearest valid name.
    """
    names = list(valid)
    near = difflib.get_close_matches(str(received), names, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return (
        f"Unknown {kind}. Received: {received!r}.{hint} "
        f"Valid: {', '.join(names)}."
    )
