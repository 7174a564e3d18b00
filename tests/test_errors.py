"""A mistake is one line, with the nearest name or the place that was meant."""

import inspect
import re

import pytest
from absl import flags

from mgpu_tf import (
    Trainer,
    cli,
    create_mirrored_strategy,
    create_model_parallel_strategy,
    create_strategy,
)
from mgpu_tf.errors import ClusterError, ConfigurationError, unknown_name
from mgpu_tf.fields import made_of, names_of
from mgpu_tf.names import COMMUNICATIONS, ELSEWHERE, PRECISIONS, STRATEGIES
from mgpu_tf.options import StepOptions, StrategyOptions


def test_tree():
    assert issubclass(ClusterError, ConfigurationError)
    assert issubclass(ConfigurationError, ValueError)


@pytest.mark.parametrize(
    ("received", "hint"),
    [
        ("miror", " Did you mean 'mirrored'?"),
        ("mirrored ", " Did you mean 'mirrored'?"),
        ("tpus", " Did you mean 'tpu'?"),
        ("horovod", ""),
        ("", ""),
        (3, ""),
        (None, ""),
        ("two\nlines", ""),
    ],
)
def test_unknown_name(received, hint):
    message = unknown_name("strategy", received, ["mirrored", "tpu"])
    assert message == (
        f"Unknown strategy. Received: {received!r}.{hint} Valid: mirrored, tpu."
    )
    assert len(message.splitlines()) == 1


def test_names_may_come_only_once():
    names = (name for name in ("sgd", "adam"))
    message = unknown_name("optimizer", "adan", names)
    assert message.endswith("Did you mean 'adam'? Valid: sgd, adam.")


COMPUTES = "Use Trainer(precision='mixed_bfloat16')."
DEVICES = "Use create_strategy(devices=2)."
EPOCHS = "Use Trainer.fit(epochs=10)."
OPTIMIZER = "Use the optimizer in build_model (learning_rate=0.1)."
PROCESSES = "Use mgpu-tf launch --num_workers=2."
STRATEGY = "Use create_strategy('mirrored')."


def mean(name):
    return f"Did you mean {name!r}?"


@pytest.mark.parametrize(
    ("name", "trainer", "strategy"),
    [
        ("accelerator", STRATEGY, STRATEGY),
        ("amp", mean("precision"), COMPUTES),
        ("batch_size", "Trainer.fit(batch_size=64)", "Trainer.fit(batch_size"),
        ("callbacks", "Trainer.fit(callbacks=", "Trainer.fit(callbacks="),
        ("clipnorm", "(global_clipnorm=1.0)", "(global_clipnorm=1.0)"),
        ("compression", mean("gradient_dtype"), "Trainer(gradient_dtype="),
        ("distribute", STRATEGY, STRATEGY),
        ("epochs", EPOCHS, EPOCHS),
        ("fp16", mean("precision"), "Trainer(precision='mixed_float16')"),
        ("gpus", DEVICES, mean("devices")),
        ("learning_rate", OPTIMIZER, OPTIMIZER),
        ("local_rank", "TF_CONFIG", "TF_CONFIG"),
        ("logger", "Trainer.fit(log_with=", "Trainer.fit(log_with="),
        ("lr", OPTIMIZER, OPTIMIZER),
        ("max_epochs", EPOCHS, EPOCHS),
        ("nnodes", PROCESSES, PROCESSES),
        ("nproc_per_node", PROCESSES, PROCESSES),
        ("num_gpus", DEVICES, mean("devices")),
        ("num_nodes", PROCESSES, PROCESSES),
        ("optimizer", "model.compile", "model.compile"),
        ("zero_stage", "create_strategy('fsdp')", mean("shard")),
    ],
)
def test_names_of_other_tools(name, trainer, strategy):
    for kind, taker, part in (
        (StepOptions, "Trainer", trainer),
        (StrategyOptions, "create_strategy", strategy),
    ):
        with pytest.raises(ConfigurationError) as caught:
            made_of(kind, {name: 2}, taker)
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ("launch -n 2", "Received: '-n'. Did you mean '--num_workers'?"),
        ("launch --nnodes=2", "Did you mean '--num_workers'?"),
        ("launch -H host0", "Did you mean '--hosts'?"),
        ("launch --accelerator=gpu", f"{STRATEGY} Flags of the command go"),
        ("launch --epochs=2", f"{EPOCHS} Flags of the command go after --."),
        ("train --amp", "Did you mean '--precision'?"),
        ("train --callbacks=a", "Use Trainer.fit(callbacks=[...])."),
        ("train --gradient_clip_val=1", "(global_clipnorm=1.0)"),
        ("train --limit_train_batches=2", "Did you mean '--steps_per_epoch'?"),
        ("train --max_steps=2", "Did you mean '--steps_per_epoch'?"),
        ("train --nproc_per_node=2", "Did you mean '--num_workers'?"),
        ("train --overfit_batches=1", "Use Trainer.fit(dataset.take(1))."),
        ("train --strategy=ddp", "'ddp'. Did you mean 'mirrored'? Valid: auto"),
        (
            "train --epochs=a:b",
            "must be a whole number. Received: epochs='a:b'",
        ),
        ("train --max_loss=x", "must be a number. Received: max_loss='x'."),
    ],
)
def test_flags_of_other_tools(arguments, part, capsys):
    assert cli.main([*arguments.split(), "--", "python", "script.py"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert part in line


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_is_meant_exists(name):
    meant = ELSEWHERE[name]
    mesh = inspect.signature(create_model_parallel_strategy).parameters
    known = {*PRECISIONS, *STRATEGIES, *COMMUNICATIONS, *mesh}
    values = {command: flags.FlagValues() for command in ("train", "launch")}
    for command in values:
        cli.COMMANDS[command].define(values[command])
        known |= set(values[command])
    assert set(meant.names) <= known
    written = {
        r"Trainer\((\w+)=": names_of(StepOptions),
        r"Trainer\.fit\((\w+)[=,)]": inspect.signature(Trainer.fit).parameters,
        r"create_strategy\((\w+)=": names_of(StrategyOptions),
        r"create_strategy\('(\w+)'": STRATEGIES,
        r"mgpu-tf launch --(\w+)": values["launch"],
    }
    for pattern, valid in written.items():
        found = re.search(pattern, meant.place)
        assert found is None or found[1] in valid


def test_a_function_says_what_was_meant():
    with pytest.raises(ConfigurationError, match="Did you mean 'devices'"):
        create_mirrored_strategy(gpus=2)


@pytest.mark.parametrize("axis", ["data", "fsdp", "tensor", "pipeline"])
def test_axes_have_a_name_in_each_function(axis):
    long = f"{axis}_parallel"
    with pytest.raises(ConfigurationError, match=f"Did you mean '{long}'"):
        create_strategy("model_parallel", **{axis: 2})
    with pytest.raises(ConfigurationError, match=f"Did you mean '{axis}'"):
        create_model_parallel_strategy(**{long: 2})
