"""Checkpoints on a server that speaks the protocol of S3, on this machine."""

import contextlib
import json
import os
import re

import numpy as np
import pytest

from mgpu_tf import cli
from mgpu_tf.checkpoints import parts, reading, step_losses, storage, store
from mgpu_tf.checkpoints.reading import Stored, UnreadableError
from mgpu_tf.checkpoints.storage import objects
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.mesh import Piece, Region
from mgpu_tf.studies.doctor import machine
from mgpu_tf.studies.doctor.findings import ERROR, OK
from tests import clusters
from tests.jobs import on_objects

pytest.importorskip("s3fs")
moto_server = pytest.importorskip("moto.server")

BUCKET = "s3://bucket"


@pytest.fixture(scope="module")
def server():
    """An S3 server; what processes need to reach it is in the environment."""
    server = moto_server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patched:
        for name, value in (
            ("AWS_ENDPOINT_URL", f"http://{host}:{port}"),
            ("AWS_ACCESS_KEY_ID", "a"),
            ("AWS_SECRET_ACCESS_KEY", "b"),
            ("AWS_DEFAULT_REGION", "us-east-1"),
            ("AWS_MAX_ATTEMPTS", "1"),
        ):
            patched.setenv(name, value)
        objects._reached.cache_clear()
        import s3fs

        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem().mkdir("bucket")
        yield server
    server.stop()
    objects._reached.cache_clear()


