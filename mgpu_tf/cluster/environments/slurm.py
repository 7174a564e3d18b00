"""The tasks of a step of Slurm, from the variables that srun sets.

    srun --nodes=4 --ntasks-per-node=1 python script.py

| variable | what it says |
|---|---|
| `SLURM_JOB_ID`, `SLURM_STEP_ID` | the step; its ports follow from it |
| `SLURM_STEP_NODELIST` | the nodes of the step |
| `SLURM_STEP_TASKS_PER_NODE` | the tasks on each of them |
| `SLURM_NODEID`, `SLURM_LOCALID` | the node of this task, its number there |

Tasks are counted node by node, whatever the `--distribution` of srun. With
parameter servers they are dealt out to the nodes in turn, so that each node
gets its share of the workers.
"""

from __future__ import annotations

import glob
from collections.abc import Mapping

from mgpu_tf.cluster.environments.node_list import expand, tasks_per_node
from mgpu_tf.cluster.environments.place import PORT, Place, chosen_port
from mgpu_tf.cluster.roles import Roles, number
from mgpu_tf.errors import ClusterError

# Ports below those that Linux gives to clients, in blocks of one step each.
FIRST_PORT = 10000
LAST_PORT = 32767
BLOCK = 64
_BLOCKS = (LAST_PORT + 1 - FIRST_PORT) // BLOCK
# It has no common factor with the number of blocks. So consecutive jobs have
# different blocks, and so have the first steps of a job.
_STRIDE = 16

_GPU_FILES = "/dev/nvidia[0-9]*"


def detect(environ: Mapping[str, str]) -> bool:
    """Returns whether this process belongs to a job of Slurm."""
    return "SLURM_JOB_ID" in environ


def read(
    environ: Mapping[str, str], gpu_files: str = _GPU_FILES
) -> tuple[Place | None, list[str]]:
    """Returns the place of this task in its step, and hints.

    Args:
        environ: The environment.
        gpu_files: A pattern of the files of this machine's GPUs.

    Returns:
        The place; None outside of a step, or in a step of one task.

    Raises:
        ClusterError: The variables contradict each other, or tasks of this
            node see the same GPUs.
    """
    if not environ.get("SLURM_STEP_NODELIST"):
        return None, _outside_hints(environ)
    hints = _no_gpu_hints(environ, gpu_files)
    counts = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if sum(counts) == 1:
        return None, _one_task_hints(environ) + hints
    place = _place(environ, counts)
    _check_gpus(environ, place)
    return place, hints


def port_of(job: int, step: int) -> int:
    """Returns the first port of a step.

    Any 355 jobs in a row have blocks of ports of their own, for their step of
    the same number, and so have steps 0 to 15 of one job.

    Args:
        job: The number of the job.
        step: The number of the step.
    """
    return FIRST_PORT + (job * _STRIDE + step) % _BLOCKS * BLOCK


def _place(environ: Mapping[str, str], counts: list[int]) -> Place:
    nodes = expand(environ["SLURM_STEP_NODELIST"])
    node = number(environ, "SLURM_NODEID")
    local = number(environ, "SLURM_LOCALID")
    if environ.get("SLURM_HET_SIZE", "1") != "1":
        raise ClusterError(
            "A cluster is one component of a job of Slurm. Received: "
            f"SLURM_HET_SIZE={environ['SLURM_HET_SIZE']}. Use a job without "
            "--het-group, or set TF_CONFIG."
        )
    if len(nodes) != len(counts) or node >= len(nodes) or local >= counts[node]:
        raise ClusterError(
            "Slurm must place this task on a node of its step. Received: "
            f"SLURM_NODEID={node}, SLURM_LOCALID={local}, "
            f"SLURM_STEP_NODELIST={environ['SLURM_STEP_NODELIST']}, "
            "SLURM_STEP_TASKS_PER_NODE="
            f"{environ['SLURM_STEP_TASKS_PER_NODE']}. Start the script with "
            "srun."
        )
    roles = Roles.cut(sum(counts), environ)
    tasks = [(n, k) for n, count in enumerate(counts) for k in range(count)]
    if roles.num_ps:
        tasks.sort(key=lambda task: (task[1], task[0]))
    port = _first_port(environ, max(counts))
    return Place(
        f"Slurm job {environ['SLURM_JOB_ID']}",
        roles,
        tuple(f"{nodes[n]}:{port + k}" for n, k in tasks),
        tasks.index((node, local)),
    )


def _first_port(environ: Mapping[str, str], most: int) -> int:
    if environ.get(PORT):
        return chosen_port(environ, 0)
    if most > BLOCK:
        raise ClusterError(
            f"A node has at most {BLOCK} tasks of a step. Received: {most}. "
            f"Use fewer, or set {PORT} to the first of {most} free ports."
        )
    job = number(environ, "SLURM_JOB_ID")
    return port_of(job, number(environ, "SLURM_STEP_ID"))


def _outside_hints(environ: Mapping[str, str]) -> list[str]:
    """Hints for a process of a job that srun has not started."""
    tasks = number(environ, "SLURM_NTASKS", 1)
    nodes = number(environ, "SLURM_JOB_NUM_NODES", 1)
    if max(tasks, nodes) == 1:
        return []
    return [
        f"Slurm job {environ['SLURM_JOB_ID']} has {nodes} nodes and "
        f"{max(tasks, nodes)} tasks, but srun was not used, so this process "
        "trains alone. Start it with srun: srun python script.py"
    ]


def _one_task_hints(environ: Mapping[str, str]) -> list[str]:
    nodes = number(environ, "SLURM_JOB_NUM_NODES", 1)
    if nodes == 1:
        return []
    return [
        f"Slurm job {environ['SLURM_JOB_ID']} has {nodes} nodes, but this step "
        "has one task, which trains alone. Use all nodes: srun "
        f"--nodes={nodes} --ntasks-per-node=1"
    ]


def _no_gpu_hints(environ: Mapping[str, str], gpu_files: str) -> list[str]:
    asked = environ.get("SLURM_GPUS_ON_NODE") or environ.get(
        "CUDA_VISIBLE_DEVICES"
    )
    gpus = len(glob.glob(gpu_files))
    if asked or not gpus:
        return []
    return [
        f"This node has {gpus} GPUs, but Slurm job {environ['SLURM_JOB_ID']} "
        f"asked for none. Ask for them: --gpus-per-node={gpus}"
    ]


def _check_gpus(environ: Mapping[str, str], place: Place) -> None:
    """Refuses workers of a node that see the same GPUs."""
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    there = number(environ, "SLURM_GPUS_ON_NODE", 0)
    host = place.addresses[place.index].rpartition(":")[0]
    workers = sum(
        address.rpartition(":")[0] == host for address in place.tasks["worker"]
    )
    seen = len([gpu for gpu in visible.split(",") if gpu.strip()])
    if place.task[0] == "worker" and there and workers * seen > there:
        raise ClusterError(
            "Workers of a node must not share GPUs. Received: each of "
            f"{workers} workers on {host} sees {seen} of its {there} GPUs. Use "
            f"srun --ntasks-per-node=1, or --gpus-per-task="
            f"{max(1, there // workers)}."
        )
