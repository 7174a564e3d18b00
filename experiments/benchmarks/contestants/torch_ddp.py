"""PyTorch's DistributedDataParallel on gloo, at its best documented settings.

One thread for each pinned process, channels_last for convolutions, gradients
as views of the buckets, a fused optimizer. Without other workers it is a
plain loop, or one around `torch.compile`.

`sharding` splits the state of the model over the workers: "fsdp2" by
`fully_shard`, each layer with weights a unit of its own; "zero1" by
`ZeroRedundancyOptimizer` over DistributedDataParallel.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from experiments.benchmarks import jobs
from experiments.benchmarks.contestants import clocks, torch_networks
from experiments.benchmarks.jobs import JOBS


def create(place) -> Ddp:
    return Ddp(place)


def build(job: jobs.Job) -> nn.Module:
    """Returns the job's model with its first weights."""
    if job.network is not None:
        return torch_networks.build(job.network, job.input_shape[-1])
    parts: list[nn.Module] = []
    before = job.input_shape[-1]
    for width in job.widths:
        if job.convolution:
            for _ in range(2):
                parts += [
                    nn.Conv2d(before, width, 3, padding=1, bias=False),
                    # As Keras's: the moving statistics keep 0.99.
                    nn.BatchNorm2d(width, eps=1e-3, momentum=0.01),
                    nn.ReLU(inplace=True),
                ]
                before = width
            parts.append(nn.MaxPool2d(2))
        else:
            parts += [nn.Linear(before, width), nn.ReLU(inplace=True)]
            before = width
    if job.convolution:
        parts += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model = nn.Sequential(*parts, nn.Linear(before, jobs.CLASSES))
    values = iter(job.weights())
    with torch.no_grad():
        for part in model:
            if isinstance(part, nn.Conv2d):
                kernel = np.transpose(next(values), (3, 2, 0, 1)).copy()
                part.weight.copy_(torch.from_numpy(kernel))
            elif isinstance(part, nn.Linear):
                part.weight.copy_(torch.from_numpy(next(values).T.copy()))
                part.bias.copy_(torch.from_numpy(next(values)))
            elif isinstance(part, nn.BatchNorm2d):
                for _ in range(4):
                    next(values)
    return model


def _optimizer(
    name: str, parameters, sharding: str | None
) -> torch.optim.Optimizer:
    # Parts of tensors have no fused update.
    fused = sharding != "fsdp2"
    if name == "adam":
        # As Keras's.
        return torch.optim.Adam(parameters, 1e-3, eps=1e-7, fused=fused)
    settings = {
        "lr": jobs.LEARNING_RATE,
        "momentum": jobs.MOMENTUM,
        "fused": fused,
    }
    if sharding == "zero1":
        return ZeroRedundancyOptimizer(
            parameters,
            optimizer_class=torch.optim.SGD,
            parameters_as_bucket_view=True,
            **settings,
        )
    return torch.optim.SGD(parameters, **settings)


class Ddp:
    """Options: `bucket_mb`, `sharding`, `bf16`, `compile`, `clock`.

    With `bf16` gradients are sent as bfloat16.
    """

    def __init__(self, place) -> None:
        job = JOBS[place.job]
        if place.threads is not None:
            torch.set_num_threads(place.threads)
        self._model = build(job)
        x, y = job.part(place.index, place.workers)
        self._x = [torch.from_numpy(part) for part in x]
        self._now = clocks.CLOCKS[place.options.get("clock", "wall")]
        if len(job.input_shape) == 3:
            self._model = self._model.to(memory_format=torch.channels_last)
            # From [n, h, w, c] in memory to its channels_last view.
            self._x = [part.permute(0, 3, 1, 2) for part in self._x]
        self._y = [torch.from_numpy(part).long() for part in y]
        self._forward = self._model
        if place.workers > 1:
            self._forward = self._parallel(place)
        if place.options.get("compile"):
            self._forward = torch.compile(self._model)
        self._optimizer = _optimizer(
            job.optimizer,
            self._model.parameters(),
            place.options.get("sharding"),
        )
        self._loss = nn.CrossEntropyLoss()
        self._position = 0

    def _parallel(self, place) -> nn.Module:
        torch.distributed.init_process_group("gloo")
        if place.options.get("sharding") == "fsdp2":
            mesh = init_device_mesh("cpu", (place.workers,))
            for layer in self._model:
                if any(True for _ in layer.parameters()):
                    fully_shard(layer, mesh=mesh)
            return fully_shard(self._model, mesh=mesh)
        model = nn.parallel.DistributedDataParallel(
            self._model,
            gradient_as_bucket_view=True,
            bucket_cap_mb=place.options.get("bucket_mb", 25),
        )
        if place.options.get("bf16"):
            from torch.distributed.algorithms.ddp_comm_hooks import (
                default_hooks,
            )

            model.register_comm_hook(None, default_hooks.bf16_compress_hook)
        return model

    def _steps(self, steps: int) -> float:
        self._model.train()
        total = torch.zeros(())
        right = torch.zeros((), dtype=torch.int64)
        for _ in range(steps):
            x = self._x[self._position % len(self._x)]
            y = self._y[self._position % len(self._y)]
            self._position += 1
            self._optimizer.zero_grad(set_to_none=True)
            logits = self._forward(x)
            loss = self._loss(logits, y)
            loss.backward()
            self._optimizer.step()
            total += loss.detach()
            right += (logits.detach().argmax(1) == y).sum()
        mean = float(total) / steps
        print(f"loss {mean:.4f} accuracy {int(right) / steps / len(y):.4f}")
        return mean

    def check(self, steps: int) -> float:
        return self._steps(steps)

    def burst(self, steps: int) -> tuple[int, float]:
        started = self._now()
        self._steps(steps)
        return steps, self._now() - started
