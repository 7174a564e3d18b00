"""The protocol of a save, on a disk and on object storage alike."""

import contextlib
import functools
import json
import math
import os
import threading
import time
import tracemalloc
import uuid

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from mgpu_tf import cli
from mgpu_tf.checkpoints import (
    manifest,
    parts,
    reading,
    registry,
    step_losses,
    storage,
    store,
)
from mgpu_tf.checkpoints.keeping import Best, ForGood, as_state
from mgpu_tf.checkpoints.manifest import MANIFEST, DamagedError
from mgpu_tf.checkpoints.reading import Stored, UnreadableError
from mgpu_tf.checkpoints.recovery import (
    Owner,
    Progress,
    SupersededError,
    living_owner,
    not_seen,
    run_of,
)
from mgpu_tf.checkpoints.registry import Registry
from mgpu_tf.checkpoints.saving import writer
from mgpu_tf.checkpoints.storage import objects
from mgpu_tf.errors import CheckpointError, ConfigurationError
from mgpu_tf.mesh import Piece, Region

DISK, MEMORY = "disk", "memory"


@pytest.fixture(params=[DISK, MEMORY])
def folder(request, tmp_path):
    if request.param == DISK:
        return str(tmp_path / "run")
    return f"memory://{uuid.uuid4().hex}/run"


@pytest.fixture
def address():
    return f"memory://{uuid.uuid4().hex}/run"


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(reading, "PAUSES_SECONDS", (0.0, 0.0, 0.0))
    monkeypatch.setattr(objects, "_NOTE_SECONDS", 0.0)


def piece(value, count=1000, first=0, of=None):
    of = of or count
    region = Region(first, count)
    data = bytes([value]) * count
    return Piece("w", "uint8", 1, (of,), region, lambda: [data])


def save(folder, *steps, token="t", value=None, state=None):
    for step in steps:
        pieces = [piece(step if value is None else value)]
        parts.write(folder, step, state or {"step": step}, pieces, token)


def save_of_two(folder, step, token, value):
    """Both processes of a run, one after other, each a half."""
    other = parts.Part(folder, step, token, 1)
    with contextlib.closing(other):
        other.add(piece(value, 500, 500, 1000))
        other.leave(other.end())
    mine = parts.Part(folder, step, token, 0)
    with contextlib.closing(mine):
        mine.add(piece(value, 500, 0, 1000))
        found = mine.end()
    found = [found, parts.left(folder, step, token, 1)]
    return parts.commit(folder, step, token, {"step": step}, found)


def file_of(path, place=0):
    """The path of a file of a checkpoint."""
    text = storage.of(path).text(os.path.join(path, MANIFEST))
    return os.path.join(path, json.loads(text)["files"][place]["name"])


def change(path, data):
    """Writes over a file of a checkpoint, wherever it is."""
    with fsspec.open(path, "wb") as file:
        file.write(data)


def steps(folder):
    return {entry.step: entry.problem for entry in store.survey(folder)}


def held(path):
    return bytes(Stored(path).read("w"))


def test_what_is_written_is_read(folder):
    path = save_of_two(folder, 7, "t", 3)
    stored = Stored(path)
    stored.check()
    assert (stored.state, stored.step) == ({"step": 7}, 7)
    assert held(path) == bytes([3]) * 1000
    assert stored.read("w", Region(400, 200)) == bytes([3]) * 200
    assert store.newest(folder).path == path
    assert b"".join(stored.stream())[-1000:] == bytes([3]) * 1000


def test_elements_at_every_stride(folder):
    data = bytes(range(256)) * 40
    whole = Piece("w", "uint8", 1, (10240,), Region(0, 10240), lambda: [data])
    stored = Stored(parts.write(folder, 1, {}, [whole]))
    region = Region(3, 2, 7, 1000)
    found = stored.read("w", region)
    expected = b"".join(data[3 + 7 * k : 5 + 7 * k] for k in range(1000))
    assert found == expected


def test_a_folder_that_is_missing(folder):
    assert store.survey(folder) == []
    assert store.newest(folder) is None
    assert store.prune(folder, 1) == []
    assert registry.read(folder) == []
    assert step_losses.read(folder) == {}


