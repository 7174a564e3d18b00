"""The command `mgpu-tf report`: the page of a run, or of two side by side."""

from __future__ import annotations

import sys

from absl import flags

from mgpu_tf.commands.arguments import Call
from mgpu_tf.errors import ConfigurationError

USAGE = """mgpu-tf report FOLDER [FOLDER ...] [--output=FILE]

Writes report.html from the report.json of a run, into its folder: what ran
where, curves, throughput, where the time went, each worker, memory, restarts
and warnings. With several folders the page has the runs side by side. The page
needs no network and no other file.

Example:
  mgpu-tf train --model=cnn --output_dir=runs/cnn
  mgpu-tf report runs/cnn
  mgpu-tf report runs/cnn runs/resnet --output=compared.html
"""


def define(values: flags.FlagValues) -> None:
    """Defines the flags."""
    flags.DEFINE_string(
        "output",
        None,
        "The file. Default: report.html in the first folder.",
        flag_values=values,
    )


def run(call: Call) -> int:
    """Writes the page, and prints its path."""
    folders = [*call.rest, *(call.command or [])]
    if not folders:
        raise ConfigurationError(
            "report takes the output_dir of a run. Received: no folder. Write "
            "mgpu-tf report runs/a."
        )
    from mgpu_tf.reports import page

    path = page.write(*folders, path=call.values.output)
    print(f"report: {path}", file=sys.stderr)
    return 0
