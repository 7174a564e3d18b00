"""A run that was broken off and resumed ends with the same bits."""

import collections
import dataclasses
import json
import logging
import os
import random
import re
import shutil
import signal

import keras
import numpy as np
import pytest
import tensorflow as tf

import mgpu_tf
from mgpu_tf.checkpoints import manifest, parts, reading, registry, store
from mgpu_tf.checkpoints.recovery import Owner, SupersededError
from mgpu_tf.checkpoints.saving.saver import CheckpointSaver
from mgpu_tf.errors import CheckpointError, ConfigurationError, Preempted
from mgpu_tf.reports.report import weights_sha256
from tests.tiers import tiered

SIZE = 75
BATCH = 8


class BrokenOff(Exception):
    pass


def arrays():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(SIZE, 6)).astype("float32")
    return x, generator.integers(0, 3, size=SIZE)


def dataset():
    return (
        tf.data.Dataset.from_tensor_slices(arrays())
        .shuffle(SIZE, seed=1)
        .batch(BATCH)
    )


def mapped():
    """A dataset that is cut before its map; the shuffle comes after it."""
    return (
        tf.data.Dataset.from_tensor_slices(arrays())
        .map(lambda x, y: (x + 1, y))
        .shuffle(SIZE, seed=1)
        .batch(BATCH)
    )


def unknown_length():
    return dataset().filter(lambda *_: True)


def endless():
    x, y = arrays()
    generator = np.random.default_rng(1)
    while True:
        rows = generator.integers(0, SIZE, size=BATCH)
        yield x[rows], y[rows]


