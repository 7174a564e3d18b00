"""Sources that are read by number: image folders, TFRecord files, TFDS."""

import gzip
import os
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf

import mgpu_tf
from mgpu_tf import data, datasets
from mgpu_tf.datasets.digits import Digits
from mgpu_tf.datasets.record_index import RecordFiles
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.strategies.topology import LocalReplicas


def batches(examples, batch_size=4, shuffle=False):
    source = data.RandomAccessSource(examples, batch_size, shuffle, 0)
    dataset = source.pass_dataset(0, LocalReplicas(0, 1, 1))
    return [batch for batch, _, _ in dataset.as_numpy_iterator()]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Images of several sizes and formats, in three classes."""
    folder = tmp_path_factory.mktemp("photos")
    generator = np.random.default_rng(0)
    for number in range(9):
        name = folder / ("ant", "bee", "cow")[number % 3]
        name.mkdir(exist_ok=True)
        image = generator.integers(0, 255, (9 + number, 12, 3), np.uint8)
        ending = (".jpg", ".png")[number % 2]
        keras.utils.save_img(name / f"{number}{ending}", image)
    (folder / "ant" / "notes.txt").write_text("no image")
    return folder


@pytest.mark.parametrize("label_mode", ["int", "categorical", None])
def test_image_folder_is_that_of_keras(photos, label_mode):
    theirs = keras.utils.image_dataset_from_directory(
        photos,
        image_size=(8, 10),
        batch_size=4,
        shuffle=False,
        label_mode=label_mode,
        verbose=False,
    )
    ours = datasets.image_folder(
        photos, image_size=(8, 10), label_mode=label_mode
    )
    if label_mode:
        assert list(ours.class_names) == theirs.class_names
    found = batches(ours)
    expected = list(theirs.as_numpy_iterator())
    assert len(found) == len(expected) == 3
    for one, other in zip(found, expected, strict=True):
        tf.nest.assert_same_structure(one, other)
        for a, b in zip(
            tf.nest.flatten(one), tf.nest.flatten(other), strict=True
        ):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(a, b, atol=1e-4)


def test_image_folder_with_classes_of_ones_own(photos):
    ours = datasets.image_folder(photos, class_names=["cow", "ant"])
    labels = np.concatenate([y for _, y in batches(ours)])
    assert labels.tolist() == [0] * 3 + [1] * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"directory": "missing"}, "folder that can be read"),
        ({"class_names": ["ant", "fox"]}, "Received: fox, not below"),
        ({"color_mode": "blue"}, "Received: 'blue'"),
        ({"label_mode": "binary"}, "'int', 'categorical' or None"),
    ],
)
def test_mistakes_of_image_folders(photos, arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        datasets.image_folder(**{"directory": photos} | arguments)


def test_a_folder_without_images(tmp_path):
    (tmp_path / "ant").mkdir()
    with pytest.raises(ConfigurationError, match="must hold images"):
        datasets.image_folder(tmp_path)


@pytest.fixture
def records(tmp_path):
    for file, count in enumerate((3, 0, 4)):
        with tf.io.TFRecordWriter(str(tmp_path / f"{file}.tfrecord")) as out:
            for number in range(count):
                out.write(bytes([file, number]) * (number + 1))
    return str(tmp_path / "*.tfrecord")


def test_records_are_those_of_tensorflow(records, tmp_path):
    files = tf.data.TFRecordDataset(sorted(tf.io.gfile.glob(records)))
    expected = list(files.as_numpy_iterator())
    for _ in range(2):  # Without an index, and with one.
        found = RecordFiles(records)
        assert [found[n] for n in range(len(found))] == expected
        assert len(list(tmp_path.glob("*.index"))) == 3
    with pytest.raises(IndexError):
        found[7]
    lengths = datasets.indexed_records(records, tf.strings.length)
    assert np.concatenate(batches(lengths)).tolist() == [
        len(record) for record in expected
    ]


def test_an_index_is_written_once_and_again_for_another_file(
    records, tmp_path, monkeypatch
):
    RecordFiles(records)
    path = tmp_path / "0.tfrecord"
    with monkeypatch.context() as patched:
        scanned = "mgpu_tf.datasets.record_index._scanned"
        patched.setattr(scanned, lambda *_: pytest.fail("read again"))
        assert len(RecordFiles(records)) == 7
    with tf.io.TFRecordWriter(str(path)) as out:
        out.write(b"another")
    found = RecordFiles(records)
    assert (len(found), found[0]) == (5, b"another")
    path.with_suffix(".tfrecord.index").write_bytes(b"no index")
    assert len(RecordFiles(records)) == 5


def test_mistakes_of_records(records, tmp_path):
    with pytest.raises(ConfigurationError, match="which matches none"):
        RecordFiles(str(tmp_path / "*.none"))
    plain = tmp_path / "0.tfrecord"
    with open(plain, "rb") as file, gzip.open(tmp_path / "0.gz", "wb") as out:
        shutil.copyfileobj(file, out)
    os.truncate(plain, 50)
    for name in ("0.tfrecord", "0.gz"):
        with pytest.raises(ConfigurationError, match="whole TFRecord files"):
            RecordFiles(str(tmp_path / name))


def test_tfds_data_source(tmp_path):
    builder = Digits(data_dir=str(tmp_path), file_format="array_record")
    builder.download_and_prepare()
    source = builder.as_data_source("test")
    examples = mgpu_tf.RandomAccess(
        source, lambda row: (row["image"], row["label"])
    )
    found = batches(examples, 100, shuffle=True)
    labels = np.concatenate([y for _, y in found])
    assert sorted(labels) == sorted(int(row["label"]) for row in source)
    assert found[0][0].shape == (100, 8, 8, 1)
