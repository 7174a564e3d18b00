"""`--config`: a run from a file or a function."""

import json

import pytest
from absl import flags

from mgpu_tf import flags as run_flags
from mgpu_tf.commands import help, launch, saved_config, trace, train
from mgpu_tf.config import RunConfig, changed_fields
from mgpu_tf.errors import ConfigurationError


def of_a_function():
    return RunConfig(epochs=9, model="cnn")


def of_a_dict():
    return {"epochs": 8}


def of_nothing():
    return 3


def parsed(*arguments):
    values = flags.FlagValues()
    train.define(values)
    values(["mgpu-tf", *arguments])
    saved_config.apply(values)
    return run_flags.config(values)


@pytest.fixture
def report(tmp_path):
    config = RunConfig(epochs=7, optimizer="lamb", max_loss=2.5, on_nan="stop")
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"configuration": changed_fields(config)}))
    return config, f"--config={path}"


def test_the_configuration_of_a_report_runs_again(report):
    config, flag = report
    assert parsed(flag) == config
    assert changed_fields(config) == {
        "epochs": 7,
        "optimizer": "lamb",
        "max_loss": 2.5,
        "on_nan": "stop",
    }


def test_flags_that_are_typed_come_first(report):
    _, flag = report
    assert parsed(flag, "--epochs=2").epochs == 2
    assert parsed("--epochs=5", flag).epochs == 5


def test_functions():
    name = "--config=tests.commands.test_saved_config"
    assert parsed(f"{name}:of_a_function") == of_a_function()
    assert parsed(f"{name}:of_a_dict").epochs == 8


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"epoch": 3}', "Did you mean 'epochs'"),
        ("[1]", "list from"),
        ("{", "must be a JSON file"),
        ("{}", "it is empty"),
        (None, "must be a JSON file"),
    ],
)
def test_refused(text, words, tmp_path):
    path = tmp_path / "run.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigurationError, match=words):
        parsed(f"--config={path}")


def test_what_is_no_configuration():
    with pytest.raises(ConfigurationError, match="int from"):
        parsed("--config=tests.commands.test_saved_config:of_nothing")


@pytest.mark.parametrize(
    ("command", "later"),
    [
        (train, "Strategy:"),
        (trace, "Strategy:"),
        (launch, "Processes and restarts:"),
    ],
)
def test_help_has_each_flag_once(command, later):
    values = flags.FlagValues()
    command.define(values)
    text = help.text(values)
    for name in values:
        flag = f"[no]{name}" if values[name].boolean else name
        assert (
            text.count(f"\n  --{flag}\n")
            + text.count(f"\n  --{flag}  (default")
            == 1
        ), name
    assert max(map(len, text.splitlines())) <= 80
    assert text.index("Common:") < text.index(later)
