"""Folders and files that a run writes."""

import os
import pathlib
import types

import pytest

from mgpu_tf import cli, job
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.folders import (
    NotRegularError,
    check_path,
    make_folder,
    not_through_links,
    open_regular,
    own_only,
    write_whole,
)
from mgpu_tf.reports import terminal
from mgpu_tf.runtime import quiet_import
from tests import clusters


@pytest.mark.parametrize("path", ["/proc/none", "/sys", "/dev/null/a"])
def test_a_folder_that_cannot_be_written_is_refused(path):
    with pytest.raises(ConfigurationError, match="output_dir must be a folder"):
        make_folder("output_dir", path)


def test_a_folder_that_is_only_read(tmp_path):
    make_folder("checkpoint_dir", "/sys", writes=False)
    make_folder("output_dir", str(tmp_path / "a" / "b"))
    assert os.listdir(tmp_path / "a" / "b") == []


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "model.keras"

    def write(text, fails=False):
        def to(place):
            assert place.endswith(".keras")
            with open(place, "w", encoding="utf-8") as file:
                file.write(text)
            if fails:
                raise OSError(28, "No space left on device")

        write_whole(str(path), to)

    write("first")
    with pytest.raises(OSError, match="No space"):
        write("second", fails=True)
    assert path.read_text() == "first"
    write("third")
    assert path.read_text() == "third"
    assert os.listdir(tmp_path) == ["model.keras"]


def test_what_is_private_is_read_by_the_owner_only(tmp_path):
    code = f"""
import sys
from mgpu_tf.folders import keep_private, make_folder
keep_private()
make_folder("output_dir", {str(tmp_path / "a" / "b")!r})
open({str(tmp_path / "a" / "file")!r}, "w").close()
"""
    assert clusters.run(["-c", code]).returncode == 0
    for name, mode in (("a", 0o700), ("a/b", 0o700), ("a/file", 0o600)):
        assert (tmp_path / name).stat().st_mode & 0o777 == mode, name


@pytest.mark.full
def test_a_private_run_is_read_by_its_owner_only(tmp_path):
    done = clusters.mgpu_tf(
        *("train", "--epochs=1", "--steps_per_epoch=2", "--private"),
        f"--checkpoint_dir={tmp_path / 'run' / 'checkpoints'}",
        f"--output_dir={tmp_path / 'run' / 'out'}",
    )
    assert done.returncode == 0, done.stderr
    made = [tmp_path / "run", *(tmp_path / "run").rglob("*")]
    assert {"model.keras", "report.json", "arrays-0.bin", "owner"} <= {
        path.name for path in made
    }
    for path in made:
        mode = 0o700 if path.is_dir() else 0o600
        assert path.stat().st_mode & 0o777 == mode, path


PATHS = {
    "be a path": [None, 3, b"a", ""],
    "have no zero byte": ["a\0b"],
    "only a shell replaces": ["~", "~/run", "~me/run", "$HOME/a", "a/${B}/c"],
    "names of at most 255 bytes": ["a" * 256, "a/" * 3000, "\u00e9" * 128],
    "be text": ["\ud800"],
}


@pytest.mark.parametrize(
    ("rule", "path"),
    [(rule, path) for rule, paths in PATHS.items() for path in paths],
)
def test_what_is_no_path(rule, path):
    with pytest.raises(ConfigurationError, match=rule) as error:
        check_path("output_dir", path)
    assert len(str(error.value)) < 400
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("path", ["a", "/a/~b", "./~a", "a$", "a$ b", "gs://a"])
def test_what_is_a_path(path):
    assert check_path("output_dir", path) == path


