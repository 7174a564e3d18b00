"""The command `mgpu-tf parity`: compares strategies with one device."""

from __future__ import annotations

from absl import flags

from mgpu_tf.cluster.config import ClusterConfig
from mgpu_tf.commands.arguments import Call, define_isolation
from mgpu_tf.config import RunConfig
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.names import EMBEDDING_GRADIENTS
from mgpu_tf.runtime import quiet_import
from mgpu_tf.user_function import check_target, is_target

USAGE = """mgpu-tf parity [--flags]

Trains a model for a few steps on one device and on strategies, in float64 if
the model allows it. Compares all weights after every step, and names the first
weight that differs by more than rounding. If a weight differs, exits with
status 1 and prints a line "cause: ..." with the remedy for each known cause in
the model.

Example:
  mgpu-tf parity --model=my_package.models:build --dataset=my_package.data:load
  mgpu-tf parity --model=cnn --num_workers=2
"""

DIFFERENT = 1


NEEDS = {
    "isolate": ("num_workers",),
    "strategies": ("not num_workers",),
    "num_virtual_devices": ("not num_workers",),
}


def define(values: flags.FlagValues) -> None:
    """Defines the flags."""
    define_isolation(values)
    text, number = flags.DEFINE_string, flags.DEFINE_integer
    for define, name, default, meaning in (
        (
            text,
            "model",
            "mlp",
            "The model: mlp, cnn, or package.module:function, which returns "
            "a compiled model.",
        ),
        (
            text,
            "dataset",
            "digits",
            "The data: digits, or package.module:function, which returns "
            "(x, y) or a batched tf.data.Dataset.",
        ),
        (
            text,
            "strategies",
            "mirrored",
            "Names of strategies, separated by commas.",
        ),
        (
            number,
            "num_workers",
            1,
            "Number of worker processes. If it is above 1, the strategy is "
            "multi_worker_mirrored.",
        ),
        (
            number,
            "num_virtual_devices",
            2,
            "Number of replicas of a process on a machine without GPUs.",
        ),
        (number, "global_batch_size", 64, "Number of examples in a step."),
        (number, "steps", 10, "Number of steps to compare."),
        (number, "seed", 0, "The seed of the initial weights."),
    ):
        define(name, default, meaning, flag_values=values)
    flags.DEFINE_enum(
        "embedding_gradients",
        EMBEDDING_GRADIENTS[0],
        EMBEDDING_GRADIENTS,
        "embedding_gradients of the strategies. One device always uses keras.",
        flag_values=values,
    )


def run(call: Call) -> int:
    """Compares, prints the report, and returns 1 if a strategy differs."""
    call.takes_flags_only()
    values = call.values
    _check(values)
    cluster = ClusterConfig.from_environment()
    if values.num_workers > 1 and cluster is None:
        return call.as_local_cluster(values.num_workers)
    quiet_import.import_tensorflow()
    from mgpu_tf.job import compare

    report = compare(
        values.model,
        values.dataset,
        values.strategies.split(",")
        if cluster is None
        else ["multi_worker_mirrored"],
        batch_size=values.global_batch_size,
        steps=values.steps,
        num_virtual_devices=1 if cluster else values.num_virtual_devices,
        seed=values.seed,
        embedding_gradients=values.embedding_gradients,
    )
    if cluster is None or cluster.is_chief:
        print(report)
    return 0 if report.same else DIFFERENT


def _check(values: flags.FlagValues) -> None:
    """Refuses names that exclude each other, before anything is imported."""
    model, data = values.model, values.dataset
    own_data, own_model = is_target(data), is_target(model)
    if not data or (own_model and not values["dataset"].present):
        raise ConfigurationError(
            "parity needs --dataset for your own model. Received: "
            f"--model={model} and no --dataset. Write "
            "--dataset=package.module:function, such as --dataset=mine:load, "
            "of a function that returns (x, y) or a batched tf.data.Dataset."
        )
    if not model or (own_data and not own_model):
        received = (
            f"--model={model}" if values["model"].present else "no --model"
        )
        raise ConfigurationError(
            "parity needs your own --model for your own data. Received: "
            f"--dataset={data} and {received}. Write "
            "--model=package.module:function, such as --model=mine:build, of "
            "a function that returns a compiled model."
        )
    if own_data:
        check_target(data, "dataset")
    if own_model:
        check_target(model, "model")
    else:
        RunConfig(model=model)  # Knows the names of the zoo.
