"""The most that a list of operations holds, by hand."""

from mgpu_tf.planner.operations.liveness import Schedule


def chain(kind):
    """a -> b -> c, each of 10 bytes; b and c by an operation of a kind."""
    schedule = Schedule([10.0, 10.0, 10.0])
    schedule.run("Fill", [], [0])
    schedule.run(kind, [0], [1])
    schedule.run(kind, [1], [2])
    return schedule


def test_a_buffer_lives_to_its_last_consumer():
    assert chain("MatMul").result().bytes == 20


def test_operations_write_into_what_dies():
    assert chain("Relu").result().bytes == 10


def test_aliases_take_nothing():
    assert chain("Reshape").result().bytes == 10


def test_what_is_read_later_is_not_written_into():
    schedule = chain("Relu")
    schedule.run("AddN", [0, 2], [])
    assert schedule.result().bytes == 20


def test_an_alias_keeps_its_buffer_alive():
    schedule = Schedule([10.0, 10.0, 10.0, 10.0])
    schedule.run("Fill", [], [0])
    schedule.run("Reshape", [0], [1])
    schedule.run("MatMul", [], [2])
    schedule.run("MatMul", [1, 2], [3])
    assert schedule.result().bytes == 30


def test_what_is_kept_is_held_to_the_end():
    schedule = Schedule([10.0, 100.0])
    schedule.run("Fill", [], [0])
    schedule.run("Fill", [], [1])
    assert schedule.result().bytes == 100
    assert schedule.result(kept=[0]).bytes == 110


def test_the_peak_tells_kinds_and_the_operation():
    schedule = Schedule([10.0, 20.0])
    schedule.run("Fill", [], [0], kind="activations")
    schedule.run("MatMul", [0], [1], kind="gradients", scratch=5.0)
    peak = schedule.result()
    assert peak.by_kind == {
        "activations": 10,
        "gradients": 20,
        "temporary": 5,
    }
    assert (peak.operation, peak.step) == ("MatMul", 1)