def test_only_whole_ones_are_pruned(folder):
    save(folder, 1, 2, 3, 4)
    change(file_of(os.path.join(folder, "step-0000000002")), b"short")
    Registry(folder).note(registry.DAMAGED, 1, "once")
    assert store.prune(folder, 1) == ["step-0000000003"]
    assert list(steps(folder)) == [1, 2, 4]
    events = [(e.what, e.step) for e in registry.read(folder)]
    assert events == [("damaged", 1), ("deleted", 3)]


def test_another_run_that_was_killed_is_pruned_as_unfinished(folder):
    save(folder, 1)
    for token in ("mine", "another"):
        part = parts.Part(folder, 5, token, 1)
        part.add(piece(5))
        part.leave(part.end())
        part.close()
    assert list(steps(folder)) == [1]
    store.prune(folder, 3, "mine")
    assert parts.left(folder, 5, "another", 1) is None
    found = parts.left(folder, 5, "mine", 1)
    # The part of this run is there still.
    place = storage.of(folder).place(folder, 5, "mine")
    path = os.path.join(place, found["file"]["name"])
    assert storage.of(folder).size(path) == 1000
    store.prune(folder, 3)
    assert not any("5" in name for name in storage.of(folder).names(folder))


def test_word_of_another_save_does_not_count(folder):
    parts.refuse(folder, 3, "t", 1, "a full disk", save=1)
    assert parts.left(folder, 3, "t", 1, save=2) is None
    with pytest.raises(CheckpointError, match="process 1: a full disk"):
        parts.left(folder, 3, "t", 1, save=1)


def test_one_of_the_same_step_is_replaced(folder):
    save(folder, 3, value=1)
    save(folder, 3, token="u", value=2)
    path = os.path.join(folder, "step-0000000003")
    assert held(path) == bytes([2]) * 1000
    assert not store.aside(folder)
    assert _count(path) == 2


def _count(path):
    """How many files a checkpoint has."""
    system, root = fsspec.url_to_fs(path)
    return len(system.find(root))


def test_one_that_is_not_whole_is_moved_aside(folder):
    save(folder, 3, value=1)
    path = os.path.join(folder, "step-0000000003")
    change(file_of(path), b"damaged")
    for _ in range(2):
        save(folder, 3, value=2)
        assert held(path) == bytes([2]) * 1000
        change(file_of(path), b"again")
    assert store.aside(folder) == [
        "damaged-step-0000000003-1",
        "damaged-step-0000000003-2",
    ]
    kept = os.path.join(folder, "damaged-step-0000000003-1")
    assert storage.of(folder).text(file_of(kept)) == b"damaged"
    assert (_count(path), _count(kept)) == (2, 2)


def test_a_later_format_is_neither_damaged_nor_deleted(folder):
    save(folder, 1, 2)
    path = os.path.join(folder, "step-0000000002", MANIFEST)
    body = json.loads(storage.of(path).text(path))
    del body["manifest_sha256"]
    body["format"] = 99
    body["manifest_sha256"] = manifest.digest(body)
    change(path, json.dumps(body).encode())
    with pytest.raises(manifest.NewerFormatError, match="Upgrade"):
        store.newest(folder)
    assert store.prune(folder, 1) == []
    assert len(steps(folder)) == 2


@pytest.mark.parametrize(
    "name",
    [
        "../arrays-0.bin",
        "s3://b/arrays-0.bin",
        "arrays-0-0123456789ABCDEF.bin",
        "arrays--0123456789abcdef.bin",
        "arrays-0-0123456789abcdef/a.bin",
    ],
)
def test_names_in_a_manifest_are_checked(name, folder):
    save(folder, 2)
    path = os.path.join(folder, "step-0000000002", MANIFEST)
    body = json.loads(storage.of(path).text(path))
    del body["manifest_sha256"]
    body["files"][0]["name"] = name
    body["manifest_sha256"] = manifest.digest(body)
    change(path, json.dumps(body).encode())
    with pytest.raises(DamagedError, match="that no release has written"):
        Stored(os.path.dirname(path))


