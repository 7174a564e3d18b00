"""Any flags and any environment: one line, no traceback, no hang.

Nothing is started and TensorFlow is not imported: what would do so raises
`Reached`.
"""

import contextlib
import io
import json
import os
import random
import signal
import subprocess
from unittest import mock

import pytest
from absl import flags

from mgpu_tf import cli
from mgpu_tf.cluster import environments
from mgpu_tf.cluster.config import ClusterConfig
from mgpu_tf.errors import ClusterError
from mgpu_tf.launch import isolation, local, ray, ssh
from mgpu_tf.runtime import quiet_import
from mgpu_tf.studies import doctor

SEED = 7
# In the default tests, and in the full tier.
FEW, MANY = 300, 10_000
# A guard against hangs; each takes milliseconds.
LIMIT_SECONDS = 60

TEXTS = (
    *("", " ", "0", "1", "2", "-1", "-0", "1e3", "1e400", "nan", "inf", "-inf"),
    *("0x10", "1_000", "9" * 30, "9" * 5000, "1.5", "1,2", ",", "1,", "2,1,x"),
    *("true", "no", "None", "auto", "always", "digits", "mlp", "fsdp", "ring"),
    *("gs://bucket/a", "s3://b", "file:///tmp/a", "http://a", "/dev/full"),
    *("/proc/none", "/", ".", "..", "~", "a b", "a\nb", "a\tb", "\x1b[31m"),
    *("\u00e9", "\U0001f600", "\udcff", "'", '"', "$(id)", "`id`", ";", "%s"),
    *("{}", "[]", "{", "package.module:function", "os:system", ":", "::", "a:"),
    *("resnet/20", "resnet/", "images/0", "images/x", "a" * 300, "--", "-"),
    *("host0,host1", "host0,host0", "host0:1", "[::1]", "lab/train:1", "1Gi"),
)
VARIABLES = (
    *("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NODELIST"),
    *("SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_ID", "SLURM_NODEID"),
    *("JOB_COMPLETION_INDEX", "MGPU_TF_PORT", "MGPU_TF_RESTARTS"),
    *("MGPU_TF_STALL_TIMEOUT_SECONDS", "SKYPILOT_NODE_IPS"),
    *("SKYPILOT_NODE_RANK", "KUBERNETES_SERVICE_HOST", "HOSTNAME"),
)


class Reached(BaseException):
    """The arguments were taken."""


def reached(*_, **__):
    raise Reached


@contextlib.contextmanager
def nothing_starts():
    with contextlib.ExitStack() as stack:
        for owner, name in (
            (local, "supervise"),
            (ssh, "supervise"),
            (ray, "run"),
            (quiet_import, "import_tensorflow"),
            (doctor, "examine"),
            (subprocess, "run"),
            (subprocess, "Popen"),
            (os, "execvpe"),
        ):
            stack.enter_context(mock.patch.object(owner, name, reached))
        # A worker of a benchmark keeps to one core, and so would its tasks.
        stack.enter_context(
            mock.patch.object(os, "sched_setaffinity", lambda *_: None)
        )
        stack.enter_context(
            mock.patch.object(isolation, "_problem", lambda: "not here")
        )
        yield


