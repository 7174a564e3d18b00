"""The pipeline of a model, traced on a real run: what is where in each stage.

    data loading -> distribution to the devices -> training on each device
                 -> gradient aggregation -> epochs -> prediction

The values are excerpts of what the run computed: the first rows of a tensor,
and of each the first numbers. `mgpu_tf.studies.pipeline_trace` makes a trace.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from mgpu_tf.reports.device_times import Profile

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
        if part.dtype == object:  # Text.
            part = part.astype(str)
        return cls(
            name, list(array.shape), str(array.dtype), device, part.tolist()
        )

    def lines(self) -> list[str]:
        """Returns the values as text, a line for each row."""
        rows = self.values if len(self.shape) > 1 else [self.values]
        size = math.prod(self.shape)
        shown = len(rows) * len(rows[0]) if rows and rows[0] else 0
        lines = [" ".join(map(number, row)) for row in rows]
        if lines and shown < size:
            lines[-1] += " ..."
        return lines


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
        loss: The mean loss of its rows, in training; None where it has no loss
            of its own.
    """

    device: str
    batch: int
    first: int
    after: int
    weight: float
    data: list[Excerpt]
    gradients: list[Excerpt] = dataclasses.field(default_factory=list)
    outputs: list[Excerpt] = dataclasses.field(default_factory=list)
    loss: float | None = None

    def title(self, place: int) -> str:
        """Returns a line that names the device and its rows."""
        rows = f"rows {self.first} to {self.after - 1}"
        if self.after == self.first:
            rows = "no rows"
        return f"Device {place}: {short(self.device)}, {rows}"

    def title_of_training(self, place: int) -> str:
        """Returns the same with the loss."""
        loss = "" if self.loss is None else f", loss {self.loss:.4g}"
        return f"{self.title(place)}{loss}"


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
        profile: What each device did in some later steps; None where they
            were not profiled.
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
    profile: Profile | None = None

    def json(self) -> str:
        """Returns the trace as JSON, with all digits."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    @property
    def summary(self) -> str:
        """Returns one line about the run."""
        return (
            f"{self.num_workers} worker{'s' * (self.num_workers > 1)}, "
            f"{self.num_replicas} device{'s' * (self.num_replicas > 1)}, "
            f"batches of {self.global_batch_size} of {self.num_examples:,} "
            f"examples, {self.num_parameters:,} parameters, {self.optimizer}."
        )

    @property
    def distribution(self) -> str:
        """Returns how rows get to the devices."""
        if not self.in_step:
            return "Each worker gets a batch of its own, and all of its rows."
        sizes = [str(s.after - s.first) for s in self.step.shares]
        return (
            f"The batch of {sum(map(int, sizes))} rows is cut in the order of "
            f"its rows: {' + '.join(sizes)}. Rows are copied to their device "
            "when the step begins; the tables show where they are before."
        )

    def epoch_table(self) -> tuple[list[str], list[list[str]]]:
        """Returns the names of the columns, and the rows, as text."""
        logs = self.epochs[0].logs
        names = [name for name in logs if name in self.test]
        names.sort(key=lambda name: name != "loss")
        rows, before = [], None
        for epoch in self.epochs:
            logs, change = epoch.logs, ""
            if before is not None:
                change = f"{logs['loss'] - before:+.4f}"
            before = logs["loss"]
            rows.append(
                [
                    str(epoch.epoch),
                    *(f"{logs[name]:.4f}" for name in names),
                    change,
                    f"{epoch.change:.2%}",
                ]
            )
        rows.append(
            [
                "test",
                *(
                    f"{self.test[n]:.4f}" if n in self.test else ""
                    for n in names
                ),
                "",
                "",
            ]
        )
        return ["epoch", *names, "change of loss", "weights moved"], rows

    @property
    def aggregation(self) -> str:
        """Returns how gradients of devices become that of the optimizer."""
        if not self.in_step:
            return (
                "Workers do not wait for each other: each gradient is applied "
                "on the parameter servers when it arrives. Two workers may "
                "have read the same weights."
            )
        if len(self.step.shares) == 1:
            return "One device: its gradient is that of the batch."
        parts = " + ".join(
            f"{share.weight:g} x device {number}"
            for number, share in enumerate(self.step.shares)
        )
        whole = {w.name: w.before.shape for w in self.step.weights}
        text = f"Sum over devices, by their part of the rows: {parts}."
        if any(each.shape != whole[each.name] for each in self.step.received):
            text += " Each device gets its part of the sum."
        return text


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


def alike(excerpts: list[Excerpt]) -> list[Excerpt]:
    """Returns excerpts, those that are the same on several devices once."""
    devices: dict[str, list[str]] = {}
    first: dict[str, Excerpt] = {}
    for each in excerpts:
        key = json.dumps([each.name, each.shape, each.values])
        first.setdefault(key, each)
        devices.setdefault(key, []).append(short(each.device))
    return [
        dataclasses.replace(each, device=", ".join(devices[key]))
        for key, each in first.items()
    ]


def share_of(values: dict[str, Any]) -> ShareTrace:
    """Returns a share from its JSON."""
    lists = {
        name: [Excerpt(**each) for each in values[name]]
        for name in ("data", "gradients", "outputs")
    }
    return ShareTrace(**values | lists)


def number(value: float) -> str:
    """Returns a number with four digits, or an integer as it is."""
    if isinstance(value, bool | int | str):
        return str(value)
    return f"{value:.4g}"


def numbers(values: list[int]) -> str:
    """Returns integers in brackets."""
    return f"[{', '.join(map(str, values))}]"


def short(device: str) -> str:
    """Returns a device without what is the same everywhere.

    Example:
        >>> short("/job:worker/replica:0/task:1/device:CPU:0")
        'worker 1 CPU:0'
    """
    if not device.startswith("/"):
        return device or "host"
    parts = dict(
        part.split(":", 1) for part in device.strip("/").split("/") if part
    )
    name = parts.get("device", "CPU:0")
    job = parts.get("job", "localhost")
    if job == "localhost":
        return name
    return f"{job} {parts.get('task', '0')} {name}"
