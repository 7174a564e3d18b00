"""The named networks of the jobs in PyTorch, with the same first weights."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from experiments.benchmarks import jobs


def build(name: str, columns: int) -> nn.Module:
    """Returns a network that ends in the classes.

    Args:
        name: Of `NETWORKS`.
        columns: Length of the last axis of an example, as Keras has it.
    """
    with torch.no_grad():
        return NETWORKS[name](columns)


def _put(to: torch.Tensor, value: np.ndarray) -> None:
    to.copy_(torch.from_numpy(np.ascontiguousarray(value)))


def _linear(before: int, width: int) -> nn.Linear:
    layer = nn.Linear(before, width)
    _put(layer.weight, jobs.kernel(before, width).T)
    nn.init.zeros_(layer.bias)
    return layer


def _norm(width: int) -> nn.BatchNorm2d:
    # As Keras's: the moving statistics keep 0.99.
    return nn.BatchNorm2d(width, eps=1e-3, momentum=0.01)


class _Same(nn.Module):
    """Pads an even image as a convolution with strides 2 does in Keras."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.pad(x, (0, 1, 0, 1))


def _convolution(
    before: int,
    width: int,
    strides: int = 1,
    size: int = 3,
    depthwise: bool = False,
) -> list[nn.Module]:
    """Returns a convolution and its BatchNormalization."""
    padded = strides == 2 and size == 3
    layer = nn.Conv2d(
        before,
        width,
        size,
        strides,
        padding=0 if padded or size == 1 else 1,
        groups=before if depthwise else 1,
        bias=False,
    )
    if depthwise:
        value = jobs.kernel(size, size, before, 1).transpose(2, 3, 0, 1)
    else:
        value = jobs.kernel(size, size, before, width).transpose(3, 2, 0, 1)
    _put(layer.weight, value)
    return [*([_Same()] if padded else []), layer, _norm(width)]


class _Residual(nn.Module):
    """The sum of two branches, and what comes after it."""

    def __init__(
        self, long: nn.Module, short: nn.Module, after: nn.Module
    ) -> None:
        super().__init__()
        self.long, self.short, self.after = long, short, after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.long(x) + self.short(x))


def _resnet20(columns: int) -> nn.Module:
    parts = [*_convolution(columns, 16), nn.ReLU(inplace=True)]
    before = 16
    for width in (16, 32, 64):
        for block in range(3):
            strides = 2 if width > 16 and block == 0 else 1
            long = nn.Sequential(
                *_convolution(before, width, strides),
                nn.ReLU(inplace=True),
                *_convolution(width, width),
            )
            short = nn.Identity()
            if strides > 1:
                short = nn.Sequential(*_convolution(before, width, strides, 1))
            parts.append(_Residual(long, short, nn.ReLU(inplace=True)))
            before = width
    return _classes(parts, before)


def _mobilenetv2(columns: int) -> nn.Module:
    parts = [*_convolution(columns, 32, 2), nn.ReLU6(inplace=True)]
    before = 32
    for expansion, width, strides in jobs.MOBILENETV2:
        wide = expansion * before
        block: list[nn.Module] = []
        if expansion > 1:
            block += [*_convolution(before, wide, size=1), nn.ReLU6(True)]
        block += _convolution(wide, wide, strides, depthwise=True)
        block += [nn.ReLU6(True), *_convolution(wide, width, size=1)]
        long = nn.Sequential(*block)
        same = strides == 1 and before == width
        parts.append(
            _Residual(long, nn.Identity(), nn.Identity()) if same else long
        )
        before = width
    parts += [*_convolution(before, 1280, size=1), nn.ReLU6(True)]
    return _classes(parts, 1280)


def _classes(parts: list[nn.Module], before: int) -> nn.Module:
    """Returns the network of images: a mean over places, then the classes."""
    end = [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*parts, *end, _linear(before, jobs.CLASSES))


class _Block(nn.Module):
    """Attention of four heads, then GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(128, eps=1e-3)
        self.norm_2 = nn.LayerNorm(128, eps=1e-3)
        self.attention = nn.MultiheadAttention(128, 4, batch_first=True)
        one = jobs.kernel(128, 4, 32).reshape(128, 128).T
        _put(self.attention.in_proj_weight, np.concatenate([one] * 3))
        last = self.attention.out_proj
        _put(last.weight, jobs.kernel(4, 32, 128).reshape(128, 128).T)
        self.wide, self.narrow = _linear(128, 512), _linear(512, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm_1(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        wide = nn.functional.gelu(self.wide(self.norm_2(x)))
        return x + self.narrow(wide)


class _Transformer(nn.Module):
    def __init__(self, columns: int) -> None:
        super().__init__()
        self.first = _linear(columns, 128)
        self.blocks = nn.Sequential(*(_Block() for _ in range(4)))
        self.last = _linear(128, jobs.CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.blocks(self.first(x)).mean(1))


class _Lstm(nn.Module):
    def __init__(self, columns: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(columns, 128, batch_first=True)
        _put(self.lstm.weight_ih_l0, jobs.kernel(columns, 512).T)
        _put(self.lstm.weight_hh_l0, jobs.kernel(128, 512).T)
        nn.init.zeros_(self.lstm.bias_ih_l0)
        nn.init.ones_(self.lstm.bias_ih_l0[128:256])
        # Keras has one bias, so that Adam moves it once.
        nn.init.zeros_(self.lstm.bias_hh_l0)
        self.lstm.bias_hh_l0.requires_grad_(False)
        self.last = _linear(128, jobs.CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.lstm(x)[0][:, -1])


NETWORKS: dict[str, Callable[[int], nn.Module]] = {
    "resnet20": _resnet20,
    "mobilenetv2": _mobilenetv2,
    "transformer": _Transformer,
    "lstm": _Lstm,
}
