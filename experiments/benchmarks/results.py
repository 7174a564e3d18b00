"""What was measured, as `results.json`, `RESULTS.md` and pictures.

`results.json` has, by processor:

    machine    the processor, its cores, the memory, the versions
    date       of the last measurement
    load       average over the last minute, at its end
    command    that made it
    results    one object for each ratio: name, contestant, baseline,
               ratio_median, ratio_min, ratio_max, alternations, loss; and
               rate_median, baseline_rate_median, unit, aim, date, load
    failed     contestants that did not run, and why
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
from collections.abc import Iterator, Mapping, Sequence

from experiments.benchmarks.runner import Rates
from experiments.benchmarks.table import Ratio

JSON = "results.json"
TEXT = "RESULTS.md"
_WORKERS = {
    "ddp": "PyTorch DDP",
    "stock_loop": "a loop with TensorFlow's strategy",
    "keras_jax": "Keras 3 on JAX",
}


@dataclasses.dataclass(frozen=True)
class Picture:
    """One question that bars answer: how many times as fast as others.

    Attributes:
        name: Of its file, after `results_`.
        title: The question.
        group: The first part of the names of its benchmarks.
        others: The baselines, in words; "" where the title names it.
    """

    name: str
    title: str
    group: str
    others: Mapping[str, str]

    @property
    def file(self) -> str:
        """Returns the name of its file."""
        return f"results_{self.name}.png"

    def rows(self, value: Mapping) -> list[Mapping]:
        """Returns what it shows of the set of a processor."""
        return [
            row
            for row in value["results"]
            if row["name"].partition("/")[0] == self.group
            and row["contestant"] == "mgpu_tf"
            and row["baseline"] in self.others
        ]

    def label(self, row: Mapping) -> str:
        """Returns a row's name as a reader knows it."""
        subject = row["name"].partition("/")[2]
        words = (_SUBJECTS[subject], self.others[row["baseline"]])
        return ", ".join(filter(None, words))


PICTURES = (
    Picture(
        "one_device_keras_3",
        "One device: how many times as fast as Keras 3's fit?",
        "one_device",
        {"keras_fit": ""},
    ),
    Picture(
        "one_device_keras_2",
        "One device: how many times as fast as Keras 2's fit?",
        "one_device",
        {"tf_keras_fit": ""},
    ),
    Picture(
        "one_device_pytorch",
        "One device: how many times as fast as PyTorch?",
        "one_device",
        {"torch_eager": "", "torch_compile": "torch.compile"},
    ),
    Picture(
        "one_device_jax",
        "One device: how many times as fast as Keras 3 on JAX?",
        "one_device",
        {"keras_jax": ""},
    ),
    Picture(
        "step_overhead",
        "A tiny model, of overhead alone: how many times as fast as ...?",
        "step_overhead",
        {
            "hand_written": "a loop written by hand",
            "keras_fit": "Keras 3's fit",
            "keras_fit_50": "Keras 3's fit, 50 steps a call",
        },
    ),
    Picture(
        "compute_bound",
        "A CNN, which mostly computes: how many times as fast as ...?",
        "compute_bound",
        _WORKERS,
    ),
    Picture(
        "communication_bound",
        "An MLP, which mostly communicates: how many times as fast as ...?",
        "communication_bound",
        _WORKERS,
    ),
    Picture(
        "asynchronous",
        "Parameter servers: how many times as fast as ...?",
        "asynchronous",
        {
            "coordinator_loop": "TensorFlow's coordinator loop",
            "tf_keras_fit_50": "Keras 2's fit, 50 steps a call",
        },
    ),
)
_SUBJECTS = {
    "cnn": "CNN",
    "lstm": "LSTM",
    "mlp_adam": "MLP, Adam",
    "mobilenetv2": "MobileNetV2",
    "resnet20": "ResNet-20",
    "transformer": "transformer",
    "one_device": "one device",
    "mirrored_x2": "two replicas",
    "mirrored_x4": "four replicas",
    "1_workers": "one worker",
    "2_workers": "two workers",
    "3_workers": "three workers",
}
_MEANING = {
    "input": "`reading` is the pipeline with no model behind it; rates are "
    "examples a second. `waited` is the rate of a run over what it would have "
    "been had no step waited for data: 0.95 says that 5% of a step was wait.",
    "start": "Rates of starts, shown as times. `import` is the second import "
    "within one process; `first_step_of_2` is from the launch of two "
    "processes to the end of the first step of the later one.",
    "memory": "The device, or process, of a run that held least over the one "
    "that held most: 1 is balance.",
}

