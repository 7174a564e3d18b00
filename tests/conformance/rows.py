"""All rows; importing the modules adds them."""

from tests.conformance import (  # noqa: F401
    draws,
    examples,
    layers,
    losses,
    metrics,
    optimizers,
    options,
    outside_attached,
    outside_contrast,
    outside_forces,
    outside_gans,
    outside_generative,
    outside_guides,
    outside_layers,
    outside_layouts,
    outside_lengths,
    outside_loops,
    outside_losses,
    outside_mechanics,
    outside_metrics,
    outside_pairs,
    outside_quantized,
    outside_regularizers,
    outside_retraced,
    outside_steps,
    outside_tables,
    outside_tasks,
    outside_text,
    outside_training,
    outside_vision,
    programs,
    structures,
)
from tests.conformance.harness import ROWS

__all__ = ["ROWS"]
