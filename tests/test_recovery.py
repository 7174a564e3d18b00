"""What failures have cost, over several beginnings of one run."""

import time

from mgpu_tf.recovery import Progress, Recovery


def test_adds_up_over_restarts(tmp_path):
    first = Progress(str(tmp_path))
    assert not first.left_behind
    assert first.begin(0, None) == Recovery()
    first.note(7, lost_workers=1)
    first.note(12, lost_workers=2)
    second = Progress(str(tmp_path))
    assert second.left_behind
    saved_at = time.time() - 100
    cost = second.begin(10, saved_at)
    assert (cost.restarts, cost.lost_steps) == (1, 2)
    assert 100 <= cost.lost_seconds < 1000
    assert cost.lost_workers == 2
    second.note(30, lost_workers=3)
    third = Progress(str(tmp_path)).begin(30, time.time())
    assert (third.restarts, third.lost_steps) == (2, 2)
    assert third.lost_workers == 5


def test_a_start_without_a_checkpoint_loses_all(tmp_path):
    Progress(str(tmp_path)).note(5)
    cost = Progress(str(tmp_path)).begin(0, None)
    assert (cost.restarts, cost.lost_steps) == (1, 5)


def test_what_follows_the_end_is_no_restart(tmp_path):
    progress = Progress(str(tmp_path))
    progress.begin(0, None)
    progress.note(5)
    progress.end()
    progress.end()
    assert not progress.left_behind
    assert Progress(str(tmp_path)).begin(5, time.time()) == Recovery()


def test_a_torn_note_is_no_note(tmp_path):
    (tmp_path / "progress").write_text("12")
    (tmp_path / "recovery.json").write_text("{")
    assert Progress(str(tmp_path)).begin(0, None) == Recovery()