def build(optimizer=None, statistics=True, units=8):
    layers = [keras.layers.Dense(units, activation="tanh")]
    if statistics:
        layers.append(keras.layers.BatchNormalization())
    layers += [keras.layers.Dropout(0.3), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    model.compile(
        optimizer or keras.optimizers.Adam(0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy", keras.metrics.SparseCategoricalCrossentropy()],
    )
    return model


class Changing(keras.utils.PyDataset):
    """A new order in each epoch, and noise from a generator of its own."""

    def __init__(self):
        super().__init__()
        self.x, self.y = arrays()
        self.order = np.arange(SIZE)
        self.random = np.random.default_rng(5)

    def __len__(self):
        return -(-SIZE // BATCH)

    def __getitem__(self, index):
        rows = self.order[index * BATCH : (index + 1) * BATCH]
        noise = 0.1 * self.random.normal(size=(len(rows), 6))
        return self.x[rows] + noise.astype("float32"), self.y[rows]

    def on_epoch_end(self):
        self.random.shuffle(self.order)


class Noisy(Changing):
    """Noise of NumPy's own generator."""

    def __init__(self):
        super().__init__()
        self.random = np.random


def noisy():
    """The same, from a generator of Python's."""
    x, y = arrays()
    while True:
        for at in range(0, SIZE, BATCH):
            noise = np.random.normal(size=x[at : at + BATCH].shape)
            yield x[at : at + BATCH] + noise, y[at : at + BATCH]


DATA = {
    "arrays": lambda: (arrays(), {"batch_size": BATCH}),
    "arrays_steps": lambda: (arrays(), {"steps_per_epoch": 7}),
    "dataset": lambda: ((dataset(),), {}),
    "dataset_steps": lambda: ((dataset(),), {"steps_per_epoch": 7}),
    "mapped": lambda: ((mapped(),), {}),
    "unknown_length": lambda: ((unknown_length(),), {}),
    "generator": lambda: ((endless(),), {"steps_per_epoch": 7}),
    "changing": lambda: ((Changing(),), {}),
    "noisy": lambda: ((Noisy(),), {}),
    "noisy_generator": lambda: ((noisy(),), {"steps_per_epoch": 7}),
}

OPTIMIZERS = {
    "accumulation_average_scaling": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.AdamW(
            0.01,
            gradient_accumulation_steps=3,
            use_ema=True,
            ema_overwrite_frequency=2,
        ),
        initial_scale=4.0,
        dynamic_growth_steps=3,
    ),
    "schedule": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.CosineDecay(0.1, 30)
    ),
}


class Run:
    """Runs to their end, or until they are broken off."""

    def __init__(self, monkeypatch):
        self._monkeypatch = monkeypatch
        self.trainer = None

    def __call__(
        self,
        strategy,
        folder,
        data="arrays",
        until=None,
        build=build,
        epochs=2,
        spe=3,
        saving=None,
        draws=0,
        **kwargs,
    ):
        """Returns hash and history; None where it was broken off."""
        boundary = CheckpointSaver.boundary

        def broken(saver, step, votes, **named):
            boundary(saver, step, votes, **named)
            if until is not None and step >= until:
                raise BrokenOff

        options = {
            "verbose": 0,
            "epochs": epochs,
            "checkpoint": mgpu_tf.SaveOptions(
                str(folder), **{"save_every_steps": 4} | (saving or {})
            ),
        }
        # A dataset draws by the seed that a process had when it was made.
        tf.random.set_seed(0)
        np.random.seed(0)
        data, data_options = DATA[data]()
        self.trainer = mgpu_tf.Trainer(build, strategy, steps_per_execution=spe)
        np.random.normal(size=draws)
        with self._monkeypatch.context() as patched:
            patched.setattr(CheckpointSaver, "boundary", broken)
            try:
                history = self.trainer.fit(
                    *data, **options | data_options | kwargs
                )
            except BrokenOff:
                return None
        weights = self.trainer.model.get_weights()
        return weights_sha256(weights), history.history


@pytest.fixture
def run(monkeypatch):
    return Run(monkeypatch)


def assert_same_bits(run, strategy, tmp_path, breaks, **kwargs):
    control = run(strategy, tmp_path / "control", **kwargs)
    steps = run.trainer.global_step
    for until in breaks:
        assert run(strategy, tmp_path / "broken", until=until, **kwargs) is None
    assert run(strategy, tmp_path / "broken", **kwargs) == control
    assert run.trainer.recovery.restarts == len(breaks)
    # Fewer than from one save to the next.
    assert run.trainer.recovery.lost_steps < 4 * max(1, len(breaks))
    assert run.trainer.global_step == steps
    spent = dataclasses.asdict(run.trainer.goodput)
    wall = spent.pop("wall_seconds")
    assert sum(spent.values()) == pytest.approx(wall, rel=0.01)
    assert (spent["restart_seconds"] > 0) == bool(breaks)
    line = run.trainer.meter.time_line()
    lost = sum(one.get("restart", 0.0) for one in line.bins)
    assert lost == pytest.approx(spent["restart_seconds"], abs=0.01)
    return control


@pytest.mark.parametrize(
    "column",
    tiered(
        ["one_device", "mirrored_x2", "central_storage_x2"],
        ["mirrored_x2"],
        ["central_storage_x2"],
    ),
)
def test_same_bits(column, run, strategies, tmp_path):
    strategy = strategies[column]
    control = assert_same_bits(run, strategy, tmp_path, [9, 13])
    if column == "mirrored_x2":
        assert run(strategy, tmp_path / "again") == control


@pytest.mark.parametrize(
    "data",
    tiered(
        sorted(set(DATA) - {"arrays"}),
        [],
        [
            *("generator", "dataset_steps", "unknown_length"),
            *("changing", "noisy", "noisy_generator"),
        ],
    ),
)
def test_same_bits_whatever_the_data(data, run, strategies, tmp_path):
    strategy = strategies["mirrored_x2"]
    assert_same_bits(run, strategy, tmp_path, [13], data=data)


def test_noise_goes_on_as_the_run_began(run, strategies, tmp_path):
    """Even where the script has drawn more before it goes on."""
    strategy, folder = strategies["mirrored_x2"], tmp_path / "broken"
    control = run(strategy, tmp_path / "control", data="noisy")
    assert run(strategy, folder, until=13, data="noisy") is None
    assert run(strategy, folder, data="noisy", draws=3) == control


@pytest.mark.parametrize("name", tiered(list(OPTIMIZERS), []))
def test_same_bits_whatever_the_optimizer(name, run, strategies, tmp_path):
    assert_same_bits(
        run,
        strategies["mirrored_x2"],
        tmp_path,
        [13],
        build=lambda: build(OPTIMIZERS[name]()),
    )


class Jitters(keras.callbacks.Callback):
    """A rate of what it draws and of the last losses."""

    def __init__(self):
        super().__init__()
        self.draws = np.random.default_rng(3)
        self.last = collections.deque(maxlen=3)

    def on_train_batch_end(self, batch, logs=None):
        self.last.append(logs["loss"])
        rate = 0.01 * self.draws.uniform() * np.mean(self.last)
        self.model.optimizer.learning_rate.assign(rate)


@pytest.mark.full
def test_callbacks_go_on(run, strategies, tmp_path):
    """Their counters, the best weights, and the learning rate."""

    def callbacks():
        return [
            keras.callbacks.ReduceLROnPlateau("val_loss", patience=1),
            keras.callbacks.EarlyStopping(
                "val_accuracy", patience=2, restore_best_weights=True
            ),
            keras.callbacks.LearningRateScheduler(lambda _, rate: rate * 0.9),
            Jitters(),
        ]

    def once(folder, until=None):
        return run(
            strategies["mirrored_x2"],
            folder,
            until=until,
            epochs=12,
            callbacks=callbacks(),
            validation_data=arrays(),
        )

    control = once(tmp_path / "control")
    assert len(control[1]["loss"]) < 12
    for until in (25,):
        assert once(tmp_path / "broken", until) is None
    assert once(tmp_path / "broken") == control
    # It is over, and stays so.
    assert once(tmp_path / "broken") == control


def test_generators_of_random_numbers_go_on(run, strategies, tmp_path):
    drawn = []

    class Draws(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            drawn.append(
                (
                    random.random(),
                    float(np.random.uniform()),
                    float(keras.random.uniform([])),
                )
            )

    def once(folder, until=None):
        drawn.clear()
        run(strategies["one_device"], folder, until=until, callbacks=[Draws()])
        return list(drawn)

    control = once(tmp_path / "control")
    assert len(control) == 2
    once(tmp_path / "broken", 14)
    assert once(tmp_path / "broken") == control[1:]


@pytest.mark.full
def test_numbers_of_steps_change_no_bits(run, strategies, tmp_path):
    """So the pace, which follows time, does not either."""
    strategy = strategies["mirrored_x2"]
    results = [
        run(
            strategy,
            tmp_path / str(spe),
            build=lambda: build(statistics=False),
            spe=spe,
            saving={"save_every_steps": None},
        )
        for spe in (1, 4, "auto")
    ]
    assert results[1:] == results[:1] * 2


@pytest.mark.full
def test_statistics_of_replicas_fix_the_pace(run, strategies, tmp_path):
    strategy = strategies["mirrored_x2"]
    assert_same_bits(run, strategy, tmp_path, [7], spe="auto")


@pytest.mark.parametrize(
    ("before", "after"),
    tiered(
        [
            ("mirrored_x2", "mirrored_x4"),
            ("mirrored_x4", "one_device"),
            ("central_storage_x2", "mirrored_x2"),
        ],
        [],
        [("mirrored_x4", "one_device"), ("mirrored_x2", "mirrored_x4")],
    ),
)
def test_other_numbers_of_replicas(before, after, run, strategies, tmp_path):
    """In the middle of an accumulation and of an epoch."""

    def build_without_noise():
        model = keras.Sequential(
            [keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3)]
        )
        model.compile(
            keras.optimizers.SGD(0.1, gradient_accumulation_steps=3),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        return model

    kwargs = {"build": build_without_noise}
    _, control = run(strategies[before], tmp_path / "control", **kwargs)
    expected = run.trainer.model.get_weights()
    folder = tmp_path / "moved"
    assert run(strategies[before], folder, until=17, **kwargs) is None
    _, history = run(strategies[after], folder, **kwargs)
    assert run.trainer.recovery.lost_steps == 3
    for name, values in control.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5)
    for one, other in zip(
        expected, run.trainer.model.get_weights(), strict=True
    ):
        np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.fixture(scope="module")
def broken_off(strategies, tmp_path_factory):
    """A folder that a run has left."""
    folder = tmp_path_factory.mktemp("broken_off")
    with pytest.MonkeyPatch.context() as patched:
        assert Run(patched)(strategies["one_device"], folder, until=9) is None
    return folder


def test_broken_ones_are_refused(run, strategies, tmp_path, caplog):
    strategy = strategies["one_device"]
    control = run(strategy, tmp_path / "control")
    run(strategy, tmp_path / "broken", until=13)
    for step, start in ((12, b""), (8, b"x")):
        path = tmp_path / "broken" / f"step-{step:010d}" / "arrays-0.bin"
        data = path.read_bytes()
        path.write_bytes(start + data[1:] if start else b"")
    (tmp_path / "broken" / ".unfinished-step-0000000016").mkdir()
    with caplog.at_level(logging.WARNING, "mgpu_tf"):
        assert run(strategy, tmp_path / "broken") == control
    refused = [r.getMessage() for r in caplog.records if "refused" in r.msg]
    assert "step-0000000012: arrays-0.bin has 0 bytes" in refused[0]
    assert "step-0000000008: arrays-0.bin was changed" in refused[1]
    assert run.trainer.recovery.lost_steps == 13 - 4


def test_nothing_is_lost_without_being_asked(
    run, strategies, tmp_path, monkeypatch, caplog
):
    """Storage fails; a newer format; all damaged: each ends the run."""
    monkeypatch.setattr(reading, "PAUSES_SECONDS", (0.0,))
    strategy, opened = strategies["one_device"], os.open
    assert run(strategy, tmp_path, until=9) is None
    manifests = [tmp_path / f"step-{s:010d}" / "manifest.json" for s in (4, 8)]

    def held():
        return {
            path: path.read_bytes()
            for path in sorted(tmp_path.glob("step-*/*"))
        }

    def broken(path, *rest, **options):
        if os.fspath(path) == str(manifests[1]):
            raise OSError(5, "Input/output error", path)
        return opened(path, *rest, **options)

    before = held()
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", broken)
        with pytest.raises(CheckpointError, match="may be whole"):
            run(strategy, tmp_path)
    body = json.loads(before[manifests[1]])
    del body["manifest_sha256"]
    body["format"] = 3
    body["manifest_sha256"] = manifest.digest(body)
    manifests[1].write_text(json.dumps(body))
    with pytest.raises(CheckpointError, match="Upgrade mgpu_tf"):
        run(strategy, tmp_path)
    for path in manifests:
        path.write_bytes(before[path][:-2])
    damaged = held()
    for resume in ("auto", "never"):
        with pytest.raises(ConfigurationError, match="all of them damaged"):
            run(strategy, tmp_path, saving={"resume": resume})
    assert held() == damaged
    saving = {"restart_from_nothing": True, "keep_checkpoints": 1}
    run(strategy, tmp_path, saving=saving)
    assert run.trainer.global_step == 20
    # The new ones took their names, and they are there under another.
    aside = {
        path.parent.name: path.read_bytes()
        for path in tmp_path.glob("damaged-*/manifest.json")
    }
    assert aside == {
        f"damaged-{path.parent.name}-1": damaged[path] for path in manifests
    }
    told = [(each.what, each.step) for each in registry.read(str(tmp_path))]
    assert ("began", 0) in told and ("damaged", 8) in told
    assert told.index(("damaged", 8)) < told.index(("moved aside", 8))


def test_a_full_disk_leaves_the_one_before(
    run, strategies, tmp_path, caplog, monkeypatch
):
    written, torn = [], []
    commit = parts.commit

    class Full(parts.Part):
        def add(self, piece):
            if self._step == 8:
                raise OSError(28, "No space left on device")
            super().add(piece)

    def committed(folder, step, *rest):
        written.append(step)
        torn.extend(n for n in os.listdir(folder) if "step-0000000008" in n)
        return commit(folder, step, *rest)

    monkeypatch.setattr(parts, "Part", Full)
    monkeypatch.setattr(parts, "commit", committed)
    with caplog.at_level(logging.WARNING, "mgpu_tf"):
        run(strategies["one_device"], tmp_path)
    said = "step 8 was not written (No space left on device); that of step 4 "
    assert said + "stays usable" in caplog.text
    assert str(tmp_path) in caplog.text
    assert 4 in written and 8 not in written and 12 in written
    assert not torn


def test_a_disk_that_stays_full_ends_with_one_line(
    run, strategies, tmp_path, caplog, monkeypatch
):
    def full(*given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(parts, "commit", full)
    with pytest.raises(mgpu_tf.CheckpointError) as raised:
        run(strategies["one_device"], tmp_path)
    line = str(raised.value)
    assert f"checkpoint_dir={str(tmp_path)!r}" in line
    assert "(No space left on device); there is no other" in line
    assert "\n" not in line
    assert raised.value.__suppress_context__
    assert "stays usable" not in caplog.text


def test_a_write_that_fails_otherwise_is_no_success(
    run, strategies, tmp_path, caplog, monkeypatch
):
    def broken(*given):
        raise RuntimeError("of the writing thread")

    monkeypatch.setattr(parts, "commit", broken)
    with pytest.raises(RuntimeError, match="of the writing thread"):
        run(strategies["one_device"], tmp_path)
    assert "was not written (RuntimeError(" in caplog.text


def test_a_later_run_ends_the_writing_of_this_one(run, strategies, tmp_path):
    class Another(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                Owner(str(tmp_path)).take()

    with pytest.raises(SupersededError, match="belongs to the run that began"):
        run(strategies["one_device"], tmp_path, callbacks=[Another()])
    # One epoch has 15 steps, and saves come every 4 steps.
    assert store.newest(str(tmp_path)).step < 16


def test_preempted(run, strategies, tmp_path):
    class Signals(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1 and until:
                os.kill(os.getpid(), signal.SIGTERM)

    def once(folder):
        return run(
            strategies["mirrored_x2"],
            folder,
            saving={"save_every_steps": None},
            callbacks=[Signals()],
        )

    until = False
    control = once(tmp_path / "control")
    handler = signal.getsignal(signal.SIGTERM)
    until = True
    with pytest.raises(Preempted) as ended:
        once(tmp_path / "broken")
    assert ended.value.code == 75
    assert signal.getsignal(signal.SIGTERM) is handler
    assert store.newest(str(tmp_path / "broken")).step == 10 + 3
    until = False
    assert once(tmp_path / "broken") == control
    recovery = run.trainer.recovery
    assert (recovery.restarts, recovery.lost_steps) == (1, 0)


def test_saves_by_time_and_keeps_so_many(run, strategies, tmp_path):
    run(
        strategies["one_device"],
        tmp_path,
        saving={
            "save_every_steps": None,
            "save_every_seconds": 1e-6,
            "keep_checkpoints": 2,
        },
    )
    assert run.trainer._totals.saver.saves >= 2
    assert run.trainer.goodput.save_seconds > 0
    assert len(store.entries(str(tmp_path))) == 2


def test_saves_each_epoch_by_default(run, strategies, tmp_path):
    run(
        strategies["one_device"],
        tmp_path,
        saving={"save_every_steps": None, "keep_checkpoints": 9},
    )
    steps = [entry.step for entry in store.entries(str(tmp_path))]
    assert steps == [10, 20]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 5}, "same data's length"),
        (
            {"build": lambda: build(statistics=False)},
            "layers of the model: .*BatchNormalization.* -> ",
        ),
        (
            {"build": lambda: build(keras.optimizers.SGD(0.1))},
            "optimizers of the model: .* -> SGD",
        ),
        ({"build": lambda: build(units=9)}, "of its checkpoint"),
        (
            {"callbacks": [keras.callbacks.EarlyStopping("loss")]},
            "the callbacks of its checkpoint.*Received: EarlyStopping, where",
        ),
        (
            {"saving": {"resume": "never"}},
            "without checkpoints. Received: .* of step 8",
        ),
        (
            {"callbacks": [keras.callbacks.BackupAndRestore("x")]},
            "resumes by itself. Received: a BackupAndRestore",
        ),
    ],
)
def test_what_does_not_go_on(
    change, message, run, strategies, tmp_path, broken_off
):
    shutil.copytree(broken_off, tmp_path, dirs_exist_ok=True)
    with pytest.raises(ConfigurationError, match=message):
        run(strategies["one_device"], tmp_path, **change)


