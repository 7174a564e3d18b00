"""Which checkpoints a run keeps: the newest, the best, and some for good."""

import math
import uuid

import keras
import numpy as np
import pytest

import mgpu_tf
from mgpu_tf import cli
from mgpu_tf.checkpoints import keeping, registry, store
from mgpu_tf.checkpoints.keeping import Best, ForGood
from mgpu_tf.checkpoints.manifest import DamagedError, NewerFormatError
from mgpu_tf.checkpoints.saving.saver import CheckpointSaver
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.reports.report import weights_sha256
from tests.checkpoints.test_storage import DISK, MEMORY, save
from tests.checkpoints.test_unreadable import change, of_format, rewrite


class Saved:
    def __init__(self, step, state=None, **scores):
        self.step = step
        self.state = {"scores": scores} if state is None else state


def test_the_best_are_ranked_and_the_earliest_first():
    every = [
        *(Saved(1, loss=2.0), Saved(2, loss=1.0), Saved(3, loss=1.0)),
        *(Saved(4, loss=math.nan), Saved(5, loss=-math.inf), Saved(6)),
        *(Saved(7, {}), Saved(8, {"scores": None}), Saved(9, loss="much")),
    ]
    assert Best(2, "loss", "min").ranked(every) == [(2, 1.0), (3, 1.0)]
    assert Best(9, "loss", "max").ranked(every) == [(1, 2), (2, 1), (3, 1)]
    assert Best(9, "none", "max").ranked(every) == []


def kept_for_good(saves, every_steps=None, every_hours=None):
    """The steps that stay of saves, each a step and its time in seconds."""
    found, so_far = [], ForGood()
    for step, seconds in saves:
        so_far = so_far.after(step, seconds, every_steps, every_hours)
        if so_far.kept == step:
            found.append((step, so_far.why))
    return found


def test_the_first_at_or_after_every_so_many_steps():
    saves = [(step, 0.0) for step in (0, 40, 90, 110, 120, 200, 240, 470, 499)]
    why = "every 100 steps"
    assert kept_for_good(saves, 100) == [(110, why), (200, why), (470, why)]
    assert kept_for_good(saves) == []


def test_one_that_is_saved_again_is_kept_again():
    why = "every 100 steps"
    saves = [(100, 0.0), (100, 1.0), (150, 2.0)]
    assert kept_for_good(saves, 100) == [(100, why)] * 2


def test_after_so_many_hours():
    saves = [(step, 1000.0 * step) for step in range(12)]
    why = "every 1 hours"
    assert kept_for_good(saves, None, 1.0) == [(4, why), (8, why)]
    found = [step for step, _ in kept_for_good(saves, 6, 1.0)]
    assert found == [4, 6, 8]


def test_what_a_function_wants(caplog):
    def even(step, logs):
        if "loss" not in logs:
            raise KeyError("loss")
        return step % 2 == 0

    wanted = keeping.Wanted(even)
    assert wanted.why(3, {"loss": 1.0}) == ""
    assert wanted.why(4, {"loss": 1.0}) == "keep_if=even"
    assert not caplog.messages
    assert wanted.why(5, {}) == "keep_if=even, which failed"
    assert "keep_if=even failed at step 5" in caplog.text
    assert keeping.Wanted(None).why(4, {}) == ""
    with pytest.raises(ConfigurationError, match="keep_if must name a module"):
        keeping.Wanted("no_such_module:function")
    with pytest.raises(ConfigurationError, match=r"Received: one of \(step\)"):
        keeping.Wanted(lambda step: True)
    so_far = ForGood(steps=4, kept=4, why="every 4 steps")
    assert so_far.after(6, 0.0, 4, None, "keep_if=even") == ForGood(
        steps=4, kept=6, why="keep_if=even"
    )


def state(step, scores=(), newest=2, best=None, **so_far):
    return {
        "scores": dict(scores),
        "keeping": keeping.as_state(newest, best, ForGood(**so_far)),
        "step": step,
    }


def test_a_reason_for_each_that_stays():
    best = Best(2, "loss", "min")
    every = [
        Saved(1, state(1, {"loss": 0.5})),
        Saved(2, state(2, kept=2, why="every 2 steps")),
        Saved(3, state(3, {"loss": 0.7}, steps=2, kept=2)),
        Saved(4, state(4, {"loss": 0.123456789}, kept=4, why="every 2 hours")),
    ]
    assert keeping.why_kept(every, 1, best) == {
        1: "best 2 by loss (0.5)",
        2: "for good, every 2 steps",
        4: "newest 1; best 2 by loss (0.123457); for good, every 2 hours",
    }
    assert set(keeping.why_kept(every, 0, None)) == {2, 4}


@pytest.mark.parametrize(
    "keeps",
    [
        *(None, 3, [], "x", {}, {"best": 3}, {"best": {"count": 1}}),
        {"best": {"count": "a", "monitor": 3, "mode": "min"}},
        {"best": {"count": 1, "monitor": 3, "mode": "least"}},
        {"for_good": [1]},
        {"for_good": {"more": 3}},
        {"newest": "many"},
    ],
)
def test_what_no_release_has_written_keeps_nothing(keeps):
    found = {"keeping": keeps}
    assert keeping.best_of(found) is None
    assert keeping.newest_of(found) == 0
    assert keeping.for_good_of(found) == ForGood()


