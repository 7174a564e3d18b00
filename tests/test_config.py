"""The rules of a run, and its names against what they stand for."""

import dataclasses
import math

import pytest

from mgpu_tf import names
from mgpu_tf.config import RunConfig
from mgpu_tf.errors import ConfigurationError


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(
            ({name: value}, f"{name} must be 1 or more. Received: {name}=")
            for name in (
                "num_workers",
                "num_virtual_devices",
                "devices",
                "global_batch_size",
                "epochs",
                "steps_per_epoch",
            )
            for value in (0, -1)
        ),
        *(
            ({name: "mirorred"}, f"Unknown {name}. Received: 'mirorred'.")
            for name in (
                "strategy",
                "communication",
                "model",
                "optimizer",
            )
        ),
        ({"strategy": "miror"}, "Did you mean 'mirrored'?"),
        *(
            ({"learning_rate": rate}, "learning_rate must be above 0")
            for rate in (0.0, -0.1, math.nan, math.inf)
        ),
        ({"label_smoothing": 1.0}, "label_smoothing must be below 1"),
        (
            {"learning_rate_rule": "sqrt"},
            "learning_rate_rule has an effect with base_batch only. Received: "
            "learning_rate_rule='sqrt', base_batch=None. Give it too, or "
            "leave learning_rate_rule out.",
        ),
        ({"weight_decay": math.nan}, "weight_decay must be finite"),
        ({"warmup_epochs": -1.0}, "warmup_epochs must be 0 or more"),
        (
            {"warmup_epochs": 5.0},
            "warmup_epochs must be less than epochs. Received: "
            "warmup_epochs=5, epochs=5.",
        ),
        (
            {"zero_init_residual": True},
            "zero_init_residual goes with the model 'resnet'. Received: "
            "model='mlp'.",
        ),
        ({"seed": -1}, "seed must be 0 to 4294967295. Received: seed=-1."),
        ({"seed": 2**32}, "Received: seed=4294967296."),
        *(
            (
                {"num_workers": 2, "strategy": strategy},
                "num_workers above 1 needs the strategy "
                "'multi_worker_mirrored', 'fsdp', 'model_parallel' or "
                "'parameter_server'. Received: "
                f"num_workers=2, strategy='{strategy}'.",
            )
            for strategy in (
                "one_device",
                "mirrored",
                "central_storage",
                "tpu",
            )
        ),
        (
            {"num_ps": 1, "strategy": "mirrored"},
            "num_ps needs the strategy 'parameter_server'. Received: "
            "num_ps=1, strategy='mirrored'.",
        ),
        ({"num_ps": -1}, "num_ps must be 0 or more. Received: num_ps=-1."),
        (
            {"max_staleness": -1},
            "max_staleness must be 0 or more. Received: max_staleness=-1.",
        ),
        ({"late_gradients": "drop"}, "Valid: hold, scale."),
        (
            {"initial_model": "a.keras", "model": "cnn"},
            "A .keras file has its model. Received: initial_model='a.keras' "
            "beside model='cnn'.",
        ),
        (
            {"checkpoint_dir": "memory://a/run"},
            "must last longer than a process. Received: checkpoint_dir='mem",
        ),
        (
            {"checkpoint_dir": "a", "monitor": "val_loss"},
            "Received: monitor='val_loss'. Write --monitor=loss",
        ),
        ({"num_virtual_devices": 10**9}, "must be 1024 or less"),
        (
            {"devices": 2, "num_virtual_devices": 3},
            "Received: devices=2, num_virtual_devices=3. Use devices=1.",
        ),
    ],
    ids=str,
)
def test_refused(changes, message):
    with pytest.raises(ConfigurationError) as caught:
        RunConfig(**changes)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {},
        *(
            {name: 1}
            for name in (
                "num_workers",
                "num_virtual_devices",
                "devices",
                "global_batch_size",
                "epochs",
                "steps_per_epoch",
            )
        ),
        {"learning_rate": 1e-12},
        {"seed": 2**32 - 1},
        {"num_workers": 2},
        {"num_workers": 2, "strategy": "multi_worker_mirrored"},
        {"num_workers": 1, "strategy": "mirrored"},
    ],
    ids=str,
)
def test_accepted(changes):
    config = RunConfig(**changes)
    assert dataclasses.asdict(config).items() >= changes.items()


def test_every_choice_is_accepted():
    for field in dataclasses.fields(RunConfig):
        for name in field.metadata["choices"]:
            needed = {"checkpoint_dir": "a", "base_batch": 8, "output_dir": "b"}
            needed["monitor"] = "loss"
            if field.name != "strategy":
                needed |= {"max_staleness": 8, "pipeline_parallel": 2}
            config = RunConfig(**needed, **{field.name: name})
            assert getattr(config, field.name) == name


def test_every_field_has_help():
    for field in dataclasses.fields(RunConfig):
        assert field.metadata["help"].endswith("."), field.name


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        RunConfig().epochs = 2


def test_names_are_those_of_the_registries():
    import keras

    from mgpu_tf import datasets
    from mgpu_tf.models import zoo
    from mgpu_tf.optimizers import named
    from mgpu_tf.strategies import registry, synchronous

    assert tuple(zoo._MODELS) == names.MODELS
    assert tuple(named._OPTIMIZERS) == names.OPTIMIZERS
    assert tuple(names.DATASETS) == datasets.NAMES
    for name in names.APPLICATIONS:
        assert callable(getattr(keras.applications, name))
    assert ("auto", "plan", *registry.KINDS) == names.STRATEGIES
    # TensorFlow has hierarchical_copy for the devices of one machine only.
    assert set(names.COMMUNICATIONS) == {
        *synchronous._IMPLEMENTATIONS,
        "hierarchical_copy",
    }
