"""The folder of checkpoints: whole or not at all, checked when read."""

import json
import math
import os
import pathlib
import resource
import signal
import subprocess
import sys

import pytest

from mgpu_tf.checkpoints import manifest, parts, store
from mgpu_tf.checkpoints.manifest import MANIFEST
from mgpu_tf.checkpoints.parts import Part
from mgpu_tf.checkpoints.reading import Stored
from mgpu_tf.checkpoints.saving import writer
from mgpu_tf.checkpoints.storage.disk import DISK
from mgpu_tf.checkpoints.storage.interface import unfinished_path
from mgpu_tf.errors import CheckpointError
from mgpu_tf.mesh import Piece, Region
from tests import clusters


def piece(name, dtype, itemsize, shape, data, region=None):
    region = region or Region(0, math.prod(shape))
    return Piece(name, dtype, itemsize, shape, region, lambda: [data])


def arrays(value=1, count=1000):
    data = bytes([value]) * (4 * count)
    return [
        piece("weights", "float32", 4, (count,), data),
        piece("nothing", "float32", 4, (0, 3), b""),
        piece("scalar", "int64", 8, (), bytes(8)),
    ]


def save(folder, *steps):
    for step in steps:
        parts.write(str(folder), step, {"step": step}, arrays(step))


def names(folder):
    return [entry.name for entry in store.entries(str(folder))]


def test_what_is_written_is_read(tmp_path):
    path = parts.write(str(tmp_path), 7, {"epoch": 3}, arrays())
    stored = Stored(path)
    assert (stored.state, stored.step) == ({"epoch": 3}, 7)
    for array in arrays():
        found = stored.arrays[array.name]
        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        assert stored.read(array.name) == b"".join(array.chunks())
    (entry,) = store.entries(str(tmp_path))
    assert (entry.step, entry.problem, entry.bytes) == (7, "", 4008)


def test_a_copy_is_whole_or_not_at_all(tmp_path):
    large = arrays(3, 2_000_000)
    stored = Stored(parts.write(str(tmp_path / "a"), 7, {"epoch": 3}, large))
    stream = list(stored.stream())
    assert len(stream) > 2
    changed = [*stream[:-1], stream[-1][:-1] + b"?"]
    body = json.loads(stream[0])
    body["files"][0]["name"] = "../elsewhere"
    del body["manifest_sha256"]
    body["manifest_sha256"] = manifest.digest(body)
    elsewhere = [json.dumps(body).encode(), *stream[1:]]
    for bad in (changed, stream[:-1], [], [b"{}"], elsewhere):
        with pytest.raises(CheckpointError):
            parts.write_copy(str(tmp_path / "b"), 7, "t", iter(bad))
        assert not os.listdir(tmp_path / "b")
    for _ in range(2):  # The second takes the place of the first.
        copy = parts.write_copy(str(tmp_path / "b"), 7, "t", stored.stream())
        copy.check()
        assert os.listdir(tmp_path / "b") == ["step-0000000007"]
    assert (copy.state, copy.arrays) == (stored.state, stored.arrays)
    assert copy.read("weights") == stored.read("weights")


def test_the_newest_comes_last_whatever_its_digits(tmp_path):
    save(tmp_path, 9)
    parts.write(str(tmp_path), 10**11, {}, arrays())
    assert [e.step for e in store.entries(str(tmp_path))] == [9, 10**11]


def test_a_folder_that_is_missing(tmp_path):
    missing = str(tmp_path / "missing")
    assert store.entries(missing) == []
    assert store.newest(missing) is None
    assert store.prune(missing, 1) == []


def truncate(path):
    with open(path / "arrays-0.bin", "r+b") as file:
        file.truncate(100)


def change(path):
    with open(path / "arrays-0.bin", "r+b") as file:
        file.seek(2000)
        file.write(b"\xff")


def lose_manifest(path):
    (path / "manifest.json").unlink()


def lose_arrays(path):
    (path / "arrays-0.bin").unlink()