@contextlib.contextmanager
def limited():
    """Ends what hangs."""

    def ends(*_):
        raise AssertionError("hangs")

    before = signal.signal(signal.SIGALRM, ends)
    signal.alarm(LIMIT_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def text_of(draw):
    kind = draw.random()
    if kind < 0.6:
        return draw.choice(TEXTS)
    if kind < 0.8:
        return str(draw.randint(-3, 70000))
    letters = [chr(draw.choice((45, 44, 58, 47, 10, 97, 48, 233, 0x1F600)))]
    return "".join(draw.choice(letters * 3 + list("a0:/,")) for _ in range(6))


def flag_names():
    names = {}
    for name, command in cli.COMMANDS.items():
        values = flags.FlagValues()
        command.define(values)
        names[name] = {flag: values[flag] for flag in values}
    return names


def line_of(draw, known):
    """A command line: mostly flags that exist, with any value."""
    command = draw.choice([*known, *known, "traim", "", "--"])
    line = [command]
    for name, flag in draw.sample(
        sorted(known.get(command, {}).items()),
        min(len(known.get(command, {})), draw.randint(0, 5)),
    ):
        kind = draw.random()
        choices = getattr(flag.parser, "enum_values", None)
        value = text_of(draw)
        if kind < 0.1:
            line.append(f"--{name}")
        elif kind < 0.15:
            line += [f"--{name}", value]
        elif kind < 0.2:
            line.append(f"--no{name}={value}")
        elif kind < 0.25:
            line.append(f"--{name[:-1]}={value}")
        elif choices and kind < 0.8:
            line.append(f"--{name}={draw.choice(choices)}")
        else:
            line.append(f"--{name}={value}")
    if draw.random() < 0.1:
        line.insert(draw.randint(1, len(line)), text_of(draw))
    if draw.random() < 0.6:
        needed = {
            "launch": ["--num_workers=2"],
            "ray": ["--num_workers=2"],
            "slurm": ["--nodes=2"],
            "kubernetes": ["--name=a", "--image=b", "--workers=2"],
        }
        for flag in needed.get(command, []):
            if draw.random() < 0.9:
                line.insert(1, flag)
    if draw.random() < 0.5:
        line += ["--", "python", *(text_of(draw) for _ in range(2))]
    return line


def value_of(draw, depth=0):
    """Any value of JSON."""
    kind = draw.randint(0, 8 if depth < 4 else 5)
    if kind < 3:
        return draw.choice(
            [None, True, False, 0, -1, 1, 2**70, 1.5, -0.0, float("inf")]
        )
    if kind < 6:
        return text_of(draw)
    if kind < 8:
        return [value_of(draw, depth + 1) for _ in range(draw.randint(0, 3))]
    names = ("worker", "ps", "chief", "type", "index", "cluster", "a", "")
    return {
        draw.choice(names): value_of(draw, depth + 1)
        for _ in range(draw.randint(0, 3))
    }


def tf_config_of(draw):
    """A TF_CONFIG that is right but for some of its parts."""
    host = draw.choice(("a", "10.0.0.1", "[::1]", "localhost"))
    count = draw.randint(1, 3)
    config = {
        "cluster": {"worker": [f"{host}:{1 + i}" for i in range(count)]},
        "task": {"type": "worker", "index": draw.randrange(count)},
    }
    for _ in range(draw.randint(0, 3)):
        part = draw.choice([config, *config.values()])
        if not isinstance(part, dict):
            continue
        names = [*part, *cli.COMMANDS, "ps", "chief", "evaluator", "type"]
        part[draw.choice(names)] = value_of(draw)
    text = json.dumps(config)
    kind = draw.random()
    if kind < 0.1:
        text = text[: draw.randrange(len(text))]
    elif kind < 0.2:
        place = draw.randrange(len(text))
        text = text[:place] + draw.choice(TEXTS) + text[place:]
    elif kind < 0.25:
        text = "[" * draw.choice((10, 100_000))
    return text


def check_line(message, what):
    assert len(message.splitlines()) == 1, (what, message)
    assert "Traceback" not in message, (what, message)


def check_command(line, environ):
    """Runs a command line; fails where it is not told in one line."""
    out = io.TextIOWrapper(io.BytesIO(), "utf-8", "strict")
    err = io.StringIO()
    with (
        mock.patch.dict(os.environ, environ),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        contextlib.suppress(Reached),
    ):
        status = cli.main(line)
        assert isinstance(status, int), line
        if status == cli.USAGE_ERROR and line and line[0]:
            check_line(err.getvalue(), (line, environ))
            assert err.getvalue().startswith("mgpu-tf: "), line


def check_tf_config(text):
    try:
        config = ClusterConfig.from_json(text)
    except ClusterError as error:
        check_line(" ".join(str(error).split()), text)
        assert len(str(error)) < 1500, text
    else:
        assert ClusterConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("first", "last"),
    [(0, FEW), pytest.param(FEW, MANY, marks=pytest.mark.full)],
)
def test_any_input(first, last, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in (*VARIABLES, "TF_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    known = flag_names()
    taken = 0
    with nothing_starts():
        for number in range(first, last):
            draw = random.Random(f"{SEED}/{number}")
            with limited():
                text = tf_config_of(draw)
                check_tf_config(text)
                environ = {
                    name: text_of(draw)
                    for name in draw.sample(VARIABLES, draw.randint(0, 4))
                    if draw.random() < 0.3
                }
                if draw.random() < 0.2:
                    environ["TF_CONFIG"] = text
                with contextlib.suppress(ClusterError):
                    environments.find(environ)
                line = line_of(draw, known)
                try:
                    check_command(line, environ)
                except Exception as error:
                    raise AssertionError(
                        f"input {number}: {line!r} {environ!r}"
                    ) from error
                taken += 1
    assert taken == last - first
