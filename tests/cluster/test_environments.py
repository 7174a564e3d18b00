"""What schedulers tell a process, and what is said where it is not enough."""

import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mgpu_tf.cluster import environments
from mgpu_tf.cluster.config import ClusterConfig
from mgpu_tf.cluster.environments import slurm
from mgpu_tf.errors import ClusterError

SLURM = {
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[9-11]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
}
P = slurm.port_of(17, 0)
SKYPILOT = {
    "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8\n",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_NODES": "2",
}
JOB = {
    "JOB_COMPLETION_INDEX": "1",
    "MGPU_TF_NUM_WORKERS": "2",
    "MGPU_TF_SERVICE": "mnist",
    "MGPU_TF_JOB": "mnist",
}
JOBSET = {
    "JOB_COMPLETION_INDEX": "1",
    "MGPU_TF_NUM_WORKERS": "2",
    "MGPU_TF_SERVICE": "mnist",
    "JOBSET_NAME": "mnist",
    "REPLICATED_JOB_NAME": "worker",
}
TF_CONFIG = (
    '{"cluster": {"worker": ["a:1", "b:1"]},'
    ' "task": {"type": "worker", "index": 1}}'
)


@pytest.fixture(autouse=True)
def each_line_again():
    """A line is told once in a process; here, once in a test."""
    environments._say.cache_clear()


@pytest.mark.parametrize(
    ("environ", "task", "tasks"),
    [
        (SLURM, "worker 1", {"worker": [f"n9:{P}", f"n10:{P}", f"n11:{P}"]}),
        (
            # Counted node by node, ports by the task's number on its node.
            SLURM
            | {
                "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
                "SLURM_LOCALID": "1",
            },
            "worker 3",
            {
                "worker": [
                    f"n9:{P}",
                    f"n9:{P + 1}",
                    f"n10:{P}",
                    f"n10:{P + 1}",
                    f"n11:{P}",
                ]
            },
        ),
        (
            # With servers each node gets one of the three workers.
            SLURM
            | {
                "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
                "MGPU_TF_NUM_PS": "1",
            },
            "worker 0",
            {
                "chief": [f"n9:{P}"],
                "worker": [f"n10:{P}", f"n11:{P}", f"n9:{P + 1}"],
                "ps": [f"n10:{P + 1}"],
            },
        ),
        (
            SLURM
            | {
                "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
                "SLURM_LOCALID": "1",
                "MGPU_TF_NUM_PS": "1",
                "MGPU_TF_EVALUATOR": "1",
            },
            "evaluator 0",
            {
                "chief": [f"n9:{P}"],
                "worker": [f"n10:{P}", f"n11:{P}"],
                "ps": [f"n9:{P + 1}"],
                "evaluator": [f"n10:{P + 1}"],
            },
        ),
        (
            SLURM | {"MGPU_TF_PORT": "700", "SLURM_JOB_ID": "18"},
            "worker 1",
            {"worker": ["n9:700", "n10:700", "n11:700"]},
        ),
        (SKYPILOT, "worker 1", {"worker": ["10.0.0.7:2222", "10.0.0.8:2222"]}),
        (
            SKYPILOT | {"SKYPILOT_NODE_IPS": "fd00::1\nfd00::2"},
            "worker 1",
            {"worker": ["[fd00::1]:2222", "[fd00::2]:2222"]},
        ),
        (
            JOB,
            "worker 1",
            {"worker": ["mnist-0.mnist:2222", "mnist-1.mnist:2222"]},
        ),
        (
            JOB | {"MGPU_TF_NUM_PS": "1", "JOB_COMPLETION_INDEX": "3"},
            "ps 0",
            {
                "chief": ["mnist-0.mnist:2222"],
                "worker": ["mnist-1.mnist:2222", "mnist-2.mnist:2222"],
                "ps": ["mnist-3.mnist:2222"],
            },
        ),
        (
            JOBSET | {"MGPU_TF_NUM_PS": "1", "MGPU_TF_EVALUATOR": "1"},
            "worker 1",
            {
                "chief": ["mnist-chief-0-0.mnist:2222"],
                "worker": [
                    "mnist-worker-0-0.mnist:2222",
                    "mnist-worker-0-1.mnist:2222",
                ],
                "ps": ["mnist-ps-0-0.mnist:2222"],
                "evaluator": ["mnist-evaluator-0-0.mnist:2222"],
            },
        ),
        (
            # A TrainJob of Kubeflow has all tasks in one replicated job.
            JOBSET | {"REPLICATED_JOB_NAME": "node", "MGPU_TF_NUM_PS": "1"},
            "worker 0",
            {
                "chief": ["mnist-node-0-0.mnist:2222"],
                "worker": [
                    "mnist-node-0-1.mnist:2222",
                    "mnist-node-0-2.mnist:2222",
                ],
                "ps": ["mnist-node-0-3.mnist:2222"],
            },
        ),
        # TF_CONFIG wins over all, and the inner scheduler over the outer one.
        (
            SLURM | SKYPILOT | JOB | {"TF_CONFIG": TF_CONFIG},
            "worker 1",
            {"worker": ["a:1", "b:1"]},
        ),
        (
            SLURM | SKYPILOT | JOB,
            "worker 1",
            {"worker": ["10.0.0.7:2222", "10.0.0.8:2222"]},
        ),
    ],
)
def test_found(environ, task, tasks):
    cluster = ClusterConfig.from_environment(environ)
    assert (cluster.task_name, cluster.tasks) == (task, tasks)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        SLURM | {"TF_CONFIG": "{}"},
        SLURM | {"SLURM_STEP_TASKS_PER_NODE": "1"},
        {"SLURM_JOB_ID": "17", "SLURM_NTASKS": "1"},
        SKYPILOT
        | {"SKYPILOT_NODE_IPS": "h", "SKYPILOT_NODE_RANK": "0"}
        | {"SKYPILOT_NUM_NODES": "1"},
        JOB | {"MGPU_TF_NUM_WORKERS": "1", "JOB_COMPLETION_INDEX": "0"},
        # Not made for a cluster, such as the runs of a search.
        {"JOB_COMPLETION_INDEX": "1"},
    ],
)
def test_a_single_process(environ):
    assert ClusterConfig.from_environment(environ) is None


