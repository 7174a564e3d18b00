"""All rows; importing the modules adds them."""

from tests.conformance import (  # noqa: F401
    examples,
    layers,
    losses,
    metrics,
    optimizers,
    options,
    programs,
    structures,
)
from tests.conformance.harness import ROWS

__all__ = ["ROWS"]