# The unit of rates that are told as times.
STARTS = "starts/s"
NOTES = "NOTES.md"
_PACKAGES = ("tensorflow", "keras", "torch", "tf_keras", "jax", "numpy")


def rows(
    name: str, ratios: Sequence[Ratio], rates: Rates, unit: str = "steps/s"
) -> list[dict]:
    """Returns a row for each ratio of which both sides ran.

    Args:
        name: Of the benchmark.
        ratios: What to tell.
        rates: What was measured; each ratio is taken within its round.
        unit: Of the rates.
    """
    found = []
    for ratio in ratios:
        ours = rates.rates.get(ratio.contestant)
        theirs = rates.rates.get(ratio.baseline)
        if not ours or not theirs:
            continue
        within = [a / b for a, b in zip(ours, theirs, strict=True)]
        found.append(
            {
                "name": name,
                "contestant": ratio.contestant,
                "baseline": ratio.baseline,
                "ratio_median": round(statistics.median(within), 4),
                "ratio_min": round(min(within), 4),
                "ratio_max": round(max(within), 4),
                "alternations": len(within),
                "loss": rates.losses.get(ratio.contestant),
                "rate_median": round(statistics.median(ours), 4),
                "baseline_rate_median": round(statistics.median(theirs), 4),
                "unit": unit,
                "aim": ratio.aim,
                "date": _today(),
                "load": _load(),
            }
        )
    return found


def read(folder: str) -> dict[str, dict]:
    """Returns the sets of the folder's `results.json`, by processor."""
    try:
        with open(os.path.join(folder, JSON), encoding="utf-8") as file:
            return json.load(file)
    except FileNotFoundError:
        return {}


def write(
    folder: str, name: str, found: list[dict], failed: dict, command: str
) -> None:
    """Puts the rows of one benchmark in place of older ones.

    Rows of other processors stay as they are.
    """
    sets = read(folder)
    here = processor()
    held = sets.get(here, {"results": [], "failed": {}})
    others = [row for row in held["results"] if row["name"] != name]
    failures = {
        key: why
        for key, why in held["failed"].items()
        if key.rpartition(":")[0] != name
    }
    failures |= {f"{name}:{who}": why for who, why in failed.items()}
    sets[here] = {
        **facts(command),
        "results": sorted(others + found, key=lambda row: row["name"]),
        "failed": failures,
    }
    os.makedirs(folder, exist_ok=True)
    temporary = os.path.join(folder, JSON + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(sets, file, indent=1)
        file.write("\n")
    os.replace(temporary, os.path.join(folder, JSON))
    notes = ""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), NOTES)
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            notes = file.read()
    with open(os.path.join(folder, TEXT), "w", encoding="utf-8") as file:
        file.write(text(sets, notes))


def text(sets: Mapping[str, Mapping], notes: str = "") -> str:
    """Returns the tables of `RESULTS.md`, the newest set first."""
    lines = [
        "# Benchmarks",
        "",
        "Each ratio is taken between turns of the same round; shown is the "
        "median over rounds, with the least and the greatest. All "
        "contestants of a benchmark start from the same weights, see the "
        "same batches and reach the same loss, which is checked before any "
        "rate is taken. The load average counts what the contestants run, "
        "and any other work. Each processor has a set of its own. A picture is "
        "of the newest set that has its benchmarks.",
        "",
    ]
    for picture, _ in _pictured(sets):
        lines += [f"![{picture.title}]({picture.file})", ""]
    for name in _newest(sets):
        lines += _set(name, sets[name])
    return "\n".join(lines) + ("\n" + notes if notes else "")


def _newest(sets: Mapping[str, Mapping]) -> list[str]:
    return sorted(sets, key=lambda name: sets[name]["date"], reverse=True)


def _pictured(
    sets: Mapping[str, Mapping],
) -> Iterator[tuple[Picture, list[Mapping]]]:
    """Yields each picture with its rows, of the newest set that has some."""
    for picture in PICTURES:
        found = (picture.rows(sets[name]) for name in _newest(sets))
        if shown := next(filter(None, found), None):
            yield picture, shown


