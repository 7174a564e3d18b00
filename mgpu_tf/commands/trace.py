"""The command `mgpu-tf trace`: what is where in each stage of a run."""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile

from absl import flags

from mgpu_tf import flags as run_flags
from mgpu_tf.cluster.config import ClusterConfig
from mgpu_tf.commands.arguments import STARTED, Call, define_isolation
from mgpu_tf.config import RunConfig
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.folders import check_local, open_regular
from mgpu_tf.options import SaveOptions
from mgpu_tf.runtime import quiet_import

USAGE = """mgpu-tf trace [--flags]

Trains a model, and shows the pipeline: data loading, distribution to the
devices, training on each device, gradient aggregation, the epochs, and a
prediction. Shapes, values and devices are those of the run.

Takes the flags of mgpu-tf train. By default the model is trained on two parts
of the CPU, with batches of 100 rows of the data set tabular.

Example:
  mgpu-tf trace --html=trace.html
  mgpu-tf trace --strategy=fsdp --model=transformer --json=trace.json
  mgpu-tf trace --num_workers=2
  mgpu-tf trace --perfetto=step.json
  mgpu-tf trace --num_workers=2 --num_ps=1
"""

# In place of the defaults of `train`.
_DEFAULTS = {"dataset": "tabular", "global_batch_size": 100}
# Strategies that need several devices in this process.
_SEVERAL = ("mirrored", "central_storage", "fsdp", "model_parallel")
# Flags of `train` that a trace has no use for.
_WITHOUT = ("profile", "output_dir", "report", "log_with")


NEEDS = {"isolate": STARTED}


def define(values: flags.FlagValues) -> None:
    """Defines the flags of a run, and where a trace is written."""
    run_flags.define(values)
    define_isolation(values)
    for name, default in _DEFAULTS.items():
        values.set_default(name, default)
    for name, meaning in (
        ("json", "A file for the trace as JSON, with all digits."),
        ("html", "A file for the trace as a page for a browser."),
        (
            "perfetto",
            "A file for the times of all operations in five later steps, which "
            "ui.perfetto.dev and chrome://tracing open.",
        ),
    ):
        flags.DEFINE_string(name, None, meaning, flag_values=values)


def run(call: Call) -> int:
    """Traces in this process or in new processes; returns the status."""
    call.takes_flags_only()
    values = call.values
    config = _config(values)
    cluster = ClusterConfig.from_environment()
    asynchronous = config.num_ps > 0 or config.strategy == "parameter_server"
    if cluster is None and (config.num_workers > 1 or asynchronous):
        return call.as_local_cluster(
            config.num_workers,
            num_ps=max(1, config.num_ps) if asynchronous else 0,
        )
    quiet_import.import_tensorflow()
    from mgpu_tf.job import trace
    from mgpu_tf.reports import perfetto, terminal, trace_html

    with tempfile.TemporaryDirectory(prefix="mgpu_tf-") as folder:
        profiled = values.perfetto or (values.html and not asynchronous)
        found = trace(config, folder if profiled else None)
        is_chief = cluster is None or cluster.is_chief
        if is_chief and values.perfetto:
            perfetto.write(folder, values.perfetto)
            print(f"perfetto: {values.perfetto}", file=sys.stderr)
    if is_chief:
        terminal.show_trace(found)
        if values.json is not None:
            _write("json", values.json, found.json())
        if values.html is not None:
            _write("html", values.html, trace_html.page(found))
    return 0


def _config(values: flags.FlagValues) -> RunConfig:
    """Returns the run, on two devices where nothing else is said."""
    config = run_flags.config(values)
    for name in (*_WITHOUT, *(f.name for f in dataclasses.fields(SaveOptions))):
        if values[name].present:
            raise ConfigurationError(
                f"A trace does not save. Received: --{name}. Leave it out, or "
                "use mgpu-tf train."
            )
    for name in ("json", "html", "perfetto"):
        _check_path(name, values[name].value)
    if values.perfetto and (
        config.num_ps or config.strategy == "parameter_server"
    ):
        raise ConfigurationError(
            "perfetto goes with strategies whose replicas step together. "
            f"Received: --perfetto={values.perfetto} with parameter servers. "
            "Leave it out."
        )
    alone = config.num_workers == 1 and not config.num_ps
    if alone and ClusterConfig.from_environment() is None:
        if config.strategy == "auto":
            config = dataclasses.replace(config, strategy="mirrored")
        unsaid = config.devices is None and config.num_virtual_devices is None
        if config.strategy in _SEVERAL and unsaid:
            config = dataclasses.replace(config, num_virtual_devices=2)
    return config


def _check_path(name: str, path: str | None) -> None:
    """Refuses a file that cannot be written, before anything is trained."""
    if path is None:
        return
    check_local(name, path)
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder) or os.path.isdir(path) or not path:
        raise ConfigurationError(
            f"{name} must be a file in a folder that exists. Received: "
            f"{name}={path!r}."
        )


def _write(name: str, path: str, text: str) -> None:
    try:
        with open_regular(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigurationError(
            f"{name} must be a file that can be written. Received: "
            f"{name}={path!r} ({error.strerror})."
        ) from None
    print(f"{name}: {path}", file=sys.stderr)
