"""What failures have cost, over several beginnings of one run."""

import shutil
import time

import pytest

from mgpu_tf.checkpoints.recovery import (
    Owner,
    Progress,
    Recovery,
    SupersededError,
    run_of,
)
from mgpu_tf.reports.goodput import Goodput, Meter


def test_adds_up_over_restarts(tmp_path, clock):
    first = Progress(str(tmp_path), clock.now)
    assert first.begin(0, None) == Recovery()
    assert not first.restarted
    first.note(7, lost_workers=1)
    first.note(12, lost_workers=2)
    saved_at = clock.now
    clock.now += 100
    second = Progress(str(tmp_path), clock.now)
    cost = second.begin(10, saved_at)
    assert second.restarted
    assert (cost.restarts, cost.lost_steps, cost.lost_workers) == (1, 2, 2)
    assert cost.lost_seconds == 100
    second.note(30, lost_workers=3)
    clock.now += 10
    third = Progress(str(tmp_path), clock.now).begin(30, clock.now)
    assert (third.restarts, third.lost_steps, third.lost_workers) == (2, 2, 5)
    assert third.lost_seconds == 100


def test_a_start_without_a_checkpoint_loses_all(tmp_path):
    Progress(str(tmp_path), 0.0).note(5)
    cost = Progress(str(tmp_path), 0.0).begin(0, None)
    assert (cost.restarts, cost.lost_steps) == (1, 5)


def test_processes_that_fail_at_once_lose_their_own_time(tmp_path, clock):
    """Each restart adds what passed since the one before it, once."""
    Progress(str(tmp_path), clock.now).note(5)
    for restarts in (1, 2, 3):
        clock.now += 40
        progress = Progress(str(tmp_path), clock.now)
        cost = progress.begin(0, None)
        assert (cost.restarts, cost.lost_steps) == (restarts, 5)
        assert cost.lost_seconds == 40 * restarts
        assert progress.since == 1000.0


def test_what_follows_the_end_is_no_restart(tmp_path):
    progress = Progress(str(tmp_path), 0.0)
    progress.begin(0, None)
    progress.note(5)
    progress.end()
    progress.end()
    following = Progress(str(tmp_path), 0.0)
    assert following.begin(5, time.time()) == Recovery()
    assert not following.restarted


def test_a_pause_after_the_end_is_not_lost(tmp_path, clock):
    """A run that ended goes on days later, and fails before it has saved."""
    saved_at = clock.now
    clock.now += 300_000
    following = Progress(str(tmp_path), clock.now)
    following.begin(5, saved_at)
    following.note(8)
    clock.now += 50
    last = Progress(str(tmp_path), clock.now)
    assert last.begin(5, saved_at).lost_seconds == 50
    assert last.since == 301_000.0


def test_a_torn_note_is_no_note(tmp_path):
    (tmp_path / "progress").write_text("12")
    (tmp_path / "recovery.json").write_text("{")
    assert Progress(str(tmp_path), 0.0).begin(0, None) == Recovery()


def test_the_wall_of_processes_that_failed_before_they_saved(tmp_path, clock):
    """Their beginnings are in the wall as well, each once."""
    Progress(str(tmp_path), clock.now - 20).note(5)
    for attempt in (1, 2, 3):
        clock.now += 40
        meter = Meter(began=clock.now - 10)
        progress = Progress(str(tmp_path), meter.began)
        progress.begin(0, None)
        meter.resume(Goodput(), progress.since, restarted=True)
        found = meter.goodput()
        assert found.wall_seconds == 20 + 40 * attempt
        assert found.restart_seconds == 20 + 40 * attempt - 10
        assert found.start_seconds == 10


def test_the_newest_run_owns_the_folder(tmp_path):
    first, second = Owner(str(tmp_path)), Owner(str(tmp_path))
    first.check()  # Nobody has taken it.
    first.take()
    first.check()
    second.take()
    second.check()
    with pytest.raises(SupersededError, match=r"process \d+ on .* has taken"):
        first.check()
    # A look that is not due yet costs nothing.
    second.check(every_seconds=3600.0)
    first.take()
    second.check(every_seconds=3600.0)
    with pytest.raises(SupersededError):
        second.check()


def test_an_owner_that_is_a_link_is_not_followed(tmp_path):
    (tmp_path / "folder").mkdir()
    other = tmp_path / "other"
    other.write_text("of somebody else")
    (tmp_path / "folder" / "owner").symlink_to(other)
    Owner(str(tmp_path / "folder")).take()
    assert other.read_text() == "of somebody else"


def test_a_run_goes_on_without_its_notes(tmp_path, caplog):
    """As on a full disk: the folder is gone."""
    progress = Progress(str(tmp_path / "gone"), 0.0)
    progress.note(1)
    progress.note(2)
    progress.end()
    assert caplog.text.count("the run goes on") == 1


def test_notes_are_not_written_through_links(tmp_path, caplog):
    (tmp_path / "other").write_text("of somebody else")
    (tmp_path / "progress").symlink_to(tmp_path / "other")
    Progress(str(tmp_path), 0.0).note(3)
    assert "levels of symbolic links" in caplog.text
    assert (tmp_path / "other").read_text() == "of somebody else"


def test_what_was_lost_need_not_be_kept(tmp_path, caplog):
    Progress(str(tmp_path), 0.0).note(5)
    (tmp_path / "recovery.json.new").mkdir()
    cost = Progress(str(tmp_path), 0.0).begin(0, None)
    assert cost.restarts == 1
    assert "the run goes on" in caplog.text


def test_a_copy_of_a_folder_is_another_run(tmp_path):
    (tmp_path / "a").mkdir()
    name = run_of(str(tmp_path / "a"))
    assert run_of(str(tmp_path / "a")) == name
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    other = run_of(str(tmp_path / "b"))
    assert other != name
    assert run_of(str(tmp_path / "b")) == other


@pytest.mark.parametrize("text", ["../../a ", "", "x" * 12])
def test_the_name_of_a_run_is_no_path(tmp_path, text):
    (tmp_path / "run").write_text(f"{text} {tmp_path}")
    assert run_of(str(tmp_path)) not in text