def test_nothing_to_go_on_from(run, strategies, tmp_path):
    with pytest.raises(ConfigurationError, match="needs a usable checkpoint"):
        run(strategies["one_device"], tmp_path, saving={"resume": "always"})
    assert run(strategies["one_device"], tmp_path, saving={"resume": "never"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"save_every_steps": 3},
            "every_steps has an effect with checkpoint_dir",
        ),
        ({"resume": "always"}, "resume has an effect with checkpoint_dir only"),
        (
            {"checkpoint_dir": "d", "save_every_steps": 0},
            "save_every_steps must be 1 or more",
        ),
        (
            {"checkpoint_dir": "d", "save_every_seconds": 0.0},
            "save_every_seconds must be above 0",
        ),
        (
            {
                "checkpoint_dir": "d",
                "save_every_seconds": 1.0,
                "save_every_steps": 1,
            },
            "not both",
        ),
        (
            {"checkpoint_dir": "d", "resume": "maybe"},
            "Unknown resume. Received: 'maybe'",
        ),
        (
            {"checkpoint_dir": "d", "keep_checkpoints": 0},
            "keep_checkpoints must be 1 or more",
        ),
        (
            {"checkpoint_dir": "d", "keep_best": 2},
            "keep_best has an effect with monitor only",
        ),
        (
            {"checkpoint_dir": "d", "monitor": "val_f1"},
            "needs monitor_mode. Received: monitor='val_f1'. Set monitor_mode",
        ),
        ({"checkpoint_dir": "d", "monitor": ""}, "is the name of a metric"),
        (
            {"checkpoint_dir": "d", "keep_every_hours": 0.0},
            "keep_every_hours must be above 0",
        ),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(ConfigurationError, match=message):
        mgpu_tf.SaveOptions(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"checkpoint_dir": "d", "checkpoint": mgpu_tf.SaveOptions("e")},
            "Give checkpoint_dir or checkpoint, not both",
        ),
        ({"checkpoint": "d"}, "checkpoint must be a SaveOptions.*str"),
    ],
)
def test_two_ways_to_say_where(options, message, strategies):
    trainer = mgpu_tf.Trainer(build, strategies["one_device"])
    with pytest.raises(ConfigurationError, match=message):
        trainer.fit(*arrays(), verbose=0, **options)