def half_manifest(path):
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text[: len(text) // 2])


def change_manifest(path):
    body = json.loads((path / "manifest.json").read_text())
    body["state"]["step"] = 99
    (path / "manifest.json").write_text(json.dumps(body))


def not_an_object(path):
    (path / "manifest.json").write_text("[]")


@pytest.mark.parametrize(
    ("damage", "how"),
    [
        (truncate, "arrays-0.bin has 100 bytes of 4008"),
        (change, "arrays-0.bin was changed"),
        (lose_manifest, "manifest.json cannot be read (No such file"),
        (lose_arrays, "arrays-0.bin cannot be read (No such file"),
        (half_manifest, "manifest.json is not whole"),
        (change_manifest, "manifest.json was changed"),
        (not_an_object, "manifest.json is not whole"),
    ],
)
def test_a_broken_one_is_refused_by_name(damage, how, tmp_path):
    save(tmp_path, 1, 2)
    damage(tmp_path / "step-0000000002")
    broken = []
    entry = store.newest(str(tmp_path), broken.append)
    assert entry.step == 1
    (refused,) = broken
    assert refused.problem.startswith(f"step-0000000002: {how}")
    with pytest.raises(CheckpointError, match="step-0000000002: "):
        Stored(refused.path).check()


def test_a_file_that_cannot_grow_leaves_the_one_before(tmp_path):
    """As on a full disk."""
    save(tmp_path, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            save(tmp_path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(tmp_path) == ["step-0000000001"]
    assert store.newest(str(tmp_path)).step == 1


def test_killed_in_the_middle_of_writing(tmp_path):
    """At each of many moments: the one before, or the whole new one."""
    code = """
import sys
from mgpu_tf.checkpoints import parts, store
from mgpu_tf.mesh import Piece, Region
size = 1 << 21
for step in range(1, 10**6):
    data = bytes([step % 251]) * size
    piece = Piece("w", "uint8", 1, (size,), Region(0, size), lambda: [data])
    parts.write(sys.argv[1], step, {}, [piece], "t")
    store.prune(sys.argv[1], 2, "t")
    print(step, flush=True)
"""
    unfinished = 0
    for _ in range(12):
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)],
            env=clusters.environment(),
            stdout=subprocess.PIPE,
        )
        with process:
            last = int(process.stdout.readline())
            while ".unfinished-step" not in str(os.listdir(tmp_path)):
                pass
            process.send_signal(signal.SIGKILL)
            last = int((process.stdout.read().split() or [last])[-1])
        unfinished += ".unfinished-step" in str(os.listdir(tmp_path))
        entry = store.newest(str(tmp_path))
        assert entry is not None and entry.step >= last
    assert unfinished
    store.prune(str(tmp_path), 1)
    # A registry is there where something was deleted.
    assert {*os.listdir(tmp_path)} - {"registry"} == {entry.name}