def _set(title: str, value: Mapping) -> list[str]:
    """Returns the tables of one processor."""
    lines = [
        f"## {title}",
        "",
        f"{value['machine']}. {value['date']}, `{value['command']}`.",
        "",
    ]
    names = list(dict.fromkeys(row["name"] for row in value["results"]))
    groups = set()
    for name in names:
        group = name.partition("/")[0]
        lines += [f"### {name}", ""]
        if group in _MEANING and group not in groups:
            lines += [_MEANING[group], ""]
        groups.add(group)
        lines += _when(value["results"], name)
        lines += [
            "| contestant | against | ratio | least - greatest | rounds "
            "| aim | rates |",
            "|---|---|---|---|---|---|---|",
        ]
        for row in value["results"]:
            if row["name"] != name:
                continue
            aim = "" if row["aim"] is None else f">= {row['aim']:g}"
            if row["aim"] is not None and row["ratio_median"] < row["aim"]:
                aim += " (missed)"
            lines.append(
                f"| {row['contestant']} | {row['baseline']} "
                f"| **{row['ratio_median']:.2f}** "
                f"| {row['ratio_min']:.2f} - {row['ratio_max']:.2f} "
                f"| {row['alternations']} | {aim} "
                f"| {told_rates(row)} |"
            )
        lines.append("")
    if value.get("failed"):
        lines += ["### Did not run", ""]
        lines += [f"- {who}: {why}" for who, why in value["failed"].items()]
        lines.append("")
    return lines


def facts(command: str) -> dict:
    """Returns where, when and under what load something was measured."""
    return {
        "machine": machine(),
        "date": _today(),
        "load": _load(),
        "command": command,
    }


def _when(found: Sequence[Mapping], name: str) -> list[str]:
    """Returns when a benchmark ran and how busy the machine then was."""
    row = next(row for row in found if row["name"] == name)
    if "load" not in row:
        return []
    return [f"{row['date']}, load average at the end {row['load']}.", ""]


def told_rates(row: Mapping) -> str:
    """Returns the two rates of a row; of starts, the times."""
    rates = row["rate_median"], row["baseline_rate_median"]
    if row["unit"] == STARTS:
        return " / ".join(f"{1000 / rate:,.0f}" for rate in rates) + " ms"
    return " / ".join(f"{rate:.4g}" for rate in rates) + f" {row['unit']}"


def processor() -> str:
    """Returns the processor's name, with the numbers that tell it apart."""
    found: dict[str, str] = {}
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                key, _, value = line.partition(":")
                found.setdefault(key.strip(), value.strip())
    except OSError:
        pass
    name = found.get("model name")
    if name is None:
        return platform.processor() or platform.machine()
    numbers = [
        f"{key} {found[key]}" for key in ("cpu family", "model") if key in found
    ]
    return f"{name} ({', '.join(numbers)})" if numbers else name


def machine() -> str:
    """Returns the machine and the versions in one line."""
    versions = []
    for package in _PACKAGES:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    cores = len(os.sched_getaffinity(0))
    return (
        f"{processor()}, {cores} cores, Python {platform.python_version()}, "
        + ", ".join(versions)
    )


def draw(sets: Mapping[str, Mapping], folder: str) -> list[str]:
    """Draws a picture for each question: bars with their least and greatest.

    Args:
        sets: Those of the processors.
        folder: Gets the pictures.

    Returns:
        Their paths.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    paths = []
    for picture, shown in _pictured(sets):
        figure, axes = pyplot.subplots(figsize=(7, 1.2 + 0.32 * len(shown)))
        for place, row in enumerate(shown):
            middle = row["ratio_median"]
            spread = [
                [middle - row["ratio_min"]],
                [row["ratio_max"] - middle],
            ]
            color = "tab:blue" if middle >= 1 else "tab:orange"
            axes.barh(place, middle, xerr=spread, color=color, capsize=2)
            axes.text(row["ratio_max"], place, f"  {middle:.2f}", va="center")
        labels = [picture.label(row) for row in shown]
        axes.set_yticks(range(len(shown)), labels)
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.set_xlim(0, 1.15 * max(row["ratio_max"] for row in shown))
        axes.set_ylim(len(shown) - 0.4, -0.6)
        axes.set_xlabel("steps per second, as a multiple (1 = equal)")
        # Over the whole figure, since labels take much of its width.
        figure.suptitle(picture.title, fontsize=11)
        figure.tight_layout()
        paths.append(os.path.join(folder, picture.file))
        figure.savefig(paths[-1], dpi=100)
        pyplot.close(figure)
    return paths


def _load() -> float:
    return round(os.getloadavg()[0], 1)


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