def test_one_line_says_what_was_found(caplog):
    caplog.set_level(logging.INFO, "mgpu_tf")
    for _ in range(3):
        cluster = ClusterConfig.from_environment(SLURM)
    assert cluster.source == "Slurm job 17"
    assert [record.getMessage() for record in caplog.records] == [
        f"Slurm job 17: 3 workers; this is worker 1 at n10:{P}"
    ]


@pytest.mark.parametrize(
    ("environ", "parts"),
    [
        (
            {"SLURM_JOB_ID": "17", "SLURM_NTASKS": "4"}
            | {"SLURM_JOB_NUM_NODES": "2"},
            ["2 nodes and 4 tasks", "srun was not used", "srun python"],
        ),
        (
            SLURM
            | {"SLURM_STEP_NODELIST": "n9", "SLURM_STEP_TASKS_PER_NODE": "1"},
            ["has 3 nodes", "one task", "--nodes=3 --ntasks-per-node=1"],
        ),
    ],
)
def test_a_hint_says_what_is_left_unused(environ, parts, caplog):
    assert ClusterConfig.from_environment(environ) is None
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    for part in parts:
        assert part in record.getMessage()


def test_a_hint_to_ask_for_gpus(tmp_path):
    for index in range(2):
        (tmp_path / f"nvidia{index}").touch()
    pattern = str(tmp_path / "nvidia[0-9]*")
    _, [hint] = slurm.read(SLURM, pattern)
    assert "has 2 GPUs" in hint
    assert "--gpus-per-node=2" in hint
    asked = {"SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": "0,1"}
    assert slurm.read(SLURM | asked, pattern)[1] == []


GPUS = SLURM | {
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
    "SLURM_GPUS_ON_NODE": "4",
    "CUDA_VISIBLE_DEVICES": "0,1,2,3",
}


@pytest.mark.parametrize(
    "change",
    [
        {"CUDA_VISIBLE_DEVICES": "0,1"},  # --gpus-per-task=2
        {"SLURM_STEP_TASKS_PER_NODE": "1(x3)"},
        # A coordinator and a server beside the worker use no GPUs.
        {"MGPU_TF_NUM_PS": "2"},
    ],
)
def test_gpus_that_are_not_shared(change):
    assert ClusterConfig.from_environment(GPUS | change) is not None


