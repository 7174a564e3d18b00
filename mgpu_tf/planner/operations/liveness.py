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

import bisect
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

# Kinds of memory, in the order in which they are listed.
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
        free_after = self._free_after()
        ending: list[list[int]] = [[] for _ in self._steps]
        for buffer, place in last.items():
            if place < len(self._steps):
                ending[free_after[place]].append(buffer)
        live: dict[int, float] = {}
        by_kind: dict[str, float] = collections.defaultdict(float)
        held = most = 0.0
        found = Peak({})
        for place, step in enumerate(self._steps):
            for buffer in step.outputs:
                if buffer in owner or buffer in live:
                    continue
                size = self._sizes[buffer]
                if step.type in IN_PLACE and size:
                    reused = self._reused(step, size, owner, last, place, live)
                    if reused is not None:
                        freed = live.pop(reused)
                        held -= freed
                        by_kind[self._kinds[reused]] -= freed
                live[buffer] = size
                held += size
                by_kind[self._kinds[buffer]] += size
            now = held + step.scratch
            if now > most:
                most = now
                kinds = dict(by_kind)
                kinds["temporary"] = kinds.get("temporary", 0.0) + step.scratch
                found = Peak(kinds, place, step.type)
            for buffer in ending[place]:
                if buffer in live:
                    freed = live.pop(buffer)
                    held -= freed
                    by_kind[self._kinds[buffer]] -= freed
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
        for buffer in step.inputs:
            root = owner.get(buffer, buffer)
            if last[root] == place and live.get(root, -1.0) == size:
                return root
        return None

    def _free_after(self) -> list[int]:
        """Returns for each operation the one at whose end its buffers are free.

        Operations that take a buffer last may run beside the ones after them.
        """
        count = len(self._steps)
        if not self._beside:
            return list(range(count))
        counted = [
            place
            for place, step in enumerate(self._steps)
            if step.type not in ALIASES
        ]
        counted += [count - 1] * self._beside
        return [
            counted[bisect.bisect(counted, place) + self._beside - 1]
            if place < count - 1
            else place
            for place in range(count)
        ]

    def _owners(self) -> dict[int, int]:
        """Returns for each buffer that is another's the one that it is."""
        owner: dict[int, int] = {}
        for step in self._steps:
            if step.type not in ALIASES:
                continue
            for made, taken in zip(step.outputs, step.inputs, strict=False):
                owner[made] = owner.get(taken, taken)
        return owner
