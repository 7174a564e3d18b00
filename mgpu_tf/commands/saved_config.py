"""The flag --config: a run from a file or a function, in place of flags.

    mgpu-tf train --config=runs/a/report.json --epochs=10
    mgpu-tf train --config=experiments.mine:config

A file is a JSON object of the fields of `RunConfig`, or a `report.json`, which
has one. A function returns a `RunConfig` or a dict. Flags that are typed as
well come first.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from absl import flags

from mgpu_tf.config import RunConfig
from mgpu_tf.errors import ConfigurationError, unknown_name
from mgpu_tf.fields import names_of
from mgpu_tf.user_function import is_target, load_function


def define(values: flags.FlagValues) -> None:
    """Defines the flag."""
    flags.DEFINE_string(
        "config",
        None,
        "A JSON file with flags, such as the report.json of a run, or "
        "package.module:function. Flags on the command line come first.",
        flag_values=values,
    )


def apply(values: flags.FlagValues) -> None:
    """Gives the flags that were not typed the values of --config.

    Raises:
        ConfigurationError: There is no such file or function, or it has a
            field that no run has.
    """
    if values.config is None:
        return
    known = names_of(RunConfig)
    for name, value in _read(values.config).items():
        if name not in known:
            raise ConfigurationError(
                unknown_name(f"field of {values.config}", name, known)
            )
        if not values[name].present:
            values[name].value = value


def _read(source: str) -> dict[str, Any]:
    if is_target(source):
        made = load_function(source, "config")()
        if isinstance(made, RunConfig):
            return dataclasses.asdict(made)
    else:
        try:
            with open(source, encoding="utf-8") as file:
                made = json.load(file)
            if not made:
                raise ValueError("it is empty")
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                "config must be a JSON file or package.module:function. "
                f"Received: config={source!r} ({error}). Give the report.json "
                "of a run."
            ) from None
        if isinstance(made, dict):
            made = made.get("configuration", made)
    if not isinstance(made, dict):
        raise ConfigurationError(
            "config must have the fields of RunConfig by name. Received: "
            f"{type(made).__name__} from {source!r}. Return a RunConfig or a "
            "dict."
        )
    return made