def test_checkpoint_dir_that_cannot_be(run, strategies, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="must be a folder that can"):
        run(strategies["one_device"], tmp_path / "file")


def test_a_complete_run_is_told(strategies, tmp_path, caplog):
    def fit():
        trainer = mgpu_tf.Trainer(build, strategies["one_device"])
        trainer.fit(
            *arrays(), epochs=1, verbose=0, checkpoint_dir=str(tmp_path)
        )

    fit()
    assert "is complete" not in caplog.text
    fit()
    assert "is complete after 1 epochs: nothing is trained" in caplog.text
    assert "Give more than 1 epochs to go on" in caplog.text


class EndsAfter(keras.callbacks.Callback):
    """Ends the training after some epochs."""

    def __init__(self, epochs):
        super().__init__()
        self._epochs = epochs

    def on_epoch_end(self, epoch, logs=None):
        if epoch + 1 == self._epochs:
            self.model.stop_training = True


def test_a_run_that_a_callback_has_ended(strategies, tmp_path, caplog):
    def fit(epochs, ends_after, folder="run"):
        caplog.clear()
        trainer = mgpu_tf.Trainer(build, strategies["mirrored_x3"])
        history = trainer.fit(
            *arrays(),
            batch_size=BATCH,
            epochs=epochs,
            verbose=0,
            callbacks=[EndsAfter(ends_after)],
            checkpoint_dir=str(tmp_path / folder),
        )
        return history.history, weights_sha256(trainer.model.get_weights())

    first, weights = fit(5, 2)
    assert len(first["loss"]) == 2
    # The same call does nothing more: a restart must not.
    for epochs in (5, 1):
        assert fit(epochs, 2) == (first, weights)
        assert (
            "was ended by a callback after 2 epochs: nothing is trained. Give "
            "more than 5 epochs to go on"
        ) in caplog.text
    whole = fit(6, 4, "whole")
    assert fit(6, 4) == whole
    assert "nothing is trained" not in caplog.text
    assert fit(6, 4) == whole
    assert "Give more than 6 epochs to go on" in caplog.text


