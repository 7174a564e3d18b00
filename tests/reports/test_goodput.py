import collections
import dataclasses
import json
import time

import pytest

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


def on_the_line(meter):
    """The sums of the time line, by the names of goodput."""
    found = collections.Counter()
    for one in meter.time_line().bins:
        found.update(one)
    return {f"{kind}_seconds": seconds for kind, seconds in found.items()}


def of_goodput(meter):
    found = dataclasses.asdict(meter.goodput())
    del found["wall_seconds"]
    return {name: pytest.approx(n) for name, n in found.items() if n > 1e-9}


def first(meter, kind):
    """Where the time line first has a kind, in seconds."""
    line = meter.time_line()
    place = [kind in one for one in line.bins].index(True)
    return place * line.width


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


def trained(clock, **resumed):
    """A process of which all kinds of time are known."""
    meter = Meter(began=clock.now)
    clock.now += 7.0
    if resumed:
        meter.resume(**resumed)
    spend(meter, clock, "evaluate", 2.0)
    clock.now += 9.0
    meter.execution(seconds=9.0, steps=1, input_seconds=1.0, traced=True)
    for _ in range(3):
        clock.now += 4.0
        meter.execution(seconds=4.0, steps=4, input_seconds=1.0, traced=False)
        spend(meter, clock, "save", 0.5)
    clock.now += 3.0
    return meter


def test_the_time_line_has_the_sums_of_goodput(clock):
    meter = trained(clock)
    assert on_the_line(meter) == of_goodput(meter)
    assert first(meter, "start") == 0.0
    assert first(meter, "evaluate") == 7.0
    assert first(meter, "compile") == 9.0
    # 18.0 to 22.0, 22.5 to 26.5, 27.0 to 31.0 are steps.
    assert first(meter, "save") == 22.0
    assert first(meter, "other") == 31.5


def test_the_time_line_goes_on_after_a_restart(clock):
    began = clock.now
    meter = trained(clock)
    meter.fault("loss nan in step 3")
    before = {"before": meter.goodput(), "since": clock.now, "restarted": True}
    before["saved"] = json.loads(json.dumps(meter.as_json()))
    clock.now += 20.0
    meter = trained(clock, **before)
    assert on_the_line(meter) == of_goodput(meter)
    assert first(meter, "restart") == 34.0
    assert meter.goodput().restart_seconds == 20.0
    # The second process began 54 s after the first, and trains 9 s later.
    assert meter.moment(began + 54.0) == 54.0
    meter.fault("worker 1 is slow")
    assert meter.faults == [
        (34.5, "loss nan in step 3"),
        (pytest.approx(clock.now - began), "worker 1 is slow"),
    ]


def test_the_time_after_an_end_is_not_on_the_line(clock):
    meter = trained(clock)
    before = {"before": meter.goodput(), "since": clock.now, "restarted": False}
    before["saved"] = meter.as_json()
    clock.now += 1000.0
    again = clock.now
    meter = trained(clock, **before)
    assert on_the_line(meter) == of_goodput(meter)
    assert meter.moment(again - 1000.5) == pytest.approx(34.0)
    assert meter.moment(again + 1.0) == pytest.approx(35.5)


def test_a_fault_outlives_going_back_to_a_checkpoint(clock):
    meter = trained(clock)
    saved, since = meter.as_json(), clock.now
    goodput = meter.goodput()
    clock.now += 5.0
    meter.fault("loss inf in step 9")
    meter.resume(goodput, since, restarted=True, saved=saved)
    assert meter.faults == [(39.5, "loss inf in step 9")]
    assert meter.goodput().restart_seconds == 5.0


def test_a_checkpoint_of_another_version_has_no_line(clock):
    meter = Meter(began=clock.now)
    meter.resume(BEFORE, clock.now - 20.0, restarted=True)
    assert first(meter, "restart") == 100.0
    assert meter.moment(clock.now) == 120.0


def test_the_newest_faults_are_kept(clock):
    meter = Meter(began=clock.now)
    for number in range(500):
        meter.fault(str(number))
    assert [text for _, text in meter.faults] == [
        str(number) for number in range(400, 500)
    ]
