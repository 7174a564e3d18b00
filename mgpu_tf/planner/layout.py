"""How a training is laid out: which devices do what, and with which options.

    layout = Layout(data=2, fsdp=4)
    layout.strategy, layout.options        # for `create_strategy`

This module does not import TensorFlow.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from mgpu_tf.errors import ConfigurationError, check_integer
from mgpu_tf.mesh import MICRO_BATCHES, check_shard, mesh_of
from mgpu_tf.options import StrategyOptions


@dataclasses.dataclass(frozen=True)
class Layout:
    """The axes of all devices, and what changes memory or time.

    Attributes:
        data: Copies of the weights; with parameter servers, the workers.
        fsdp: Over how many devices each copy is split.
        tensor: Over how many devices the computing of layers is split.
        pipeline: Into how many stages layers are cut.
        shard: What is split over fsdp, one of `SHARDS`.
        micro_batches: Into how many parts a pipeline cuts the rows of a
            replica. Default: 4 for each stage.
        schedule: The order of work of a pipeline.
        accumulation: Over how many steps gradients are added up.
        recompute: "layers", "stages", or None.
        sequence_parallel: Whether devices of the tensor axis have parts of a
            sequence between layers.
        num_ps: Parameter servers; 0 for synchronous training.
        central: Whether one copy of the weights serves all devices.

    Raises:
        ConfigurationError: Axes or options do not go together.
    """

    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    pipeline: int = 1
    shard: str = "weights"
    micro_batches: int | None = None
    schedule: str = "1f1b"
    accumulation: int = 1
    recompute: str | None = None
    sequence_parallel: bool = False
    num_ps: int = 0
    central: bool = False

    def __post_init__(self) -> None:
        for name in ("data", "fsdp", "tensor", "pipeline", "accumulation"):
            check_integer(name, getattr(self, name), 1)
        mesh_of(self.devices, self.data, self.fsdp, self.tensor, self.pipeline)
        check_shard(self.shard, self.tensor, self.pipeline)

    @property
    def devices(self) -> int:
        """Returns the number of devices that compute."""
        return self.data * self.fsdp * self.tensor * self.pipeline

    @property
    def replicas(self) -> int:
        """Returns over how many parts the rows of a batch are divided."""
        return self.data * self.fsdp

    @property
    def parts(self) -> int:
        """Returns into how many micro-batches a pipeline cuts its rows."""
        if self.pipeline == 1:
            return 1
        return self.micro_batches or MICRO_BATCHES * self.pipeline

    @property
    def splits_weights(self) -> bool:
        """Whether whole weights are gathered to compute with."""
        return self.fsdp > 1 and self.shard == "weights"

    @property
    def gathers_layers(self) -> bool:
        """Whether that is done layer by layer, and not once a step."""
        return self.splits_weights and self.pipeline == 1

    @property
    def recomputes(self) -> bool:
        """Whether layers are computed again in the backward pass."""
        by_gathering = self.gathers_layers and self.tensor == 1
        return self.recompute == "layers" or by_gathering

    @property
    def strategy(self) -> str:
        """Returns the name that `create_strategy` takes, on one machine."""
        if self.num_ps:
            return "parameter_server"
        if self.central:
            return "central_storage"
        if self.tensor > 1 or self.pipeline > 1:
            return "model_parallel"
        if self.fsdp > 1:
            return "fsdp"
        return "mirrored" if self.data > 1 else "one_device"

    @property
    def options(self) -> dict[str, Any]:
        """Returns the options of the strategy and the steps.

        Those that are not the default; `devices` is left to the caller.
        """
        found: dict[str, Any] = {}
        if self.strategy in ("fsdp", "model_parallel"):
            found["data_parallel"] = self.data
            for axis in ("fsdp", "tensor", "pipeline"):
                if getattr(self, axis) > 1:
                    found[f"{axis}_parallel"] = getattr(self, axis)
        if self.fsdp > 1 and self.shard != "weights":
            found["shard"] = self.shard
        if self.pipeline > 1:
            found["micro_batches"] = self.parts
        if self.schedule != "1f1b":
            found["pipeline_schedule"] = self.schedule
        if self.sequence_parallel:
            found["sequence_parallel"] = True
        if self.recompute:
            found["recompute"] = self.recompute
        if self.accumulation > 1:
            found["gradient_accumulation_steps"] = self.accumulation
        return found

    @property
    def strategy_options(self) -> dict[str, Any]:
        """Returns those of the options that `create_strategy` takes."""
        names = {field.name for field in dataclasses.fields(StrategyOptions)}
        return {k: v for k, v in self.options.items() if k in names}

    def rows(self, global_batch_size: int) -> int:
        """Returns the most rows that a replica has at one time.

        Args:
            global_batch_size: Rows of an update, over all replicas.

        Raises:
            ConfigurationError: There are fewer rows than parts.
        """
        check_integer("global_batch_size", global_batch_size, 1)
        every = self.replicas * self.accumulation
        if global_batch_size < every * self.parts:
            raise ConfigurationError(
                "global_batch_size must give each part of a batch an example. "
                f"Received: global_batch_size={global_batch_size} for "
                f"{self.replicas} replicas x {self.accumulation} micro-steps "
                f"x {self.parts} micro-batches."
            )
        return math.ceil(global_batch_size / every)

    def __str__(self) -> str:
        axes = [
            f"{axis} {getattr(self, axis)}"
            for axis in ("data", "fsdp", "tensor", "pipeline")
            if getattr(self, axis) > 1
        ]
        notes = [
            *([f"shard {self.shard}"] if self.shard != "weights" else []),
            *([f"{self.parts} micro-batches"] if self.pipeline > 1 else []),
            *(
                [f"accumulation {self.accumulation}"]
                if self.accumulation > 1
                else []
            ),
            *(["sequence parallel"] if self.sequence_parallel else []),
            *([f"recompute {self.recompute}"] if self.recompute else []),
        ]
        return ", ".join([" x ".join(axes) or "one device", *notes])


def layout_of(
    strategy: str,
    devices: int = 1,
    *,
    num_ps: int = 0,
    accumulation: int = 1,
    recompute: str | None = None,
    data_parallel: int | None = None,
    fsdp_parallel: int | None = None,
    tensor_parallel: int | None = None,
    pipeline_parallel: int = 1,
    shard: str = "weights",
    micro_batches: int | None = None,
    pipeline_schedule: str = "1f1b",
    sequence_parallel: bool = False,
) -> Layout:
    """Returns the layout that options of a strategy stand for.

    Args:
        strategy: A name for `create_strategy`.
        devices: The devices of all workers.
        num_ps: Parameter servers.
        accumulation: Steps over which gradients are added up.
        recompute: As in `StepOptions`.
        data_parallel: As in `StrategyOptions`, and so are the others.
        fsdp_parallel: As there.
        tensor_parallel: As there.
        pipeline_parallel: As there.
        shard: As there.
        micro_batches: As there.
        pipeline_schedule: As there.
        sequence_parallel: As there.

    Raises:
        ConfigurationError: Options do not go together.
    """
    common = {"accumulation": accumulation, "recompute": recompute}
    if strategy in ("fsdp", "model_parallel"):
        mesh = mesh_of(
            devices,
            data_parallel,
            fsdp_parallel,
            tensor_parallel or 1,
            pipeline_parallel,
        )
        return Layout(
            mesh.data,
            mesh.fsdp,
            mesh.tensor,
            mesh.pipeline,
            shard=shard,
            micro_batches=micro_batches,
            schedule=pipeline_schedule,
            sequence_parallel=sequence_parallel,
            **common,  # type: ignore[arg-type]
        )
    return Layout(
        devices,
        num_ps=max(num_ps, 1) if strategy == "parameter_server" else 0,
        central=strategy == "central_storage",
        **common,  # type: ignore[arg-type]
    )