@pytest.fixture(scope="module")
def runs(server, tmp_path_factory):
    """What both workers observed of each run."""
    once = tmp_path_factory.mktemp("once") / "killed"
    done = clusters.mgpu_tf(
        *("launch", "--num_workers=2", "--max_restarts=1"),
        *("--startup_seconds=0", "--isolate=off", "--", clusters.PYTHON),
        *("-m", "tests.jobs.on_objects", f"--address={BUCKET}/runs"),
        f"--once={once}",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "worker 1 failed with SIGKILL" in done.stdout + done.stderr
    pattern = r"^\[worker (\d)\] RESULT (\S+) (.*)$"
    return {
        (name, int(worker)): json.loads(text)
        for worker, name, text in re.findall(pattern, done.stdout, re.M)
    }


@pytest.mark.full
def test_a_run_that_was_killed_ends_with_the_same_bits(runs):
    whole = runs["whole", 0]
    assert (whole["restarts"], runs["killed", 0]["restarts"]) == (0, 1)
    for name in ("whole", "killed", "in_memory"):
        for worker in (0, 1):
            found = runs[name, worker]
            assert found["sha256"] == whole["sha256"]
            assert found["loss"] == whole["loss"]


@pytest.mark.full
@pytest.mark.parametrize("name", ["whole", "killed", "in_memory"])
def test_all_that_is_left_is_whole(name, runs, capsys):
    address = f"{BUCKET}/runs/{name}"
    assert cli.main(["checkpoints", address]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines] == [
        "ok      step-0000000024",
        "ok      step-0000000028",
        "ok      step-0000000030",
    ]
    assert lines[0].endswith("saved: every 4 steps, kept: newest 3")
    names = storage.of(address).names(address)
    assert sorted(names) == sorted(
        [
            *("losses.00000000", "owner", "registry"),
            *("step-0000000024", "step-0000000028", "step-0000000030"),
            *(["recovery.json"] if name == "killed" else []),
        ]
    )
    for step in store.paths(address).values():
        assert len(storage.of(step).names(step)) == 3  # Of two processes.


@pytest.mark.full
def test_the_best_and_some_for_good_are_kept(runs, capsys):
    assert cli.main(["checkpoints", f"{BUCKET}/runs/best"]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = {int(re.search(r"step-(\d+)", line)[1]): line for line in lines}
    assert list(found) == [8, 10, 16, 24, 28, 30]
    whole = runs["whole", 0]
    loss = whole["loss"][0]
    assert found[8].endswith("kept: for good, every 7 steps")
    assert found[10].endswith(f"kept: best 1 by loss ({loss:.6g})")
    best, other = runs["best", 0], runs["best", 1]
    assert best["best"] == other["best"] == 10
    assert best["scores"] == other["scores"]
    assert best["sha256"] == other["sha256"] != whole["sha256"]
    assert best["loss"] == whole["loss"]


@pytest.mark.full
def test_a_replay_reads_checkpoints_and_losses(runs, tmp_path):
    address = f"{BUCKET}/runs/whole"
    recorded = step_losses.read(address)
    assert len(recorded) == 30
    step_losses.write(address, 29, [recorded[29] + 1])
    storage.of(address).settle()
    done = clusters.mgpu_tf(
        *("replay", "--step=29", "--", clusters.PYTHON, "-m", "mgpu_tf"),
        *("launch", "--num_workers=2", "--startup_seconds=0", "--isolate=off"),
        *("--", clusters.PYTHON, "-m", "tests.jobs.on_objects"),
        *(f"--address={BUCKET}/runs", f"--once={tmp_path}/once"),
    )
    told = done.stdout + done.stderr
    assert (
        f"replay of step 29: hardware (the run had loss {recorded[29] + 1}"
        in told
    )
    assert f"and two repeats have {recorded[29]}" in told
    assert done.returncode == 1


@pytest.mark.full
def test_an_evaluator_follows_an_address(server):
    done = clusters.mgpu_tf(
        *("launch", "--num_workers=1", "--num_ps=1", "--evaluator"),
        *("--startup_seconds=0", "--isolate=off", "--", clusters.PYTHON),
        *("-m", "tests.jobs.on_objects", f"--address={BUCKET}/servers"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    pattern = r"^\[\S+ 0\] RESULT (\S+) (.*)$"
    found = {
        task: json.loads(text)
        for task, text in re.findall(pattern, done.stdout, re.M)
    }
    (epochs, scores), (_, expected) = found["evaluator"], found["chief"]
    assert epochs[-1] == 3
    for name in ("val_loss", "val_accuracy"):
        there = [expected[name][epoch - 1] for epoch in epochs]
        np.testing.assert_allclose(scores[name], there, rtol=1e-5)


@pytest.mark.full
def test_goes_on_with_one_device(runs, strategies, capsys):
    """From a checkpoint in the middle, to the numbers of two workers."""
    address = f"{BUCKET}/runs/in_memory"
    kept = storage.of(address)
    for step in (28, 30):
        kept.remove_all(f"{address}/step-{step:010d}")
    found = on_objects.train(strategies["one_device"], address)
    np.testing.assert_allclose(
        found["loss"], runs["whole", 0]["loss"], rtol=1e-5
    )
    assert cli.main(["checkpoints", address, "--keep=1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["deleted step-0000000024", "deleted step-0000000028"]


def piece(count, data=bytes(1 << 20)):
    chunks = count // len(data)
    return Piece(
        *("w", "uint8", 1, (count,), Region(0, count)),
        lambda: (data for _ in range(chunks)),
    )


@pytest.mark.full
@pytest.mark.parametrize("at_once", [True, False])
def test_an_upload_in_parts(at_once, server, monkeypatch):
    monkeypatch.setattr(objects, "_UPLOAD_BYTES", 5 << 20)
    monkeypatch.setattr(objects, "_READ_BYTES", 3 << 20)
    address = f"{BUCKET}/parts-{at_once}"
    part = parts.Part(address, 1, "t", at_once=at_once)
    with contextlib.closing(part):
        part.add(piece(17 << 20))
        found = part.end()
    stored = Stored(parts.commit(address, 1, "t", {}, [found]))
    stored.check()
    assert stored.read("w", Region(5 << 20, 9 << 20)) == bytes(9 << 20)


@pytest.mark.full
def test_an_upload_that_breaks_off(server, monkeypatch):
    """No object is made of its parts, and none of them is left."""
    monkeypatch.setattr(objects, "_UPLOAD_BYTES", 5 << 20)
    import s3fs

    system = s3fs.S3FileSystem()
    address = f"{BUCKET}/broken"
    part = parts.Part(address, 1, "t", at_once=False)
    part.add(piece(12 << 20))
    listed = system.call_s3("list_multipart_uploads", Bucket="bucket")
    assert len(listed["Uploads"]) == 1
    part.close()
    del part
    listed = system.call_s3("list_multipart_uploads", Bucket="bucket")
    assert not listed.get("Uploads")
    assert not storage.of(address).is_folder(address)


@pytest.mark.full
def test_a_bucket_that_is_missing(server):
    with pytest.raises(ConfigurationError, match="there is no such bucket"):
        storage.of("s3://none/a").make("checkpoint_dir", "s3://none/a")
    (found,) = machine.folder("checkpoint_dir", "s3://none/a")
    assert found.status == ERROR and "no such bucket" in found.found
    (found,) = machine.folder("checkpoint_dir", f"{BUCKET}/a")
    assert found.status == OK


@pytest.mark.full
def test_a_server_that_does_not_answer(server, monkeypatch):
    monkeypatch.setattr(reading, "PAUSES_SECONDS", (0.0,))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    import s3fs

    system = s3fs.S3FileSystem(skip_instance_cache=True)
    monkeypatch.setattr(
        objects, "_reached", lambda scheme: objects.Objects(system)
    )
    with pytest.raises(UnreadableError, match="Could not connect"):
        store.newest(f"{BUCKET}/runs")
    assert not os.path.exists("s3:")
