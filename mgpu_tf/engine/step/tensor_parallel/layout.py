"""The layouts that backbones of keras-hub publish."""

from __future__ import annotations

from typing import Any

import keras


def published_layout(model: keras.Model) -> dict[str, tuple[Any, ...]] | None:
    """Returns the layout that a backbone of keras-hub publishes, if it does.

    What it splits over data-parallel devices stays whole.

    Args:
        model: A model, the backbone or a task around it.
    """
    backbone = getattr(model, "backbone", model)
    publish = getattr(type(backbone), "get_layout_map", None)
    if publish is None:
        return None
    mesh = keras.distribution.DeviceMesh(
        (1, 1), ("batch", "model"), devices=["cpu:0"]
    )
    return {
        ".*" + pattern: tuple(
            axis if axis == "model" else None for axis in layout.axes
        )
        for pattern, layout in publish(mesh).items()
    }
