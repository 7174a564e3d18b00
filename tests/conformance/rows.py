"""All rows; importing the modules adds them."""

from tests.conformance import (  # noqa: F401
    examples,
    layers,
    losses,
    metrics,
    optimizers,
    options,
    outside_losses,
    outside_pairs,
    outside_steps,
    programs,
    structures,
)
from tests.conformance.harness import ROWS

__all__ = ["ROWS"]
