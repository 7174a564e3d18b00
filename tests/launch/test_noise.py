"""Which lines of a task a launcher leaves out, and what has them."""

import sys

import pytest

from mgpu_tf.launch import isolation, local, noise

NOISE = [
    b"I0000 00:00:1795517950.281757    8798 port.cc:153] oneDNN custom",
    b"I0000 00:00:1795530973.92 20141 coordination_service.h:529] /job:worker",
    b"/job:worker/replica:0/task:1\n",
    b"W0000 00:00:1795517950.281757    8798 gpu_device.cc:2341] Cannot dlopen",
    b"E0000 00:00:1795517959.209887    8798 cuda_platform.cc:52] failed call to"
    b" cuInit: INTERNAL: CUDA error",
    b"E0000 00:00:1795517959.2 8798 cuda_dnn.cc:8310] Unable to register cuDNN",
    b"2026-11-24 10:00:00.281757: I tensorflow/core/util/port.cc:153] oneDNN",
    b"2026-11-24 10:00:00.281757: W external/local_xla/a.cc:1] could not",
    b"WARNING: All log messages before absl::InitializeLog() is called are",
    b"To enable the following instructions: AVX2 FMA, in other operations, re",
]
SHOWN = [
    b"Epoch 1/5",
    b"I am the author's own line",
    b"/job:worker/replica:0/task:1 has no data",
    b"E0000 00:00:1795517959.209887 8798 coordination_service.cc:52] worker 1",
    b"2026-11-24 10:00:00.281757: E tensorflow/core/a.cc:1] no such file",
    b"INFO 10:00:00.28 my.cc:1] not TensorFlow's",
    b"",
]


@pytest.mark.parametrize("line", NOISE)
def test_left_out(line):
    assert noise.Noise().has(line)


@pytest.mark.parametrize("line", SHOWN)
def test_shown(line):
    assert not noise.Noise().has(line)


def test_a_message_ends_with_an_empty_line():
    lines = [
        (
            b"I0000 00:00:17.2 1 service.cc:355] Options: goo.gle/debugproto  ",
            1,
        ),
        (b"device_count {", 1),
        (b'  key: "CPU"', 1),
        (b"}", 1),
        (b"", 1),
        (b"lr: 0.1", 0),
        (b"", 0),
        (b"I0000 00:00:17.2 1 service.cc:355] goo.gle/debugstr", 1),
        (b"Epoch 1/5", 0),
        (b"lr: 0.1", 0),
    ]
    of_one_task = noise.Noise()
    for line, is_noise in lines:
        assert of_one_task.has(line) is bool(is_noise), line


def test_a_collective_that_ends_with_another_task():
    lines = [
        (
            b"E0000 00:00:17.3 21 ring_alg.cc:291] Aborting RingReduce with UN",
            1,
        ),
        (
            b"Additional GRPC error information from remote target /job:worker",
            1,
        ),
        (b":UNKNOWN:Error received from peer  {grpc_status:14}", 1),
        (b"E0000 00:00:17.3 21 base_collective_executor.cc:252] StartAbort", 1),
        (
            b"W0000 00:00:17.3 21 local_rendezvous.cc:412] Local rendezvous is",
            1,
        ),
        (
            b"Additional GRPC error information from remote target /job:worker",
            1,
        ),
        (b"The error could be from a previous operation. Restart your pro", 1),
        (
            b"\t [[{{function_node while_body_741}}{{node while/Coll}}]]",
            1,
        ),
        (b"InvalidArgumentError: shapes differ", 0),
        (b"\t [[{{node while/reduce}}]]", 0),
        (b"E0000 00:00:17.3 21 executor.cc:29] no such file", 0),
    ]
    of_one_task = noise.Noise()
    for line, is_noise in lines:
        assert of_one_task.has(line) is bool(is_noise), line


@pytest.mark.parametrize(
    ("level", "wanted"), [(None, False), ("3", False), ("0", True), ("2", True)]
)
def test_whoever_sets_a_level_sees_it(level, wanted):
    assert noise.is_wanted({} if level is None else {noise.LEVEL: level}) is (
        wanted
    )


def test_the_log_has_all(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv(noise.LEVEL, "3")
    body = f"print({NOISE[0].decode()!r}); print('mine')"
    code = local.launch([sys.executable, "-c", body], 1, log_dir=str(tmp_path))
    assert code == 0
    assert capfd.readouterr().out == "[worker 0] mine\n"
    log = (tmp_path / "worker-0.log").read_text()
    assert NOISE[0].decode() in log
    monkeypatch.setenv(noise.LEVEL, "0")
    assert local.launch([sys.executable, "-c", body], 1) == 0
    assert "oneDNN" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("OSError: [Errno 101] Network is unreachable", True),
        ("socket.gaierror: [Errno -3] Temporary failure in name", True),
        ("urllib.error.URLError: <urlopen error>", True),
        ("ValueError: shapes differ", False),
        ("KeyError: 'a'", False),
    ],
)
def test_the_hint_follows_errors_of_the_network(line, told, capsys):
    isolation.explain_failure(["before", line])
    assert ("--isolate=off" in capsys.readouterr().err) is told


@pytest.mark.parametrize(
    ("logged", "level", "seen"),
    [(True, None, "0"), (True, "3", "3"), (False, None, "None")],
)
def test_a_task_with_a_log_prints_all(
    logged, level, seen, tmp_path, capfd, monkeypatch
):
    if level is None:
        monkeypatch.delenv(noise.LEVEL, raising=False)
    else:
        monkeypatch.setenv(noise.LEVEL, level)
    body = f"import os; print(os.environ.get({noise.LEVEL!r}))"
    log_dir = str(tmp_path) if logged else None
    assert local.launch([sys.executable, "-c", body], 1, log_dir=log_dir) == 0
    assert capfd.readouterr().out == f"[worker 0] {seen}\n"


def test_a_line_for_the_log_alone(tmp_path, capfd):
    body = (
        "from mgpu_tf.launch import noise; noise.print_to_log('resumed');"
        "print('for all')"
    )
    command = [sys.executable, "-c", body]
    assert local.launch(command, 2, log_dir=str(tmp_path)) == 0
    shown = capfd.readouterr().out
    assert sorted(shown.splitlines()) == [
        "[worker 0] for all",
        "[worker 1] for all",
    ]
    for task in ("worker-0", "worker-1"):
        log = (tmp_path / f"{task}.log").read_text()
        assert "\nresumed\nfor all\n" in log
    assert local.launch(command, 1) == 0
    assert capfd.readouterr().out == "[worker 0] for all\n"


@pytest.mark.full
def test_the_log_has_what_tensorflow_prints(tmp_path, capfd, monkeypatch):
    monkeypatch.delenv(noise.LEVEL, raising=False)
    body = (
        "import mgpu_tf; mgpu_tf.import_tensorflow(); import tensorflow as tf;"
        "print(int(tf.constant(7)))"
    )
    code = local.launch([sys.executable, "-c", body], 1, log_dir=str(tmp_path))
    assert code == 0
    assert capfd.readouterr().out == "[worker 0] 7\n"
    assert ".cc:" in (tmp_path / "worker-0.log").read_text()
