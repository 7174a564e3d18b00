"""TF_CONFIG: what it says, and what is told where it says nothing sane."""

import dataclasses
import json
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mgpu_tf.cluster.config import TASK_TYPES, ClusterConfig
from mgpu_tf.errors import ClusterError

TWO_WORKERS = {"worker": ["a:1", "b:1"]}


def tf_config(cluster, task_type="worker", index=0):
    return json.dumps(
        {"cluster": cluster, "task": {"type": task_type, "index": index}}
    )


@st.composite
def clusters(draw):
    """Any valid cluster, seen by any of its tasks."""
    host = st.one_of(
        st.from_regex(
            r"[a-z]([a-z0-9-]{0,3}[a-z0-9])?(\.[a-z]{1,3})?", fullmatch=True
        ),
        st.ip_addresses(v=4, network="10.0.0.0/8").map(str),
        st.ip_addresses(v=6, network="fd00::/8").map("[{}]".format),
    )
    address = st.builds("{}:{}".format, host, st.integers(1, 65535))
    limits = {"chief": 1, "worker": 4, "ps": 3, "evaluator": 1}
    tasks = {name: [] for name in limits}
    for unique in draw(st.sets(address, min_size=1, max_size=9)):
        free = [name for name in limits if len(tasks[name]) < limits[name]]
        if not tasks["chief"] and not tasks["worker"]:
            free = ["chief", "worker"]
        tasks[draw(st.sampled_from(free))].append(unique)
    task_type = draw(st.sampled_from([name for name in tasks if tasks[name]]))
    index = draw(st.integers(0, len(tasks[task_type]) - 1))
    addresses = {name: tuple(found) for name, found in tasks.items()}
    return ClusterConfig(task_type=task_type, task_index=index, **addresses)