@pytest.mark.parametrize("remains", [True, False])
def test_a_folder_that_is_emptied_in_between(
    remains, run, strategies, tmp_path, caplog
):
    class Empties(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                # At once, whatever the writing thread does.
                os.rename(tmp_path / "run", tmp_path / "moved")
                if remains:
                    (tmp_path / "run").mkdir()

    whole = run(strategies["one_device"], tmp_path / "whole")
    found = run(
        strategies["one_device"], tmp_path / "run", callbacks=[Empties()]
    )
    assert found == whole
    # The thread that writes may see it too.
    lines = [m for m in caplog.messages if "is no longer the folder" in m]
    assert lines[0].startswith(f"{tmp_path / 'run'} is no longer")
    assert store.newest(str(tmp_path / "run")) is not None


def test_a_working_directory_that_changes(
    run, strategies, tmp_path, monkeypatch
):
    class Moves(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            monkeypatch.chdir(tmp_path / "other")

    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    run(strategies["one_device"], "run", callbacks=[Moves()])
    assert store.newest(str(tmp_path / "run")) is not None
    assert os.listdir(tmp_path / "other") == []


def network(
    activation="tanh",
    optimizer="Adam",
    rate=0.001,
    last=keras.layers.Dense,
    units=4,
):
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(units, activation),
            *(keras.layers.Identity() for _ in range(20)),
            last(3),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(getattr(keras.optimizers, optimizer)(rate), loss)
    return model


class OtherDense(keras.layers.Dense):
    """Of the same variables, and another layer."""


def resumed_with(strategy, folder, **changed):
    for options in ({}, changed):
        trainer = mgpu_tf.Trainer(lambda o=options: network(**o), strategy)
        epochs = 2 if options else 1
        trainer.fit(
            *arrays(), epochs=epochs, verbose=0, checkpoint_dir=str(folder)
        )


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"optimizer": "AdamW"}, "optimizers of the model: Adam -> AdamW"),
        # The end of a long list counts too.
        ({"last": OtherDense}, "Identity, OtherDense"),
    ],
)
def test_other_layers_and_optimizers_are_refused(
    changed, line, strategies, tmp_path
):
    with pytest.raises(ConfigurationError, match=line):
        resumed_with(strategies["one_device"], tmp_path, **changed)


