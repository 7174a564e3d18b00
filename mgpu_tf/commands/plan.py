"""The command `mgpu-tf plan`: memory, hours and price of a training run."""

from __future__ import annotations

import json
import math
import os

from absl import flags

from mgpu_tf import planner
from mgpu_tf.commands import planned_model
from mgpu_tf.commands.arguments import Call
from mgpu_tf.errors import ConfigurationError, check_integer, is_integer
from mgpu_tf.mesh import MICRO_BATCHES, bubble
from mgpu_tf.names import OPTIMIZERS, SHARDS
from mgpu_tf.reports.scaling import MEANING, ScalingTable, aligned

USAGE = """mgpu-tf plan [--flags]

Estimates what a training run will take.

With --model: the layouts of the devices, each with the memory of a device, the
speed and what limits it, the best first. Neither the devices nor the memory of
the model have to be here.

With --num_parameters: the memory that each device needs, without activations.

With --scaling, a file of mgpu-tf benchmark: the hours and the price for each
number of devices in the file. The benchmark does not wait for data, so add the
time of waiting for data.

Example:
  mgpu-tf plan --model=resnet50 --global_batch_size=512 --devices=8 --nodes=4 \\
    --device=a100-40gb --interconnect=25gbe
  mgpu-tf plan --model=my_package.models:build --global_batch_size=64
  mgpu-tf plan --num_parameters=1.5G --optimizer=adam --device_memory_gib=16
  mgpu-tf plan --num_parameters=1.5G --fsdp_parallel=4
  mgpu-tf plan --num_parameters=1.5G --tensor_parallel=4
  mgpu-tf plan --num_parameters=1.5G --pipeline_parallel=4 --micro_batches=16
  mgpu-tf plan --scaling=runs/scaling/scaling.json --examples=1.28M --epochs=90
"""

_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9}
_MOST = 1e15

NEEDS = {
    "optimizer": ("num_parameters", "model"),
    "device_memory_gib": ("num_parameters", "model"),
    **dict.fromkeys(
        ("fsdp_parallel", "tensor_parallel", "shard", "pipeline_parallel"),
        ("num_parameters",),
    ),
    "micro_batches": ("pipeline_parallel",),
    "examples": ("scaling",),
    "epochs": ("scaling",),
    "price": ("scaling", "model"),
    **dict.fromkeys(planned_model.FLAGS, ("model",)),
}


def define(values: flags.FlagValues) -> None:
    """Defines the flags of the command."""
    text, number, real = (
        flags.DEFINE_string,
        flags.DEFINE_integer,
        flags.DEFINE_float,
    )
    for define_flag, name, default, meaning in (
        (
            text,
            "num_parameters",
            None,
            "Number of trainable parameters, such as 25.6M or 1.5G.",
        ),
        (
            text,
            "optimizer",
            "adam",
            f"The optimizer: {', '.join(OPTIMIZERS)}.",
        ),
        (real, "device_memory_gib", None, "Memory of a device, in GiB."),
        (
            number,
            "fsdp_parallel",
            1,
            "Number of devices that the state of the model is split over.",
        ),
        (
            number,
            "tensor_parallel",
            1,
            "Number of devices that compute layers in parts. All weights are "
            "counted as split.",
        ),
        (
            text,
            "shard",
            "weights",
            f"What is split: {', '.join(SHARDS)}.",
        ),
        (
            number,
            "pipeline_parallel",
            1,
            "Number of stages that the layers are cut into.",
        ),
        (
            number,
            "micro_batches",
            None,
            "Number of parts that the rows of a replica are cut into. "
            f"Default: {MICRO_BATCHES} for each stage.",
        ),
        (text, "scaling", None, "A scaling.json of mgpu-tf benchmark."),
        (
            text,
            "examples",
            None,
            "Number of examples in an epoch, such as 50000 or 1.28M.",
        ),
        (number, "epochs", 1, "Number of epochs."),
        (real, "price", None, "Price of one device for one hour."),
    ):
        define_flag(name, default, meaning, flag_values=values)
    planned_model.define(values)


def run(call: Call) -> int:
    """Runs the command with parsed flags.

    Returns:
        The exit status.

    Raises:
        ConfigurationError: A flag is wrong.
    """
    call.takes_flags_only()
    values = call.values
    if not any((values.model, values.num_parameters, values.scaling)):
        raise ConfigurationError(
            "plan needs a model, its size, or what was measured. Received: "
            "none of them. Write --model=resnet50 --global_batch_size=64, "
            "--num_parameters=25.6M, or --scaling=FILE with --examples=N."
        )
    if values.model is not None:
        for name in ("num_parameters", "scaling"):
            if values[name].value is not None:
                raise ConfigurationError(
                    f"Give --model or --{name}, not both. Received: --model "
                    f"beside --{name}={values[name].value}. Leave one out: a "
                    "model has its own parameters and its own speed."
                )
        return _model(values)
    parts = []
    if values.num_parameters is not None:
        parts.append(_memory(values))
    if values.scaling is not None:
        parts.append(_costs(values))
    print("\n\n".join(parts))
    return 0