unhurried = settings(
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def as_seen_by_all(cluster):
    return [
        dataclasses.replace(cluster, task_type=name, task_index=index)
        for name, addresses in cluster.tasks.items()
        for index in range(len(addresses))
    ]


@unhurried
@given(clusters())
def test_round_trip(cluster):
    assert ClusterConfig.from_json(cluster.to_json()) == cluster


@unhurried
@given(clusters())
def test_tasks_agree_about_who_is_who(cluster):
    views = as_seen_by_all(cluster)
    computing = [v for v in views if v.task_type in ("chief", "worker")]
    indices = [view.worker_index for view in computing]
    assert indices == list(range(cluster.num_workers))
    chiefs = [view.worker_index for view in views if view.is_chief]
    assert chiefs == ([0] if computing else [])
    assert len({view.address for view in views}) == len(views)


def test_parsed():
    text = tf_config(
        {"chief": ["c:1"], "worker": ["a:1", "b:2"], "ps": ["p:3"]}, index=1
    )
    assert ClusterConfig.from_json(text) == ClusterConfig(
        task_type="worker",
        task_index=1,
        chief=("c:1",),
        worker=("a:1", "b:2"),
        ps=("p:3",),
    )


@pytest.mark.parametrize(
    ("chief", "task_type", "index", "worker_index", "is_chief", "address"),
    [
        ([], "worker", 0, 0, True, "a:1"),
        ([], "worker", 1, 1, False, "b:1"),
        (["c:1"], "chief", 0, 0, True, "c:1"),
        (["c:1"], "worker", 0, 1, False, "a:1"),
        (["c:1"], "worker", 1, 2, False, "b:1"),
    ],
)
def test_place_among_workers(
    chief, task_type, index, worker_index, is_chief, address
):
    cluster = TWO_WORKERS | ({"chief": chief} if chief else {})
    config = ClusterConfig.from_json(tf_config(cluster, task_type, index))
    assert config.num_workers == 2 + len(chief)
    assert config.worker_index == worker_index
    assert config.is_chief is is_chief
    assert config.address == address
    assert config.task_name == f"{task_type} {index}"
    assert config.tasks == cluster


@pytest.mark.parametrize("task_type", ["ps", "evaluator"])
def test_tasks_that_do_not_compute(task_type):
    cluster = TWO_WORKERS | {task_type: ["p:1"]}
    config = ClusterConfig.from_json(tf_config(cluster, task_type))
    assert config.num_workers == 2
    assert not config.is_chief
    with pytest.raises(ClusterError, match=f"Received: task='{task_type} 0'"):
        _ = config.worker_index


@pytest.mark.parametrize(
    "environ", [{}, *({"TF_CONFIG": text} for text in ("", "  \n", "{}"))]
)
def test_single_process(environ, monkeypatch):
    assert ClusterConfig.from_environment(environ) is None
    monkeypatch.delenv("TF_CONFIG", raising=False)
    for name, text in environ.items():
        monkeypatch.setenv(name, text)
    assert ClusterConfig.from_environment() is None


def test_environment(monkeypatch):
    text = tf_config(TWO_WORKERS, index=1)
    monkeypatch.setenv("TF_CONFIG", text)
    assert ClusterConfig.from_environment() == ClusterConfig.from_json(text)
    assert ClusterConfig.from_environment({}) is None


@pytest.mark.parametrize(
    ("text", "same"),
    [
        (tf_config({"worker": "a:1"}), tf_config({"worker": ["a:1"]})),
        (tf_config(TWO_WORKERS, index="1"), tf_config(TWO_WORKERS, index=1)),
        (
            '{"environment": "cloud", ' + tf_config(TWO_WORKERS)[1:],
            tf_config(TWO_WORKERS),
        ),
    ],
    ids=["one address", "index as text", "other members"],
)
def test_lenient(text, same):
    assert ClusterConfig.from_json(text) == ClusterConfig.from_json(same)


BE_JSON = "must be JSON"
BE_OBJECT = "must be a JSON object"
NEED_CLUSTER = "must have the member 'cluster'"
NEED_TASK = "must have the member 'task'"
NEED_TYPE = '"task" must have a "type"'
NEED_INDEX = '"task" must have an "index", an integer'
KNOWN_TYPE = f"Unknown task type.*Valid: {', '.join(TASK_TYPES)}"
TYPE_HERE = "task's type must be in the cluster"
IN_RANGE = "index of a worker must be 0 to 1"
BE_LIST = "addresses of 'worker' must be a list"
BE_ADDRESS = '"host:port" with a port of 1 to 65535'
BE_UNIQUE = "every task needs an address of its own"
AT_MOST_ONE = "at most one"

# TF_CONFIG; what of it the message holds; the rule.
MALFORMED = [
    ("worker:1", "'worker:1'", BE_JSON),
    ("{'cluster': {}}", "{'cluster': {}}", BE_JSON),
    ('{"cluster":\n', r'{"cluster":\n', BE_JSON),
    ("[" * 100_000, "[[[[", BE_JSON),
    (f'{{"task": {"9" * 5000}}}', '{"task": 999', BE_JSON),
    ("null", "'null'", BE_OBJECT),
    ("[1, 2]", "[1, 2]", BE_OBJECT),
    (
        '{"cluster": {"worker": ["a:1"], "worker": ["b:1"]}, "task": {}}',
        "'worker' 2 times",
        "each member once",
    ),
    ('"worker"', '"worker"', BE_OBJECT),
    ('{"task": {}}', '{"task": {}}', NEED_CLUSTER),
    ('{"cluster": {}}', '{"cluster": {}}', NEED_CLUSTER),
    ('{"cluster": ["a:1"]}', '["a:1"]', NEED_CLUSTER),
    ('{"cluster": {"worker": ["a:1"]}}', '["a:1"]', NEED_TASK),
    ('{"cluster": {"worker": []}, "task": 0}', '"task": 0', NEED_TASK),
    ('{"cluster": {"a": 1}, "task": {"index": 7}}', "7}", NEED_TYPE),
    (tf_config(TWO_WORKERS, None), "None", NEED_TYPE),
    (tf_config(TWO_WORKERS, index=None), "None", NEED_INDEX),
    (tf_config(TWO_WORKERS, index=True), "True", NEED_INDEX),
    (tf_config(TWO_WORKERS, index=0.0), "0.0", NEED_INDEX),
    (tf_config(TWO_WORKERS, index="-1"), "'-1'", NEED_INDEX),
    (tf_config(TWO_WORKERS, index="\u0661"), "\u0661", NEED_INDEX),
    (tf_config(TWO_WORKERS, index="9" * 5000), "999", NEED_INDEX),
    (tf_config(TWO_WORKERS, index=2), "2", IN_RANGE),
    (tf_config(TWO_WORKERS, index=-1), "-1", IN_RANGE),
    (tf_config({"wroker": ["a:1"]}), "'wroker'", "Did you mean 'worker'"),
    (tf_config({"master": ["a:1"]}), "'master'", KNOWN_TYPE),
    (tf_config(TWO_WORKERS, "master"), "'master'", KNOWN_TYPE),
    (tf_config(TWO_WORKERS, "ps"), "'ps', cluster ['worker']", TYPE_HERE),
    (tf_config({"worker": []}), "'worker', cluster []", TYPE_HERE),
    (tf_config({"worker": {"0": "a:1"}}), "{'0': 'a:1'}", BE_LIST),
    (tf_config({"worker": ["a:1", 2]}), "['a:1', 2]", BE_LIST),
    (tf_config({"worker": None}), "None", BE_LIST),
    (tf_config({"worker": ["a"]}), "'a' for worker 0", BE_ADDRESS),
    (tf_config({"worker": ["a:1", ":2"]}), "':2' for worker 1", BE_ADDRESS),
    (tf_config({"worker": ["a:0"]}), "'a:0'", BE_ADDRESS),
    (tf_config({"worker": ["a:65536"]}), "'a:65536'", BE_ADDRESS),
    (tf_config({"worker": ["a:" + "9" * 5000]}), "'a:999", BE_ADDRESS),
    (tf_config({"worker": ["a:http"]}), "'a:http'", BE_ADDRESS),
    (tf_config({"worker": ["a:1\n"]}), r"'a:1\n'", BE_ADDRESS),
    (tf_config({"worker": ["a b:1"]}), "'a b:1'", BE_ADDRESS),
    (tf_config({"worker": ["a:\u0661"]}), "'a:\u0661'", BE_ADDRESS),
    (tf_config({"worker": ["grpc://a:1"]}), "'grpc://a:1'", BE_ADDRESS),
    (tf_config({"worker": ["::1:1"]}), "'::1:1'", BE_ADDRESS),
    (
        tf_config({"worker": ["a:1", "a:1"]}),
        "'a:1' for worker 0 and worker 1",
        BE_UNIQUE,
    ),
    (
        tf_config(TWO_WORKERS | {"ps": ["b:1"]}),
        "'b:1' for worker 1 and ps 0",
        BE_UNIQUE,
    ),
    (tf_config({"chief": ["a:1", "b:1"]}, "chief"), "2", AT_MOST_ONE),
    (tf_config({"evaluator": ["a:1", "b:1"]}, "evaluator"), "2", AT_MOST_ONE),
]


@pytest.mark.parametrize(
    ("text", "received", "rule"),
    MALFORMED,
    ids=[f"{row:02}" for row in range(len(MALFORMED))],
)
def test_malformed(text, received, rule):
    with pytest.raises(ClusterError) as caught:
        ClusterConfig.from_environment({"TF_CONFIG": text})
    message = str(caught.value)
    assert message.startswith("TF_CONFIG")
    assert len(message.splitlines()) == 1
    assert re.search(rule, message)
    told = message.partition("Received: ")[2].partition(" Example: ")[0]
    assert received in told


def test_long_text_is_shortened():
    with pytest.raises(ClusterError) as caught:
        ClusterConfig.from_json("x" * 10_000)
    assert len(str(caught.value)) < 500


def test_frozen_and_hashable():
    config = ClusterConfig.from_json(tf_config(TWO_WORKERS))
    assert {config: 1}[dataclasses.replace(config)] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.task_index = 1
