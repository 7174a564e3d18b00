"""What storage does not give for a moment is not damaged, and not lost."""

import errno
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys

import pytest

from mgpu_tf.checkpoints import manifest, parts, reading, registry, store
from mgpu_tf.checkpoints.manifest import (
    MANIFEST,
    DamagedError,
    NewerFormatError,
)
from mgpu_tf.checkpoints.reading import Stored, UnreadableError
from mgpu_tf.checkpoints.recovery import Owner, living_owner, run_of
from mgpu_tf.checkpoints.registry import Registry
from mgpu_tf.checkpoints.saving.writer import Writer
from mgpu_tf.errors import CheckpointError, ConfigurationError
from mgpu_tf.mesh import Piece, Region
from tests import clusters

FORMATS = pathlib.Path(__file__).parent / "formats"

ERRORS = [
    errno.EIO,
    errno.ESTALE,
    errno.EACCES,
    errno.EPERM,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.ETIMEDOUT,
    errno.ENOTCONN,
    errno.EHOSTDOWN,
    errno.EREMOTEIO,
]


class Storage:
    """Storage whose files cannot be opened for a while.

    Attributes:
        failures: How often the next opening of each name fails.
    """

    def __init__(self, monkeypatch):
        self.failures, self.code, self.tries = {}, errno.EIO, 0
        opened = os.open

        def injected(path, flags, *more, **options):
            name = os.path.basename(os.fspath(path))
            if self.failures.get(name, 0):
                self.failures[name] -= 1
                self.tries += 1
                raise OSError(self.code, os.strerror(self.code), path)
            return opened(path, flags, *more, **options)

        monkeypatch.setattr(os, "open", injected)


@pytest.fixture
def storage(monkeypatch):
    monkeypatch.setattr(reading, "PAUSES_SECONDS", (0.0, 0.0, 0.0))
    return Storage(monkeypatch)


def save(folder, *steps):
    piece = Piece("w", "uint8", 1, (4,), Region(0, 4), lambda: [b"abcd"])
    for step in steps:
        parts.write(str(folder), step, {"step": step}, [piece])


def change(folder, step, name="arrays-0.bin"):
    path = folder / f"step-{step:010d}" / name
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def rewrite(folder, step, edit):
    """Changes fields of a manifest; its checksum is right again."""
    path = folder / f"step-{step:010d}" / MANIFEST
    body = json.loads(path.read_text())
    del body["manifest_sha256"]
    edit(body)
    body["manifest_sha256"] = manifest.digest(body)
    path.write_text(json.dumps(body))


def of_format(number):
    return lambda body: body.update(format=number)


# Errors of the storage.


@pytest.mark.parametrize("name", [MANIFEST, "arrays-0.bin"])
@pytest.mark.parametrize("code", ERRORS)
def test_an_error_that_passes_changes_nothing(name, code, tmp_path, storage):
    save(tmp_path, 1, 2)
    storage.failures, storage.code = {name: 2}, code
    refused = []
    assert store.newest(str(tmp_path), refused.append).step == 2
    assert (storage.tries, refused) == (2, [])


@pytest.mark.parametrize("name", [MANIFEST, "arrays-0.bin"])
@pytest.mark.parametrize("code", ERRORS)
def test_an_error_that_stays_ends_the_search(name, code, tmp_path, storage):
    """One that may be whole is not passed by, and nothing is deleted."""
    save(tmp_path, 1, 2)
    storage.failures, storage.code = {name: 99}, code
    reason = f"step-0000000002: {name} cannot be read .{os.strerror(code)}"
    with pytest.raises(UnreadableError, match=reason):
        store.newest(str(tmp_path))
    with pytest.raises(UnreadableError, match=reason):
        Stored(str(tmp_path / "step-0000000002")).check()
    store.prune(str(tmp_path), 1)
    storage.failures = {}
    assert store.newest(str(tmp_path)).step == 2


def test_an_array_is_read_again_from_its_beginning(tmp_path, storage):
    save(tmp_path, 1)
    stored = Stored(str(tmp_path / "step-0000000001"))
    storage.failures = {"arrays-0.bin": 3}
    assert stored.read("w") == b"abcd"
    storage.failures = {MANIFEST: 1, "arrays-0.bin": 2}
    assert b"".join(stored.stream()).endswith(b"abcd")
    assert storage.tries == 6