@pytest.mark.parametrize("lost", [1, 500, 1000])
def test_what_was_uploaded_in_part_is_damaged(lost, folder):
    save(folder, 1, 2)
    path = file_of(os.path.join(folder, "step-0000000002"))
    change(path, storage.of(path).text(path)[:-lost])
    refused = []
    assert store.newest(folder, refused.append).step == 1
    assert f"has {1000 - lost} bytes of 1000" in refused[0].problem


# A process is killed at every request, one after other.


class Killed(BaseException):
    pass


class Requests:
    """Counts what changes the storage; from one of them on, none works."""

    DISK = ("mkdir", "rename", "replace", "fsync", "unlink", "rmdir")
    MEMORY = ("pipe_file", "_rm", "cp_file")

    def __init__(self, monkeypatch, folder):
        self.done, self.last = 0, math.inf
        if folder.startswith("memory"):
            for name in self.MEMORY:
                self._watch(monkeypatch, MemoryFileSystem, name)
            opened = MemoryFileSystem._open

            def open_counted(system, path, mode="rb", **options):
                if "w" in mode:
                    self.count()
                return opened(system, path, mode=mode, **options)

            monkeypatch.setattr(MemoryFileSystem, "_open", open_counted)
        else:
            for name in self.DISK:
                self._watch(monkeypatch, os, name)

    def count(self):
        self.done += 1
        if self.done > self.last:
            raise Killed

    def _watch(self, monkeypatch, where, name):
        watched = getattr(where, name)

        def counted(*args, **kwargs):
            self.count()
            return watched(*args, **kwargs)

        monkeypatch.setattr(where, name, counted)


def _killed_at(number, folder, monkeypatch, work):
    """Does work until a request; returns whether it came so far."""
    with monkeypatch.context() as patched:
        requests = Requests(patched, folder)
        requests.last = number
        try:
            work()
        except Killed:
            return True
        return requests.done > number


def _each_kill(make_folder, monkeypatch, prepare, work):
    """Yields a folder after each kill, to the first that comes too late."""
    for number in range(200):
        folder = make_folder(number)
        prepare(folder)
        was_killed = _killed_at(
            number, folder, monkeypatch, functools.partial(work, folder)
        )
        yield folder, was_killed
        if not was_killed:
            assert number > 5
            return
    raise AssertionError("no end")


def test_killed_at_each_request_of_a_save(folder, monkeypatch):
    """There is the new one, or the one before, and never a damaged one."""
    late = []

    def work(folder):
        save_of_two(folder, 2, "t", 2)
        store.prune(folder, 1, "t")

    for run, was_killed in _each_kill(
        lambda k: f"{folder}{k}", monkeypatch, lambda f: save(f, 1), work
    ):
        store.recover(run)
        assert not any(steps(run).values())
        newest = store.newest(run)
        late.append(newest.step == 2)
        assert held(newest.path) == bytes([newest.step]) * 1000
        # The one that comes next cleans up, and goes on.
        save_of_two(run, 3, "u", 3)
        store.prune(run, 1, "u")
        if folder.startswith("memory"):
            names = set(storage.of(run).names(run))
            assert names == {"registry", "step-0000000003"}
        if not was_killed:
            assert newest.step == 2
    assert late == sorted(late) and True in late and False in late


def test_killed_at_each_request_where_one_is_replaced(folder, monkeypatch):
    for run, was_killed in _each_kill(
        lambda k: f"{folder}{k}",
        monkeypatch,
        lambda f: save_of_two(f, 2, "s", 1),
        lambda f: save_of_two(f, 2, "t", 2),
    ):
        store.recover(run)
        (problem,) = steps(run).values()
        newest = store.newest(run)
        assert not problem
        value = held(newest.path)[0]
        assert held(newest.path) == bytes([value]) * 1000
        assert was_killed or value == 2


