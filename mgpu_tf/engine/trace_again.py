"""What a trace raises that came upon what is to be traced in another way.

Whoever raises it has noted how. The engine then traces once more: nothing has
run yet.
"""

from __future__ import annotations

from mgpu_tf.errors import ConfigurationError


class TraceAgain(ConfigurationError):
    """A step is to be traced once more, for what this trace has found."""
