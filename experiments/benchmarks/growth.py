"""How a step grows with replicas and with parameters: `make growth`.

    python -m experiments.benchmarks.growth [--rounds=5] [--only=parameters]

Hardware: any. Writes `growth.json`,
`GROWTH.md` and `growth.png` beside this file, anew after each model; `--only`
leaves the others as they are. Each point is a process, or
two, of `mgpu_tf.Trainer.fit` with metrics and progress bar on; the points of
one model take turns and reach the same loss.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence

import numpy as np

from experiments.benchmarks import jobs, results
from experiments.benchmarks.runner import Contestant, Failed, Rates, alternate

_COMMAND = "make growth"
JSON = "growth.json"
TEXT = "GROWTH.md"
FIGURE = "growth.png"
_STEPS = 4
REPLICAS = tuple(range(1, 9))
_TRAINER = "experiments.benchmarks.contestants.trainer"
_HERE = os.path.dirname(os.path.abspath(__file__))

_ONE = Contestant("one_device", _TRAINER, {"strategy": "one_device"})
_PLACES = (
    _ONE,
    Contestant(
        "mirrored_x2", _TRAINER, {"strategy": "mirrored", "replicas": 2}
    ),
    Contestant(
        "2_workers", _TRAINER, {"strategy": "multi_worker_mirrored"}, workers=2
    ),
)


@dataclasses.dataclass(frozen=True)
class Point:
    """The time of a step at one size.

    Attributes:
        x: Replicas, or millions of parameters.
        ms: Milliseconds of a step, one value for each round.
    """

    x: float
    ms: list[float]


@dataclasses.dataclass(frozen=True)
class Series:
    """Step times that grow, and the line through them.

    Attributes:
        name: What was varied, and where it ran.
        unit: Of x.
        points: In the order of x.
    """

    name: str
    unit: str
    points: list[Point]

    def line(self) -> tuple[float, float, float]:
        """Fits a line through the least times.

        What else a machine does can only add to a time; the least of a few
        rounds is the one it added to least. Squares are of deviations in
        proportion, so that small sizes count as much as large ones.

        Returns:
            Milliseconds for one more of the unit, milliseconds at zero, and
            the greatest deviation of a point in proportion to it. One point
            alone has a level line.
        """
        x = np.array([point.x for point in self.points])
        y = np.array([min(point.ms) for point in self.points])
        if len(x) == 1:
            return 0.0, float(y[0]), 0.0
        slope, intercept = np.polyfit(x, y, 1, w=1 / y)
        away = np.abs(slope * x + intercept - y) / y
        return float(slope), float(intercept), float(away.max())


def over_replicas(job: str, rounds: int, logs: str) -> list[Series]:
    """Measures 1 to 8 replicas, parts of the CPU, at one global batch."""
    contestants = [_ONE] + [
        Contestant(
            f"mirrored_x{replicas}",
            _TRAINER,
            {"strategy": "mirrored", "replicas": replicas},
        )
        for replicas in REPLICAS[1:]
    ]
    rates = _alternate(contestants, job, rounds, logs)
    points = [
        Point(count, _ms(rates.rates[contestant.name]))
        for count, contestant in zip(REPLICAS, contestants, strict=True)
    ]
    name = f"replicas, {millions(job):.3g} M parameters"
    return [Series(name, "replicas", points)]


def over_parameters(job: str, rounds: int, logs: str) -> list[Series]:
    """Measures a number of parameters, a core to each process."""
    rates = _alternate(_PLACES, job, rounds, logs, pinned=True)
    return [
        Series(
            f"parameters, {name}",
            "million parameters",
            [Point(millions(job), _ms(found))],
        )
        for name, found in rates.rates.items()
    ]


MEASURES = {
    **{f"replicas/{job}": (over_replicas, job) for job in ("tiny", "mlp")},
    **{f"parameters/{job}": (over_parameters, job) for job in jobs.GROWING},
}


def _alternate(
    contestants: Sequence[Contestant],
    job: str,
    rounds: int,
    logs: str,
    *,
    pinned: bool = False,
) -> Rates:
    folder = os.path.join(logs, job)
    os.makedirs(folder, exist_ok=True)
    rates = alternate(
        contestants,
        job,
        check_steps=_STEPS,
        burst_seconds=1.5,
        rounds=rounds,
        log_folder=folder,
        pinned=pinned,
        multiple=_STEPS,
    )
    if rates.failed:
        raise Failed(f"{job}: {rates.failed}")
    for name, found in rates.rates.items():
        print(f"{job}, {name}: {max(found):.4g} steps/s", flush=True)
    return rates


def _ms(rates: Sequence[float]) -> list[float]:
    return [round(1000 / rate, 4) for rate in rates]


def millions(job: str) -> float:
    """Returns the parameters of a job's model, statistics included."""
    weights = jobs.JOBS[job].weights()
    return round(sum(value.size for value in weights) / 1e6, 3)


def as_json(series: Sequence[Series], facts: Mapping) -> dict:
    """Returns what `growth.json` holds."""
    entries = []
    for one in series:
        slope, intercept, away = one.line()
        entries.append(
            dataclasses.asdict(one)
            | {
                "ms_per_unit": round(slope, 4),
                "ms_at_zero": round(intercept, 4),
                "greatest_deviation": round(away, 4),
            }
        )
    return {**facts, "series": entries}


