"""The command `mgpu-tf kubernetes`: manifests for a script."""

from __future__ import annotations

import dataclasses
import os

from absl import flags

from mgpu_tf.commands.arguments import Call
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.launch.dockerfile import dockerfile
from mgpu_tf.launch.kubernetes import KINDS, MOUNT, KubernetesJob, manifests

USAGE = """mgpu-tf kubernetes --name=NAME --image=IMAGE --workers=N [--flags]
    -- COMMAND [ARGUMENTS]

Prints the manifests of a job for Kubernetes. The command is started in a pod
for each task. The same flags always print the same text.

Example:
  mgpu-tf kubernetes --name=mnist --image=lab/train:1 --workers=4 --gpus=8 \\
      --checkpoint_claim=runs -- python train.py | kubectl apply -f -
"""


# A Dockerfile has none of the other fields.
NEEDS = {
    field.name: ("not dockerfile",)
    for field in dataclasses.fields(KubernetesJob)
    if field.name not in ("command", "gpus", "user_id")
}


def define(values: flags.FlagValues) -> None:
    """Defines the flags of the command."""
    text, number = flags.DEFINE_string, flags.DEFINE_integer
    for define_flag, name, default, meaning in (
        (text, "name", None, "The name of the job."),
        (text, "image", None, "The image of the containers."),
        (number, "workers", None, "Number of workers, a pod each."),
        (number, "gpus", 0, "Number of GPUs of each worker."),
        (
            number,
            "ps",
            0,
            "Number of parameter servers. If it is above 0, there is a "
            "coordinator too.",
        ),
        (
            flags.DEFINE_boolean,
            "evaluator",
            False,
            "One more pod evaluates the checkpoints.",
        ),
        (
            text,
            "kind",
            "jobset",
            f"The kind of the job: {', '.join(KINDS)}. jobset and trainjob "
            "need JobSet or Kubeflow Trainer in the cluster.",
        ),
        (text, "namespace", None, "The namespace."),
        (text, "queue", None, "The queue of Kueue."),
        (text, "cpus", None, "CPUs that each pod asks for, such as 4."),
        (text, "memory", None, "Memory of each pod, such as 16Gi."),
        (
            text,
            "shared_memory",
            "1Gi",
            "Size of /dev/shm, which NCCL uses. It is part of the memory.",
        ),
        (
            text,
            "checkpoint_claim",
            None,
            f"The volume claim that all pods mount at {MOUNT}.",
        ),
        (
            text,
            "checkpoint_size",
            None,
            "Make the volume claim with this size. Default: it exists.",
        ),
        (
            number,
            "max_restarts",
            3,
            "Restart after a failure, at most N times. Preemptions do not "
            "count.",
        ),
        (
            number,
            "grace_seconds",
            300,
            "Seconds that a pod has to save and end after a signal.",
        ),
        (
            number,
            "user_id",
            1000,
            "The user and group that the containers run as.",
        ),
        (
            flags.DEFINE_boolean,
            "dockerfile",
            False,
            "Print a Dockerfile for the image in place of the manifests. It "
            "needs none of the other flags.",
        ),
    ):
        define_flag(name, default, meaning, flag_values=values)


def run(call: Call) -> int:
    """Prints the manifests; returns the status."""
    values = call.values
    command = call.own_command("--name=mnist --image=lab/train:1 --workers=4")
    if values.dockerfile:
        text = dockerfile(
            command,
            gpu=values.gpus > 0,
            requirements=os.path.exists("requirements.txt"),
            user_id=values.user_id,
        )
        print(text, end="")
        return 0
    for name, example in (
        ("name", "mnist"),
        ("image", "lab/train:1"),
        ("workers", "4"),
    ):
        if values[name].value is None:
            raise ConfigurationError(
                f"kubernetes needs --{name}. Received: none. Write "
                f"--{name}={example}."
            )
    given = {
        field.name: values[field.name].value
        for field in dataclasses.fields(KubernetesJob)
        if field.name != "command"
    }
    print(manifests(KubernetesJob(tuple(command), **given)), end="")
    return 0
