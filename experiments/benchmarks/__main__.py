"""Runs the benchmarks: `make bench`, `make bench ONLY=step_overhead`.

Hardware: any; on 2 quiet CPU cores half a minute to six for each benchmark.
Expected: the ratios of RESULTS.md. Results are written after each benchmark,
so a run that was broken off goes on with `make bench ARGS=--continue`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

from experiments.benchmarks import results
from experiments.benchmarks.jobs import JOBS
from experiments.benchmarks.memory import BALANCES, Balance
from experiments.benchmarks.runner import Failed, Rates, alternate
from experiments.benchmarks.starts import STARTS, Start
from experiments.benchmarks.table import BENCHMARKS, Benchmark
from experiments.benchmarks.waits import WAITS, Waits

ALL = (*BENCHMARKS, *WAITS, *STARTS, *BALANCES)
HERE = os.path.dirname(os.path.abspath(__file__))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.benchmarks", description=__doc__
    )
    parser.add_argument("--only", default="", help="names begin with this")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output_dir", default=HERE)
    parser.add_argument(
        "--continue",
        dest="proceed",
        action="store_true",
        help="leave out what the log folder says is done",
    )
    arguments = parser.parse_args()
    chosen = [b for b in ALL if b.name.startswith(arguments.only)]
    if arguments.rounds < 1 or not chosen:
        names = ", ".join(b.name for b in ALL)
        parser.error(
            "--rounds must be 1 or more and --only the beginning of one of "
            f"{names}. Received: --rounds={arguments.rounds}, "
            f"--only={arguments.only}."
        )
    logs = os.path.join("runs", "benchmarks")
    os.makedirs(logs, exist_ok=True)
    command = f"make bench ONLY={arguments.only}".removesuffix(" ONLY=")
    wrong = 0
    for benchmark in chosen:
        mark = os.path.join(logs, benchmark.name.replace("/", ".") + ".done")
        if arguments.proceed and os.path.exists(mark):
            print(f"{benchmark.name}: done before", flush=True)
            continue
        wrong |= _run(benchmark, arguments, logs, command)
        with open(mark, "w", encoding="utf-8"):
            pass
    results.draw(results.read(arguments.output_dir), arguments.output_dir)
    return wrong


def _run(benchmark, arguments, logs: str, command: str) -> int:
    started = time.monotonic()
    folder = os.path.join(logs, benchmark.name.replace("/", "."))
    os.makedirs(folder, exist_ok=True)
    try:
        rates = _rates(benchmark, arguments.rounds, folder)
    except Failed as error:
        print(f"{benchmark.name}: {error}", file=sys.stderr, flush=True)
        return 1
    found = results.rows(
        benchmark.name, benchmark.ratios, rates, benchmark.unit
    )
    results.write(
        arguments.output_dir, benchmark.name, found, rates.failed, command
    )
    print(f"{benchmark.name}, {time.monotonic() - started:.0f} s", flush=True)
    for row in found:
        aim = "" if row["aim"] is None else f", aim {row['aim']:g}"
        print(
            f"  {row['contestant']} / {row['baseline']}: "
            f"{row['ratio_median']:.2f} "
            f"({row['ratio_min']:.2f} - {row['ratio_max']:.2f}){aim}; "
            f"{results.told_rates(row)}",
            flush=True,
        )
    for name, why in rates.failed.items():
        print(f"  {name} did not run: {why}", flush=True)
    return 0


def _rates(
    benchmark: Benchmark | Waits | Start | Balance,
    rounds: int,
    folder: str,
) -> Rates:
    if not isinstance(benchmark, Benchmark):
        return benchmark.measure(rounds)
    found = alternate(
        benchmark.contestants,
        benchmark.job,
        check_steps=benchmark.check_steps,
        burst_seconds=benchmark.burst_seconds,
        rounds=rounds,
        log_folder=folder,
        pinned=benchmark.pinned,
        multiple=benchmark.multiple,
    )
    if benchmark.unit == "examples/s":
        size = JOBS[benchmark.job].batch(1)
        for name, rates in found.rates.items():
            found.rates[name] = [rate * size for rate in rates]
    return found


if __name__ == "__main__":
    sys.exit(main())