def text(series: Sequence[Series], facts: Mapping) -> str:
    """Returns the tables of `GROWTH.md`."""
    lines = [
        "# Growth of a step",
        "",
        f"{facts['machine']}. {facts['date']}, `{facts['command']}`. Load "
        f"average at the end {facts['load']}.",
        "",
        "Milliseconds of a step of `Trainer.fit`. The line goes through the "
        "least times, by least squares of deviations in proportion. Parts of "
        "one CPU share its cores, so more replicas of it do the same work "
        "with more overhead. Parameters: MLPs of four hidden layers, 32 "
        "examples in a step, each process on one core with one thread.",
        "",
        f"![Growth]({FIGURE})",
        "",
    ]
    for one in series:
        slope, intercept, away = one.line()
        lines += [
            f"## {one.name}",
            "",
            f"| {one.unit} | least ms | median ms | greatest ms | line ms |",
            "|---|---|---|---|---|",
        ]
        for point in one.points:
            lines.append(
                f"| {point.x:g} | {min(point.ms):.3g} "
                f"| {statistics.median(point.ms):.3g} "
                f"| {max(point.ms):.3g} "
                f"| {intercept + slope * point.x:.3g} |"
            )
        lines += [
            "",
            f"A step takes {intercept:.3g} ms + {slope:.3g} ms x {one.unit}; "
            f"the point farthest from the line is off by {away:.0%}.",
            "",
        ]
    return "\n".join(lines)


def draw(series: Sequence[Series], path: str) -> None:
    """Draws the points, their spread and the lines.

    Replicas have a panel for each model, and all parameters one.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels: dict[str, list[Series]] = {}
    for one in series:
        panel = one.name if one.unit == "replicas" else one.unit
        panels.setdefault(panel, []).append(one)
    figure, every = pyplot.subplots(
        1, len(panels), figsize=(4.5 * len(panels), 4.2), squeeze=False
    )
    for those, axes in zip(panels.values(), every[0], strict=True):
        for one in those:
            slope, intercept, _ = one.line()
            x = np.array([point.x for point in one.points])
            least = [min(point.ms) for point in one.points]
            middle = [statistics.median(point.ms) for point in one.points]
            above = [b - a for a, b in zip(least, middle, strict=True)]
            bars = axes.errorbar(
                x, least, yerr=[[0] * len(x), above], fmt="o", capsize=3
            )
            ends = np.geomspace(x.min(), x.max(), 100)
            axes.plot(
                ends,
                slope * ends + intercept,
                color=bars[0].get_color(),
                linewidth=1,
                label=f"{one.name}: {intercept:.3g} + {slope:.3g} x ms",
            )
        axes.set_xlabel(those[0].unit)
        axes.set_ylabel("step, ms: least, bar to the median")
        if those[0].unit == "replicas":
            axes.set_ylim(bottom=0)
        else:
            axes.loglog()
        axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def read(folder: str) -> list[Series]:
    """Returns what was written before, nothing where there is none."""
    try:
        with open(os.path.join(folder, JSON), encoding="utf-8") as file:
            entries = json.load(file)["series"]
    except FileNotFoundError:
        return []
    return [
        Series(e["name"], e["unit"], [Point(**p) for p in e["points"]])
        for e in entries
    ]


def write(folder: str, series: Sequence[Series], facts: Mapping) -> None:
    """Writes the three files."""
    with open(os.path.join(folder, JSON), "w", encoding="utf-8") as file:
        json.dump(as_json(series, facts), file, indent=1)
        file.write("\n")
    with open(os.path.join(folder, TEXT), "w", encoding="utf-8") as file:
        file.write(text(series, facts))
    draw(series, os.path.join(folder, FIGURE))


def merged(held: Sequence[Series], found: Sequence[Series]) -> list[Series]:
    """Returns what is held, with points that were found in place of older."""
    series = {one.name: one for one in held}
    for one in found:
        points = {point.x: point for point in one.points}
        before = series[one.name].points if one.name in series else []
        points = {point.x: point for point in before} | points
        series[one.name] = Series(
            one.name, one.unit, [points[x] for x in sorted(points)]
        )
    return sorted(
        series.values(), key=lambda one: one.name.startswith("parameters")
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.benchmarks.growth", description=__doc__
    )
    parser.add_argument("--only", default="", help="names begin with this")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output_dir", default=_HERE)
    arguments = parser.parse_args()
    folder = arguments.output_dir
    chosen = [name for name in MEASURES if name.startswith(arguments.only)]
    if arguments.rounds < 1 or not chosen:
        parser.error(
            "--rounds must be 1 or more and --only the beginning of one of "
            f"{', '.join(MEASURES)}. Received: --rounds={arguments.rounds}, "
            f"--only={arguments.only}."
        )
    os.makedirs(folder, exist_ok=True)
    for name in chosen:
        measure, job = MEASURES[name]
        found = measure(job, arguments.rounds, os.path.join("runs", "growth"))
        write(folder, merged(read(folder), found), results.facts(_COMMAND))
    return 0


if __name__ == "__main__":
    sys.exit(main())
