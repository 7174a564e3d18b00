"""The pieces of variables: written on one mesh, read on another."""

import json
import os
import pathlib
import shutil
import threading

import keras
import numpy as np
import pytest

import mgpu_tf
from mgpu_tf.checkpoints import keeping, parts, store
from mgpu_tf.checkpoints.reading import Stored
from mgpu_tf.checkpoints.recovery import Owner, not_seen
from mgpu_tf.checkpoints.saving import writer as writer_lib
from mgpu_tf.checkpoints.saving.writer import Variables, Writer, piece_of
from mgpu_tf.engine import snapshot as snapshot_lib
from mgpu_tf.engine.snapshot import Snapshot
from mgpu_tf.errors import CheckpointError, ConfigurationError
from mgpu_tf.mesh import Region, Split, shares
from tests import clusters

# What releases have written, one folder for each format.
FORMATS = pathlib.Path(__file__).parent / "formats"

VALUES = {
    "matrix": np.arange(70, dtype="float32").reshape(14, 5),
    "vector": np.arange(9, dtype="float64"),
    "short": np.arange(5, dtype="float32").astype("bfloat16"),
    "count": np.int64(2**60 + 1),
    "flag": np.array([True, False]),
    "none": np.zeros((0, 3), "float32"),
}


def variables(strategy, scale=1):
    """Variables of all types; on a strategy that splits, some are split."""
    with strategy.scope():
        return [
            keras.Variable(
                value if scale else np.zeros_like(value),
                dtype=value.dtype.name,
                trainable=value.dtype.kind == "f",
            )
            for value in VALUES.values()
        ]


def snapshot_of(every, strategy, own=()):
    kinds = snapshot_lib.Variables.of([*every, *own], own)
    return Snapshot(kinds, strategy, stored_once=False)


def saved(snapshot, folder, **options):
    writer = Writer(str(folder), "t", **options)
    writer.begin(1, snapshot.pieces())
    writer.finish({}, 3)
    return Variables(Stored(store.newest(str(folder)).path))


MESHES = ("one_device", "mirrored_x3", "fsdp_x3", "data_2_fsdp_2")


@pytest.mark.parametrize("before", MESHES)
def test_any_mesh_reads_what_any_other_wrote(
    before, strategies, tmp_path, monkeypatch
):
    monkeypatch.setattr(snapshot_lib, "CHUNK_BYTES", 24)
    held = variables(strategies[before])
    in_memory = before == "fsdp_x3"
    stored = saved(
        snapshot_of(held, strategies[before]), tmp_path, in_memory=in_memory
    )
    for after in MESHES:
        others = variables(strategies[after], scale=0)
        snapshot_of(others, strategies[after]).put(stored)
        for value, variable in zip(VALUES.values(), others, strict=True):
            np.testing.assert_array_equal(
                value, keras.ops.convert_to_numpy(variable)
            )
            local = strategies[after].experimental_local_results
            copies = local(variable.value)
            if len(copies) == 3 and after == "mirrored_x3":
                assert all(np.array_equal(copy, value) for copy in copies)


def test_what_replicas_have_of_their_own(strategies, tmp_path):
    strategy = strategies["mirrored_x3"]
    (own,) = made = [held_by_replicas(strategy, [10, 20, 30])]
    stored = saved(snapshot_of([], strategy, made), tmp_path)
    assert stored.arrays == {"sums/00000": ("int32", (3,))}
    own.assign(0)
    snapshot_of([], strategy, made).put(stored)
    assert read_by_replicas(strategy, own) == [10, 20, 30]
    # On another number the first has the sum.
    other = strategies["mirrored_x2"]
    own = held_by_replicas(other, [1, 2])
    snapshot_of([], other, [own]).put(stored)
    assert read_by_replicas(other, own) == [60, 0]


def held_by_replicas(strategy, numbers):
    with strategy.scope():
        own = keras.Variable(0, dtype="int32", trainable=False)
    copies = strategy.experimental_local_results(own.value)
    for copy, number in zip(copies, numbers, strict=True):
        copy.assign(number)
    return own


def read_by_replicas(strategy, own):
    return [int(v) for v in strategy.experimental_local_results(own.value)]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_processes_divide_the_elements(count):
    matrix = Split((6, 10), 2, dim=1)
    regions = [
        (Region(0, 11), 4),
        (Region(0, 0), 4),
        (matrix.region(0), 8),
        (Region(0, 1), 8),
    ]
    every = shares(regions, count)
    assert len(every) == count
    found = [[] for _ in regions]
    for mine in every:
        for number, begin, region in mine:
            assert begin == sum(part.size for part in found[number])
            found[number].append(region)
        loads = sum(region.size * regions[n][1] for n, _, region in mine)
        assert loads <= 292 / count + 5 * 8
    for (whole, _), cut in zip(regions, found, strict=True):
        assert numbers_of(whole) == [
            n for part in cut for n in numbers_of(part)
        ]
    assert (1, 0, Region(0, 0)) in every[0]


def numbers_of(region):
    return [
        region.first + run * region.stride + place
        for run in range(region.runs)
        for place in range(region.length)
    ]


def arrays_of_1(folder, body):
    """One file; each array whole."""
    data = (folder / "arrays.bin").read_bytes()
    return {
        entry["name"]: np.frombuffer(
            data[entry["offset"] :][: entry["bytes"]], entry["dtype"]
        ).reshape(entry["shape"])
        for entry in body["arrays"]
    }