def _model(values: flags.FlagValues) -> int:
    """Plans a model; prints a table or JSON, and writes the page."""
    from mgpu_tf.planner.choice import page

    found = planned_model.plan_of(values)
    if values.html is not None:
        folder = os.path.dirname(os.path.abspath(values.html))
        try:
            os.makedirs(folder, exist_ok=True)
            with open(values.html, "w", encoding="utf-8") as file:
                file.write(page.page(found))
        except OSError as error:
            raise ConfigurationError(
                "html must be a file that can be written. Received: "
                f"html={values.html!r} ({error.strerror})."
            ) from None
    if values.json:
        print(json.dumps(found.to_dict(), indent=2))
    else:
        print(page.text(found))
    return 0 if found.best.fits else 1


def _memory(values: flags.FlagValues) -> str:
    memory = planner.StateMemory(
        _count("num_parameters", values.num_parameters),
        values.optimizer,
        values.fsdp_parallel,
        values.shard,
        tensor=values.tensor_parallel,
        pipeline=values.pipeline_parallel,
    )
    room = values.device_memory_gib
    if room is not None and not 0 < room < _MOST:
        raise ConfigurationError(
            "device_memory_gib must be a number above 0. Received: "
            f"device_memory_gib={room}."
        )
    text = memory.text(None if room is None else int(room * (1 << 30)))
    micro = values.micro_batches
    if values.pipeline_parallel == 1:
        return text
    if micro is None:
        micro = MICRO_BATCHES * values.pipeline_parallel
    check_integer("micro_batches", micro, 1)
    part = bubble(values.pipeline_parallel, micro)
    return (
        f"{text}\neach stage is without work for {part:.1%} of a step of "
        f"{micro} micro-batches"
    )


def _costs(values: flags.FlagValues) -> str:
    if values.examples is None:
        raise ConfigurationError(
            "Hours need the examples of an epoch. Received: --scaling without "
            "--examples. Write --examples=50000."
        )
    if values.price is not None and not 0 <= values.price < _MOST:
        raise ConfigurationError(
            "price must be a number of 0 or more. Received: "
            f"price={values.price}."
        )
    if not 1 <= values.epochs < _MOST:
        raise ConfigurationError(
            f"epochs must be from 1 to {_MOST:.0g}. Received: "
            f"epochs={values.epochs}."
        )
    examples = _count("examples", values.examples)
    table = _read(values.scaling)
    head = [
        "devices",
        "batch",
        "examples/s",
        "efficiency",
        "hours",
        "device hours",
    ]
    rows = [head if values.price is None else [*head, "price"]]
    hours = planner.hours(table, examples, values.epochs)
    for point, time in zip(table.points, hours, strict=True):
        row = [
            str(point.devices),
            str(point.global_batch_size),
            f"{point.median:,.0f}",
            f"{table.efficiency(point):.0%}",
            f"{time:,.2f}",
            f"{time * point.devices:,.2f}",
        ]
        if values.price is not None:
            row.append(f"{time * point.devices * values.price:,.2f}")
        rows.append(row)
    title = (
        f"{table.model}, {table.scaling} scaling: {values.epochs} epochs of "
        f"{examples:,} examples"
    )
    return "\n".join([title, *aligned(rows)])


def _read(path: str) -> ScalingTable:
    try:
        table = ScalingTable.read(path)
        _check(table)
    except (
        *(OSError, ValueError, LookupError, TypeError, AttributeError),
        RecursionError,
    ) as error:
        raise ConfigurationError(
            "scaling must be a file that mgpu-tf benchmark --output_dir "
            f"wrote. Received: scaling={path!r} ({type(error).__name__})."
        ) from None
    return table


def _check(table: ScalingTable) -> None:
    """Raises ValueError or TypeError if no benchmark can have written it."""
    sound = bool(table.points) and table.kind in MEANING
    for point in table.points:
        rates = point.examples_per_second
        sound &= is_integer(point.devices) and point.devices > 0
        sound &= bool(rates) and all(0 < r < math.inf for r in rates)
    if not sound:
        raise ValueError(table)


def _count(name: str, text: str) -> int:
    """Parses a number such as `25.6M`."""
    text = text.strip().upper()
    digits = text.rstrip("".join(_UNITS))
    unit = text[len(digits) :]
    try:
        value = float(digits) * _UNITS[unit]
    except (ValueError, KeyError):
        value = 0.0
    if not 1 <= value < _MOST:
        raise ConfigurationError(
            f"{name} must be a number of 1 or more, with K, M, G or B if you "
            f"like. Received: {name}={text!r}."
        )
    return round(value)