def test_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Bytes and folder reach the disk before the name, the name after."""
    seen = []
    fsync, rename = os.fsync, os.rename

    def observed_fsync(descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        is_file = os.path.isfile(path)
        seen.append((path, os.path.getsize(path) if is_file else None))
        fsync(descriptor)

    def observed_rename(before, after):
        rename(before, after)
        seen.append((before, after))

    monkeypatch.setattr(os, "fsync", observed_fsync)
    monkeypatch.setattr(os, "rename", observed_rename)
    path = parts.write(str(tmp_path), 1, {"step": 1}, arrays())
    [unfinished] = {
        os.path.dirname(name) for name, size in seen if isinstance(size, int)
    }
    sizes = {
        name: os.path.getsize(os.path.join(path, name))
        for name in os.listdir(path)
    }
    assert len(sizes) == 2
    assert dict(seen[:2]) == {
        os.path.join(unfinished, name): size for name, size in sizes.items()
    }
    assert seen[2:] == [
        (unfinished, None),
        (unfinished, path),
        (str(tmp_path), None),
    ]


def test_one_of_the_same_step_is_replaced(tmp_path):
    save(tmp_path, 1, 2)
    truncate(tmp_path / "step-0000000002")
    parts.write(str(tmp_path), 2, {"again": True}, arrays())
    assert Stored(str(tmp_path / "step-0000000002")).state["again"]
    # What was there is no longer in the way, and not lost.
    assert names(tmp_path) == ["step-0000000001", "step-0000000002"]
    (name,) = store.aside(str(tmp_path))
    assert name == "damaged-step-0000000002-1"
    assert (tmp_path / name / "arrays-0.bin").stat().st_size == 100


def test_prune_keeps_the_newest_whole_ones(tmp_path):
    save(tmp_path, 1, 2, 3, 4, 5)
    truncate(tmp_path / "step-0000000003")
    truncate(tmp_path / "step-0000000005")
    (tmp_path / ".unfinished-step-0000000006").mkdir()
    (tmp_path / "notes.txt").touch()
    gone = store.prune(str(tmp_path), 2)
    assert sorted(gone) == [
        ".unfinished-step-0000000006",
        "step-0000000001",
    ]
    # Damaged ones stay, older or newer.
    assert names(tmp_path) == [f"step-000000000{step}" for step in (2, 3, 4, 5)]
    assert (tmp_path / "notes.txt").exists()


@pytest.mark.parametrize("name", [MANIFEST, "arrays-0.bin"])
def test_a_file_that_is_a_link_is_refused(name, tmp_path):
    path = pathlib.Path(parts.write(str(tmp_path), 1, {}, []))
    other = tmp_path / "other"
    (path / name).rename(other)
    (path / name).symlink_to(other)
    with pytest.raises(CheckpointError, match=f"{name} cannot be read"):
        Stored(str(path)).check()


def matrix_by(*regions):
    """A matrix of 6 x 4 bytes, its regions written by a process each."""
    whole = bytes(range(24))
    return [
        piece("m", "uint8", 1, (6, 4), elements(whole, region), region)
        for region in regions
    ]


def elements(data, region):
    return b"".join(
        data[first : first + region.length]
        for run in range(region.runs)
        for first in [region.first + run * region.stride]
    )


ROWS = (Region(0, 8), Region(8, 16))
COLUMNS = (Region(0, 3, 4, 6), Region(3, 1, 4, 6))


def write_parts(folder, pieces, token="t"):
    every = [
        Part(str(folder), 1, token, number) for number in range(len(pieces))
    ]
    for part, own in zip(every, pieces, strict=True):
        part.add(own)
    for part in every[1:]:
        part.leave(part.end())
    return [every[0].end()] + [
        parts.left(str(folder), 1, token, number)
        for number in range(1, len(every))
    ]


@pytest.mark.parametrize("written", [ROWS, COLUMNS, (Region(0, 24),)])
def test_any_region_is_read_from_any_others(written, tmp_path):
    found = write_parts(tmp_path, matrix_by(*written))
    path = parts.commit(str(tmp_path), 1, "t", {}, found)
    stored = Stored(path)
    whole = bytes(range(24))
    assert stored.read("m") == whole
    for wanted in (*ROWS, *COLUMNS, Region(5, 1), Region(1, 2, 4, 3)):
        assert stored.read("m", wanted) == elements(whole, wanted)
    files = {f"arrays-{number}.bin" for number in range(len(written))}
    assert set(os.listdir(path)) == {"manifest.json"} | files
    for place in range(2):
        stored.check(place, 2)
    # Each process checks files of its own.
    with open(os.path.join(path, "arrays-0.bin"), "r+b") as file:
        file.write(b"\xff")
    stored.check(1, 2)
    with pytest.raises(CheckpointError, match=r"arrays-0\.bin was changed"):
        stored.check(0, 2)


def test_a_part_that_is_missing_is_found(tmp_path):
    found = write_parts(tmp_path, matrix_by(*ROWS))
    path = parts.commit(str(tmp_path), 1, "t", {}, found[:1])
    assert Stored(path).read("m", ROWS[0])
    with pytest.raises(CheckpointError, match="'m' is not all there"):
        Stored(path).read("m")


def test_nothing_is_committed_without_the_files_of_all(tmp_path):
    save(tmp_path, 0)
    found = write_parts(tmp_path, matrix_by(*ROWS))
    os.remove(tmp_path / ".unfinished-step-0000000001-t" / "arrays-1.bin")
    with pytest.raises(CheckpointError, match=r"arrays-1\.bin cannot be read"):
        parts.commit(str(tmp_path), 1, "t", {}, found)
    assert store.newest(str(tmp_path)).step == 0


def test_a_part_that_failed_is_told(tmp_path):
    assert parts.left(str(tmp_path), 1, "t", 1) is None
    part = Part(str(tmp_path), 1, "t", 1)
    part.add(arrays()[0])
    part.drop()
    parts.refuse(str(tmp_path), 1, "t", 1, "No space left on device")
    with pytest.raises(CheckpointError, match="process 1: No space left on"):
        parts.left(str(tmp_path), 1, "t", 1)
    # A run that still writes keeps what it has not finished.
    store.prune(str(tmp_path), 1, "t")
    assert len(os.listdir(tmp_path)) == 1
    store.prune(str(tmp_path), 1, "another")
    assert not os.listdir(tmp_path)


def test_a_process_that_cannot_begin_tells_so(tmp_path):
    """As where its file cannot be made; the first one does not wait."""
    folder = str(tmp_path)
    place = pathlib.Path(unfinished_path(folder, 1, "t"))
    (place / "arrays-1.bin").mkdir(parents=True)
    second = writer.Writer(folder, "t", 1, 2)
    second.begin(1, arrays())
    with pytest.raises(OSError, match="Is a directory"):
        second.finish({}, 1)
    first = writer.Writer(folder, "t", 0, 2)
    first.begin(1, arrays())
    with pytest.raises(CheckpointError, match="process 1: Is a directory"):
        first.finish({}, 1)
    assert not os.listdir(tmp_path)


def test_what_came_late_goes_with_the_next_save(tmp_path):
    """The first process has given up a save when a part of it comes."""
    folder = str(tmp_path)
    Part(folder, 1, "another", 1).close()
    for step in (1, 2):
        part = Part(folder, step, "t", 1, save=1)
        part.add(arrays()[0])
        part.leave(part.end())
    first = writer.Writer(folder, "t", 0, 2)
    first.begin(2, arrays())
    first.finish({}, 1)
    assert first.written == 2
    assert sorted(os.listdir(tmp_path)) == ["registry", "step-0000000002"]


def test_killed_while_one_is_replaced(tmp_path):
    """Between its two names it has the one that nobody looks for."""
    save(tmp_path, 3)
    code = """
