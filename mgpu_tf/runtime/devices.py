"""Which devices of this machine a process uses, and that it leaves the rest.

GPUs are counted and numbered as TensorFlow sees them; memory of those that
are selected grows as it is needed.
"""

from __future__ import annotations

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
        num_virtual_devices: Splits the CPU into N devices instead.

    Returns:
        The names of the logical devices, "CPU:0" where there is no GPU.

    Raises:
        ConfigurationError: A device does not exist, both were given, or an
            op ran before.
    """
    if num_virtual_devices is not None:
        if devices is not None:
            raise ConfigurationError(
                "Give `devices` (GPUs) or `num_virtual_devices` (parts of "
                f"the CPU), not both. Received: devices={devices!r}, "
                f"num_virtual_devices={num_virtual_devices}."
            )
        select_gpus([])
        _split_cpu(num_virtual_devices)
        return [f"CPU:{i}" for i in range(num_virtual_devices)]
    indices = gpu_indices(devices)
    select_gpus(indices)
    if not indices:
        return ["CPU:0"]
    return [f"GPU:{i}" for i in range(len(indices))]


def gpus() -> list[tf.config.PhysicalDevice]:
    """Returns the GPUs of this machine that TensorFlow sees."""
    return tf.config.list_physical_devices("GPU")


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
    try:
        tf.config.set_visible_devices(chosen, "GPU")
        for gpu in chosen:
            tf.config.experimental.set_memory_growth(gpu, True)
    except RuntimeError:
        if tf.config.get_visible_devices("GPU") != chosen:
            raise ConfigurationError(
                "GPUs must be selected before TensorFlow runs its first op. "
                "Received: an op ran earlier in this process. Move "
                "create_strategy() to the top of the script."
            ) from None


def _split_cpu(count: int) -> None:
    StrategyOptions(num_virtual_devices=count)  # Refuses what is no number.
    cpu = tf.config.list_physical_devices("CPU")[0]
    wanted = [tf.config.LogicalDeviceConfiguration() for _ in range(count)]
    try:
        tf.config.set_logical_device_configuration(cpu, wanted)
    except RuntimeError:
        if len(tf.config.list_logical_devices("CPU")) < count:
            raise ConfigurationError(
                "The CPU must be split before TensorFlow runs its first op. "
                "Received: an op ran earlier in this process. Move "
                "create_strategy() to the top of the script."
            ) from None


def _gpu_index(device: int | str) -> int:
    text = str(device).upper().removeprefix("/").removeprefix("DEVICE:")
    number = text.removeprefix("GPU:")
    if not number.isdecimal():
        raise ConfigurationError(
            'A device must be a GPU by index or name, such as 1 or "GPU:1". '
            f"Received: {device!r}."
        )
    return int(number)
