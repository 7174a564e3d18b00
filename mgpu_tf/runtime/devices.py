"""Which devices of this machine a process uses, and that it leaves the rest.

GPUs are counted and numbered as TensorFlow sees them; memory of those that
are selected grows as it is needed. The CPU, or one GPU, may be split into
several devices, to try several replicas on a machine without them.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from typing import Any

import tensorflow as tf

from mgpu_tf.errors import ConfigurationError, is_integer
from mgpu_tf.names import Devices
from mgpu_tf.options import StrategyOptions


def select_local(
    devices: Devices, num_virtual_devices: int | None
) -> list[str]:
    """Selects this process's devices.

    Args:
        devices: A number of GPUs, or GPUs by index or name; all by default.
        num_virtual_devices: Splits the one GPU of `devices` into N devices;
            the CPU where `devices` is None.

    Returns:
        The names of the logical devices, "CPU:0" where there is no GPU.

    Raises:
        ConfigurationError: A device does not exist, several GPUs are to be
            split, or an op ran before.
    """
    count = num_virtual_devices
    StrategyOptions(num_virtual_devices=count)  # Refuses what is no number.
    if count is not None and devices is None:
        select_gpus([])
        _split("CPU", tf.config.list_physical_devices("CPU")[0], count, None)
        return [f"CPU:{i}" for i in range(count)]
    if count is not None and not gpus():
        raise ConfigurationError(
            "There are 0 GPUs on this machine, so none to split. Received: "
            f"devices={devices!r}, num_virtual_devices={count}. Leave devices "
            "out to split the CPU."
        )
    indices = gpu_indices(devices)
    if count is not None:
        if len(indices) > 1:
            raise ConfigurationError(
                "num_virtual_devices splits the CPU, or the one GPU that "
                f"`devices` names. Received: devices={devices!r}, "
                f"num_virtual_devices={count}. Use devices=[{indices[0]}]."
            )
        gpu = gpus()[indices[0]]
        _only_visible([gpu])
        _split("GPU", gpu, count, gpu_memory_mib() // count)
        return [f"GPU:{i}" for i in range(count)]
    select_gpus(indices)
    if not indices:
        return ["CPU:0"]
    return [f"GPU:{i}" for i in range(len(indices))]


def gpus() -> list[tf.config.PhysicalDevice]:
    """Returns the GPUs of this machine that TensorFlow sees."""
    return tf.config.list_physical_devices("GPU")


def several_here(count: int) -> dict[str, Any]:
    """Returns the options of a strategy that has several devices here.

    Args:
        count: How many parts, where there is one GPU or only the CPU.
    """
    present = len(gpus())
    if present > 1:
        return {}
    return {"num_virtual_devices": count} | ({"devices": 1} if present else {})


def gpu_indices(devices: Devices) -> list[int]:
    """Returns the indices of GPUs, each checked to exist.

    Args:
        devices: A number of GPUs, or GPUs by index or name; all by default.

    Raises:
        ConfigurationError: A GPU is not there, or is named twice.
    """
    available = len(gpus())
    if is_integer(devices):
        devices = int(devices)  # type: ignore[arg-type]
    if devices is None:
        return list(range(available))
    if isinstance(devices, int):
        if devices < 1:
            raise ConfigurationError(
                f"A number of devices must be 1 or more. Received: {devices}."
            )
        # No list that no memory holds.
        wanted = list(range(min(devices, available + 1)))
    else:
        wanted = [_gpu_index(device) for device in devices]
    if not wanted or len(set(wanted)) != len(wanted):
        raise ConfigurationError(
            "`devices` must name one GPU or more, each once. Received: "
            f"{devices!r}."
        )
    if max(wanted) >= available:
        raise ConfigurationError(
            f"There are {available} GPUs on this machine. Received: "
            f"devices={devices!r}. Use fewer, or num_virtual_devices="
            f"{len(wanted)} to try the same on the CPU."
        )
    return wanted


def gpu_memory_mib() -> int:
    """Returns the MiB that are free on each GPU of this machine, less a tenth.

    Raises:
        ConfigurationError: There is no `nvidia-smi`, which knows it.
    """
    command = ["nvidia-smi", "--query-gpu=memory.free"]
    try:
        done = subprocess.run(
            [*command, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        return min(int(line) for line in done.stdout.split()) * 9 // 10
    except (OSError, subprocess.SubprocessError, ValueError):
        raise ConfigurationError(
            "To split a GPU its free memory must be known. Received: no "
            f"answer from {' '.join(command)}. Install the driver's "
            "nvidia-smi, or give num_virtual_devices without devices."
        ) from None


def select_gpus(indices: list[int]) -> None:
    """Leaves the other GPUs alone; memory of these grows as it is needed.

    Args:
        indices: As from `gpu_indices`; none for a process on the CPU.

    Raises:
        ConfigurationError: TensorFlow has begun to use another selection.
    """
    present = gpus()
    chosen = [present[i] for i in indices]
    if not present:
        return
    _only_visible(chosen)
    for gpu in chosen:
        # After the first op, and of a GPU that was split, it stays as it is.
        with contextlib.suppress(RuntimeError, ValueError):
            tf.config.experimental.set_memory_growth(gpu, True)


def _only_visible(chosen: list[tf.config.PhysicalDevice]) -> None:
    try:
        tf.config.set_visible_devices(chosen, "GPU")
    except RuntimeError:
        if tf.config.get_visible_devices("GPU") != chosen:
            raise _too_late("GPUs must be selected") from None


def _split(
    kind: str, device: tf.config.PhysicalDevice, count: int, mib: int | None
) -> None:
    """Splits a device into some, each with at most so much memory."""
    wanted = [
        tf.config.LogicalDeviceConfiguration(memory_limit=mib)
        for _ in range(count)
    ]
    try:
        tf.config.set_logical_device_configuration(device, wanted)
    except RuntimeError:
        if len(tf.config.list_logical_devices(kind)) < count:
            raise _too_late(f"The {kind} must be split") from None
    if kind == "GPU":
        # TensorFlow refuses `set_memory_growth` for parts of a GPU.
        os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")


def _too_late(rule: str) -> ConfigurationError:
    return ConfigurationError(
        f"{rule} before TensorFlow runs its first op. Received: an op ran "
        "earlier in this process. Move create_strategy() to the top of the "
        "script."
    )


def _gpu_index(device: int | str) -> int:
    text = str(device).upper().removeprefix("/").removeprefix("DEVICE:")
    number = text.removeprefix("GPU:")
    if not number.isdecimal():
        raise ConfigurationError(
            'A device must be a GPU by index or name, such as 1 or "GPU:1". '
            f"Received: {device!r}."
        )
    return int(number)
