"""Flags are the fields of RunConfig, no more and no less."""

import dataclasses

import pytest
from absl import flags as absl_flags

from mgpu_tf import flags
from mgpu_tf.config import RunConfig
from mgpu_tf.errors import ConfigurationError

FIELDS = {field.name: field for field in dataclasses.fields(RunConfig)}

# For each field a value that is not its default, and what else it needs.
VALUES = {
    "precision": "mixed_bfloat16",
    "random": "per_replica",
    "auto_micro_batch": True,
    "step_parts": 4,
    "report": "html",
    "log_with": "prometheus",
    "strategy": "mirrored",
    "num_workers": 3,
    "num_ps": 2,
    "max_staleness": 8,
    "late_gradients": "scale",
    "num_virtual_devices": 4,
    "balance": "2,1",
    "devices": 2,
    "communication": "ring",
    "model": "resnet/8",
    "initial_model": "a/model.keras",
    "batch_normalization": "synchronized",
    "dataset": "images/32",
    "deterministic": False,
    "data_dir": "/data sets/a",
    "global_batch_size": 96,
    "epochs": 7,
    "steps_per_epoch": 11,
    "optimizer": "lamb",
    "learning_rate": 0.25,
    "base_batch": 32,
    "learning_rate_rule": "sqrt",
    "learning_rate_decay": "cosine",
    "warmup_epochs": 1.5,
    "weight_decay": 0.01,
    "label_smoothing": 0.1,
    "zero_init_residual": True,
    "seed": 4294967295,
    "output_dir": "out=1",
    "gradient_dtype": "bfloat16",
    "embedding_gradients": "summed",
    "jit_compile": "auto",
    "tpu": "local",
    "data_parallel": 2,
    "fsdp_parallel": 4,
    "tensor_parallel": 2,
    "layout": "layouts:of_my_model",
    "sequence_parallel": True,
    "shard": "optimizer",
    "pipeline_parallel": 2,
    "micro_batches": 6,
    "pipeline_schedule": "gpipe",
    "pipeline_stages": "first,second",
    "recompute": "layers",
    "kernels": "keras",
    "noise_scale": True,
    "check_replicas_every": 7,
    "on_nan": "stop",
    "max_restores": 5,
    "max_loss": 1000.5,
    "profile": "10,5",
    "checkpoint_dir": "out=1/checkpoints",
    "save_every_steps": 20,
    "save_every_seconds": 1.5,
    "save_every": "auto",
    "mean_hours_between_failures": 6.5,
    "local_checkpoint_dir": "/local disk/a",
    "shared_every": 4,
    "keep_checkpoints": 9,
    "keep_every_steps": 200,
    "keep_every_hours": 2.5,
    "keep_if": "rules:every_prime",
    "monitor": "loss",
    "monitor_mode": "max",
    "keep_best": 4,
    "restart_from_nothing": True,
    "snapshot_in": "memory",
    "resume": "always",
    "private": True,
    "stall_timeout_seconds": 60.5,
    "first_step_seconds": 0.0,
}


def needed_by(name, choice=0):
    """What a field needs to have an effect, and what that needs, as values."""
    found = {}
    for need in FIELDS[name].metadata["needs"][choice : choice + 1]:
        other, _, value = need.partition("=")
        found = {other: value or VALUES[other]} | needed_by(other)
    return found


@pytest.fixture
def values():
    values = absl_flags.FlagValues()
    flags.define(values)
    return values


def parsed(values, *arguments):
    assert values(["program", *arguments]) == ["program"]
    return flags.config(values)


def test_a_flag_for_every_field(values):
    assert set(values) == set(FIELDS)


@pytest.mark.parametrize("name", FIELDS)
def test_default_and_help(name, values):
    flag, field = values[name], FIELDS[name]
    assert flag.default == field.default
    assert flag.help.endswith(field.metadata["help"])
    choices = tuple(getattr(flag.parser, "enum_values", ()))
    assert choices == field.metadata["choices"]


def test_no_flags_is_the_default_run(values):
    assert parsed(values) == RunConfig()


def test_values_cover_every_field():
    assert set(VALUES) == set(FIELDS)


@pytest.mark.parametrize(("name", "value"), VALUES.items())
def test_value_arrives(name, value, values):
    others = {"model": "resnet"} if name == "zero_init_residual" else {}
    chosen = others | needed_by(name) | {name: value}
    arguments = [f"--{name}={value}" for name, value in chosen.items()]
    config = parsed(values, *arguments)
    assert config == RunConfig(**chosen)
    assert type(getattr(config, name)) is type(value)


NEEDY = [
    (name, choice)
    for name, field in FIELDS.items()
    for choice in range(len(field.metadata["needs"]))
]


@pytest.mark.parametrize(("name", "choice"), NEEDY)
def test_a_flag_without_effect_is_refused(name, choice, values):
    """As is one that is given its default; each need alone is enough."""
    given = needed_by(name, choice) | {name: VALUES[name]}
    arguments = [f"--{name}={value}" for name, value in given.items()]
    assert parsed(values, *arguments) == RunConfig(**given)
    # "auto" may turn out to be the strategy that it needs.
    lone = {name: VALUES[name], "strategy": "one_device"}
    with pytest.raises(ConfigurationError, match=f"^{name} has an effect with"):
        RunConfig(**lone)
    values.unparse_flags()
    default = FIELDS[name].default
    if default in (None, ""):
        return
    lone[name] = default
    RunConfig(**lone)
    arguments = [f"--{name}={value}" for name, value in lone.items()]
    with pytest.raises(ConfigurationError, match=f"^{name} has an effect with"):
        parsed(values, *arguments)


@pytest.mark.parametrize(
    "argument",
    ["--epochs=many", "--epochs=1.5", "--learning_rate=x"],
)
def test_wrong_type(argument, values):
    with pytest.raises(absl_flags.IllegalFlagValueError):
        values(["program", argument])


def test_rules_hold(values):
    with pytest.raises(ConfigurationError, match="Received: epochs=0"):
        parsed(values, "--epochs=0")


def test_nearest_model(values):
    with pytest.raises(ConfigurationError, match="Did you mean 'mlp'"):
        parsed(values, "--model=mlpp")


def test_defined_twice(values):
    with pytest.raises(absl_flags.DuplicateFlagError):
        flags.define(values)
