"""What is trained: data, first weights and settings, the same for everyone.

    job = JOBS["mlp"]
    x, y = job.data(workers=2)       # float32 [rows, ...], int32 [rows]
    weights = job.weights()          # in the order of Keras's get_weights

Nothing here knows a framework. Global batch k holds the rows from k * batch;
worker r of n takes the r-th of n equal parts of it, as `mgpu_tf` does.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

BATCHES = 16
LEARNING_RATE = 0.01
MOMENTUM = 0.9
CLASSES = 10

# Expansion, channels and strides of the blocks of MobileNetV2.
MOBILENETV2 = (
    (1, 16, 1),
    *((6, 24, strides) for strides in (2, 1)),
    *((6, 32, strides) for strides in (2, 1, 1)),
    *((6, 64, strides) for strides in (2, 1, 1, 1)),
    *((6, 96, strides) for strides in (1, 1, 1)),
    *((6, 160, strides) for strides in (2, 1, 1)),
    (6, 320, 1),
)


def kernel(*shape: int) -> np.ndarray:
    """Returns first weights that follow from their shape, as Keras has it.

    Frameworks need not agree on an order of weights then.
    """
    random = np.random.default_rng(list(shape))
    scale = np.float32(1.0 / np.sqrt(np.prod(shape[:-1])))
    return random.standard_normal(shape, np.float32) * scale


@dataclasses.dataclass(frozen=True)
class Job:
    """A model and the examples for it.

    Attributes:
        input_shape: Of one example.
        per_worker: Examples of a worker in a step.
        widths: Hidden layers of an MLP, or channels of the blocks of a CNN
            (two 3x3 convolutions, each with BatchNormalization and relu,
            then 2x2 pooling; a global mean before the last layer).
        convolution: Whether it is the CNN.
        global_batch: The size of a step where it does not grow with the
            workers.
        dataset: The set of the package that it trains on, made-up examples
            where there is none.
        examples: In a pass over the set.
        network: A name in `tensorflow_model.NETWORKS`, in place of an MLP or
            the CNN. Its kernels begin as `kernel` has them, the rest as Keras
            does.
        optimizer: "momentum" or "adam".
    """

    input_shape: tuple[int, ...]
    per_worker: int
    widths: tuple[int, ...]
    convolution: bool = False
    global_batch: int | None = None
    dataset: str | None = None
    examples: int = 0
    network: str | None = None
    optimizer: str = "momentum"

    @property
    def pass_steps(self) -> int:
        """The steps of a pass over the set."""
        return -(-self.examples // self.batch(1))

    def batch(self, workers: int) -> int:
        """Returns the examples in a step, over all workers."""
        return self.global_batch or self.per_worker * workers

    def data(self, workers: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns `BATCHES` made-up batches; classes follow a linear rule."""
        rows = BATCHES * self.batch(workers)
        random = np.random.default_rng(1)
        x = random.standard_normal((rows, *self.input_shape), np.float32)
        rule = random.standard_normal((x[0].size, CLASSES), np.float32)
        return x, (x.reshape(rows, -1) @ rule).argmax(1).astype(np.int32)

    def part(
        self, index: int, workers: int
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Returns a worker's rows of each global batch, in order."""
        x, y = self.data(workers)
        size = self.batch(workers)
        low, high = size * index // workers, size * (index + 1) // workers
        starts = range(0, len(x), size)
        return (
            [x[s + low : s + high] for s in starts],
            [y[s + low : s + high] for s in starts],
        )

    def weights(self) -> list[np.ndarray]:
        """Returns the first weights, in the order of Keras's `get_weights`."""
        random = np.random.default_rng(2)

        def kernel(*shape: int) -> np.ndarray:
            scale = np.float32(np.sqrt(2.0 / np.prod(shape[:-1])))
            return random.standard_normal(shape, np.float32) * scale

        values: list[np.ndarray] = []
        before = self.input_shape[-1]
        for width in self.widths:
            if self.convolution:
                for _ in range(2):
                    values += [kernel(3, 3, before, width)]
                    values += [np.ones(width), np.zeros(width)]
                    values += [np.zeros(width), np.ones(width)]
                    before = width
            else:
                values += [kernel(before, width), np.zeros(width)]
                before = width
        values += [kernel(before, CLASSES), np.zeros(CLASSES)]
        return [np.asarray(value, np.float32) for value in values]


def _growing(millions: float) -> Job:
    """Returns an MLP of about N million parameters."""
    columns, layers = 256, 4
    # (layers - 1) * width**2 + (columns + CLASSES + layers) * width
    squares, others = layers - 1, columns + CLASSES + layers
    root = math.sqrt(others**2 + 4 * squares * millions * 1e6)
    width = round((root - others) / (2 * squares))
    return Job((columns,), 32, (width,) * layers, global_batch=32)


GROWING = {f"mlp_{m}M": _growing(m) for m in (0.1, 0.5, 1, 5, 10, 25, 50)}

SETS = {
    "tabular": Job((20,), 128, (64,), dataset="tabular", examples=8_000),
    "digits": Job(
        (8, 8, 1),
        64,
        (16, 32),
        convolution=True,
        dataset="digits",
        examples=1_437,
    ),
    "images": Job(
        (64, 64, 3),
        64,
        (8, 16),
        convolution=True,
        dataset="images/64",
        examples=1_024,
    ),
}

JOBS = {
    **GROWING,
    **SETS,
    "tiny": Job((20,), 100, (64,), global_batch=100),
    "cnn": Job((32, 32, 3), 64, (32, 64, 128), convolution=True),
    "mlp": Job((784,), 128, (1024,) * 4),
    "mlp_adam": Job((784,), 128, (1024,) * 4, optimizer="adam"),
    "resnet20": Job((32, 32, 3), 64, (), network="resnet20"),
    "mobilenetv2": Job((96, 96, 3), 16, (), network="mobilenetv2"),
    "transformer": Job(
        (32, 64), 32, (), network="transformer", optimizer="adam"
    ),
    "lstm": Job((32, 64), 64, (), network="lstm", optimizer="adam"),
}
