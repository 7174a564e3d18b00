"""A flag has an effect, or it is refused; for all flags of all commands."""

import contextlib
import io
import os

import pytest
from absl import flags as absl_flags

from mgpu_tf import cli
from mgpu_tf.errors import ConfigurationError

# For commands that print, a line, and for each flag a value that is not its
# default, with other flags that it needs.
PRINTING = {
    "slurm": (
        "--nodes=2",
        {
            "nodes": "3",
            "min_nodes": "1",
            "grow_minutes": "5 --min_nodes=1",
            "gpus_per_node": "2",
            "num_ps": "1",
            "evaluator": "true --num_ps=1",
            "name": "other",
            "log_dir": "other",
            "signal_seconds": "60",
            "max_restarts": "2",
            "container_image": "lab/train",
            "time": "90",
            "partition": "gpu",
            "account": "team",
            "sbatch_option": "qos=high",
        },
    ),
    "kubernetes": (
        "--name=a --image=b --workers=2",
        {
            "name": "other",
            "image": "other",
            "workers": "3",
            "gpus": "2",
            "ps": "1",
            "evaluator": "true --ps=1 --checkpoint_claim=a",
            "kind": "job",
            "namespace": "other",
            "queue": "other",
            "cpus": "2",
            "memory": "2Gi",
            "shared_memory": "2Gi",
            "checkpoint_claim": "other",
            "checkpoint_size": "1Gi --checkpoint_claim=a",
            "max_restarts": "5",
            "grace_seconds": "60",
            "user_id": "1001",
            "dockerfile": "true",
        },
    ),
    "launch": (
        "--hosts=a,b --print",
        {
            "num_workers": "3",
            "num_ps": "1",
            "evaluator": "true --num_ps=1",
            "startup_seconds": "60",
            "hosts": "a,c",
            "ssh": "true",
            "ssh_command": "rsh",
            "port": "3333",
            "stall_timeout_seconds": "60",
            "first_step_seconds": "60",
            "max_restarts": "1",
            "min_workers": "1",
            "max_workers": "3",
            "spares": "1",
            "backoff_seconds": "5",
            "grace_seconds": "60",
            "log_dir": "other",
            "isolate": "off",
        },
    ),
}
# Flags whose effect is no text.
ACTING = {"slurm": {"submit"}, "launch": {"print"}, "kubernetes": set()}


def flag_values(command):
    values = absl_flags.FlagValues()
    command.define(values)
    return values


def printed(command, line):
    """What a command prints, None where it refuses."""
    out, err = io.StringIO(), io.StringIO()
    given = [*line.split(), "--", "python", "a.py"]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.main([command, *given])
    assert status in (0, cli.USAGE_ERROR)
    return out.getvalue() if status == 0 else None


@pytest.mark.parametrize("command", PRINTING)
def test_every_flag_has_a_row(command):
    names = set(flag_values(cli.COMMANDS[command]))
    assert names == PRINTING[command][1].keys() | ACTING[command]


@pytest.mark.parametrize(
    ("command", "name"),
    [(command, name) for command in PRINTING for name in PRINTING[command][1]],
)
def test_what_is_printed_differs_or_the_flag_is_refused(command, name):
    line, values = PRINTING[command]
    value, *others = values[name].split()
    without = printed(command, " ".join([line, *others]))
    assert without
    given = printed(command, " ".join([line, *others, f"--{name}={value}"]))
    assert given != without


@pytest.mark.parametrize("line", ["--gpus=1", "--user_id=1001"])
def test_flags_of_a_dockerfile(line):
    plain = printed("kubernetes", "--dockerfile")
    assert plain
    assert printed("kubernetes", f"--dockerfile {line}") not in (plain, None)
    for name in PRINTING["kubernetes"][1].keys() - {
        *("gpus", "user_id", "dockerfile"),
    }:
        value = PRINTING["kubernetes"][1][name].split()[0]
        assert printed("kubernetes", f"--dockerfile --{name}={value}") is None


NEEDY = [
    (command, name)
    for command, module in cli.COMMANDS.items()
    for name in getattr(module, "NEEDS", {})
]
VALUES = {
    "isolate": "off",
    "strategies": "fsdp",
    "optimizer": "sgd",
    "shard": "optimizer",
    "examples": "8",
    "log_dir": "a",
    "ssh_command": "rsh",
}


@pytest.mark.parametrize(("command", "name"), NEEDY)
def test_a_flag_that_needs_another_is_refused_alone(command, name, monkeypatch):
    """Before anything is started."""
    if command == "kubernetes":
        return  # Above.
    monkeypatch.delenv("TF_CONFIG", raising=False)
    module = cli.COMMANDS[command]
    needed = module.NEEDS[name]
    values = flag_values(module)
    is_flag = values[name].flag_type() == "bool"
    line = [f"--{name}={is_flag or VALUES.get(name, 2)}"]
    for need in needed:
        other = need.removeprefix("not ").partition("=")[0]
        assert other in values, need
        if need.startswith("not "):
            kind = values[other].flag_type()
            line.append(f"--{other}={'true' if kind == 'bool' else 2}")
    monkeypatch.setattr(module, "run", lambda _: os.abort())
    with pytest.raises(ConfigurationError, match=f"^{name} has (an|no) effect"):
        cli._run(command, line)
