"""A function of the user's by its name, such as `package.module:function`.

build_model = load_function("my_package.models:build", "model")
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any

from mgpu_tf.errors import ConfigurationError, unknown_name


def is_target(text: str) -> bool:
    """Returns whether a text names a function in a module."""
    return ":" in text


def check_target(text: str, what: str) -> None:
    """Refuses the name of a function whose package is nowhere, unimported.

    Args:
        text: `package.module:function`.
        what: The flag that the name came from.

    Raises:
        ConfigurationError: It has another form, or there is no such package.
    """
    package = _parts(text, what)[0].partition(".")[0]
    if importlib.util.find_spec(package) is None:
        raise _absent(text, what, f"No module named {package!r}")


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
    module_name, name = _parts(text, what)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise
        raise _absent(text, what, error) from None
    function = getattr(module, name, None)
    if not callable(function):
        names = [n for n in vars(module) if not n.startswith("_")]
        raise ConfigurationError(
            f"{what}: "
            + unknown_name(f"function in {module_name}", name, names)
        )
    return function


def _parts(text: str, what: str) -> tuple[str, str]:
    """Returns module and function; the current folder is then looked into."""
    module_name, _, name = text.partition(":")
    if not module_name or not name:
        raise ConfigurationError(
            f"{what} must be package.module:function. Received: {text!r}."
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return module_name, name


def _absent(text: str, what: str, why: object) -> ConfigurationError:
    return ConfigurationError(
        f"{what} must name a module that can be imported. Received: {text!r} "
        f"({why}). Run from the folder that holds it."
    )