def test_killed_at_each_request_where_one_is_moved_aside(folder, monkeypatch):
    """What was damaged is lost at no moment."""

    def prepare(folder):
        save(folder, 1)
        save(folder, 2)
        path = os.path.join(folder, "step-0000000002")
        change(file_of(path), b"damaged")

    for run, _ in _each_kill(
        lambda k: f"{folder}{k}",
        monkeypatch,
        prepare,
        lambda f: save_of_two(f, 2, "t", 2),
    ):
        store.recover(run)
        assert store.newest(run).step in (1, 2)
        places = [
            os.path.join(run, name)
            for name in ["step-0000000002", *store.aside(run)]
        ]
        found = []
        for path in places:
            with contextlib.suppress(FileNotFoundError):
                found.append(storage.of(run).text(file_of(path)))
        assert b"damaged" in found


def test_killed_at_each_request_of_a_deletion(folder, monkeypatch):
    for run, _ in _each_kill(
        lambda k: f"{folder}{k}",
        monkeypatch,
        lambda f: [save_of_two(f, step, "s", step) for step in (1, 2, 3)],
        lambda f: store.prune(f, 1),
    ):
        if folder.startswith("memory"):
            assert not any(steps(run).values())
        assert store.newest(run).step == 3


BEST = Best(1, "loss", "min")


def save_scored(folder, step, loss, kept=-1):
    """One whose run keeps the best, and some for good."""
    so_far = ForGood(steps=kept, kept=kept, why="every 2 steps")
    state = {
        "scores": {"loss": loss},
        "keeping": as_state(1, BEST, so_far),
    }
    save(folder, step, state=state)


def scored(folder):
    """Six, of which the second is the best and the third stays for good."""
    for step, loss in enumerate((3.0, 1.0, 2.0, 4.0, 5.0, 6.0), 1):
        save_scored(folder, step, loss, kept=3)


def test_the_best_and_what_is_kept_for_good_stay(folder):
    scored(folder)
    gone = store.prune(folder, 1, best=BEST)
    assert gone == [f"step-000000000{step}" for step in (1, 4, 5)]
    why = {event.why for event in registry.read(folder)}
    assert why == {"older than the newest 1, and not of the best 1 by loss"}
    # Of a later run that keeps no best.
    assert store.prune(folder, 1) == ["step-0000000002"]
    assert store.prune(folder, 1, spare=False) == ["step-0000000003"]
    assert list(steps(folder)) == [6]


def test_what_is_kept_for_good_is_read_once(folder, monkeypatch):
    """However long a run is; what it saves again is read again."""
    read, looked = [], store.read_manifest
    monkeypatch.setattr(
        store,
        "read_manifest",
        lambda path: (read.append(path), looked(path))[1],
    )
    run = writer.Writer(folder, "t")
    for step in (1, 2, 3, 4, 4, 5):
        run.begin(step, [piece(step)])
        kept = ForGood(steps=step, kept=step if step < 5 else 4)
        read.clear()
        run.finish({"keeping": as_state(1, None, kept)}, 1)
        assert [int(path[-1]) for path in read] == [step]
    run.close()
    assert list(steps(folder)) == [1, 2, 3, 4, 5]


def test_a_best_one_that_is_damaged_stays_and_does_not_count(folder):
    scored(folder)
    change(file_of(os.path.join(folder, "step-0000000002")), b"short")
    Registry(folder).note(registry.DAMAGED, 3, "once")
    store.prune(folder, 1, best=BEST)
    assert list(steps(folder)) == [1, 2, 3, 6]


def test_killed_at_each_request_of_a_save_that_prunes_by_a_rule(
    folder, monkeypatch
):
    """At each moment the best, those for good and the newest are whole."""

    def work(folder):
        save_scored(folder, 7, 0.5, kept=3)
        store.prune(folder, 1, "t", best=BEST)

    for run, was_killed in _each_kill(
        lambda k: f"{folder}{k}", monkeypatch, scored, work
    ):
        store.recover(run)
        there = {entry.step for entry in store.whole(store.survey(run))}
        assert {3, 7} <= there or {2, 3, 6} <= there
        newest = max(there)
        assert held(store.newest(run).path) == bytes([newest]) * 1000
        if newest == 7:
            assert store.choose(run, "best").step == 7
        else:
            assert store.choose(run, "best").step == 2
        # The one that comes next deletes the rest.
        save_scored(run, 8, 0.7, kept=3)
        store.prune(run, 1, "u", best=BEST)
        best = 7 if newest == 7 else 8
        there = [entry.step for entry in store.whole(store.survey(run))]
        assert there == sorted({3, best, 8})
        assert was_killed or newest == 7