@pytest.fixture
def folder(request, tmp_path):
    if request.param == DISK:
        return str(tmp_path / "run")
    return f"memory://{uuid.uuid4().hex}/run"


# Runs.

SIZE, BATCH, STEPS = 40, 8, 5
LOOKS = {"keep_checkpoints": 1, "monitor": "val_loss", "keep_best": 2}
RULE = LOOKS | {"save_every_steps": 3, "keep_every_steps": 7}
# Of RULE: saves are at 3, 5, 6, 9, 10, 12, 15 and so on.
FOR_GOOD = [9, 15, 21]


def arrays():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(SIZE, 6))
    return x, generator.integers(0, 3, size=SIZE)


def build():
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.layers.Dense(8, activation="tanh", dtype="float64"),
            keras.layers.Dense(3, dtype="float64"),
        ]
    )
    model.compile(
        keras.optimizers.Adam(0.2),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


class BrokenOff(Exception):
    pass


def fit(strategy, folder, until=None, epochs=5, validated=True, **saving):
    """Returns the trainer; None where the run was broken off."""
    trainer = mgpu_tf.Trainer(build, strategy, steps_per_execution=1, seed=2)
    boundary = CheckpointSaver.boundary

    def broken(saver, step, votes, **named):
        boundary(saver, step, votes, **named)
        if until is not None and step >= until:
            raise BrokenOff

    x, y = arrays()
    options = {"validation_data": validation()} if validated else {}
    options["checkpoint"] = mgpu_tf.SaveOptions(str(folder), **saving)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(CheckpointSaver, "boundary", broken)
        try:
            history = trainer.fit(*(x, y, BATCH, epochs), verbose=0, **options)
        except BrokenOff:
            return None
    trainer.history = history.history
    return trainer


def validation():
    x, y = arrays()
    return x[:16], np.roll(y[:16], 1)


def steps_of(folder):
    return [entry.step for entry in store.entries(str(folder))]


def listed(folder, capsys):
    capsys.readouterr()
    assert cli.main(["checkpoints", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    return [line.partition(", kept: ")[2] for line in lines]


def kept(history):
    """The steps that stay of a run of five epochs with RULE."""
    losses = history["val_loss"]
    best = sorted(range(5), key=lambda epoch: losses[epoch])[:2]
    return [STEPS * (epoch + 1) for epoch in best], losses[best[0]]


def test_a_run_keeps_the_best_and_some_for_good(strategies, tmp_path, capsys):
    strategy = strategies["one_device"]
    assert fit(strategy, tmp_path, 15, **RULE) is None
    trainer = fit(strategy, tmp_path, **RULE)
    best, loss = kept(trainer.history)
    assert steps_of(tmp_path) == sorted({*FOR_GOOD, *best, 25})
    lines = listed(tmp_path, capsys)
    assert "for good, every 7 steps" in lines
    assert f"best 2 by val_loss ({loss:.6g})" in "\n".join(lines)
    assert lines[-1].startswith("newest 1")
    # The best one, for evaluation.
    assert trainer.restore(str(tmp_path), "best", *arrays()) == best[0]
    assert trainer.global_step == best[0]
    x, y = validation()
    found = trainer.evaluate(x, y, BATCH, 0, return_dict=True)
    np.testing.assert_allclose(found["loss"], loss, rtol=1e-6)
    assert trainer.restore(str(tmp_path), 15, *arrays()) == 15
    for which in ("worst", 14, None, [15]):
        with pytest.raises(ConfigurationError, match=r"of the steps: 5, 9, 1"):
            trainer.restore(str(tmp_path), which, *arrays())


def test_a_run_keeps_what_a_function_wants(strategies, tmp_path, capsys):
    """Also of a run that was broken off; the logs are those of epochs."""
    seen = {}

    def keep_if(step, logs):
        seen[step] = logs
        return step == 5 or (step == 12 and not logs)

    saving = {"save_every_steps": 3, "keep_checkpoints": 1, "keep_if": keep_if}
    strategy = strategies["one_device"]
    assert fit(strategy, tmp_path, 9, **saving) is None
    trainer = fit(strategy, tmp_path, **saving)
    assert steps_of(tmp_path) == [12, 25]
    losses = trainer.history["loss"]
    assert {step: logs.get("loss") for step, logs in seen.items()} == {
        **dict.fromkeys((3, 6, 9, 12, 18, 21, 24)),
        **{15: losses[2], 25: losses[4]},
    }
    assert "for good, keep_if=keep_if" in listed(tmp_path, capsys)


def test_what_cannot_be_judged_may_be_the_best(tmp_path):
    folder, best = str(tmp_path), Best(1, "loss", "min")
    for step in (1, 2, 3):
        save(folder, step, state=state(step, {"loss": step}, 3, best))
    assert store.choose(folder, "best").step == 1
    rewrite(tmp_path, 3, of_format(99))
    for which in ("best", "newest"):
        with pytest.raises(NewerFormatError):
            store.choose(folder, which)
    assert store.choose(folder, 1).step == 1
    change(tmp_path, 1)
    with pytest.raises(DamagedError, match="Name another checkpoint"):
        store.choose(folder, 1)


@pytest.mark.full
@pytest.mark.parametrize(
    ("column", "folder"),
    [("mirrored_x3", DISK), ("fsdp_x3", MEMORY)],
    indirect=["folder"],
)
def test_a_resumed_run_keeps_the_same(column, folder, strategies, capsys):
    strategy = strategies[column]
    whole = fit(strategy, f"{folder}-whole", **RULE)
    best, loss = kept(whole.history)
    assert steps_of(f"{folder}-whole") == sorted({*FOR_GOOD, *best, 25})
    for until in (9, 16):
        assert fit(strategy, folder, until, **RULE) is None
    resumed = fit(strategy, folder, **RULE)
    assert resumed.history == whole.history
    weights = [trainer.model.get_weights() for trainer in (resumed, whole)]
    assert weights_sha256(weights[0]) == weights_sha256(weights[1])
    assert steps_of(folder) == steps_of(f"{folder}-whole")
    assert listed(folder, capsys) == listed(f"{folder}-whole", capsys)
    # On another strategy.
    trainer = mgpu_tf.Trainer(build, strategies["one_device"])
    assert trainer.restore(folder, "best", *arrays()) == best[0]
    x, y = validation()
    found = trainer.evaluate(x, y, BATCH, 0, return_dict=True)
    np.testing.assert_allclose(found["loss"], loss, rtol=1e-6)


def test_other_options_do_not_delete_what_is_kept_for_good(
    strategies, tmp_path, caplog
):
    strategy = strategies["one_device"]
    fit(strategy, tmp_path, epochs=2, keep_every_steps=5, **LOOKS)
    assert steps_of(tmp_path) == [5, 10]
    with pytest.raises(ConfigurationError, match="where they have: accuracy, "):
        fit(strategy, tmp_path, epochs=3, monitor="val_los_loss")
    assert steps_of(tmp_path) == [5, 10]
    fit(strategy, tmp_path, epochs=4, keep_checkpoints=1)
    assert steps_of(tmp_path) == [5, 10, 20]
    assert "has kept its best checkpoints by val_loss (min)" in caplog.text
    events = registry.read(str(tmp_path))
    assert [e.step for e in events if e.what == registry.DELETED] == [15]


@pytest.mark.full
def test_with_checkpoints_of_each_machine(strategies, tmp_path, capsys):
    """The rules are of the shared folder, which gets the end of each epoch."""
    rule = LOOKS | {"save_every_steps": 2, "keep_every_steps": 7}
    rule |= {"shared_every": 50, "local_checkpoint_dir": f"{tmp_path}/local"}
    shared = tmp_path / "shared"
    assert fit(strategies["one_device"], shared, 13, **rule) is None
    local = store.folders(str(tmp_path / "local"))[0]
    assert steps_of(local)[-1] == 12
    assert set(listed(local, capsys)) == {""}
    trainer = fit(strategies["one_device"], shared, **rule)
    best, _ = kept(trainer.history)
    assert steps_of(shared) == sorted({10, 15, 25, *best})


def test_a_metric_that_no_epoch_has(strategies, tmp_path):
    """Told at the end of the first epoch, which is saved."""
    with pytest.raises(ConfigurationError, match=r"accuracy, loss\. Write one"):
        fit(
            strategies["one_device"],
            tmp_path,
            validated=False,
            save_every_steps=2,
            **LOOKS,
        )
    assert steps_of(tmp_path) == [5]


def test_a_command_deletes_more_where_it_is_asked_to(tmp_path, capsys):
    for step, scores, so_far in (
        *((1, {"loss": 1.0}, {"kept": 1}), (2, {"loss": 0.5}, {"kept": 1})),
        *((3, {}, {"kept": 1}), (4, {}, {"kept": 1}), (5, {}, {"kept": 1})),
    ):
        best = Best(1, "loss", "min")
        saved = state(step, scores, 2, best, why="every step", **so_far)
        save(str(tmp_path), step, state=saved)
    assert listed(tmp_path, capsys) == [
        *("for good, every step", "best 1 by loss (0.5)", ""),
        *("newest 2", "newest 2"),
    ]
    assert cli.main(["checkpoints", str(tmp_path), "--keep=1"]) == 0
    assert steps_of(tmp_path) == [1, 2, 5]
    asked = ["checkpoints", str(tmp_path), "--only_newest"]
    assert cli.main(asked) == 2
    assert "only_newest has an effect with keep only" in capsys.readouterr().err
    assert cli.main([*asked, "--keep=1"]) == 0
    assert steps_of(tmp_path) == [5]