def test_nothing_is_pruned_that_cannot_be_read(tmp_path, storage):
    save(tmp_path, 1, 2, 3)
    opened = os.lstat

    def injected(path, **options):
        if "step-0000000001" in os.fspath(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return opened(path, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "lstat", injected)
        assert store.prune(str(tmp_path), 1) == ["step-0000000002"]
    assert [each.step for each in store.entries(str(tmp_path))] == [1, 3]


def test_a_folder_that_cannot_be_listed_is_not_empty(tmp_path, monkeypatch):
    save(tmp_path, 1)
    monkeypatch.setattr(reading, "PAUSES_SECONDS", (0.0,))

    def broken(path):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)

    monkeypatch.setattr(os, "listdir", broken)
    with pytest.raises(UnreadableError, match="Stale file handle"):
        store.newest(str(tmp_path))


def test_a_save_whose_pruning_fails_is_a_save(tmp_path, monkeypatch, caplog):
    save(tmp_path, 1)

    def broken(*given, **named):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(store, "prune", broken)
    writer = Writer(str(tmp_path), "t")
    writer.begin(2, [])
    writer.finish({}, 1)
    assert writer.written == 2
    assert "older checkpoints were not deleted" in caplog.text


def test_the_name_of_a_run_outlives_an_error(tmp_path, storage):
    name = run_of(str(tmp_path))
    storage.failures = {"run": 2}
    assert run_of(str(tmp_path)) == name
    storage.failures = {"run": 99}
    with pytest.raises(UnreadableError):
        run_of(str(tmp_path))


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
@pytest.mark.parametrize(("times", "line"), [("2", "2 ok"), ("99", "EIO ok")])
def test_a_disk_that_fails(times, line, tmp_path):
    """The kernel's own answer, to a process that reads the newest."""
    save(tmp_path, 1, 2)
    code = """
import sys
from mgpu_tf.checkpoints import reading, store
reading.PAUSES_SECONDS = (0.0,) * 3
try:
    print(store.newest(sys.argv[1]).step, "ok")
except reading.UnreadableError as error:
    print("EIO ok" if "Input/output error" in str(error) else error)
"""
    done = subprocess.run(
        [
            *("strace", "-f", "-e", "trace=openat", "-e"),
            f"inject=openat:error=EIO:when=1..{times}",
            *("-P", str(tmp_path / "step-0000000002" / "arrays-0.bin")),
            *(sys.executable, "-c", code, str(tmp_path)),
        ],
        env=clusters.environment(),
        capture_output=True,
        text=True,
        timeout=clusters.LIMIT_SECONDS,
    )
    assert "INJECTED" in done.stderr
    assert done.stdout.strip() == line


# Formats.


@pytest.mark.parametrize("number", [3, 99, "new"])
def test_a_newer_format_ends_the_search(number, tmp_path):
    save(tmp_path, 1, 2)
    rewrite(tmp_path, 2, of_format(number))
    with pytest.raises(NewerFormatError, match=r"reads formats 1 to 2\. Up"):
        store.newest(str(tmp_path))
    store.prune(str(tmp_path), 1)
    (_, newer) = store.survey(str(tmp_path))
    assert newer.describe().startswith("UNKNOWN step-0000000002 is of format")


def test_a_flipped_bit_is_no_newer_format(tmp_path):
    """2 and 3 differ in one bit; the checksum tells."""
    save(tmp_path, 1, 2)
    path = tmp_path / "step-0000000002" / MANIFEST
    path.write_text(path.read_text().replace('"format": 2', '"format": 3'))
    assert store.newest(str(tmp_path)).step == 1


@pytest.mark.parametrize("number", range(1, manifest.FORMAT + 1))
def test_each_format_has_a_fixture(number):
    (folder,) = (FORMATS / str(number)).iterdir()
    stored = Stored(str(folder))
    stored.check()
    assert all(stored.read(name) is not None for name in stored.arrays)


def test_parts_of_two_processes_of_format_2():
    stored = Stored(str(FORMATS / "2_of_two" / "step-0000000001"))
    assert (stored.state, stored.step) == ({"by": "two processes"}, 1)
    assert stored.read("m") == bytes(range(48))


# What a manifest may name.


def files(edit):
    return lambda body: edit(body["files"][0])


