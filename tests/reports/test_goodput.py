import dataclasses
import time

from mgpu_tf.reports.goodput import Goodput, Meter, process_began

BEFORE = Goodput(
    wall_seconds=100.0, step_seconds=60.0, save_seconds=5.0, restart_seconds=1.0
)


def spend(meter, clock, name, seconds):
    with meter.phase(name):
        clock.now += seconds


def parts(found):
    values = dataclasses.asdict(found)
    return values.pop("wall_seconds"), sum(values.values())


def test_seconds_add_up_to_the_wall(clock):
    meter = Meter(began=clock.now - 100.0)
    meter.execution(seconds=6.0, steps=10, input_seconds=0.0, traced=True)
    clock.now += 12.0
    meter.execution(seconds=12.0, steps=10, input_seconds=2.0, traced=False)
    spend(meter, clock, "evaluate", 3.0)
    spend(meter, clock, "save", 1.0)
    found = meter.goodput()
    assert found.wall_seconds == 116.0
    assert found.start_seconds == 94.0
    # The steps of the call that traced count as long as those of the other.
    assert found.step_seconds == 6.0 + 10.0
    assert (found.compile_seconds, found.input_seconds) == (0.0, 2.0)
    assert (found.evaluate_seconds, found.save_seconds) == (3.0, 1.0)
    assert found.other_seconds == 0.0
    assert found.share == 16 / 116


def test_an_evaluation_before_the_steps_is_no_start(clock):
    meter = Meter(began=clock.now - 1.0)
    spend(meter, clock, "evaluate", 5.0)
    assert meter.goodput().start_seconds == 1.0
    assert parts(meter.goodput()) == (6.0, 6.0)
    clock.now += 2.0
    meter.execution(seconds=2.0, steps=1, input_seconds=0.0, traced=False)
    assert meter.goodput().start_seconds == 1.0
    assert parts(meter.goodput()) == (8.0, 8.0)


def test_tracing_is_what_a_call_took_longer_than_others(clock):
    meter = Meter(began=clock.now - 50.0)
    meter.execution(seconds=9.0, steps=1, input_seconds=0.0, traced=True)
    for _ in range(3):
        clock.now += 4.0
        meter.execution(seconds=4.0, steps=4, input_seconds=0.0, traced=False)
    found = meter.goodput()
    assert found.compile_seconds == 8.0
    assert found.step_seconds == 13.0
    assert parts(found) == (62.0, 62.0)


def test_says_where_the_time_went(clock):
    meter = Meter(began=clock.now - 10.0)
    meter.execution(seconds=5.0, steps=5, input_seconds=1.0, traced=False)
    text = str(meter.goodput())
    assert text.startswith("40% of 10.0 s: step 4.0, start 5.0")


def resumed(clock, *, restarted):
    """A process that began 10 s ago, 20 s after the checkpoint."""
    meter = Meter(began=clock.now - 10.0)
    meter.resume(BEFORE, clock.now - 30.0, restarted=restarted)
    meter.execution(seconds=4.0, steps=4, input_seconds=1.0, traced=False)
    return meter


def test_goes_on_with_the_time_of_the_process_before(clock):
    found = resumed(clock, restarted=True).goodput()
    assert found.wall_seconds == 100 + 20 + 10
    assert found.restart_seconds == 1 + 20
    assert found.step_seconds == 60 + 3
    assert (found.input_seconds, found.save_seconds) == (1.0, 5.0)
    assert "restart 21.0" in str(found)


def test_the_time_after_an_end_is_none_of_the_run(clock):
    found = resumed(clock, restarted=False).goodput()
    assert (found.wall_seconds, found.restart_seconds) == (110.0, 1.0)


def test_steps_after_a_checkpoint_that_is_gone_back_to_do_not_count(clock):
    meter = resumed(clock, restarted=True)
    meter.resume(BEFORE, clock.now - 5.0, restarted=True)
    found = meter.goodput()
    assert (found.wall_seconds, found.restart_seconds) == (105.0, 6.0)
    assert (found.step_seconds, found.input_seconds) == (60.0, 0.0)


def test_a_second_fit_of_a_process_forgets_nothing(clock):
    meter = resumed(clock, restarted=True)
    before = meter.goodput()
    meter.resume(BEFORE, clock.now - 5.0, restarted=False)
    assert meter.goodput() == before


def test_another_trainer_of_the_process_goes_on_from_the_checkpoint(clock):
    meter = Meter(began=clock.now - 1000.0)
    meter.resume(BEFORE, clock.now - 5.0, restarted=True)
    assert meter.goodput().wall_seconds == 105.0


def test_process_began_before_now():
    assert 0.0 < time.time() - process_began() < 86_400.0
