"""PyTorch's sharded data parallelism on gloo, as its tutorials write it.

`fsdp2` is `fully_shard` of each layer with weights, and of the model. `zero1`
is `ZeroRedundancyOptimizer` with DistributedDataParallel.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from experiments.benchmarks import jobs
from experiments.benchmarks.contestants.torch_ddp import Ddp

SETTINGS = {"lr": jobs.LEARNING_RATE, "momentum": jobs.MOMENTUM}


def create(place) -> Ddp:
    return {"fsdp2": Fsdp2, "zero1": Zero1}[place.options["kind"]](place)


class Fsdp2(Ddp):
    """Weights, gradients and momentum in parts.

    PyTorch 2.15 has no fused SGD for them.
    """

    def __init__(self, place) -> None:
        super().__init__(place)
        self._optimizer = torch.optim.SGD(
            self._model.parameters(), foreach=True, **SETTINGS
        )

    def _parallel(self, place) -> nn.Module:
        torch.distributed.init_process_group("gloo")
        mesh = torch.distributed.init_device_mesh("cpu", (place.workers,))
        for part in self._model:
            if isinstance(part, nn.Linear):
                fully_shard(part, mesh=mesh)
        return fully_shard(self._model, mesh=mesh)


class Zero1(Ddp):
    """Momentum in parts."""

    def __init__(self, place) -> None:
        super().__init__(place)
        self._optimizer = ZeroRedundancyOptimizer(
            self._model.parameters(),
            optimizer_class=torch.optim.SGD,
            fused=True,
            **SETTINGS,
        )