@pytest.fixture
def pipe(tmp_path):
    """A pipe that nobody writes to: to open it would wait."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return str(path)


@pytest.mark.parametrize("mode", ["r", "w", "a", "rb", "r+"])
def test_no_pipe_or_device_is_opened(mode, pipe):
    for path in (pipe, "/dev/zero", "/dev/null"):
        with pytest.raises(NotRegularError):
            open_regular(path, mode)
    with pytest.raises(NotRegularError):
        open_regular(os.path.dirname(pipe), mode)


def test_regular_files_are_opened_as_by_open(tmp_path):
    path = str(tmp_path / "a")
    with open_regular(path, "w") as file:
        file.write("one\n")
    with open_regular(path, "a") as file:
        file.write("two\n")
    with open_regular(path) as file:
        assert file.read() == "one\ntwo\n"


@pytest.mark.parametrize(
    "line",
    [
        "plan --scaling={pipe} --examples=8",
        "plan --scaling=/dev/zero --examples=8",
        "trace --json={pipe}",
        "train --initial_model={pipe}.keras",
        "train --output_dir={pipe}",
        "train --output_dir=~/run",
        "train --checkpoint_dir=$HOME/run",
        "launch --num_workers=1 --log_dir={pipe} -- true",
        "checkpoints {pipe}",
    ],
)
def test_commands_do_not_wait_for_a_pipe(line, pipe, monkeypatch, capsys):
    monkeypatch.setattr(quiet_import, "import_tensorflow", lambda: None)
    monkeypatch.setattr(job, "_splits", lambda config: None)
    monkeypatch.setattr(
        job,
        "trace",
        lambda *_: types.SimpleNamespace(json=lambda: "{}"),
    )
    monkeypatch.setattr(terminal, "show_trace", lambda trace: None)
    monkeypatch.setattr(
        job, "_trained", lambda config, splits, *_: job._model(config, splits)
    )
    os.link(pipe, f"{pipe}.keras")
    assert cli.main(line.format(pipe=pipe).split()) == cli.USAGE_ERROR
    told = capsys.readouterr().err.splitlines()
    assert "Received: " in told[-1]


def test_a_file_is_written_whole_where_somebody_has_put_a_link(tmp_path):
    """The link goes, and what it names stays."""
    other = tmp_path / "other"
    other.write_text("of somebody else")
    path = tmp_path / "model.keras"
    path.symlink_to(other)
    write_whole(str(path), lambda to: pathlib.Path(to).write_text("own"))
    assert (path.read_text(), path.is_symlink()) == ("own", False)
    assert other.read_text() == "of somebody else"


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, "link"])
@pytest.mark.parametrize("opener", [not_through_links, own_only])
@pytest.mark.parametrize("mode", ["rb", "wb", "ab", "r+b"])
def test_only_regular_files_are_opened(make, opener, mode, tmp_path):
    path, other = tmp_path / "file", tmp_path / "other"
    other.write_text("of somebody else")
    if make == "link":
        path.symlink_to(other)
    else:
        make(path)
    with pytest.raises(NotRegularError), open(path, mode, opener=opener):
        pass
    assert other.read_text() == "of somebody else"


@pytest.mark.parametrize("make", [os.mkfifo, "link"])
def test_what_comes_while_a_file_is_opened(make, tmp_path, monkeypatch):
    """After the first look and before the opening."""
    path = tmp_path / "file"
    if make == "link":
        path.symlink_to(tmp_path / "other")
    else:
        make(path)

    look = os.stat

    def nothing(one, **options):
        if one == path:
            raise FileNotFoundError
        return look(one, **options)

    monkeypatch.setattr(os, "stat", nothing)
    for mode in ("rb", "ab"):
        with pytest.raises(OSError, match=r"links|regular|No such device"):
            open(path, mode, opener=not_through_links).close()
    assert not (tmp_path / "other").exists()


def test_logs_are_not_written_through_links(tmp_path):
    other = tmp_path / "other"
    other.write_text("of somebody else")
    (tmp_path / "worker-0.log").symlink_to(other)
    done = clusters.mgpu_tf(
        *("launch", "--num_workers=1", f"--log_dir={tmp_path}"),
        *("--", "true"),
    )
    assert done.returncode == 0
    assert "levels of symbolic links" in done.stderr
    assert other.read_text() == "of somebody else"
