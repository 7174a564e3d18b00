"""Runs every command of the README in order, and writes what each takes.

    python -m tests.readme          (or: make commands)

The seconds go to docs/commands.json, and as a table into the README. Where
others use the machine too, processor seconds say more than seconds.
"""

import datetime
import json
import os
import pathlib
import re
import resource
import subprocess
import sys
import tempfile
import textwrap
import time

from tests import clusters

ROOT = pathlib.Path(clusters.ROOT)
README = ROOT / "README.md"
RESULTS = ROOT / "docs" / "commands.json"
MARKS = ("<!-- commands: begin -->", "<!-- commands: end -->")

# What `mgpu-tf parity` of the README compares: a package of the reader's.
_OWN = {
    "__init__.py": "",
    "models.py": """
import keras

def build():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.1, clipnorm=1.0), "mse")
    return model
""",
    "data.py": """
import numpy as np

def load():
    x = np.random.default_rng(0).normal(size=(200, 4))
    return x, x.sum(axis=1, keepdims=True)
""",
}


def script():
    """The first script of the README."""
    [text] = re.findall(
        r"```python\n(import mgpu_tf\n\n.*?)```", README.read_text(), re.S
    )
    return text


def commands():
    """The commands of the README in order, but those that need machines."""
    found = []
    for text in re.findall(
        r"^```sh\n(.*?)^```$", README.read_text(), re.M | re.S
    ):
        for line in text.replace("\\\n", " ").splitlines():
            command = " ".join(line.partition(" #")[0].split())
            if command.startswith("mgpu-tf ") and "host0" not in command:
                found.append(command)
    first = next(
        n for n, c in enumerate(found) if not c.startswith("mgpu-tf test")
    )
    return [*found[:first], "python digits.py", *found[first:]]


def run_all(folder):
    """Runs the commands; yields what each took.

    Args:
        folder: An empty one, in which they run one after another.

    Raises:
        AssertionError: A command failed, or printed lines of TensorFlow.
    """
    (folder / "digits.py").write_text(script())
    (folder / "experiments").symlink_to(ROOT / "experiments")
    (folder / "my_package").mkdir()
    for name, text in _OWN.items():
        (folder / "my_package" / name).write_text(text)
    programs = folder / "bin"
    programs.mkdir()
    for name, words in (("mgpu-tf", "-m mgpu_tf"), ("python", "")):
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec {clusters.PYTHON} {words} "$@"\n')
        program.chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    environment = clusters.environment(PATH=path)
    environment.pop("TF_CPP_MIN_LOG_LEVEL", None)
    for command in commands():
        began, spent, load = time.monotonic(), _spent(), os.getloadavg()[0]
        done = subprocess.run(
            command,
            shell=True,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        said = done.stdout + done.stderr
        assert done.returncode == 0, (command, said)
        assert ".cc:" not in said, (command, said)
        yield {
            "command": command,
            "seconds": round(time.monotonic() - began, 1),
            "processor_seconds": round(_spent() - spent, 1),
            "load": round(load, 1),
        }


def table(values):
    """The lines of the README."""
    rows = values["rows"]
    loads = sorted(row["load"] for row in rows)
    text = (
        f"Measured on {values['date']} on {values['cores']} cores of an "
        f"{values['processor']}, which other work used at the same time (load "
        f"{loads[0]:.0f} to {loads[-1]:.0f}). Idle cores take fewer seconds. "
        "Processor seconds are those of all processes of a command."
    )
    lines = [
        *textwrap.wrap(text, 80),
        "",
        "| command | seconds | processor seconds |",
        "|---|---|---|",
    ]
    for row in rows:
        seconds, spent = (
            f"{row[name]:.0f}" if row[name] >= 1 else "below 1"
            for name in ("seconds", "processor_seconds")
        )
        lines.append(f"| `{row['command']}` | {seconds} | {spent} |")
    return "\n".join(lines)


def main():
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for row in run_all(pathlib.Path(folder)):
            print(json.dumps(row), flush=True)
            rows.append(row)
    values = {
        "date": datetime.date.today().isoformat(),
        "cores": os.cpu_count(),
        "processor": _processor(),
        "rows": rows,
    }
    RESULTS.write_text(json.dumps(values, indent=1) + "\n")
    write(values)
    return 0


def write(values):
    """Writes the table into the README."""
    before, _, rest = README.read_text().partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    text = f"{before}{MARKS[0]}\n{table(values)}\n{MARKS[1]}{after}"
    README.write_text(text)


def _spent():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _processor():
    text = pathlib.Path("/proc/cpuinfo").read_text()
    return re.search(r"model name\s*: (.*)", text)[1].strip()


if __name__ == "__main__":
    sys.exit(main())