import os, signal, sys
from mgpu_tf.checkpoints import parts, store

rename = os.rename

def killed(before, after):
    rename(before, after)
    if "replaced" in after:
        os.kill(os.getpid(), signal.SIGKILL)

os.rename = killed
parts.write(sys.argv[1], 3, {}, [])
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env=clusters.environment(),
        timeout=clusters.LIMIT_SECONDS,
    )
    assert done.returncode == -signal.SIGKILL
    assert store.newest(str(tmp_path)) is None
    store.recover(str(tmp_path))
    entry = store.newest(str(tmp_path))
    assert entry.state == {"step": 3}
    store.prune(str(tmp_path), 1)
    assert os.listdir(tmp_path) == ["step-0000000003"]


def test_one_is_kept_beside_the_newest(tmp_path):
    save(tmp_path, 1, 2, 3, 4)
    store.prune(str(tmp_path), 1, "t", beside=2)
    assert names(tmp_path) == ["step-0000000002", "step-0000000004"]


def write_as_run(folder, step, count):
    path = parts.write(str(folder), step, {}, arrays(step, count), "t")
    store.prune(str(folder), 1, "t")
    return pathlib.Path(path) / "arrays-0.bin"


def test_a_run_writes_over_the_files_that_it_would_delete(tmp_path):
    inodes = []
    for step, count in enumerate([1000, 900, 1100, 10], 1):
        file = write_as_run(tmp_path, step, count)
        inodes.append(file.stat().st_ino)
        (entry,) = store.entries(str(tmp_path))
        assert (entry.step, entry.problem) == (step, "")
        assert entry.bytes == file.stat().st_size == 4 * count + 8
        data = bytes([step]) * 4 * count
        assert Stored(entry.path).read("weights") == data
    assert inodes[2:] == inodes[:2]
    # Another run, and this one at its end, delete what is left of it.
    DISK.forget_written_over(str(tmp_path), "t")
    assert sorted(os.listdir(tmp_path)) == ["registry", "step-0000000004"]


def test_what_is_read_or_linked_is_not_written_over(tmp_path):
    first = write_as_run(tmp_path, 1, 1000)
    with DISK.reading(str(first)) as file:
        write_as_run(tmp_path, 2, 1000)
        third = write_as_run(tmp_path, 3, 1000)
        assert file.read(4000) == bytes([1]) * 4000
    os.link(third, tmp_path / "backup")
    for step in (4, 5):
        write_as_run(tmp_path, step, 1000)
    assert (tmp_path / "backup").read_bytes()[:4000] == bytes([3]) * 4000


def test_a_checkpoint_that_is_a_link_is_refused(tmp_path):
    path = pathlib.Path(parts.write(str(tmp_path / "of-others"), 1, {}, []))
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / path.name).symlink_to(path)
    (entry,) = store.entries(str(folder))
    assert "is a link" in entry.problem
    # One of the same step takes its place, and leaves the other as it is.
    parts.write(str(folder), 1, {"own": True}, [])
    assert Stored(str(folder / path.name)).state == {"own": True}
    assert Stored(str(path)).state == {}
