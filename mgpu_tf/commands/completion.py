"""The command `mgpu-tf completion`: commands and flags for bash and zsh."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from types import ModuleType

from absl import flags

from mgpu_tf.commands.arguments import Call

USAGE = """mgpu-tf completion

Prints what makes a shell complete commands and flags. For bash and zsh:

  eval "$(mgpu-tf completion)"

Example:
  mgpu-tf completion
"""


def define(values: flags.FlagValues) -> None:
    """Defines no flags."""
    del values


def run(call: Call) -> int:
    """Prints the script."""
    call.takes_flags_only()
    print(script(call.commands), end="")
    return 0


def script(commands: Mapping[str, ModuleType]) -> str:
    """Returns the script.

    Args:
        commands: The modules of the commands by name.
    """
    lines = [
        "# For bash and zsh.",
        "type compdef >/dev/null 2>&1 && autoload -U bashcompinit && "
        "bashcompinit",
        "_mgpu_tf() {",
        '  local words="" current="${COMP_WORDS[COMP_CWORD]}"',
        '  case "${COMP_CWORD}:${COMP_WORDS[1]}" in',
        f"    1:*) words={shlex.quote(' '.join([*commands, 'version']))} ;;",
    ]
    for name, command in commands.items():
        values = flags.FlagValues()
        command.define(values)
        known = []
        for flag in values:
            has_value = not values[flag].boolean
            known.append(f"--{flag}=" if has_value else f"--{flag}")
        lines.append(f"    *:{name}) words={shlex.quote(' '.join(known))} ;;")
    lines += [
        "  esac",
        '  COMPREPLY=($(compgen -W "$words" -- "$current"))',
        '  [[ "${COMPREPLY[0]}" == *= ]] && compopt -o nospace 2>/dev/null',
        "  return 0",
        "}",
        "complete -o default -F _mgpu_tf mgpu-tf",
        "",
    ]
    return "\n".join(lines)
