"""Any value for any argument: one line, and no hang.

Each public function and class is called with each of the values of `hostile`
for each of its arguments, beside others that are right.
"""

import dataclasses
import functools
import inspect

import keras
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mgpu_tf
from mgpu_tf import config, options, planner
from mgpu_tf.cluster.config import ClusterConfig
from mgpu_tf.launch import dockerfile, hosts
from mgpu_tf.launch.job import LaunchJob
from mgpu_tf.launch.kubernetes import KubernetesJob
from mgpu_tf.launch.policy import RestartPolicy
from mgpu_tf.launch.slurm import SlurmJob
from mgpu_tf.optimizers import large_batch
from tests import hostile
from tests.tiers import tiered

COMMAND = ("python", "a.py")
# What is called, and arguments that are right.
LIGHT = {
    "RunConfig": (config.RunConfig, {}),
    "StrategyOptions": (options.StrategyOptions, {}),
    "StepOptions": (options.StepOptions, {}),
    "LargeBatchOptions": (options.LargeBatchOptions, {"base_batch": 8}),
    "SaveOptions": (options.SaveOptions, {"checkpoint_dir": "a"}),
    "WatchOptions": (options.WatchOptions, {}),
    "ClusterConfig": (
        ClusterConfig,
        {"task_type": "worker", "task_index": 0, "worker": ("a:1", "b:1")},
    ),
    "ClusterConfig.from_json": (ClusterConfig.from_json, {"text": "{}"}),
    "RestartPolicy": (RestartPolicy, {}),
    "LaunchJob": (LaunchJob, {"command": COMMAND, "num_workers": 2}),
    "KubernetesJob": (
        KubernetesJob,
        {"command": COMMAND, "name": "a", "image": "b", "workers": 2},
    ),
    "SlurmJob": (SlurmJob, {"command": COMMAND, "nodes": 2}),
    "places": (hosts.places, {"num_tasks": 2, "hosts": ["a"], "port": 2222}),
    "dockerfile": (dockerfile.dockerfile, {"command": COMMAND, "gpu": True}),
    "StateMemory": (planner.StateMemory, {"parameters": 10}),
    "RandomAccess": (mgpu_tf.RandomAccess, {"source": [1.0, 2.0]}),
    "image_folder": (mgpu_tf.datasets.image_folder, {"directory": "photos"}),
    "text_folder": (mgpu_tf.datasets.text_folder, {"directory": "texts"}),
    "records": (
        mgpu_tf.datasets.records,
        {"pattern": "a.tfrecord", "parse": lambda one: one, "batch_size": 2},
    ),
    "indexed_records": (
        mgpu_tf.datasets.indexed_records,
        {"pattern": "a.tfrecord", "parse": lambda one: one},
    ),
    "parquet": (mgpu_tf.datasets.parquet, {"pattern": "a.parquet"}),
    "load": (mgpu_tf.datasets.load, {"name": "no such set"}),
    "scale_learning_rate": (
        large_batch.scale_learning_rate,
        {"base": 0.1, "base_batch": 8, "batch": 16},
    ),
    "create_schedule": (
        large_batch.create_schedule,
        {"learning_rate": 0.1, "start": 0.0, "steps": 8, "warmup_steps": 2},
    ),
    "large_batch_recipe": (
        large_batch.large_batch_recipe,
        {"batch": 8, "steps_per_epoch": 2, "epochs": 2},
    ),
    "LARS": (mgpu_tf.optimizers.LARS, {}),
    "LazyAdam": (mgpu_tf.optimizers.LazyAdam, {}),
    "create_optimizer": (mgpu_tf.optimizers.create_optimizer, {"name": "sgd"}),
    "create_model": (
        mgpu_tf.models.create_model,
        {"name": "mlp", "input_shape": (2,), "num_classes": 2},
    ),
    "synchronize_batch_normalization": (
        mgpu_tf.synchronize_batch_normalization,
        {"model": None},
    ),
}