def test_a_refusal_names_the_setting_that_changed(strategies, tmp_path, caplog):
    line = (
        "Received: .* where the checkpoint has .* this changed: .*units: 4 -> 9"
    )
    with pytest.raises(ConfigurationError, match=line):
        resumed_with(strategies["one_device"], tmp_path, units=9)
    assert "The run goes on" not in caplog.text


SETTINGS = [
    ({"activation": "relu"}, "activation: tanh -> relu"),
    ({"rate": 0.5}, r"learning_rate: 0.001\d* -> 0.5"),
]


@pytest.mark.parametrize(("changed", "line"), tiered(SETTINGS, SETTINGS[1:]))
def test_other_settings_are_told(changed, line, strategies, tmp_path, caplog):
    resumed_with(strategies["one_device"], tmp_path)
    resumed_with(strategies["one_device"], tmp_path / "a", activation="tanh")
    assert "this changed" not in caplog.text
    resumed_with(strategies["one_device"], tmp_path / "b", **changed)
    assert re.search(line, caplog.text)


def test_other_data_is_told(run, strategies, tmp_path, caplog, monkeypatch):
    strategy, changed = strategies["one_device"], "values or its order"
    assert run(strategy, tmp_path, until=4) is None
    assert run(strategy, tmp_path, until=8) is None
    assert changed not in caplog.text
    x, y = arrays()
    monkeypatch.setitem(
        DATA, "arrays", lambda: ((-x, y), {"batch_size": BATCH})
    )
    run(strategy, tmp_path)
    assert caplog.text.count(changed) == 1