@pytest.mark.parametrize(
    ("environ", "parts"),
    [
        (GPUS, ["must not share GPUs", "each of 2", "--gpus-per-task=2"]),
        (SLURM | {"SLURM_NODEID": "3"}, ["SLURM_NODEID=3", "with srun"]),
        (SLURM | {"SLURM_LOCALID": "1"}, ["SLURM_LOCALID=1"]),
        (SLURM | {"SLURM_LOCALID": ""}, ["SLURM_LOCALID=''"]),
        (SLURM | {"SLURM_STEP_NODELIST": "n[9-"}, ["n[9-", "with srun"]),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "x"}, ["such as 2(x3),1"]),
        (SLURM | {"SLURM_HET_SIZE": "2"}, ["SLURM_HET_SIZE=2"]),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "65(x3)"}, ["at most 64"]),
        (SLURM | {"SLURM_STEP_ID": "batch"}, ["SLURM_STEP_ID='batch'"]),
        (SLURM | {"MGPU_TF_NUM_PS": "2"}, ["3 processes", "Start 4 or more"]),
        (SLURM | {"MGPU_TF_NUM_PS": "two"}, ["MGPU_TF_NUM_PS='two'"]),
        (SLURM | {"MGPU_TF_EVALUATOR": "1"}, ["without MGPU_TF_NUM_PS"]),
        (SLURM | {"MGPU_TF_EVALUATOR": "2"}, ["at most one evaluator"]),
        (SLURM | {"MGPU_TF_PORT": "70000"}, ["MGPU_TF_PORT=70000"]),
        (SKYPILOT | {"SKYPILOT_NODE_RANK": "2"}, ["SKYPILOT_NODE_RANK=2"]),
        (SKYPILOT | {"SKYPILOT_NODE_IPS": "a a"}, ["each node once"]),
        (JOB | {"JOB_COMPLETION_INDEX": "2"}, ["of 2", "completions"]),
        (JOB | {"MGPU_TF_NUM_WORKERS": ""}, ["MGPU_TF_NUM_WORKERS=''"]),
        (JOB | {"MGPU_TF_NUM_WORKERS": "0"}, ["needs a worker"]),
        (JOB | {"MGPU_TF_SERVICE": ""}, ["headless service"]),
        (JOB | {"MGPU_TF_SERVICE": "a b"}, ["Kubernetes Job mnist: an addr"]),
        (JOB | {"MGPU_TF_JOB": ""}, ["neither JOBSET_NAME nor MGPU_TF_JOB"]),
        (
            {k: v for k, v in JOB.items() if k != "JOB_COMPLETION_INDEX"},
            ["completionMode: Indexed"],
        ),
        (JOBSET | {"REPLICATED_JOB_NAME": "ps"}, ["'ps', roles worker"]),
        (JOBSET | {"REPLICATED_JOB_NAME": ""}, ["REPLICATED_JOB_NAME=''"]),
    ],
)
def test_a_mistake_is_one_line(environ, parts):
    with pytest.raises(ClusterError) as caught:
        ClusterConfig.from_environment(environ)
    assert "\n" not in str(caught.value)
    assert "Received: " in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


@settings(deadline=None, database=None)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=5),
    st.integers(0, 3),
    st.booleans(),
)
def test_all_tasks_of_a_step_agree(counts, num_ps, evaluator):
    environ = SLURM | {
        "SLURM_STEP_NODELIST": f"n[1-{len(counts)}]",
        "SLURM_STEP_TASKS_PER_NODE": ",".join(map(str, counts)),
        "MGPU_TF_NUM_PS": str(num_ps),
        "MGPU_TF_EVALUATOR": str(int(evaluator and num_ps > 0)),
    }
    needed = 1 + (num_ps > 0) + num_ps + (evaluator and num_ps > 0)
    if sum(counts) < max(2, needed):
        return
    views = [
        ClusterConfig.from_environment(
            environ | {"SLURM_NODEID": str(n), "SLURM_LOCALID": str(k)}
        )
        for n, count in enumerate(counts)
        for k in range(count)
    ]
    assert len({view.task_name for view in views}) == sum(counts)
    assert len({view.address for view in views}) == sum(counts)
    assert all(view.tasks == views[0].tasks for view in views)
    assert len(views[0].ps) == num_ps


def test_jobs_and_steps_do_not_meet():
    starts = {slurm.port_of(job, 0) for job in range(1000, 1355)}
    assert len(starts) == 355
    assert len({slurm.port_of(9, step) for step in range(16)}) == 16
    assert min(starts) >= 10000
    assert max(starts) + slurm.BLOCK <= 32768


def test_parameter_servers_asked_for(monkeypatch):
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MGPU_TF_NUM_PS", "")
    monkeypatch.delenv("MGPU_TF_NUM_PS")
    environments.ask_for_ps(0)
    assert ClusterConfig.from_environment().ps == ()
    environments.ask_for_ps(1)
    environments.ask_for_ps(1)
    assert ClusterConfig.from_environment().ps == (f"n11:{P}",)
    with pytest.raises(ClusterError, match="num_ps=2, MGPU_TF_NUM_PS=1"):
        environments.ask_for_ps(2)


def test_nothing_is_asked_where_there_is_no_scheduler(monkeypatch):
    monkeypatch.delenv("MGPU_TF_NUM_PS", raising=False)
    environments.ask_for_ps(1)
    environments.ask_for_ps(2)
