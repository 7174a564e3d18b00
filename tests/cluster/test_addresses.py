"""One validator of names and addresses, for all that name machines."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mgpu_tf.cluster.addresses import Address, host_of, parse
from mgpu_tf.cluster.config import ClusterConfig
from mgpu_tf.errors import ClusterError, ConfigurationError
from mgpu_tf.launch import hosts

NO_HOSTS = [
    *("", " ", ".", "..", "a..b", "-a", "a-", "a b", "a\0", "a\n", "'a'"),
    *('"a"', "a,b", "*", "$a", "user@a", "http://a", "a/b", "n[1-2]", "a" * 64),
    *(".".join(["a" * 60] * 5), "é", "\uff11.2.3.4", "1.2.3.999", "1.2.3", "1"),
    *("0x7f.1", "1.2.3.0x4", "01.2.3.4", "0.0.0.0", "224.0.0.1"),
    *("::1", "[::1", "[]", "[:::]", "[:::::]", "[::]", "[a]", "[1.2.3.4]"),
    *("[fe80::1%eth0]", "[1:2:3:4:5:6:7:8:9]", "[ff02::1]"),
]


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("a:1", "a", 1),
        ("Node-7.Lab.:02222", "node-7.lab", 2222),
        ("my_service:65535", "my_service", 65535),
        ("10.0.0.1:22", "10.0.0.1", 22),
        ("[::0:1]:22", "::1", 22),
        ("LOCALHOST:22", "127.0.0.1", 22),
    ],
)
def test_taken(text, host, port):
    assert parse(text) == Address(host, port)


@pytest.mark.parametrize("host", NO_HOSTS)
def test_no_host_is_refused_everywhere(host):
    with pytest.raises(ValueError, match=r"\w"):
        host_of(host)
    cluster = {"worker": ["a:1", f"{host}:2"]}
    text = json.dumps(
        {"cluster": cluster, "task": {"type": "worker", "index": 0}}
    )
    with pytest.raises(ClusterError, match="for worker 1, ") as error:
        ClusterConfig.from_json(text)
    assert len(str(error.value).splitlines()) == 1
    with pytest.raises(ConfigurationError, match="hosts must be") as error:
        hosts.places(2, ["a", host], 2222)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    "port", ["0", "65536", "http", "", "-1", "1 ", "\uff11"]
)
def test_no_port(port):
    with pytest.raises(ValueError, match="port"):
        parse(f"a:{port}")


@pytest.mark.parametrize(
    ("one", "other"),
    [("Host0", "host0"), ("a.", "a"), ("localhost", "127.0.0.1")]
    + [("[::1]", "[0:0:0:0:0:0:0:1]")],
)
def test_one_machine_in_two_texts(one, other):
    with pytest.raises(ConfigurationError, match="are one"):
        hosts.places(2, [one, other], 2222)
    with pytest.raises(ClusterError, match="worker 0 and worker 1"):
        ClusterConfig("worker", 0, worker=(f"{one}:1", f"{other}:1"))
    assert ClusterConfig("worker", 0, worker=(f"{one}:1", f"{other}:2"))


def test_a_cluster_has_a_task_that_trains():
    with pytest.raises(ClusterError, match="needs a worker"):
        ClusterConfig("ps", 0, ps=("a:1",))


@pytest.mark.parametrize(("port", "tasks"), [(0, 1), (65536, 1), (65535, 3)])
def test_ports_of_hosts(port, tasks):
    with pytest.raises(ConfigurationError, match="port must be 1 to 65535"):
        hosts.places(tasks, ["a", "b"], port)
    assert hosts.places(2, ["a", "b"], 65535)


@settings(max_examples=200, database=None, derandomize=True)
@given(st.text())
def test_any_text(text):
    try:
        address = parse(text)
    except ValueError as error:
        assert str(error)
    else:
        host = f"[{address.host}]" if ":" in address.host else address.host
        assert parse(f"{host}:{address.port}") == address
