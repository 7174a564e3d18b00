"""The flags of a run, for the command line and for your own scripts.

    from absl import app
    import mgpu_tf

    mgpu_tf.flags.define()

    def main(argv):
        config = mgpu_tf.flags.config()      # a RunConfig

    app.run(main)

Each flag is a field of `RunConfig`, which holds its default and help. This
module does not import TensorFlow.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import TypeVar

from absl import flags

from mgpu_tf.config import RunConfig
from mgpu_tf.fields import check_effects, names_of

T = TypeVar("T")


def define(
    flag_values: flags.FlagValues = flags.FLAGS, kind: type = RunConfig
) -> None:
    """Defines a flag for each field of `RunConfig`.

    Args:
        flag_values: Where to define them; by default absl's `FLAGS`.
        kind: Another class whose fields are options, for some of the flags.

    Raises:
        absl.flags.DuplicateFlagError: A flag of the same name exists.
    """
    types = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        text, choices = field.metadata["help"], field.metadata["choices"]
        common = {"flag_values": flag_values}
        hint = types[field.name]
        if choices:
            flags.DEFINE_enum(
                field.name, field.default, list(choices), text, **common
            )
        elif hint is bool:
            flags.DEFINE_boolean(field.name, field.default, text, **common)
        elif int in (hint, *typing.get_args(hint)):
            flags.DEFINE_integer(field.name, field.default, text, **common)
        elif float in (hint, *typing.get_args(hint)):
            flags.DEFINE_float(field.name, field.default, text, **common)
        else:
            flags.DEFINE_string(field.name, field.default, text, **common)


def config(flag_values: flags.FlagValues = flags.FLAGS) -> RunConfig:
    """Returns the configuration that the parsed flags describe.

    Args:
        flag_values: Where the flags were defined.

    Returns:
        The configuration.

    Raises:
        ConfigurationError: A value is out of range, or two values exclude
            each other.
    """
    return options(RunConfig, flag_values)


def options(kind: type[T], flag_values: flags.FlagValues) -> T:
    """Returns options of one kind from parsed flags.

    Args:
        kind: The class.
        flag_values: Where the flags were defined.

    Raises:
        ConfigurationError: As for `config`.
    """
    names = names_of(kind)
    made = kind(**{name: flag_values[name].value for name in names})
    check_effects(made, [name for name in names if flag_values[name].present])
    return made
