"""The graph of a step and its trace, against blocks, devices and processes.

    python experiments/graph_growth.py [--blocks=4,12] [--devices=2,4,8]
        [--processes=2,4]

Runs `exchanges.py` for `fsdp`, once for each pair: on parts of one CPU, and in
processes of one device each. Writes the table of
[docs/growth.md](../docs/growth.md) after each run. Half a minute for 2 blocks
on 4 devices on 2 idle cores, and in proportion.
"""

import argparse
import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
BEGIN, END = "<!-- graph growth -->", "<!-- end of graph growth -->"
HEAD = (
    "| blocks | devices | processes | nodes that run | nodes for each device | "
    "seconds of the first step |\n|---|---|---|---|---|---|\n"
)


def numbers(text):
    """Returns numbers that are separated by commas."""
    return [int(each) for each in text.split(",") if each]


def run(blocks, devices, processes):
    """Returns what each process has counted in a step, in new processes."""
    command = [
        sys.executable,
        str(ROOT / "experiments" / "exchanges.py"),
        f"--blocks={blocks}",
    ]
    if processes > 1:
        launcher = [sys.executable, "-m", "mgpu_tf", "launch"]
        command = [*launcher, f"--num_workers={processes}", "--", *command]
    else:
        command.append(f"--devices={devices}")
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return [
        json.loads(line[line.index("{") :])
        for line in done.stdout.splitlines()
        if '{"layout"' in line
    ]


def row(blocks, devices, processes):
    """Returns a row of the table, which is measured."""
    found = run(blocks, devices, processes)
    nodes = sum(each["nodes"] for each in found)
    seconds = max(each["first_step_seconds"] for each in found)
    return (
        f"| {blocks} | {devices} | {processes} | {nodes:,} | "
        f"{nodes // devices:,} | {seconds} |\n"
    )


def main():
    """Runs all pairs, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=numbers, default=[4, 12])
    parser.add_argument("--devices", type=numbers, default=[2, 4, 8])
    parser.add_argument("--processes", type=numbers, default=[2, 4])
    parser.add_argument("--out", type=pathlib.Path, default="docs/growth.md")
    arguments = parser.parse_args()
    meshes = [(devices, 1) for devices in arguments.devices]
    meshes += [(processes, processes) for processes in arguments.processes]
    rows = []
    for blocks in arguments.blocks:
        for devices, processes in meshes:
            rows.append(row(blocks, devices, processes))
            print(rows[-1], end="", flush=True)
            text = arguments.out.read_text()
            before, _, rest = text.partition(BEGIN)
            after = rest.partition(END)[2]
            table = f"{BEGIN}\n\n{HEAD}{''.join(rows)}\n{END}"
            arguments.out.write_text(before + table + after)


if __name__ == "__main__":
    main()
