import dataclasses
import time

import pytest

from mgpu_tf.goodput import Goodput, Meter, process_began


def test_seconds_add_up_to_the_wall():
    meter = Meter(began=time.time() - 100.0)
    with meter.phase("evaluate"):
        time.sleep(0.01)
    meter.execution(seconds=6.0, steps=10, input_seconds=0.0, traced=True)
    meter.execution(seconds=12.0, steps=10, input_seconds=2.0, traced=False)
    with meter.phase("save"):
        time.sleep(0.01)
    found = meter.goodput()
    assert found.wall_seconds == pytest.approx(100.0, abs=1.0)
    assert found.start_seconds == pytest.approx(94.0, abs=1.0)
    # The steps of the call that traced count as long as those of the other.
    assert found.step_seconds == pytest.approx(6.0 + 10.0)
    assert (found.compile_seconds, found.input_seconds) == (0.0, 2.0)
    assert 0.01 <= found.evaluate_seconds < 1.0
    assert 0.01 <= found.save_seconds < 1.0
    assert found.share == pytest.approx(0.16, abs=0.01)


def parts(found):
    values = dataclasses.asdict(found)
    return values.pop("wall_seconds"), sum(values.values())


def test_an_evaluation_before_the_steps_is_no_start():
    meter = Meter(began=time.time() - 1.0)
    with meter.phase("evaluate"):
        time.sleep(0.5)
    wall, told = parts(meter.goodput())
    assert told == pytest.approx(wall, abs=0.01)
    meter.execution(seconds=0.2, steps=1, input_seconds=0.0, traced=False)
    time.sleep(0.3)
    wall, told = parts(meter.goodput())
    assert told == pytest.approx(wall, abs=0.01)


def test_tracing_is_what_a_call_took_longer_than_others():
    meter = Meter(began=time.time() - 50.0)
    meter.execution(seconds=9.0, steps=1, input_seconds=0.0, traced=True)
    for _ in range(3):
        meter.execution(seconds=4.0, steps=4, input_seconds=0.0, traced=False)
    found = meter.goodput()
    assert found.compile_seconds == pytest.approx(8.0)
    assert found.step_seconds == pytest.approx(13.0)
    assert found.other_seconds >= 0.0


def test_says_where_the_time_went():
    meter = Meter(began=time.time() - 10.0)
    meter.execution(seconds=5.0, steps=5, input_seconds=1.0, traced=False)
    text = str(meter.goodput())
    assert text.startswith("40% of 10.0 s: step 4.0, start 5.0")


BEFORE = Goodput(
    wall_seconds=100.0, step_seconds=60.0, save_seconds=5.0, restart_seconds=1.0
)


def resumed(*, restarted):
    """A process that began 10 s ago, 20 s after the checkpoint."""
    meter = Meter(began=time.time() - 10.0)
    meter.resume(BEFORE, time.time() - 30.0, restarted=restarted)
    meter.execution(seconds=4.0, steps=4, input_seconds=1.0, traced=False)
    return meter


def test_goes_on_with_the_time_of_the_process_before():
    found = resumed(restarted=True).goodput()
    assert found.wall_seconds == pytest.approx(100 + 20 + 10, abs=1.0)
    assert found.restart_seconds == pytest.approx(1 + 20, abs=1.0)
    assert found.step_seconds == pytest.approx(60 + 3)
    assert (found.input_seconds, found.save_seconds) == (1.0, 5.0)
    assert "restart 21.0" in str(found)


def test_the_time_after_an_end_is_none_of_the_run():
    found = resumed(restarted=False).goodput()
    assert found.wall_seconds == pytest.approx(110.0, abs=1.0)
    assert found.restart_seconds == 1.0


def test_steps_after_a_checkpoint_that_is_gone_back_to_do_not_count():
    meter = resumed(restarted=True)
    meter.resume(BEFORE, time.time() - 5.0, restarted=True)
    found = meter.goodput()
    assert found.wall_seconds == pytest.approx(105.0, abs=1.0)
    assert found.restart_seconds == pytest.approx(6.0, abs=1.0)
    assert (found.step_seconds, found.input_seconds) == (60.0, 0.0)


def test_a_second_fit_of_a_process_forgets_nothing():
    meter = resumed(restarted=True)
    before = meter.goodput()
    meter.resume(BEFORE, time.time() - 5.0, restarted=False)
    found = meter.goodput()
    assert found.step_seconds == before.step_seconds
    assert found.wall_seconds == pytest.approx(before.wall_seconds, abs=1.0)


def test_another_trainer_of_the_process_goes_on_from_the_checkpoint():
    meter = Meter(began=time.time() - 1000.0)
    meter.resume(BEFORE, time.time() - 5.0, restarted=True)
    assert meter.goodput().wall_seconds == pytest.approx(105.0, abs=1.0)


def test_reads_what_other_versions_wrote():
    assert Goodput.of({}) == Goodput()
    assert Goodput.of({"step_seconds": 2.0, "later": 1.0}).step_seconds == 2.0


def test_process_began_before_now():
    assert 0.0 < time.time() - process_began() < 86_400.0
