"""Who is slow, from planted times."""

import pytest

from mgpu_tf.reports.stragglers import SectionTimes, slow_workers


def times(input=0.001, compute=0.05, step=0.1, best=None):
    best = best or {}
    return {
        "input": input,
        "compute": compute,
        "step": step,
        "best input": best.get("input", input),
        "best compute": best.get("compute", compute),
    }


@pytest.mark.parametrize(
    ("workers", "found"),
    [
        ([times(), times()], []),
        ([times(), times(compute=0.09)], [(1, "compute")]),
        ([times(input=0.03), times(), times()], [(0, "input")]),
        (
            [times(), times(input=0.05, compute=0.2), times()],
            [(1, "input"), (1, "compute")],
        ),
        # Less than half as long again, less than a fifth of a step, 5 ms.
        ([times(compute=0.2), times(compute=0.25)], []),
        ([times(), times(compute=0.07)], []),
        ([times(), times(input=0.02)], []),
        ([times(step=0.004), times(step=0.004, input=0.005)], []),
        # Nobody is slower than the others.
        ([times(input=0.09), times(input=0.09), times(input=0.09)], []),
        # A worker whose steps were not timed.
        ([times(), times(compute=0.09), None], []),
        ([times(compute=0.09)], []),
    ],
)
def test_who_is_slow(workers, found):
    slow = slow_workers(workers)
    assert [(one.worker, one.section) for one in slow] == found


def test_what_is_told():
    (slow,) = slow_workers(
        [times(), times(compute=0.2, best={"compute": 0.06})], epoch=3
    )
    assert str(slow) == (
        "worker 1 is slow: in epoch 3 a step took 200 ms to compute its "
        "gradients, and 50 ms on the others; in its best epoch it took 60 ms"
    )
    (slow,) = slow_workers([times(), times(compute=0.2)])
    assert str(slow).endswith("50 ms on the others")


def test_the_medians_of_an_epoch():
    section = SectionTimes()
    for seconds in (0.2, 0.1, 9.0, 0.1, 0.2):
        section.note((seconds, 2 * seconds), 3 * seconds, 10)
    first = section.epoch()
    assert first == times(0.2, 0.4, pytest.approx(0.6))
    for _ in range(5):
        section.note((1.0, 0.3), 2.0, 10)
    best = {"input": 0.2, "compute": 0.3}
    assert section.epoch() == times(1.0, 0.3, 2.0, best)
    section.note((1.0, 0.1), 2.0, 10)
    assert section.epoch() is None


def test_every_step_counts_over_epochs():
    section = SectionTimes()
    for _ in range(6):
        section.note((0.1, 0.2), 0.4, steps=10)
    section.epoch()
    section.note(None, 0.8, steps=5)
    told = section.as_json()
    assert (told["step"]["steps"], told["step"]["most"]) == (65, 0.8)
    assert (told["compute"]["steps"], told["compute"]["most"]) == (60, 0.2)


def test_one_process_has_steps_and_no_sections():
    section = SectionTimes()
    for _ in range(6):
        section.note(None, 0.5, steps=1)
    assert section.epoch() is None
    assert section.as_json()["step"]["p50"] == 0.5
    assert section.as_json()["compute"] is None
