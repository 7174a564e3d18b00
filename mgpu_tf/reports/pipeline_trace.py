"""The pipeline of a model, traced on a real run: what is where in each stage.

    data loading -> distribution to the devices -> training on each device
                 -> gradient aggregation -> epochs -> prediction

The values are excerpts of what the run computed: the first rows of a tensor,
and of each the first numbers. `mgpu_tf.studies.pipeline_trace` makes a trace.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

ROWS, COLUMNS = 2, 6


@dataclasses.dataclass(frozen=True)
class Excerpt:
    """Some values of a tensor.

    Attributes:
        name: What it is, such as "inputs" or the path of a weight.
        shape: The shape of the whole tensor.
        dtype: Its type.
        device: Where it lies.
        values: The first numbers of its first rows; a list, or for tensors of
            two and more axes a list for each row.
    """

    name: str
    shape: list[int]
    dtype: str
    device: str
    values: Any

    @classmethod
    def of(cls, name: str, array: Any, device: str) -> Excerpt:
        """Returns the excerpt of a NumPy array."""
        part = array.reshape(-1)[:COLUMNS]
        if array.ndim > 1 and array.size:
            part = array.reshape(len(array), -1)[:ROWS, :COLUMNS]
        return cls(
            name, list(array.shape), str(array.dtype), device, part.tolist()
        )


@dataclasses.dataclass(frozen=True)
class ShareTrace:
    """What one device did with its rows.

    Attributes:
        device: Where it computed.
        batch: Index of the global batch, from 0.
        first: Its first row in the global batch.
        after: The row after its last.
        weight: Its part of the gradient that the optimizer gets: its rows
            divided by the rows of the global batch. 1 on parameter servers.
        data: The rows that it got.
        gradients: For each weight the mean gradient of its rows.
        outputs: What it predicted, in a prediction.
    """

    device: str
    batch: int
    first: int
    after: int
    weight: float
    data: list[Excerpt]
    gradients: list[Excerpt] = dataclasses.field(default_factory=list)
    outputs: list[Excerpt] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class BatchTrace:
    """A global batch, as it was read.

    Attributes:
        rows: The numbers of its rows in the data set, the first ones; empty
            if the data is not arrays.
        data: Its values.
    """

    rows: list[int]
    data: list[Excerpt]


@dataclasses.dataclass(frozen=True)
class WeightTrace:
    """A weight before and after the step.

    Attributes:
        name: Its path.
        devices: Where its copies or parts lie.
        before: Its values before the step.
        after: Its values after the step.
    """

    name: str
    devices: list[str]
    before: Excerpt
    after: Excerpt


@dataclasses.dataclass(frozen=True)
class StepTrace:
    """One step of training.

    Attributes:
        batches: The global batches; several on parameter servers.
        shares: What each device did.
        received: What the optimizer got, for each weight and device.
        weights: Each weight before and after.
        logs: Loss and metrics of the step.
    """

    batches: list[BatchTrace]
    shares: list[ShareTrace]
    received: list[Excerpt]
    weights: list[WeightTrace]
    logs: dict[str, float]


@dataclasses.dataclass(frozen=True)
class EpochTrace:
    """One epoch.

    Attributes:
        epoch: Its number, from 1.
        logs: Loss and metrics.
        change: How far the weights moved, as a part of their norm.
    """

    epoch: int
    logs: dict[str, float]
    change: float


@dataclasses.dataclass(frozen=True)
class PredictionTrace:
    """The prediction for one batch.

    Attributes:
        data: The inputs.
        shares: What each device computed.
        combined: The outputs of `predict` for all rows.
    """

    data: list[Excerpt]
    shares: list[ShareTrace]
    combined: list[Excerpt]


@dataclasses.dataclass(frozen=True)
class PipelineTrace:
    """The trace of a run.

    Attributes:
        strategy: The name of the strategy.
        num_workers: Number of processes that train.
        num_replicas: Number of devices that train.
        in_step: Whether the devices step together.
        model: The name of the model.
        num_parameters: Number of its parameters.
        optimizer: The name of its optimizer.
        num_examples: Number of examples to train on.
        global_batch_size: Number of examples in a step.
        step: The first step of training.
        epochs: The epochs.
        prediction: A prediction after training.
        test: Loss and metrics on the test data.
    """

    strategy: str
    num_workers: int
    num_replicas: int
    in_step: bool
    model: str
    num_parameters: int
    optimizer: str
    num_examples: int
    global_batch_size: int
    step: StepTrace
    epochs: list[EpochTrace]
    prediction: PredictionTrace
    test: dict[str, float]

    def json(self) -> str:
        """Returns the trace as JSON, with all digits."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    @property
    def aggregation(self) -> str:
        """Returns how gradients of devices become that of the optimizer."""
        if not self.in_step:
            return (
                "Workers do not wait for each other: each gradient is applied "
                "on the parameter servers when it arrives."
            )
        if len(self.step.shares) == 1:
            return "One device: its gradient is that of the batch."
        parts = " + ".join(
            f"{share.weight:g} x device {number}"
            for number, share in enumerate(self.step.shares)
        )
        return f"Sum over devices, by their part of the rows: {parts}."


def joined(step: StepTrace, every: list[dict[str, Any]]) -> StepTrace:
    """Returns the trace of a step with the devices of all workers.

    Args:
        step: That of one worker.
        every: Those of all workers, as dictionaries.
    """
    devices = {
        weight.name: [
            device
            for worker in every
            for each in worker["weights"]
            if each["name"] == weight.name
            for device in each["devices"]
        ]
        for weight in step.weights
    }
    return dataclasses.replace(
        step,
        shares=[share_of(s) for worker in every for s in worker["shares"]],
        received=[Excerpt(**e) for worker in every for e in worker["received"]],
        weights=[
            dataclasses.replace(weight, devices=devices[weight.name])
            for weight in step.weights
        ],
    )


def share_of(values: dict[str, Any]) -> ShareTrace:
    """Returns a share from its JSON."""
    lists = {
        name: [Excerpt(**each) for each in values[name]]
        for name in ("data", "gradients", "outputs")
    }
    return ShareTrace(**values | lists)


def short(device: str) -> str:
    """Returns a device without what is the same everywhere.

    Example:
        >>> short("/job:worker/replica:0/task:1/device:CPU:0")
        'worker 1 CPU:0'
    """
    parts = dict(
        part.split(":", 1) for part in device.strip("/").split("/") if part
    )
    name = parts.get("device", "CPU:0")
    job = parts.get("job", "localhost")
    if job == "localhost":
        return name
    return f"{job} {parts.get('task', '0')} {name}"
