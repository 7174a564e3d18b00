"""The report of a run: what was trained, how fast, and to which weights.

The format of `report.json` is stable: fields may be added, and no field is
removed:

    strategy            name of the strategy
    num_workers         processes that trained
    num_replicas        replicas of all processes
    global_batch_size   examples in a step
    global_step         number of training steps
    examples_seen       examples trained on, each counted once
    epochs              one object for each epoch: epoch (from 1), loss,
                        metrics, seconds, examples_per_second, staleness
                        (mean, p50, p95 and max; null if none was
                        measured, as on synchronous strategies),
                        gradient_noise (noise_scale in examples,
                        gradient_square and gradient_variance, smoothed; null
                        if not measured)
    suggested_batch_size
                        the global batch size that the last noise scale
                        suggests; null if it suggests none
    test                loss and metrics on the test data
    weights_sha256      SHA-256 over `model.get_weights()` in order, each as
                        C-contiguous little-endian bytes
    restarts            number of restarts of the run
    lost_steps          steps that were done again
    lost_seconds        time from each state that the run went back to, until
                        the run continued from that state
    lost_workers        how often an asynchronous run lost a worker, whose
                        work other workers did
    saving_seconds      time for which saving stopped the training
    goodput             the time of the chief, failed processes included:
                        wall_seconds, split into step_, start_,
                        compile_, input_, evaluate_, save_, restart_ and
                        other_seconds
    fused               how many layers and optimizers ran as fused
                        operations, by class
    left_out            the batches that on_nan="restore" has left out: epoch
                        and batch (both from 1), step (the global step that it
                        would have been), loss (a text such as "nan")
    slow                the workers that were slower than the others: worker,
                        section ("input" or "compute"), epoch (from 1), and
                        the seconds in a step: seconds, others (the median of
                        the others), best (in the worker's best epoch)
    pipeline            the stages of a pipeline: stages (the first layer of
                        each), parameters, micro_batches, schedule, bubble
                        (the part of the time without work) and live (the
                        most micro-batches whose activations each stage
                        keeps); null without a pipeline
    devices             the names of the devices of each worker
    mesh                the sizes of the axes data, fsdp, tensor and pipeline;
                        null without a mesh
    memory              bytes of variables on each device of the chief: device,
                        weights, optimizer, other, stage
    step_times          one object for each epoch in which steps were timed:
                        epoch (from 1) and workers, each with the medians of
                        input, compute and step in seconds, or null
    distributions       how often a step took how long, one object for each
                        worker: step, and with several workers compute (the
                        gradients of its own rows), each null or with steps,
                        executions (calls; the steps of one count with their
                        mean), the seconds least, p50, p90, p99 and most, and
                        bins (from, to, steps); since the run was resumed
    time_line           what each stretch of the time went to: width (the
                        seconds of a bin), bins (the seconds of each by the
                        names of goodput) and faults (at, in seconds since the
                        run began, and text)
    tasks               the processes of the run: task and role
    events              of checkpoints, over all restarts: at (seconds since
                        the run began), what (began, saved, resumed, damaged,
                        moved aside), step and why; empty without
                        checkpoint_dir
    warnings            what the chief was warned of
    configuration       the fields of RunConfig that are not the default; what
                        mgpu-tf train --config takes
    predicted           what the planner predicts beside what was measured:
                        memory_bytes of a device, step_seconds, and the parts
                        of a step (predicted, and the seconds of a step that
                        waited for input); null without output_dir, and where
                        a model cannot be traced
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import pathlib
from collections.abc import Iterable
from typing import Any

from mgpu_tf.folders import open_regular, write_whole

REPORT_FILE = "report.json"


@dataclasses.dataclass(frozen=True)
class EpochReport:
    """The report of one epoch.

    Attributes:
        epoch: Number of the epoch, from 1.
        loss: Mean loss over the examples of the epoch.
        metrics: The compiled metrics by name.
        seconds: Time of the steps, with tracing.
        examples_per_second: Number of examples divided by `seconds`.
        staleness: Mean, p50, p95 and max of the staleness of gradients; None if
            none was measured, as on synchronous strategies.
        gradient_noise: The noise scale in examples (None if it is infinite),
            and the two values that it is the quotient of; None if not measured.
    """

    epoch: int
    loss: float
    metrics: dict[str, float]
    seconds: float
    examples_per_second: float
    staleness: dict[str, float] | None = None
    gradient_noise: dict[str, float | None] | None = None


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """A batch that a run has left out.

    Attributes:
        epoch: Number of the epoch, from 1.
        batch: Number of the batch in the epoch, from 1.
        step: The global step that it would have been.
        loss: The loss that it had, such as "nan".
    """

    epoch: int
    batch: int
    step: int
    loss: str


@dataclasses.dataclass(frozen=True)
class Report:
    """The report of a run, with the fields of `report.json`."""

    strategy: str
    num_workers: int
    num_replicas: int
    global_batch_size: int
    global_step: int
    examples_seen: int
    epochs: list[EpochReport]
    test: dict[str, float]
    weights_sha256: str
    restarts: int = 0
    lost_steps: int = 0
    lost_seconds: float = 0.0
    lost_workers: int = 0
    saving_seconds: float = 0.0
    goodput: dict[str, float] | None = None
    fused: dict[str, int] = dataclasses.field(default_factory=dict)
    suggested_batch_size: int | None = None
    pipeline: dict[str, Any] | None = None
    left_out: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    slow: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    devices: list[list[str]] = dataclasses.field(default_factory=list)
    mesh: dict[str, int] | None = None
    memory: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    step_times: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    events: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    distributions: list[dict[str, Any]] = dataclasses.field(
        default_factory=list
    )
    time_line: dict[str, Any] | None = None
    tasks: list[dict[str, str]] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)
    configuration: dict[str, Any] = dataclasses.field(default_factory=dict)
    predicted: dict[str, Any] | None = None

    def write(self, folder: str) -> str:
        """Writes `report.json`, whole or not at all.

        Args:
            folder: An existing folder.

        Returns:
            The path of the file.
        """
        path = os.path.join(folder, REPORT_FILE)
        text = json.dumps(dataclasses.asdict(self), indent=2) + "\n"
        write_whole(
            path,
            lambda path: pathlib.Path(path).write_text(text, encoding="utf-8"),
        )
        return path

    @classmethod
    def read(cls, folder: str) -> Report:
        """Reads `report.json` from a folder."""
        path = os.path.join(folder, REPORT_FILE)
        with open_regular(path, encoding="utf-8") as file:
            values = json.load(file)
        epochs = [
            EpochReport(**known(EpochReport, epoch))
            for epoch in values.pop("epochs")
        ]
        return cls(epochs=epochs, **known(cls, values))


def suggested_batch_size(
    noise_scale: float | None, num_replicas: int = 1
) -> int | None:
    """Returns the global batch size that a noise scale suggests.

    A batch of as many examples as the noise scale needs about twice the
    examples, and about twice the steps, of the fewest that are possible.
    Smaller batches save examples, larger ones save steps.

    Example:
        >>> suggested_batch_size(103.7, num_replicas=8)
        104

    Args:
        noise_scale: In examples.
        num_replicas: The batch size is a multiple of it.

    Returns:
        The nearest multiple, at least one example for each replica; None if
        there is no finite noise scale above 0.

    References:
        S. McCandlish et al.: An Empirical Model of Large-Batch Training, 2018,
        arXiv 1812.06162, section 2.3.
    """
    if noise_scale is None or not 0 < noise_scale < math.inf:
        return None
    return max(1, round(noise_scale / num_replicas)) * num_replicas


def known(kind: type[Any], values: dict[str, Any]) -> dict[str, Any]:
    """Returns the values that are fields of a dataclass.

    A file of another version may have other fields.
    """
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: values[name] for name in values if name in names}


def weights_sha256(weights: Iterable[Any]) -> str:
    """Returns the SHA-256 of a model's weights.

    Args:
        weights: NumPy arrays, such as `model.get_weights()`.

    Returns:
        The hexadecimal digest over all arrays in order, each as C-contiguous
        little-endian bytes.
    """
    digest = hashlib.sha256()
    for weight in weights:
        little = weight.astype(weight.dtype.newbyteorder("<"), copy=False)
        digest.update(little.tobytes(order="C"))
    return digest.hexdigest()
