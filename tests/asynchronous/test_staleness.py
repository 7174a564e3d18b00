import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu_tf.engine.asynchronous.schedule.staleness import (
    Admission,
    StalenessRecord,
)


def test_example():
    admission = Admission(limit=1)
    assert admission.admit("a", 1)
    assert admission.admit("b", 1)
    assert not admission.admit("c", 1)  # Would make "a" 2 late.
    admission.release("a")
    assert not admission.admit("c", 1)  # And now "b".
    admission.release("b")
    assert admission.admit("c", 1)


def test_no_limit():
    admission = Admission(None)
    assert all(admission.admit(name, 10) for name in range(100))


def test_one_at_a_time():
    admission = Admission(0)
    assert admission.admit("a", 5)  # Its own steps make nothing late.
    assert not admission.admit("b", 1)
    admission.release("a")
    assert admission.admit("b", 1)


@given(
    st.integers(0, 6),
    st.lists(st.tuples(st.booleans(), st.integers(1, 4)), max_size=60),
    st.randoms(use_true_random=False),
)
def test_no_piece_is_overtaken_by_more_than_the_limit(limit, events, random):
    """Every order in which pieces may end, against a count by hand."""
    admission = Admission(limit)
    steps, alive = {}, {}
    for name, (ends, size) in enumerate(events):
        if ends and alive:
            ended = random.choice(sorted(alive))
            others = sum(steps[other] for other in alive.pop(ended))
            assert others <= limit
            admission.release(ended)
        elif admission.admit(name, size):
            steps[name] = size
            for overlapping in alive.values():
                overlapping.add(name)
            alive[name] = set(alive)
        else:
            assert alive  # With nothing under way anything may begin.


def test_logs():
    record = StalenessRecord()
    assert record.logs() == {}
    record.add([0, 1, 1])
    record.add([6])
    assert record.values == [0, 1, 1, 6]
    assert record.logs() == {
        "staleness_mean": 2.0,
        "staleness_p50": 1.0,
        "staleness_p95": pytest.approx(5.25),
        "staleness_max": 6.0,
    }