def arrays_of_2(folder, body):
    """A file of each process; each array by pieces."""
    files = [(folder / file["name"]).read_bytes() for file in body["files"]]
    found = {}
    for entry in body["arrays"]:
        flat = np.empty(int(np.prod(entry["shape"])), entry["dtype"])
        for file, offset, *numbers in entry["pieces"]:
            region = Region(*numbers)
            data = files[file][offset:][: region.size * entry["itemsize"]]
            flat[numbers_of(region)] = np.frombuffer(data, entry["dtype"])
        found[entry["name"]] = flat.reshape(entry["shape"])
    return found


@pytest.mark.parametrize(
    ("number", "arrays_of"), [(1, arrays_of_1), (2, arrays_of_2)]
)
def test_a_checkpoint_of_each_format_goes_on(
    number, arrays_of, strategies, tmp_path
):
    """The same run, saved by a release of each format."""
    shutil.copytree(FORMATS / str(number), tmp_path, dirs_exist_ok=True)
    (folder,) = (FORMATS / str(number)).iterdir()
    body = json.loads((folder / "manifest.json").read_text())
    assert body["format"] == number
    older = arrays_of(folder, body)
    strategy = strategies["mirrored_x2"]
    seen = []

    class Looks(keras.callbacks.EarlyStopping):
        def on_train_batch_begin(self, batch, logs=None):
            model = self.model
            if not seen:
                every = [*model.variables, *model.optimizer.variables]
                sums = [v for v in every if "accumulat" in v.path]
                alike = [v for v in every if "accumulat" not in v.path]
                seen.extend(v.numpy() for v in alike)
                seen.append([copies_of(strategy, v) for v in sums])

    Looks.__name__ = "EarlyStopping"
    trainer = mgpu_tf.Trainer(older_model, strategy, steps_per_execution=1)
    generator = np.random.default_rng(0)
    x = generator.normal(size=(75, 6)).astype("float32")
    trainer.fit(
        x,
        generator.integers(0, 3, size=75),
        batch_size=8,
        epochs=1,
        verbose=0,
        callbacks=[Looks("loss", patience=9, restore_best_weights=True)],
        checkpoint=mgpu_tf.SaveOptions(
            str(tmp_path),
            keep_checkpoints=1,
            monitor="loss",
            keep_every_steps=3,
        ),
    )
    assert trainer.global_step == 10
    # It has no score, and nobody has kept it for good.
    kept = store.whole(store.survey(str(tmp_path)))
    assert [entry.step for entry in kept] == [10]
    why = keeping.why_kept(kept, 0, keeping.best_of(kept[0].state))
    assert "best 1 by loss" in why[10] and "every 3 steps" in why[10]
    *alike, sums = seen
    names = [name for name in older if name.startswith("variables/shared/")]
    for name, value in zip(sorted(names), alike, strict=True):
        np.testing.assert_array_equal(older[name], value)
    names = [name for name in older if name.startswith("variables/sums/")]
    # Those of metrics are before them.
    names = sorted(names)[-len(sums) :]
    assert any(np.any(older[name][0] != older[name][1]) for name in names)
    for name, copies in zip(names, sums, strict=True):
        np.testing.assert_array_equal(older[name], copies)


def copies_of(strategy, variable):
    return np.stack(strategy.experimental_local_results(variable.value))


def older_model():
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(3, activation="tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(3),
        ]
    )
    model.compile(
        keras.optimizers.Adam(0.01, gradient_accumulation_steps=3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def writers(folder, processes=2):
    return [
        Writer(str(folder), "t", process, processes)
        for process in range(processes)
    ]


def begin(writer, step=1):
    writer.begin(step, [piece_of("shared/00000", np.arange(4))])


def test_the_part_of_another_worker_is_waited_for(tmp_path, monkeypatch):
    first, second = writers(tmp_path)
    monkeypatch.setattr(writer_lib, "WAIT_SECONDS", 0.0)
    begin(first)
    with pytest.raises(ConfigurationError, match="not seen the part of worker"):
        first.finish({}, 3)
    assert not os.listdir(tmp_path)
    monkeypatch.setattr(writer_lib, "WAIT_SECONDS", 600.0)
    first, second = writers(tmp_path)  # All processes have as many saves.
    begin(first)
    begin(second)
    thread = threading.Thread(target=first.finish, args=({}, 3))
    thread.start()
    second.finish({}, 3)
    thread.join(600)
    assert sorted(os.listdir(tmp_path)) == ["registry", "step-0000000001"]
    assert len(os.listdir(tmp_path / "step-0000000001")) == 3


def test_a_worker_that_cannot_write_is_told(tmp_path, monkeypatch):
    first, second = writers(tmp_path)
    begin(first)

    def full(part, piece):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(parts.Part, "add", full)
        begin(second)
    with pytest.raises(OSError, match="No space left"):
        second.finish({}, 3)
    with pytest.raises(CheckpointError, match="process 1: No space left"):
        first.finish({}, 3)
    assert not os.listdir(tmp_path)


def test_a_folder_of_another_machine_is_not_seen(tmp_path):
    owner = Owner(str(tmp_path))
    assert not owner.shown
    owner.take()
    assert not not_seen(str(tmp_path), owner.shown, seconds=0.0)
    other = tmp_path / "other"
    for _ in range(2):
        told = not_seen(str(other), owner.shown, seconds=0.0)
        assert told == "does not see"
        other.mkdir(exist_ok=True)


@pytest.mark.full
def test_a_save_holds_no_second_copy():
    """20 M weights on 2 replicas, 240 MB to save."""
    done = clusters.run(["-m", "tests.checkpoints.at_size", "20", "2", "file"])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["checkpoint_bytes"] > 230e6
    assert found["above_training_bytes"] < 128e6
