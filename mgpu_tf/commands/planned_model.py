"""The model and the machines that `mgpu-tf plan --model` names."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from absl import flags

from mgpu_tf import planner
from mgpu_tf.errors import ConfigurationError, check_integer, unknown_name
from mgpu_tf.names import APPLICATIONS, MODELS
from mgpu_tf.planner import devices as devices_lib
from mgpu_tf.planner.choice.plans import Plan
from mgpu_tf.planner.machine import calibration
from mgpu_tf.planner.speed.step_time import Machines
from mgpu_tf.user_function import is_target, load_function

if TYPE_CHECKING:
    import keras

HERE = "here"
PRECISIONS = ("float32", "mixed_bfloat16", "mixed_float16")
_MOST = 1e15

# They go with --model.
FLAGS = (
    "global_batch_size",
    "devices",
    "nodes",
    "device",
    "interconnect",
    "input_shape",
    "num_classes",
    "precision",
    "examples_per_second",
    "all_devices",
    "calibration",
    "json",
    "html",
)


def define(values: flags.FlagValues) -> None:
    """Defines the flags that go with --model."""
    text, number = flags.DEFINE_string, flags.DEFINE_integer
    names = ", ".join([HERE, *devices_lib.DEVICES])
    for define_flag, name, default, meaning in (
        (
            text,
            "model",
            None,
            "The model: a name of keras.applications in any case, one of "
            f"{', '.join(MODELS)}, or package.module:function of a function "
            "that returns a compiled model.",
        ),
        (number, "global_batch_size", 64, "Examples in an update."),
        (number, "devices", None, "Devices of each machine. Default: 1."),
        (number, "nodes", 1, "Machines."),
        (
            text,
            "device",
            HERE,
            f"What a device is: {names}. here: as mgpu-tf calibrate has "
            "measured, or a CPU.",
        ),
        (
            text,
            "interconnect",
            None,
            "The link of each machine to the others, such as 25gbe or "
            "100mbit, or edr, hdr, ndr. Default: as calibrated, or 25gbe.",
        ),
        (
            text,
            "input_shape",
            None,
            "The shape of an example for a named model, such as 224x224x3.",
        ),
        (number, "num_classes", 1000, "Classes of a named model."),
        (
            text,
            "precision",
            "float32",
            f"The policy of the layers: {', '.join(PRECISIONS)}. A function's "
            "model gets it as Keras's global policy.",
        ),
        (
            flags.DEFINE_float,
            "examples_per_second",
            None,
            "Examples that each machine can prepare in a second.",
        ),
        (
            text,
            "calibration",
            None,
            "A file of mgpu-tf calibrate. Default: where that command writes.",
        ),
        (text, "html", None, "Write a page with a picture to this file."),
    ):
        define_flag(name, default, meaning, flag_values=values)
    flags.DEFINE_boolean(
        "all_devices",
        False,
        "Compare only layouts of all devices.",
        flag_values=values,
    )
    flags.DEFINE_boolean(
        "json", False, "Print the plan as JSON.", flag_values=values
    )


def plan_of(values: flags.FlagValues) -> Plan:
    """Returns the plan that the flags ask for.

    Raises:
        ConfigurationError: A flag is wrong.
    """
    # All that can be wrong without TensorFlow is said before it is imported.
    machines = _machines(values)
    check_integer("global_batch_size", values.global_batch_size, 1)
    build_model = _build_model(values)
    room = values.device_memory_gib
    if room is not None and not 0 < room < _MOST:
        raise ConfigurationError(
            "device_memory_gib must be a number above 0. Received: "
            f"device_memory_gib={room}."
        )
    return planner.plan(
        build_model,
        values.global_batch_size,
        machines,
        all_devices=values.all_devices,
        memory_bytes=None if room is None else room * (1 << 30),
    )


def _machines(values: flags.FlagValues) -> Machines:
    found = None
    path = values.calibration or calibration.default_path()
    if values.calibration is not None or os.path.exists(path):
        found = calibration.Calibration.read(path)
    if values.device != HERE:
        device = devices_lib.device(values.device)
    else:
        device = devices_lib.DEVICES["cpu"] if found is None else found.device
    between = devices_lib.link("25gbe")
    if values.interconnect is not None:
        between = devices_lib.link(values.interconnect)
    elif found is not None and found.link is not None:
        between = found.link
    per_node = 1 if values.devices is None else values.devices
    check_integer("devices", per_node, 1)
    check_integer("nodes", values.nodes, 1)
    for name in ("price", "examples_per_second"):
        value = values[name].value
        if value is not None and not 0 <= value < _MOST:
            raise ConfigurationError(
                f"{name} must be a number of 0 or more. Received: "
                f"{name}={value}."
            )
    if values.precision not in PRECISIONS:
        raise ConfigurationError(
            unknown_name("precision", values.precision, PRECISIONS)
        )
    return Machines(
        device,
        per_node,
        values.nodes,
        between,
        precision=values.precision,
        input_examples_per_second=values.examples_per_second,
        price=values.price,
    )


def _build_model(values: flags.FlagValues) -> Callable[[], keras.Model]:
    name, precision = values.model, values.precision
    if is_target(name):
        make = load_function(name, "model")
    else:
        make = _named(values)

    def build() -> Any:
        import keras

        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy(precision)
        try:
            model = make()
        finally:
            keras.config.set_dtype_policy(before)
        if isinstance(model, keras.Model) and not model.compiled:
            from mgpu_tf.optimizers import create_optimizer

            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(create_optimizer(values.optimizer), loss)
        return model

    return build


def _named(values: flags.FlagValues) -> Callable[[], keras.Model]:
    name = values.model
    base = name.partition("/")[0]
    by_lower = {each.lower(): each for each in APPLICATIONS}
    application = by_lower.get(name.lower())
    if application is None and base not in MODELS:
        raise ConfigurationError(
            unknown_name("model", name, [*MODELS, *APPLICATIONS])
        )
    shape = _shape(values.input_shape)
    if shape is None:
        shape = (224, 224, 3) if application else (32, 32, 3)

    def make() -> keras.Model:
        from mgpu_tf.models import create_model

        return create_model(application or name, shape, values.num_classes)

    return make


def _shape(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = text.lower().split("x")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ConfigurationError(
            "input_shape must be whole numbers with x between them. Received: "
            f"input_shape={text!r}. Write --input_shape=224x224x3."
        )
    return tuple(map(int, parts))
