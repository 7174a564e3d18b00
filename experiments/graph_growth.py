"""The graph of a step and its trace, against blocks and devices.

    python experiments/graph_growth.py [--blocks=4,12] [--devices=2,4,8]

Runs `exchanges.py` for `fsdp` on parts of one CPU, once for each pair, and
writes the table of [docs/growth.md](../docs/growth.md) after each run. Half a
minute for 2 blocks on 4 devices on 2 idle cores, and in proportion.
"""

import argparse
import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
BEGIN, END = "<!-- graph growth -->", "<!-- end of graph growth -->"
HEAD = (
    "| blocks | devices | nodes that run | nodes for each device | "
    "seconds of the first step |\n|---|---|---|---|---|\n"
)


def numbers(text):
    """Returns numbers that are separated by commas."""
    return [int(each) for each in text.split(",")]


def run(blocks, devices):
    """Returns what is counted in a step, in a process of its own."""
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "experiments" / "exchanges.py"),
            f"--blocks={blocks}",
            f"--devices={devices}",
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def main():
    """Runs all pairs, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=numbers, default=[4, 12])
    parser.add_argument("--devices", type=numbers, default=[2, 4, 8])
    parser.add_argument("--out", type=pathlib.Path, default="docs/growth.md")
    arguments = parser.parse_args()
    rows = []
    for blocks in arguments.blocks:
        for devices in arguments.devices:
            found = run(blocks, devices)
            nodes = found["nodes"]
            rows.append(
                f"| {blocks} | {devices} | {nodes:,} | {nodes // devices:,} | "
                f"{found['first_step_seconds']} |\n"
            )
            print(rows[-1], end="", flush=True)
            text = arguments.out.read_text()
            before, _, rest = text.partition(BEGIN)
            after = rest.partition(END)[2]
            table = f"{BEGIN}\n\n{HEAD}{''.join(rows)}\n{END}"
            arguments.out.write_text(before + table + after)


if __name__ == "__main__":
    main()
