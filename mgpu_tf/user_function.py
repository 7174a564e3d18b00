"""A function of the user's by its name, such as `package.module:function`.

build_model = load_function("my_package.models:build", "model")
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from mgpu_tf.errors import ConfigurationError, unknown_name


def is_target(text: str) -> bool:
    """Returns whether a text names a function in a module."""
    return ":" in text


def load_function(text: str, what: str) -> Callable[..., Any]:
    """Imports a module, from the current folder too, and takes a function.

    Args:
        text: `package.module:function`.
        what: The flag that the name came from.

    Returns:
        The function.

    Raises:
        ConfigurationError: There is no such module or function.
    """
    module_name, _, name = text.partition(":")
    if not module_name or not name:
        raise ConfigurationError(
            f"{what} must be package.module:function. Received: {text!r}."
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise
        raise ConfigurationError(
            f"{what} must name a module that can be imported. Received: "
            f"{text!r} ({error}). Run from the folder that holds it."
        ) from None
    function = getattr(module, name, None)
    if not callable(function):
        names = [n for n in vars(module) if not n.startswith("_")]
        raise ConfigurationError(
            f"{what}: "
            + unknown_name(f"function in {module_name}", name, names)
        )
    return function