def arguments_of(call):
    if dataclasses.is_dataclass(call):
        return [field.name for field in dataclasses.fields(call)]
    return [
        name
        for name, parameter in inspect.signature(call).parameters.items()
        if parameter.kind
        not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", LIGHT)
def test_any_value_of_any_argument(name):
    call, right = LIGHT[name]
    found = {}
    for argument in arguments_of(call):
        for kind, value in hostile.VALUES.items():
            error = hostile.tried(call, **right | {argument: value})
            if error is not None:
                found[argument, kind] = repr(error)[:120]
    assert not found, "\n".join(f"{k}: {v}" for k, v in found.items())


ANYTHING = st.recursive(
    st.sampled_from(list(hostile.VALUES.values()))
    | st.text()
    | st.binary()
    | st.floats()
    | st.integers(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.tuples(inner, inner)
    ),
    max_leaves=5,
)
X = np.ones((8, 2), "float32")
Y = X[:, :1]


def build():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def methods(trainer):
    """The calls of a trainer, and arguments that are right."""
    batch = {"x": X, "y": Y}
    quiet = {"verbose": 0}
    return {
        "fit": (trainer.fit, batch | quiet | {"batch_size": 4}),
        "evaluate": (trainer.evaluate, batch | quiet),
        "predict": (trainer.predict, {"x": X} | quiet),
        "train_on_batch": (trainer.train_on_batch, batch),
        "test_on_batch": (trainer.test_on_batch, batch),
        "predict_on_batch": (trainer.predict_on_batch, {"x": X}),
        "save": (trainer.save, {"path": "a.keras"}),
        "save_weights": (trainer.save_weights, {"path": "a.weights.h5"}),
        "Trainer": (
            mgpu_tf.Trainer,
            {"build_model": build, "strategy": trainer.strategy},
        ),
        "create_strategy": (
            functools.partial(mgpu_tf.create_strategy, num_virtual_devices=2),
            {"name": "mirrored"},
        ),
        **{
            name: (getattr(mgpu_tf, name), {})
            for name in mgpu_tf.__all__
            if name.startswith("create_") and name != "create_strategy"
        },
        "check_parity": (
            mgpu_tf.check_parity,
            {
                "build_model": build,
                "data": (X, Y),
                "strategies": [trainer.strategy],
                "steps": 1,
                "batch_size": 4,
            },
        ),
    }


QUICK = ("predict_on_batch", "save", "create_mirrored_strategy")
# They ask for so many steps, and a function of the user's fails.
MEANT = {
    *((argument, "huge") for argument in ("epochs", "steps_per_epoch")),
    *((argument, "huge") for argument in ("validation_steps", "steps")),
    *(
        (argument, kind)
        for argument in ("x", "validation_data", "data", "build_model")
        for kind in ("failing", "class", "function")
    ),
}
METHODS = [
    *("fit", "evaluate", "predict", "train_on_batch", "test_on_batch"),
    *("predict_on_batch", "save", "save_weights", "Trainer", "check_parity"),
    *(name for name in mgpu_tf.__all__ if name.startswith("create_")),
]


@pytest.mark.parametrize("name", tiered(METHODS, QUICK))
def test_any_value_of_any_argument_of_a_call(name, strategies):
    trainer = mgpu_tf.Trainer(build, strategies["one_device"])
    call, right = methods(trainer)[name]
    found = {}
    for argument in arguments_of(call):
        for kind, value in hostile.VALUES.items():
            if (argument, kind) in MEANT:
                continue
            error = hostile.tried(call, **right | {argument: value})
            if error is not None:
                found[argument, kind] = repr(error)[:120]
    assert not found, "\n".join(f"{k}: {v}" for k, v in found.items())


def test_every_public_function_is_called():
    """Or stands in a list here, which says why it is not."""
    called = {*LIGHT, *METHODS}
    public = {name: getattr(mgpu_tf, name) for name in mgpu_tf.__all__}
    others = {
        name
        for name, value in public.items()
        if callable(value)
        and name not in called
        and not (isinstance(value, type) and issubclass(value, BaseException))
    }
    assert others == {
        # Without arguments, and the values of results.
        *("enable_determinism", "ParityReport", "Report"),
        # With what the ones above take.
        *("Loop", "run", "launch_from_notebook", "is_chief"),
        *("TensorBoardTracker", "MLflowTracker", "WandbTracker"),
        *("PrometheusTracker", "import_tensorflow"),
        *("sum_over_batch", "mean_over_batch", "batch_mean", "gather_batch"),
    }


PAIRS = [(name, a) for name in LIGHT for a in arguments_of(LIGHT[name][0])]


@pytest.mark.full
@settings(
    max_examples=5000,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(st.sampled_from(PAIRS), ANYTHING, ANYTHING)
def test_anything_at_all(pair, value, other):
    name, argument = pair
    call, right = LIGHT[name]
    also = {
        a: other for a in arguments_of(call)[-1:] if a not in (argument, *right)
    }
    error = hostile.tried(call, **right | also | {argument: value})
    assert error is None, (name, argument, value, also, error)
