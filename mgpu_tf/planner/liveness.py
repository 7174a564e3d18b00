"""The most memory that a list of operations holds at one time.

    peak = Schedule(sizes)
    peak.run("MatMul", inputs=[0, 1], outputs=[2], kind="activations")
    peak.result(kept=[2]).bytes

A buffer lives from the operation that makes it to the last that takes it. Some
operations make no buffer: they name their input anew (`ALIASES`), or write
into an input that nobody takes after them (`IN_PLACE`), as TensorFlow's
kernels do.

What an operation needs while it runs, beside what it takes and makes, is in
`scratch.py`.

This module does not import TensorFlow.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence

ALIASES = frozenset(
    {
        "Identity",
        "IdentityN",
        "Reshape",
        "Squeeze",
        "ExpandDims",
        "StopGradient",
        "PreventGradient",
        "Snapshot",
        "CheckNumerics",
        "ReadVariableOp",
        "EnsureShape",
        "Enter",
        "Exit",
        "TensorListFromTensor",
    }
)

# Kernels of TensorFlow that forward an input's buffer to their output.
IN_PLACE = frozenset(
    {
        "Abs",
        "Add",
        "AddN",
        "AddV2",
        "BiasAdd",
        "BiasAddV1",
        "Div",
        "DivNoNan",
        "Elu",
        "EluGrad",
        "Erf",
        "Exp",
        "Expm1",
        "FusedBatchNormV3",
        "FusedBatchNormGradV3",
        "LeakyRelu",
        "LeakyReluGrad",
        "Log",
        "Log1p",
        "LogSoftmax",
        "Maximum",
        "Minimum",
        "Mul",
        "MulNoNan",
        "Neg",
        "Pow",
        "RealDiv",
        "Reciprocal",
        "Relu",
        "Relu6",
        "Relu6Grad",
        "ReluGrad",
        "Rsqrt",
        "RsqrtGrad",
        "Selu",
        "SeluGrad",
        "Sigmoid",
        "SigmoidGrad",
        "Softmax",
        "SoftmaxCrossEntropyWithLogits",
        "Softplus",
        "SoftplusGrad",
        "SparseSoftmaxCrossEntropyWithLogits",
        "Sqrt",
        "SqrtGrad",
        "Square",
        "SquaredDifference",
        "Sub",
        "Tanh",
        "TanhGrad",
    }
)

# Kinds of memory, in the order in which they are told.
KINDS = (
    "parameters",
    "gradients",
    "slots",
    "averages",
    "activations",
    "gathered weights",
    "micro-batches",
    "reduction",
    "temporary",
    "batches",
    "allocator",
    "other",
)


@dataclasses.dataclass(frozen=True)
class Peak:
    """The moment of the most memory.

    Attributes:
        by_kind: Bytes of each kind of memory at that moment.
        step: The number of the operation that runs then.
        operation: Its type.
    """

    by_kind: dict[str, float]
    step: int = 0
    operation: str = ""

    @property
    def bytes(self) -> float:
        """Returns all bytes."""
        return sum(self.by_kind.values())


@dataclasses.dataclass(slots=True)
class _Step:
    type: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    scratch: float
    kind: str


class Schedule:
    """Operations in the order in which they run.

    Args:
        sizes: Bytes of each buffer, by its number. What is held from
            beginning to end, as a weight, has a size of 0 here.
        beside: How many operations may have begun before one that stands
            before them in the list has ended.
    """

    def __init__(self, sizes: Sequence[float], beside: int = 0) -> None:
        self._sizes = list(sizes)
        self._steps: list[_Step] = []
        self._kinds: dict[int, str] = {}
        self._beside = beside

    def new(self, size: float) -> int:
        """Returns the number of one more buffer."""
        self._sizes.append(size)
        return len(self._sizes) - 1

    def size(self, buffer: int) -> float:
        """Returns the bytes of a buffer."""
        return self._sizes[buffer]

    def run(
        self,
        operation: str,
        inputs: Iterable[int],
        outputs: Iterable[int],
        *,
        kind: str = "activations",
        scratch: float = 0.0,
    ) -> None:
        """Appends an operation.

        Args:
            operation: Its type.
            inputs: The buffers that it takes.
            outputs: The buffers that it makes.
            kind: The kind of memory of what it makes.
            scratch: Bytes that it needs beside them while it runs.
        """
        made = tuple(outputs)
        self._steps.append(_Step(operation, tuple(inputs), made, scratch, kind))
        for buffer in made:
            self._kinds[buffer] = kind

    def result(self, kept: Iterable[int] = ()) -> Peak:
        """Walks the operations.

        Args:
            kept: The buffers that are held to the end.
        """
        owner = self._owners()
        last: dict[int, int] = {}
        for place, step in enumerate(self._steps):
            for buffer in (*step.inputs, *step.outputs):
                last[owner.get(buffer, buffer)] = place
        for buffer in kept:
            last[owner.get(buffer, buffer)] = len(self._steps)
        ending: dict[int, list[int]] = collections.defaultdict(list)
        for buffer, place in last.items():
            ending[self._free_after(place)].append(buffer)
        live: dict[int, float] = {}
        held = most = 0.0
        found = Peak({})
        where = -1
        snapshot: dict[int, float] = {}
        for place, step in enumerate(self._steps):
            for buffer in step.outputs:
                root = owner.get(buffer, buffer)
                if root != buffer or buffer in live:
                    continue
                size = self._sizes[buffer]
                reused = self._reused(step, size, owner, last, place, live)
                if reused is not None:
                    held -= live.pop(reused)
                live[buffer] = size
                held += size
            now = held + step.scratch
            if now > most:
                most, where = now, place
                snapshot = dict(live)
            for buffer in ending[place]:
                held -= live.pop(buffer, 0.0)
        if where >= 0:
            found = self._peak(snapshot, where)
        return found

    def _reused(
        self,
        step: _Step,
        size: float,
        owner: dict[int, int],
        last: dict[int, int],
        place: int,
        live: dict[int, float],
    ) -> int | None:
        """Returns the input into whose buffer an operation may write."""
        if step.type not in IN_PLACE or not size:
            return None
        for buffer in step.inputs:
            root = owner.get(buffer, buffer)
            if last[root] == place and live.get(root, -1.0) == size:
                return root
        return None

    def _free_after(self, place: int) -> int:
        """Returns the operation at whose end a buffer is free.

        Operations that take it last may run beside the ones after them.
        """
        left = self._beside
        while left and place + 1 < len(self._steps):
            place += 1
            left -= self._steps[place].type not in ALIASES
        return place

    def _owners(self) -> dict[int, int]:
        """Returns for each buffer that is another's the one that it is."""
        owner: dict[int, int] = {}
        for step in self._steps:
            if step.type not in ALIASES:
                continue
            for made, taken in zip(step.outputs, step.inputs, strict=False):
                owner[made] = owner.get(taken, taken)
        return owner

    def _peak(self, live: dict[int, float], place: int) -> Peak:
        by_kind: dict[str, float] = collections.defaultdict(float)
        for buffer, size in live.items():
            by_kind[self._kinds.get(buffer, "activations")] += size
        step = self._steps[place]
        by_kind["temporary"] += step.scratch
        return Peak(dict(by_kind), place, step.type)