def arrays(edit):
    return lambda body: edit(body["arrays"][0])


NAMES = [
    *("../../victim", "/etc/hostname", "..", ".", "", "arrays-0.bin/..", "a/b"),
    *("arrays-0.bin\n", "arrays-0.bin\0", "manifest.json", "arrays-\u0660.bin"),
    *("arrays--1.bin", 7, None, ["arrays-0.bin"]),
]

FIELDS = {
    **{
        f"name {name!r}": files(lambda file, name=name: file.update(name=name))
        for name in NAMES
    },
    "negative size": files(lambda file: file.update(bytes=-1)),
    "size is text": files(lambda file: file.update(bytes="4")),
    "no checksum": files(lambda file: file.pop("sha256")),
    "short checksum": files(lambda file: file.update(sha256="ab")),
    "no files": lambda body: body.pop("files"),
    "files are one": lambda body: body.update(files=3),
    "no state": lambda body: body.pop("state"),
    "state is a list": lambda body: body.update(state=[]),
    "no step": lambda body: body.pop("step"),
    "step is true": lambda body: body.update(step=True),
    "arrays are one": lambda body: body.update(arrays=3),
    "huge array": arrays(lambda array: array.update(pieces=[[0, 0, 0, 10**9]])),
    "huge file": arrays(
        lambda array: array.update(shape=[10**18], pieces=[[0, 0, 0, 10**18]])
    ),
    "piece of no file": arrays(
        lambda array: array.update(pieces=[[7, 0, 0, 4]])
    ),
    "piece before the file": arrays(
        lambda array: array.update(pieces=[[0, -4, 0, 4]])
    ),
    "piece beyond the array": arrays(lambda array: array.update(shape=[2])),
    "piece of many runs": arrays(
        lambda array: array.update(pieces=[[0, 0, 0, 1, 0, 10**9]])
    ),
    "negative shape": arrays(lambda array: array.update(shape=[-4])),
}


@pytest.mark.parametrize("field", FIELDS)
def test_a_manifest_that_no_release_has_written(field, tmp_path):
    """Its checksum is right: somebody else has made it."""
    save(tmp_path, 1, 2)
    (tmp_path / "victim").write_bytes(b"vict")
    rewrite(tmp_path, 2, FIELDS[field])
    with pytest.raises(DamagedError, match="no release has written"):
        Stored(str(tmp_path / "step-0000000002"))
    assert store.newest(str(tmp_path)).step == 1


@pytest.mark.parametrize(
    "text", [b"[" * 100_000, b'{"a": ' * 100_000, b"9" * 10_000, b"\xff", b""]
)
def test_a_manifest_that_is_no_json(text, tmp_path):
    save(tmp_path, 1, 2)
    (tmp_path / "step-0000000002" / MANIFEST).write_bytes(text)
    assert store.newest(str(tmp_path)).step == 1


def test_an_array_that_is_said_to_be_huge_takes_no_memory(tmp_path):
    save(tmp_path, 1)
    rewrite(tmp_path, 1, arrays(lambda array: array.update(shape=[10**15])))
    with pytest.raises(DamagedError, match="'w' is not all there"):
        Stored(str(tmp_path / "step-0000000001")).read("w")


def fifo(path):
    os.mkfifo(path)


def device(path):
    os.symlink("/dev/zero", path)


def bound(path):
    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()
        os.chdir(os.path.dirname(path))
        server.bind(os.path.basename(path))
        os.chdir(here)


@pytest.mark.parametrize("make", [fifo, device, bound, os.mkdir])
@pytest.mark.parametrize("name", [MANIFEST, "arrays-0.bin"])
def test_what_is_no_file_is_not_waited_for(make, name, tmp_path):
    save(tmp_path, 1, 2)
    path = tmp_path / "step-0000000002" / name
    path.unlink()
    make(str(path))
    refused = []
    assert store.newest(str(tmp_path), refused.append).step == 1
    assert f"step-0000000002: {name} cannot be read" in refused[0].problem


@pytest.mark.parametrize("name", ["owner", "run", "progress", "registry"])
def test_a_fifo_in_place_of_a_note_is_not_waited_for(name, tmp_path):
    os.mkfifo(tmp_path / name)
    owner = Owner(str(tmp_path))
    owner.take()
    assert owner.check()
    assert run_of(str(tmp_path))
    Registry(str(tmp_path)).note("saved", 1, "")
    assert living_owner(str(tmp_path))


