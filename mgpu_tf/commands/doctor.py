"""The command `mgpu-tf doctor`: checks of a machine and its cluster."""

from __future__ import annotations

import dataclasses
import json

from absl import flags

from mgpu_tf.commands.arguments import Call
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.studies import doctor
from mgpu_tf.studies.doctor.findings import ERROR, WARNING

USAGE = """mgpu-tf doctor [--flags]

Checks the versions, Keras's settings, processors, limits, folders, TF_CONFIG,
addresses, ports and GPUs of this machine. Of GPUs: whether TensorFlow has
kernels for them, the driver, and the links between them. Each finding has its
remedy.

With --all_reduce: sums a tensor over all devices, and prints the bandwidth and
what NCCL says of its ways. In a cluster, every task must run this command at
the same time.

Exits with status 1 if training cannot start or will fail.

Example:
  mgpu-tf doctor --checkpoint_dir=runs/a/checkpoints
  mgpu-tf launch --num_workers=2 -- mgpu-tf doctor --all_reduce
"""

FAILS = 1
_FOLDERS = ("checkpoint_dir", "output_dir", "data_dir", "log_dir")


def define(values: flags.FlagValues) -> None:
    """Defines the flags of the command."""
    flags.DEFINE_bool(
        "json", False, "Print the findings as JSON.", flag_values=values
    )
    for name in _FOLDERS:
        flags.DEFINE_string(
            name, None, "A folder that the run writes to.", flag_values=values
        )
    flags.DEFINE_string(
        "data",
        None,
        "A pattern of input files, such as 'data/*.tfrecord'.",
        flag_values=values,
    )
    flags.DEFINE_bool(
        "all_reduce",
        False,
        "Sum a tensor over all devices. In a cluster, every task must do it.",
        flag_values=values,
    )
    flags.DEFINE_float(
        "timeout_seconds",
        300.0,
        "Seconds that TensorFlow has to start, and to sum.",
        flag_values=values,
    )


def run(call: Call) -> int:
    """Prints a finding for each check; returns 1 if one is an error."""
    call.takes_flags_only()
    values = call.values
    if not 0 < values.timeout_seconds < 1e6:
        raise ConfigurationError(
            "timeout_seconds must be above 0. Received: "
            f"timeout_seconds={values.timeout_seconds}."
        )
    given = {name: values[name].value for name in _FOLDERS}
    request = doctor.Request(
        folders={name: path for name, path in given.items() if path},
        data=values.data,
        all_reduce=values.all_reduce,
        seconds=values.timeout_seconds,
    )
    findings = []
    for finding in doctor.examine(request):
        findings.append(finding)
        if not values.json:
            print(finding.line(), flush=True)
    errors = sum(finding.status == ERROR for finding in findings)
    warnings = sum(finding.status == WARNING for finding in findings)
    if values.json:
        print(json.dumps([dataclasses.asdict(f) for f in findings], indent=1))
    else:
        print(f"{errors} errors, {warnings} warnings")
    return FAILS if errors else 0
