"""The order of passes, played with pen and paper."""

import pytest

from mgpu_tf.engine.synchronous.pipeline.schedule import (
    Pass,
    in_turn,
    live,
    orders,
    timing,
)
from mgpu_tf.mesh import bubble


def text(order):
    return " ".join(f"{'FB'[each.backward]}{each.micro}" for each in order)


@pytest.mark.parametrize(
    ("schedule", "stages", "micro_batches", "expected"),
    [
        (
            "1f1b",
            2,
            3,
            ["F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"],
        ),
        (
            "1f1b",
            3,
            4,
            [
                "F0 F1 F2 B0 F3 B1 B2 B3",
                "F0 F1 B0 F2 B1 F3 B2 B3",
                "F0 B0 F1 B1 F2 B2 F3 B3",
            ],
        ),
        ("1f1b", 3, 1, ["F0 B0"] * 3),
        ("gpipe", 2, 3, ["F0 F1 F2 B0 B1 B2"] * 2),
    ],
)
def test_orders(schedule, stages, micro_batches, expected):
    found = orders(schedule, stages, micro_batches)
    assert [text(order) for order in found] == expected


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_batches", [1, 2, 5, 8])
def test_the_bubble_of_the_papers(schedule, stages, micro_batches):
    played = timing(orders(schedule, stages, micro_batches))
    assert played.bubble == pytest.approx(bubble(stages, micro_batches))
    if schedule == "gpipe":
        assert played.live == [micro_batches] * stages
    else:
        assert played.live == [
            min(micro_batches, stages - stage) for stage in range(stages)
        ]


def test_by_hand():
    # F takes 1 and B takes 2:
    #   stage 0   F0 F1 .  .  B0 B0 .  B1 B1
    #   stage 1   .  F0 B0 B0 F1 B1 B1 .  .
    played = timing(orders("1f1b", 2, 2))
    assert played.bubble == pytest.approx(1 - 12 / 18)
    assert bubble(2, 2) == pytest.approx(1 / 3)


def test_every_pass_once_after_what_it_needs():
    seen = []
    for each in in_turn(orders("1f1b", 3, 4)):
        assert each not in seen
        if each.backward:
            assert each._replace(backward=False) in seen
            assert each.stage == 2 or each._replace(stage=each.stage + 1) in (
                seen
            )
        elif each.stage:
            assert each._replace(stage=each.stage - 1) in seen
        seen.append(each)
    assert len(seen) == 2 * 3 * 4


def test_passes_that_wait_for_each_other():
    backward_first = [[Pass(0, 0, True), Pass(0, 0, False)]]
    with pytest.raises(ValueError, match="wait for each other"):
        list(in_turn(backward_first))


def test_live():
    order = orders("1f1b", 4, 8)[1]
    assert live(order) == 3
    assert live(order[:2]) == 2