def test_a_checkpoint_that_was_renamed_is_none(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "step-0000000001").rename(tmp_path / "step-0000000009")
    (entry,) = store.entries(str(tmp_path))
    assert "was renamed, it is of step 1" in entry.problem


# What is kept.


def test_nothing_begins_anew_beside_damaged_ones(tmp_path):
    store.refuse_to_lose("checkpoint_dir", str(tmp_path))
    save(tmp_path, 1, 2)
    for step in (1, 2):
        change(tmp_path, step)
    with pytest.raises(
        ConfigurationError, match=r"with 2, all of them damaged; .* set restart"
    ):
        store.refuse_to_lose("checkpoint_dir", str(tmp_path))


def test_what_was_found_damaged_is_never_deleted(tmp_path):
    """Its size is right, so that only a registry remembers."""
    save(tmp_path, 1, 2, 3)
    change(tmp_path, 2)
    Registry(str(tmp_path)).note(registry.DAMAGED, 2, "was changed")
    assert store.prune(str(tmp_path), 1) == ["step-0000000001"]
    store.remove_after(str(tmp_path), 1)
    assert list(store.paths(str(tmp_path))) == [2]
    # Another of the same step, which is whole, ends that.
    save(tmp_path, 2, 3)
    Registry(str(tmp_path)).note(registry.SAVED, 2, "")
    assert store.prune(str(tmp_path), 1) == ["step-0000000002"]
    (name,) = store.aside(str(tmp_path))
    assert (tmp_path / name / "arrays-0.bin").read_bytes() == b"abce"


def test_a_newer_format_in_the_way_is_moved_aside(tmp_path):
    save(tmp_path, 1)
    rewrite(tmp_path, 1, of_format(3))
    save(tmp_path, 1)
    assert store.newest(str(tmp_path)).step == 1
    assert store.aside(str(tmp_path)) == ["damaged-step-0000000001-1"]


def test_a_registry_tells_what_became_of_each(tmp_path):
    writer = Writer(str(tmp_path), "t")
    for step in (1, 2, 3):
        writer.begin(step, [])
        writer.finish({}, 1, why="every step")
    with open(tmp_path / "registry", "ab") as file:
        file.write(b'torn {"at": 1\n[]\n{"at": 0, "what": 1}\n')
    told = [(e.what, e.step, e.why) for e in registry.read(str(tmp_path))]
    older = "older than the newest 1"
    assert told == [
        ("saved", 1, "every step"),
        ("saved", 2, "every step"),
        ("deleted", 1, older),
        ("saved", 3, "every step"),
        ("deleted", 2, older),
    ]


def test_a_long_registry_is_shortened(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_MOST_LINES", 10)
    noted = Registry(str(tmp_path))
    for step in range(11):
        noted.note("saved", step, "")
    noted.shorten()
    assert [e.step for e in registry.read(str(tmp_path))] == list(range(6, 11))


def test_the_owner_is_known_while_it_lives(tmp_path):
    assert not living_owner(str(tmp_path))
    owner = Owner(str(tmp_path))
    owner.take()
    assert f"process {os.getpid()}" in living_owner(str(tmp_path))
    owner.release()
    assert not living_owner(str(tmp_path))
    later = Owner(str(tmp_path))
    later.take()
    assert living_owner(str(tmp_path))
    del later
    assert not living_owner(str(tmp_path))


def test_nothing_is_deleted_while_the_owner_is_not_known(tmp_path, storage):
    owner = Owner(str(tmp_path))
    owner.take()
    writer = Writer(str(tmp_path), "t", check=owner.check)
    storage.failures = {"owner": 99}
    for step in (1, 2):
        writer.begin(step, [])
        writer.finish({}, 1)
    assert list(store.paths(str(tmp_path))) == [1, 2]
    storage.failures = {}
    writer.begin(3, [])
    writer.finish({}, 1)
    assert list(store.paths(str(tmp_path))) == [3]


def test_an_error_of_a_checkpoint_is_one_line():
    for kind in (DamagedError, NewerFormatError, UnreadableError):
        assert issubclass(kind, CheckpointError)
        # It is no ValueError, which much code takes for bad input.
        assert not issubclass(kind, ValueError | OSError)
