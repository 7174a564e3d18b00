"""Published scaling tables as a test of the planner's communication model.

    python -m experiments.planner.published --output_dir=docs

Each machine has two constants, fitted on the rows of one model: the part of
its links' rate that sums over devices reach, and how much its devices differ.
The rows of its other models are predicted from the throughput of one device
alone, or of the fewest that were published. All rows are in the table, good
or bad. A few seconds, no TensorFlow.

Sources
    tensorflow/docs, site/en/r1/guide/performance/benchmarks.md, May 2017
    NVIDIA/DeepLearningExamples, TensorFlow2: README of BERT, EfficientNet,
    UNet_Medical and MaskRCNN
    A. Sergeev, M. Del Balso: Horovod, 2018, arXiv 1802.05799, figure 6
    P. Goyal et al.: ImageNet in 1 Hour, 2017, arXiv 1706.02677
    pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import statistics

from mgpu_tf.planner.devices import LINKS, Efficiencies, Link, link
from mgpu_tf.planner.speed.communication import Network
from mgpu_tf.planner.speed.weak_scaling import efficiency

_MILLION = 1e6
# Parameters, and bytes of each gradient in float32.
PARAMETERS = {
    "InceptionV3": 23.9,
    "ResNet-50": 25.6,
    "ResNet-101": 44.6,
    "ResNet-152": 60.3,
    "AlexNet": 61.1,
    "VGG16": 138.4,
    "BERT-large": 336.0,
    "EfficientNet-B0": 5.3,
    "EfficientNet-B4": 19.3,
    "U-Net": 31.0,
    "Mask R-CNN": 44.4,
}


@dataclasses.dataclass(frozen=True)
class Machine:
    """A machine of a table.

    Attributes:
        name: Its name.
        per_node: Devices of a node.
        inside: The link in a node.
        between: The link of a node to the others.
        source: Where its rows are from.
    """

    name: str
    per_node: int
    inside: Link
    between: Link
    source: str


@dataclasses.dataclass(frozen=True)
class Series:
    """Throughputs of a model on a machine.

    Attributes:
        machine: Which machine.
        model: Which model.
        note: What distinguishes the series, such as a precision.
        rows: Examples of a device in a step.
        rates: Examples per second by number of devices.
        fitted: Whether the machine's constants are fitted on it.
        word: What is said of it beforehand.
    """

    machine: Machine
    model: str
    note: str
    rows: int
    rates: dict[int, float]
    fitted: bool = False
    word: str = ""


_TF = "TensorFlow benchmarks page, 2017"
_NV = "NVIDIA DeepLearningExamples, TensorFlow 2"
DGX1_P100 = Machine("DGX-1, P100", 8, LINKS["pcie3"], link("100gbe"), _TF)
GCE_K80 = Machine("GCE, K80", 8, LINKS["pcie3"], link("10gbe"), _TF)
EC2_K80 = Machine("EC2 p2, K80", 8, LINKS["pcie3"], link("20gbe"), _TF)
DGX2_V100 = Machine(
    "DGX-2, V100", 16, LINKS["nvlink2"], Link("8 x edr", 1e11, 3e-6), _NV
)
DGXA_A100 = Machine(
    "DGX A100", 8, LINKS["nvlink3"], Link("8 x hdr", 2e11, 3e-6), _NV
)
DGX1_V100 = Machine(
    "DGX-1, V100", 8, LINKS["nvlink2"], Link("4 x edr", 5e10, 3e-6), _NV
)
PASCAL = Machine("128 x 4 P100, 25 GbE", 4, LINKS["pcie3"], link("25gbe"), "")
BIG_BASIN = Machine("Big Basin, P100", 8, LINKS["nvlink1"], link("50gbe"), "")

_BOUND_BY_HOST = (
    "the source says that augmentation on the host bounds it: not predicted"
)
_SUPER_LINEAR = (
    "super-linear from 1 to 4 devices, so the row of one device is bound by "
    "something else: not predicted"
)
SERIES = (
    Series(
        *(DGX1_P100, "VGG16", "synthetic", 64),
        {1: 154, 2: 295, 4: 584, 8: 1081},
        fitted=True,
    ),
    Series(
        *(DGX1_P100, "InceptionV3", "synthetic", 64),
        {1: 142, 2: 284, 4: 569, 8: 1131},
    ),
    Series(
        *(DGX1_P100, "ResNet-50", "synthetic", 64),
        {1: 219, 2: 422, 4: 852, 8: 1734},
    ),
    Series(
        *(DGX1_P100, "ResNet-152", "synthetic", 64),
        {1: 91.8, 2: 181, 4: 356, 8: 716},
    ),
    Series(
        *(DGX1_P100, "AlexNet", "synthetic", 512),
        {1: 2987, 2: 5658, 4: 10509, 8: 17822},
    ),
    Series(
        *(DGX1_P100, "VGG16", "synthetic, batch 32", 32),
        {1: 144, 2: 281, 4: 549, 8: 820},
    ),
    Series(
        *(DGX1_P100, "ResNet-50", "synthetic, batch 32", 32),
        {1: 195, 2: 368, 4: 768, 8: 1485},
    ),
    Series(
        *(DGX1_P100, "ResNet-50", "real data", 64),
        {1: 218, 2: 425, 4: 853, 8: 1630},
        word="input is not in the model",
    ),
    Series(
        *(DGX1_P100, "VGG16", "real data", 64),
        {1: 154, 2: 284, 4: 534, 8: 898},
        word="input is not in the model",
    ),
    Series(
        *(GCE_K80, "ResNet-50", "synthetic", 64),
        {1: 51.9, 2: 99.0, 4: 195, 8: 387},
        fitted=True,
    ),
    Series(
        *(GCE_K80, "InceptionV3", "synthetic", 64),
        {1: 30.5, 2: 57.8, 4: 116, 8: 227},
    ),
    Series(
        *(GCE_K80, "ResNet-152", "synthetic", 32),
        {1: 20.0, 2: 38.2, 4: 75.8, 8: 148},
    ),
    Series(
        *(GCE_K80, "AlexNet", "synthetic", 512),
        {1: 656, 2: 1209, 4: 2328, 8: 4640},
    ),
    Series(
        *(GCE_K80, "VGG16", "synthetic", 32),
        {1: 35.4, 2: 64.8, 4: 120, 8: 234},
    ),
    Series(
        *(EC2_K80, "ResNet-50", "distributed, synthetic", 64),
        {1: 52.4, 8: 378, 16: 751, 32: 1388, 64: 2744},
        fitted=True,
    ),
    Series(
        *(EC2_K80, "InceptionV3", "distributed, synthetic", 64),
        {1: 29.7, 8: 229, 16: 459, 32: 902, 64: 1783},
    ),
    Series(
        *(EC2_K80, "ResNet-152", "distributed, synthetic", 32),
        {1: 19.4, 8: 146, 16: 291, 32: 565, 64: 981},
    ),
    Series(
        *(EC2_K80, "VGG16", "one machine, synthetic", 32),
        {1: 36.3, 2: 69.4, 4: 141, 8: 260},
    ),
    Series(
        *(DGX2_V100, "BERT-large", "length 128, float32", 65536),
        {1: 49.97, 4: 194.02, 8: 367.9, 16: 762.22},
        fitted=True,
    ),
    Series(
        *(DGX2_V100, "BERT-large", "length 512, float32", 30720),
        {1: 11.06, 4: 43.05, 8: 85.51, 16: 161.38},
    ),
    Series(
        *(DGX2_V100, "BERT-large", "length 128, mixed", 61440),
        {1: 206.5, 4: 789.75, 8: 1561.77, 16: 3077.99},
    ),
    Series(
        *(DGX2_V100, "BERT-large", "length 512, mixed", 30720),
        {1: 40.95, 4: 158.5, 8: 312.03, 16: 614.94},
    ),
    Series(
        *(DGXA_A100, "EfficientNet-B4", "TF32", 80),
        {1: 167, 8: 1280, 32: 5023, 64: 9838},
        fitted=True,
    ),
    Series(
        *(DGXA_A100, "EfficientNet-B4", "mixed", 160),
        {1: 394, 8: 2984, 32: 11034, 64: 21844},
    ),
    Series(
        *(DGXA_A100, "EfficientNet-B0", "TF32", 512),
        {1: 1206, 8: 9365, 16: 18361},
    ),
    Series(
        *(DGXA_A100, "EfficientNet-B0", "mixed", 1024),
        {1: 2549, 8: 16336, 16: 33000},
        word=_BOUND_BY_HOST,
    ),
    Series(
        *(DGXA_A100, "U-Net", "batch 8, TF32", 8),
        {1: 46.26, 8: 293.64},
    ),
    Series(
        *(DGXA_A100, "U-Net", "batch 8, mixed", 8),
        {1: 118.98, 8: 561.77},
    ),
    Series(
        *(DGX1_V100, "EfficientNet-B4", "float32", 32),
        {1: 89, 8: 643, 32: 2095, 64: 4109},
        fitted=True,
    ),
    Series(
        *(DGX1_V100, "EfficientNet-B4", "mixed", 64),
        {1: 193, 8: 1298, 32: 4892, 64: 9666},
    ),
    Series(
        *(DGX1_V100, "EfficientNet-B0", "float32", 128),
        {1: 629, 8: 4012},
        word=_BOUND_BY_HOST,
    ),
    Series(
        *(DGX1_V100, "BERT-large", "SQuAD, batch 8, float32", 8),
        {1: 11.11, 4: 42.84, 8: 85.91},
    ),
    Series(
        *(DGX1_V100, "BERT-large", "SQuAD, batch 12, mixed", 12),
        {1: 47.06, 4: 165.26, 8: 330.29},
    ),
    Series(
        *(DGX1_V100, "U-Net", "batch 8, float32", 8),
        {1: 17.91, 8: 137.11},
    ),
    Series(
        *(DGX1_V100, "Mask R-CNN", "batch 4, float32", 4),
        {1: 4.7, 4: 22.2, 8: 38.9},
        word=_SUPER_LINEAR,
    ),
    Series(
        *(DGX1_V100, "Mask R-CNN", "batch 2, mixed", 2),
        {1: 6.6, 4: 34.8, 8: 49.8},
        word=_SUPER_LINEAR,
    ),
)

# Published as an efficiency alone, from many devices, without the rate of
# one: the step of one device is taken from the DGX-1 rows of the same GPU.
_STEP = {
    "InceptionV3": 64 / 142,
    "ResNet-101": 64 / 219 * 1.75,
    "VGG16": 64 / 154,
    "ResNet-50": 32 / 195,
}
TOLD = (
    (PASCAL, "InceptionV3", "Horovod, 512 devices", 1, 512, 0.90, False),
    (PASCAL, "ResNet-101", "Horovod, 512 devices", 1, 512, 0.90, False),
    (PASCAL, "VGG16", "Horovod, 512 devices", 1, 512, 0.68, True),
    (BIG_BASIN, "ResNet-50", "Goyal, 8 to 256 devices", 8, 256, 0.90, False),
)

# Rows that no model of communication predicts, each with the reason.
NAMED = (
    (
        "1.7x, 3.5x, 6.2x on 2, 4, 8 GPUs, a CNN on ImageNet",
        "The attribution to Krizhevsky 2012 looks wrong: that paper trains on "
        "two GPUs. Those of his One weird trick, 2014, are 1.95, 3.74, 6.25. "
        "Neither gives the rate of one GPU by link, so nothing is predicted.",
    ),
    (
        "ResNet-50 in 2.2 minutes",
        "From Ying et al. 2018 (arXiv 1811.06992), 1,024 TPU v3 chips, and not "
        "from Shallue et al.; a time to accuracy, and no efficiency.",
    ),
    (
        "46.5x",
        "No source of the rate of one device was found; not predicted.",
    ),
    (
        "Mask R-CNN 4.0x on 8 devices",
        "The table was not found. Those of the README above are super-linear "
        "from 1 to 4 devices, so the input bounds the row of one device.",
    ),
    (
        "torchtitan, Llama 3.1 8B on 8 and 128 H100: 5,762 and 5,605 tokens/s",
        "97.3% over 16 times as many devices. Weights are gathered ahead of "
        "each layer, which this model of sums of gradients does not have.",
    ),
)


def constants(machine: Machine) -> Efficiencies:
    """Returns the constants of a machine, fitted on one of its models."""
    fitted = [s for s in SERIES if s.machine is machine and s.fitted]
    told = [t for t in TOLD if t[0] is machine and t[6]]
    best, found = float("inf"), Efficiencies()
    for rate, deviation in itertools.product(
        [1.0 / 1.25**power for power in range(24)],
        [0.0, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04],
    ):
        tried = Efficiencies(link=rate, deviation=deviation)
        errors = [
            predicted(series, n, tried) - measured(series, n)
            for series in fitted
            for n in list(series.rates)[1:]
        ]
        errors += [
            _told(machine, model, first, n, tried) - value
            for _, model, _, first, n, value, _ in told
        ]
        error = sum(each * each for each in errors)
        if (fitted or told) and error < best - 1e-12:
            best, found = error, tried
    return found


def network(machine: Machine, devices: int, reached: Efficiencies) -> Network:
    """Returns the links of as many devices."""
    nodes = -(-devices // machine.per_node)
    return Network(
        machine.per_node,
        nodes,
        machine.inside,
        machine.between,
        reached.link,
    )


def predicted(series: Series, devices: int, reached: Efficiencies) -> float:
    """Returns the predicted efficiency of a row."""
    first = next(iter(series.rates))
    return efficiency(
        series.rows * first / series.rates[first],
        PARAMETERS[series.model] * _MILLION * 4,
        devices,
        network(series.machine, devices, reached),
        reached,
    )


def measured(series: Series, devices: int) -> float:
    """Returns the published efficiency of a row."""
    first = next(iter(series.rates))
    one = series.rates[first] / first
    return series.rates[devices] / devices / one


def _told(
    machine: Machine,
    model: str,
    first: int,
    devices: int,
    reached: Efficiencies,
) -> float:
    def of(count: int) -> float:
        return efficiency(
            _STEP[model],
            PARAMETERS[model] * _MILLION * 4,
            count,
            network(machine, count, reached),
            reached,
        )

    return of(devices) / of(first)


def table() -> list[dict[str, object]]:
    """Returns all rows."""
    rows: list[dict[str, object]] = []
    found = {series.machine: constants(series.machine) for series in SERIES}
    for series in SERIES:
        for devices in list(series.rates)[1:]:
            reached = found[series.machine]
            rows.append(
                {
                    "machine": series.machine.name,
                    "model": series.model,
                    "note": series.note,
                    "devices": devices,
                    "predicted": round(predicted(series, devices, reached), 4),
                    "published": round(measured(series, devices), 4),
                    "fitted": series.fitted,
                    "word": series.word,
                }
            )
    for machine, model, note, first, devices, value, fitted in TOLD:
        # Goyal's machine has no row to be fitted on: that of Horovod's.
        reached = constants(PASCAL)
        rows.append(
            {
                "machine": machine.name,
                "model": model,
                "note": note,
                "devices": devices,
                "predicted": round(
                    _told(machine, model, first, devices, reached), 4
                ),
                "published": value,
                "fitted": fitted,
                "word": "",
            }
        )
    return rows


def summary(rows: list[dict[str, object]]) -> dict[str, float]:
    """Returns the error in points over the rows that were predicted."""
    points = sorted(
        abs(float(r["predicted"]) - float(r["published"])) * 100  # type: ignore[arg-type]
        for r in rows
        if not r["fitted"]
    )
    return {
        "rows": len(points),
        "median_points": round(statistics.median(points), 2),
        "worst_points": round(points[-1], 2),
        "within_5_points": sum(each <= 5 for each in points),
    }


def markdown(rows: list[dict[str, object]]) -> str:
    """Returns the table as Markdown."""
    told = summary(rows)
    lines = [
        "# Published scaling, predicted",
        "",
        "Made by `python -m experiments.planner.published`, which names the "
        "sources and what is fitted. Efficiency is throughput over n times "
        "that of one device.",
        "",
        f"{told['rows']} rows were predicted: median error "
        f"{told['median_points']} points, worst {told['worst_points']}, "
        f"{told['within_5_points']} within 5 points.",
        "",
        "| machine | model | | devices | predicted | published | points | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        predicted_, published = (
            float(row[name])  # type: ignore[arg-type]
            for name in ("predicted", "published")
        )
        word = "fitted" if row["fitted"] else row["word"]
        lines.append(
            f"| {row['machine']} | {row['model']} | {row['note']} | "
            f"{row['devices']} | {predicted_:.1%} | {published:.1%} | "
            f"{(predicted_ - published) * 100:+.1f} | {word} |"
        )
    lines += ["", "Not predicted:", ""]
    lines += [f"- {name}: {reason}" for name, reason in NAMED]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output_dir", default="docs")
    folder = parser.parse_args().output_dir
    rows = table()
    value = {"summary": summary(rows), "rows": rows, "named": NAMED}
    path = os.path.join(folder, "planner_published.json")
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.write("\n")
    path = os.path.join(folder, "planner_published.md")
    with open(path, "w", encoding="utf-8") as file:
        file.write(markdown(rows))
    print(json.dumps(value["summary"]))


if __name__ == "__main__":
    main()