# The storage fails.


class Away:
    """Object storage that does not answer for a while.

    Attributes:
        first: The number of the first request that fails.
        failures: How many fail.
    """

    def __init__(self, monkeypatch, error):
        self.first = self.failures = self.asked = 0
        self._error = error
        for name in ("cat_file", "find", "info"):
            self._watch(monkeypatch, name)

    def _watch(self, monkeypatch, name):
        request = getattr(MemoryFileSystem, name)

        def failing(*args, **kwargs):
            self.asked += 1
            if self.asked > self.first and self.failures:
                self.failures -= 1
                raise self._error
            return request(*args, **kwargs)

        monkeypatch.setattr(MemoryFileSystem, name, failing)


class ClientError(Exception):
    """As of a package that does not raise OSError."""


class NoSuchHostError(OSError):
    """As of a name that resolves to no machine."""


ERRORS = [
    ClientError("SlowDown\nplease"),
    PermissionError("Access Denied"),
    TimeoutError(),
    ConnectionResetError(104, "Connection reset by peer"),
    NoSuchHostError(2, "No such host"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_an_error_of_the_network_is_no_damage(error, address, monkeypatch):
    save(address, 1, 2)
    away = Away(monkeypatch, error)
    store.newest(address)
    requests = away.asked
    assert requests > 4
    for first in range(requests):
        refused = []
        away.asked, away.first, away.failures = 0, first, 3
        assert store.newest(address, refused.append).step == 2
        away.asked, away.failures = 0, 99
        with pytest.raises(UnreadableError) as raised:
            store.newest(address, refused.append)
        assert "\n" not in str(raised.value)
        assert not refused
    away.failures = 0
    assert steps(address) == {1: "", 2: ""}


def test_a_save_that_fails_leaves_the_one_before(address, monkeypatch):
    save(address, 1)
    for name in ("pipe_file", "cp_file"):

        def failing(*args, **kwargs):
            raise ClientError("SlowDown")

        with monkeypatch.context() as patched:
            patched.setattr(MemoryFileSystem, name, failing)
            if name == "cp_file":
                path = os.path.join(address, "step-0000000002")
                save(address, 2)
                change(file_of(path), b"damaged")
            with pytest.raises(OSError, match="SlowDown"):
                save(address, 2, token="u")
    # What is damaged could not be kept, so nothing took its name.
    assert list(steps(address).values()) == [
        "",
        f"step-0000000002: {os.path.basename(file_of(path))} has 7 bytes of "
        "1000",
    ]


def test_an_upload_that_breaks_off_leaves_nothing(address):
    def chunks():
        yield b"abc"
        raise OSError("the state cannot be read")

    save(address, 1)
    for at_once in (True, False):
        part = parts.Part(address, 2, "t", at_once=at_once)
        bad = Piece("w", "uint8", 1, (9,), Region(0, 9), chunks)
        with contextlib.closing(part), pytest.raises(OSError):
            part.add(bad)
        parts.abandon(address, 2, "t")
        assert storage.of(address).names(address) == ["step-0000000001"]


def test_a_save_that_fails_leaves_the_same_step(folder, monkeypatch):
    """Of the same run, which went back and has come there again."""
    save(folder, 2, value=1)
    path = os.path.join(folder, "step-0000000002")
    with monkeypatch.context() as patched:
        patched.setattr(parts, "check_size", _fails)
        with pytest.raises(OSError, match="of the test"):
            save(folder, 2, value=2)
    assert held(path) == bytes([1]) * 1000
    assert _count(path) == 2
    save(folder, 2, value=3)
    assert held(path) == bytes([3]) * 1000


def _fails(*args):
    raise OSError(5, "of the test")


def test_a_step_without_manifest_is_unfinished(address):
    save(address, 1, 2)
    storage.of(address).remove(
        os.path.join(address, "step-0000000002", MANIFEST)
    )
    refused = []
    assert store.newest(address, refused.append).step == 1
    assert not refused and list(steps(address)) == [1]
    store.refuse_to_lose("checkpoint_dir", address + "/step-0000000002")
    assert store.prune(address, 1) == ["step-0000000002"]


# Who may write.


def test_the_run_that_came_last_owns_it(folder):
    os.path.exists(folder) or storage.of(folder).make("checkpoint_dir", folder)
    first, second = Owner(folder), Owner(folder)
    first.take()
    assert first.check() and not_seen(folder, first.shown) == ""
    second.take()
    assert second.check()
    with pytest.raises(SupersededError, match="give each run"):
        first.check()
    assert not_seen(folder, first.shown, 0.0) == "does not see"


def test_whether_an_owner_lives(folder, monkeypatch, capsys):
    monkeypatch.setattr(objects, "RENEW_SECONDS", 0.2)
    storage.of(folder).make("checkpoint_dir", folder)
    save(folder, 1, 2)
    owner = Owner(folder)
    owner.take()
    assert f"process {os.getpid()} on" in living_owner(folder)
    assert cli.main(["checkpoints", folder, "--keep=1"]) == 2
    assert "which belongs to process" in capsys.readouterr().err
    owner.release()
    assert living_owner(folder) == ""
    assert cli.main(["checkpoints", folder, "--keep=1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "deleted step-0000000001"
    assert lines[1].startswith("ok      step-0000000002, 0.0 MB")


def test_an_owner_that_was_killed_does_not_live(address, monkeypatch):
    monkeypatch.setattr(objects, "RENEW_SECONDS", 0.1)
    kept = storage.of(address)
    kept.put(address + "/owner", b"word process 1 on there\n")
    kept.put(address + "/owner.lease", b"word 3")
    assert living_owner(address) == ""


def test_another_run_is_noticed_without_a_request(address, monkeypatch):
    monkeypatch.setattr(objects, "RENEW_SECONDS", 0.05)
    first = Owner(address)
    first.take()
    Owner(address).take()
    end = time.monotonic() + 20
    with pytest.raises(SupersededError):
        while time.monotonic() < end:
            first.check(wait=False)
            time.sleep(0.01)


def test_the_name_of_a_run_stays(folder):
    storage.of(folder).make("checkpoint_dir", folder)
    assert run_of(folder) == run_of(folder)


# Notes of the thread that trains.


def test_notes_are_read_by_another_process(folder):
    storage.of(folder).make("checkpoint_dir", folder)
    for first in (1, 3, 4095, 9000):
        step_losses.write(folder, first, [first, first + 0.5, first + 0.25])
    step_losses.write(folder, 2, [7.0])
    storage.of(folder).settle()
    found = step_losses.read(folder)
    assert (found[1], found[2], found[3]) == (1.0, 7.0, 3.0)
    assert (found[4097], found[9002]) == (4095.25, 9000.25)
    assert len(found) == 11


def test_progress_is_noted_and_forgotten(folder):
    storage.of(folder).make("checkpoint_dir", folder)
    progress = Progress(folder, 1.0)
    progress.begin(0, None)
    for step in range(20):
        progress.note(step, 2)
    storage.of(folder).settle()
    found = Progress(folder, 1.0).begin(12, None)
    assert (found.restarts, found.lost_steps, found.lost_workers) == (1, 7, 2)
    for _ in range(20):
        progress.note(30)
    progress.end()
    storage.of(folder).settle()
    later = Progress(folder, 1.0)
    assert later.begin(30, None).restarts == 1 and not later.restarted


def test_the_first_note_is_stored_at_once(address, monkeypatch):
    """A process that is killed in its first second has left one."""
    monkeypatch.setattr(objects, "_NOTE_SECONDS", 60.0)
    kept, began = storage.of(address), time.monotonic()

    def stored(name):
        while f"{name}.00000000" not in kept.names(address):
            time.sleep(0.01)
        return kept.text(f"{address}/{name}.00000000").split()[0]

    kept.put(f"{address}/owner", b"")
    kept.notes(f"{address}/others").write_at(0, b"1")
    assert stored("others") == b"1"
    progress = Progress(address, 1.0)
    progress.note(3)
    assert stored("progress") == b"3"
    progress.note(4)
    assert stored("progress") == b"3"
    assert time.monotonic() - began < 30.0
    kept.settle()
    assert stored("progress") == b"4"


def test_training_waits_for_no_request(address, monkeypatch):
    """The storage answers nothing until the thread that trains is done."""
    owner = Owner(address)
    owner.take()
    saver = writer.Writer(address, "t", check=owner.check)
    answers, asked = threading.Event(), []
    for name in ("pipe_file", "_open", "cat_file", "find", "info", "ls", "_rm"):
        request = getattr(MemoryFileSystem, name)

        def slow(*args, _request=request, **kwargs):
            trains = threading.current_thread() is threading.main_thread()
            asked.append(trains and not answers.is_set())
            assert answers.wait(0 if trains else 60)
            return _request(*args, **kwargs)

        monkeypatch.setattr(MemoryFileSystem, name, slow)
    progress = Progress(address, 1.0)
    for step in range(3):
        owner.check(every_seconds=0.0, wait=False)
        progress.note(step)
        step_losses.write(address, step + 1, [0.5])
    saver.begin(3, [piece(3)])
    assert not any(asked)
    answers.set()
    saver.finish({"step": 3}, 1)
    assert saver.written == 3 and store.newest(address).step == 3
    owner.release()


# Memory.


class Drain(AbstractFileSystem):
    """Storage that takes parts of files, and keeps none."""

    protocol = "drain"
    largest = parts = 0

    def _open(self, path, mode="rb", **options):
        return DrainFile(self, path, mode, **options)


class DrainFile(AbstractBufferedFile):
    def _initiate_upload(self):
        pass

    def _upload_chunk(self, final=False):
        Drain.parts += 1
        Drain.largest = max(Drain.largest, self.buffer.tell())
        return True


@pytest.mark.parametrize("at_once", [True, False])
def test_no_second_copy_is_in_memory(at_once, monkeypatch):
    monkeypatch.setattr(objects, "_UPLOAD_BYTES", 1 << 20)
    monkeypatch.setattr(objects, "_CHUNK_BYTES", 1 << 18)
    fsspec.register_implementation("drain", Drain, clobber=True)
    Drain.largest = Drain.parts = 0
    count, chunk = 64 << 20, bytes(1 << 20)
    state = Piece(
        *("w", "uint8", 1, (count,), Region(0, count)),
        lambda: (chunk for _ in range(64)),
    )
    tracemalloc.start()
    try:
        part = parts.Part("drain://b/run", 1, "t", at_once=at_once)
        with contextlib.closing(part):
            part.add(state)
            found = part.end()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found["file"]["bytes"] == count
    assert Drain.parts >= 32 and Drain.largest < 3 << 20
    assert peak < 8 << 20


# What is refused.


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("nothing://b/run", "storage that fsspec knows, such as s3://"),
        ("file:///tmp/run", "or the path of a mount"),
        ("absent://b/run", "needs a package that reaches it"),
    ],
)
def test_addresses_that_cannot_be(address, message, capsys):
    fsspec.register_implementation("absent", "mgpu_absent.A", clobber=True)
    with pytest.raises(ConfigurationError, match=message) as raised:
        storage.check("checkpoint_dir", address)
    assert str(raised.value).startswith("checkpoint_dir ")
    assert cli.main(["checkpoints", address]) == 2
    assert message in capsys.readouterr().err


def test_an_address_that_cannot_be_written(address, monkeypatch):
    def denied(*args, **kwargs):
        raise PermissionError("Access Denied")

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", denied)
    with pytest.raises(ConfigurationError, match="Access Denied"):
        storage.of(address).make("checkpoint_dir", address)
    assert not storage.of(address).is_writable(address)
