"""Sources that are read by number: image folders, TFRecord files, TFDS."""

import datetime
import decimal
import gzip
import os
import resource
import shutil
from concurrent import futures

import keras
import numpy as np
import pyarrow
import pytest
import tensorflow as tf
from pyarrow import parquet as files

import mgpu_tf
from mgpu_tf import data, datasets
from mgpu_tf.datasets.digits import Digits
from mgpu_tf.datasets.open_files import most_open
from mgpu_tf.datasets.parquet import ParquetRows
from mgpu_tf.datasets.record_index import RecordFiles
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.strategies.replicas.topology import LocalReplicas


def batches(examples, batch_size=4, shuffle=False):
    source = data.RandomAccessSource(examples, batch_size, shuffle, 0)
    dataset = source.pass_dataset(0, LocalReplicas(0, 1, 1))
    return [batch for batch, _, _ in dataset.as_numpy_iterator()]


def build():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


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


INTERPOLATIONS = [
    *("area", "bicubic", "bilinear", "gaussian"),
    *("lanczos3", "lanczos5", "mitchellcubic", "nearest"),
]


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_image_folder_interpolates_as_keras(photos, interpolation):
    """Of the photos, one has this size already."""
    options = {"image_size": (12, 12), "interpolation": interpolation}
    theirs = keras.utils.image_dataset_from_directory(
        photos, batch_size=4, shuffle=False, verbose=False, **options
    )
    ours = datasets.image_folder(photos, **options)
    for (one, _), (other, _) in zip(
        batches(ours), theirs.as_numpy_iterator(), strict=True
    ):
        np.testing.assert_allclose(one, other, atol=1e-4)


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
        ({"interpolation": "cubic"}, "nearest. Received: 'cubic'"),
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


@pytest.fixture(scope="module")
def reviews(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reviews")
    for number in range(7):
        name = folder / ("bad", "good")[number % 2]
        name.mkdir(exist_ok=True)
        text = f"number {number} " + "é " * number
        (name / f"{number}.txt").write_text(text, "utf-8")
    (folder / "bad" / "image.png").write_bytes(b"no text")
    return folder


@pytest.mark.parametrize(
    ("label_mode", "max_length"), [("int", None), ("categorical", 9), (None, 3)]
)
def test_text_folder_is_that_of_keras(reviews, label_mode, max_length):
    options = {"label_mode": label_mode, "max_length": max_length}
    theirs = keras.utils.text_dataset_from_directory(
        reviews, batch_size=4, shuffle=False, verbose=False, **options
    )
    ours = datasets.text_folder(reviews, **options)
    if label_mode:
        assert list(ours.class_names) == theirs.class_names
    for one, other in zip(
        batches(ours), theirs.as_numpy_iterator(), strict=True
    ):
        tf.nest.assert_same_structure(one, other)
        tf.nest.map_structure(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"label_mode": "binary"}, "'int', 'categorical' or None"),
        ({"max_length": 0}, "max_length must be"),
        ({"class_names": ["good", "new"]}, "Received: new, not below"),
    ],
)
def test_mistakes_of_text_folders(reviews, arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        datasets.text_folder(reviews, **arguments)


@pytest.fixture
def tables(tmp_path):
    """Twenty rows in two files, in groups of three rows."""
    for file in range(2):
        numbers = np.arange(10 * file, 10 * file + 10)
        table = pyarrow.table(
            {
                "number": numbers,
                "half": numbers.astype(np.float32) / 2,
                "text": [f"row {n}" for n in numbers],
                "pair": [[float(n), 1.0] for n in numbers],
            }
        )
        path = tmp_path / f"{file}.parquet"
        files.write_table(table, path, row_group_size=3)
    return str(tmp_path / "*.parquet")


def test_rows_of_parquet_files(tables):
    rows = ParquetRows(tables)
    assert len(rows) == 20
    assert rows[13]["text"] == "row 13"
    with pytest.raises(IndexError):
        rows[20]
    data = datasets.parquet(
        tables,
        lambda row: (row["half"], row["number"]),
        columns=["half", "number"],
    )
    found = batches(data, 8, shuffle=True)
    x, y = map(np.concatenate, zip(*found, strict=True))
    assert sorted(y) == list(range(20))
    np.testing.assert_array_equal(x, y / 2)
    [first, *_] = batches(datasets.parquet(tables), 3)
    assert first["pair"].tolist() == [[0, 1], [1, 1], [2, 1]]
    assert first["text"].tolist() == [b"row 0", b"row 1", b"row 2"]


def test_a_row_group_is_read_once_while_it_fits(tables):
    rows = ParquetRows(tables)
    for _ in range(2):
        rows.__getitems__([0, 18, 1, 17])
        rows.__getitems__([5, 0])
    assert rows.groups_read == 3
    rows = ParquetRows(tables, memory_bytes=0)
    rows.__getitems__([0, 1, 2])
    rows.__getitems__([2, 3])
    rows.__getitems__([3])
    assert rows.groups_read == 2
    rows.__getitems__([0])
    assert rows.groups_read == 3


def test_mistakes_of_parquet(tables, tmp_path):
    with pytest.raises(ConfigurationError, match="which matches none"):
        ParquetRows(str(tmp_path / "*.none"))
    with pytest.raises(ConfigurationError, match="Received: age, not in"):
        ParquetRows(tables, ["half", "age"])
    (tmp_path / "2.parquet").write_text("no table")
    with pytest.raises(ConfigurationError, match="Parquet files alone"):
        ParquetRows(tables)


@pytest.mark.parametrize("name", ["number", "text", "pair"])
def test_a_value_that_is_missing_is_named(name, tmp_path, tables, strategies):
    columns = {
        "number": [float(n) for n in range(10)],
        "text": list("abcdefghij"),
        "pair": [[1.0, 2.0]] * 10,
    }
    columns[name][7] = [1.0, None] if name == "pair" else None
    path = tmp_path / "2.parquet"
    files.write_table(pyarrow.table(columns), path, row_group_size=3)

    def parse(row):
        return row["pair"][:1], tf.cast(row["number"], "float32")[None]

    data = datasets.parquet(str(path), parse)
    trainer = mgpu_tf.Trainer(build, strategies["mirrored_x3"])
    with pytest.raises(
        ConfigurationError, match=rf"row 7 of '.*2.parquet', .* column '{name}'"
    ) as caught:
        trainer.fit(data, batch_size=4, verbose=0)
    assert "\n" not in str(caught.value)


def test_matrices_of_parquet(tmp_path):
    kind = pyarrow.list_(pyarrow.list_(pyarrow.float32()))
    rows = [[[1.0, 2.0, 3.0], [4.0, 5.0, number]] for number in range(5)]

    def written(values):
        path = tmp_path / "a.parquet"
        table = pyarrow.table({"x": pyarrow.array(values, kind)})
        files.write_table(table, path, row_group_size=2)
        return datasets.parquet(str(path), lambda row: row["x"])

    found = np.concatenate(batches(written(rows), 2))
    assert found.dtype == np.float32
    assert found.tolist() == rows
    rows[3] = [[1.0, 2.0, 3.0], [4.0, None, 0.0]]
    with pytest.raises(tf.errors.OpError, match=r"row 3 of .* column 'x'"):
        batches(written(rows), 2)
    rows[3] = [[1.0, 2.0, 3.0], [4.0]]
    with pytest.raises(tf.errors.OpError, match="rows of one length"):
        batches(written(rows), 2)


def test_tensors_of_parquet(tmp_path):
    values = np.arange(12.0).reshape(2, 2, 3)
    column = pyarrow.FixedShapeTensorArray.from_numpy_ndarray(values)
    path = str(tmp_path / "a.parquet")
    files.write_table(pyarrow.table({"x": column}), path)
    [found] = batches(datasets.parquet(path, lambda row: row["x"]))
    assert found.tolist() == values.tolist()


@pytest.mark.parametrize(
    "values",
    [
        [datetime.datetime(2020, 1, 1)],
        [decimal.Decimal("1.5")],
        [[datetime.date(2020, 1, 1)]],
        [{"day": datetime.date(2020, 1, 1), "number": 1}],
        [[{"number": 1}]],
    ],
    ids=["timestamp", "decimal", "list", "struct", "list of structs"],
)
def test_a_column_of_another_type_is_refused_by_name(values, tmp_path):
    path = str(tmp_path / "a.parquet")
    table = pyarrow.table({"number": [1], "other": values})
    files.write_table(table, path)
    line = rf"'{path}' with the column 'other' of .* columns without it"
    with pytest.raises(ConfigurationError, match=line):
        datasets.parquet(path)
    assert batches(datasets.parquet(path, columns=["number"]))


def test_a_value_of_another_type_is_refused():
    rows = mgpu_tf.RandomAccess([{"x": datetime.date(2020, 1, 1)}])
    with pytest.raises(ConfigurationError, match="Received: a date"):
        batches(rows)


def test_a_number_too_large_for_the_first_type_is_refused(tmp_path):
    for name, values, kind in (
        ("0", [1.0, np.inf], pyarrow.float32()),
        ("1", [0.1, 1e300], pyarrow.float64()),
    ):
        table = pyarrow.table({"x": pyarrow.array(values, kind)})
        files.write_table(table, tmp_path / f"{name}.parquet")
    data = datasets.parquet(str(tmp_path / "*.parquet"), lambda row: row["x"])
    with pytest.raises(tf.errors.OpError, match="float64 after float32"):
        batches(data, 2)


def test_a_column_without_any_value(tmp_path):
    path = tmp_path / "a.parquet"
    table = pyarrow.table(
        {"x": [1.0, 2.0], "none": pyarrow.array([None, None], pyarrow.int64())}
    )
    files.write_table(table, path)
    data = datasets.parquet(str(path), lambda row: row["x"])
    assert batches(data)[0].tolist() == [1.0, 2.0]


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


def test_an_index_of_other_records_is_found(records, tmp_path):
    """Also where size and time are those of the file that was indexed."""
    RecordFiles(records)
    path = tmp_path / "2.tfrecord"
    before = os.stat(path)

    def rewrite(lengths, seconds):
        with tf.io.TFRecordWriter(str(path)) as out:
            for length in lengths:
                out.write(b"x" * length)
        assert path.stat().st_size == before.st_size
        later = before.st_mtime_ns + seconds * 10**9
        os.utime(path, ns=(later, later))

    rewrite([5, 5, 5, 5], seconds=0)
    stale = RecordFiles(records)
    with pytest.raises(ConfigurationError, match="must not change"):
        stale[3]
    rewrite([2, 6, 4, 8], seconds=60)
    found = RecordFiles(records)
    assert [len(found[n]) for n in range(3, 7)] == [2, 6, 4, 8]
    # A copy with a time of its own has the same records.
    index = path.with_suffix(".tfrecord.index")
    written = index.stat().st_ino
    rewrite([2, 6, 4, 8], seconds=120)
    assert len(RecordFiles(records)) == 7
    assert index.stat().st_ino == written


def test_an_empty_file_that_was_copied_has_no_records(records, tmp_path):
    RecordFiles(records)
    os.utime(tmp_path / "1.tfrecord", ns=(1, 1))
    assert len(RecordFiles(records)) == 7


@pytest.fixture
def few_files():
    """Lets the process open fewer files than there are."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    now = max(map(int, os.listdir("/proc/self/fd")))
    # Earlier tests may have many open; a source takes a share of the limit.
    limit = 2 * now + 40
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limits[1]))
    yield limit
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_more_files_than_a_process_may_open(tmp_path, few_files):
    count = few_files + 50
    one = pyarrow.table({"number": [0, 1]})
    for file in range(count):
        with tf.io.TFRecordWriter(str(tmp_path / f"{file:04}.tfrecord")) as out:
            out.write(str(file).encode())
    for kind, ending in ((RecordFiles, "tfrecord"), (ParquetRows, "parquet")):
        if kind is ParquetRows:
            for file in range(count):
                files.write_table(one, tmp_path / f"{file:04}.parquet")
        before = len(os.listdir("/proc/self/fd"))
        rows = kind(str(tmp_path / f"*.{ending}"))
        with futures.ThreadPoolExecutor(8) as threads:
            read = list(threads.map(rows.__getitem__, range(len(rows))))
        # A record file has its index open as well.
        after = len(os.listdir("/proc/self/fd"))
        assert after - before <= 2 * most_open() + 2
        if kind is RecordFiles:
            assert read == [str(file).encode() for file in range(count)]
        else:
            assert read == [{"number": n} for n in (0, 1)] * count


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


def rows_of_grain(x, y):
    grain = pytest.importorskip("grain")
    return grain.MapDataset.source(list(zip(x, y, strict=True))).map(
        lambda row: {"value": row[0], "label": row[1]}
    )


def rows_of_hugging_face(x, y):
    package = pytest.importorskip("datasets")
    rows = package.Dataset.from_dict({"value": list(x), "label": list(y)})
    return rows.with_format("numpy")


@pytest.mark.full
@pytest.mark.parametrize("make", [rows_of_grain, rows_of_hugging_face])
def test_packages_whose_examples_have_numbers(make):
    """Each worker reads its rows of the order that one worker has."""
    x = np.random.default_rng(0).normal(size=(23, 3)).astype("float32")
    y = np.arange(23)
    examples = mgpu_tf.RandomAccess(
        make(x, y), map=lambda row: (2 * row["value"], row["label"])
    )
    assert len(examples) == 23
    source = data.RandomAccessSource(examples, 5, True, 7)

    def read(worker, workers):
        passes = source.pass_dataset(1, LocalReplicas(worker, 1, workers))
        return [batch for batch, _, _ in passes.as_numpy_iterator()]

    whole = read(0, 1)
    parts = [read(worker, 3) for worker in range(3)]
    order = np.concatenate([labels for _, labels in whole])
    assert sorted(order) == list(y) != list(order)
    for number, (values, labels) in enumerate(whole):
        np.testing.assert_array_equal(values, 2 * x[labels])
        for place, found in enumerate((values, labels)):
            joined = np.concatenate([part[number][place] for part in parts])
            np.testing.assert_array_equal(joined, found)


class OneBuffer:
    """A source that writes each example into the same array."""

    def __init__(self, length=20):
        self.buffer, self.length = np.zeros(2, "float32"), length

    def __len__(self):
        return self.length

    def __getitem__(self, number):
        self.buffer[:] = number, 1
        return self.buffer


class OneBufferOfMany(OneBuffer):
    """The same, of several examples."""

    def __getitems__(self, numbers):
        return [self[number] for number in numbers]


def test_an_array_that_is_written_over_is_read_in_time():
    found = np.concatenate(batches(mgpu_tf.RandomAccess(OneBuffer())))
    np.testing.assert_array_equal(found[:, 0], np.arange(20))
    assert found[:, 0].sum() == 190
    with pytest.raises(ConfigurationError, match="array that is written over"):
        batches(mgpu_tf.RandomAccess(OneBufferOfMany()))


def test_constant_rows_are_no_buffer():
    rows = [(np.float32(i), np.ones(2)) for i in range(2)] * 3
    assert len(batches(mgpu_tf.RandomAccess(rows), 6)) == 1


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([1, 2, 2.5, 3], "float32 after int64"),
        ([True, True, 2], "int64 after bool"),
        ([np.int8(1), np.int8(2), np.int64(300)], "int64 after int8"),
        ([1.5, 2.5, 1 + 2j], "complex128 after float32"),
        (["a", "b", 1], "int64 after text"),
        ([1, 2, "b"], "text after int64"),
    ],
)
def test_a_value_that_would_change_is_refused(rows, told):
    with pytest.raises(tf.errors.InvalidArgumentError, match=told):
        batches(mgpu_tf.RandomAccess(rows))


def test_values_that_stay_the_same_are_taken():
    rows = [np.int64(1), np.int64(2), np.int8(3), np.uint8(200)]
    (found,) = batches(mgpu_tf.RandomAccess(rows))
    assert found.tolist() == [1, 2, 3, 200]
    (found,) = batches(mgpu_tf.RandomAccess([1.5, 2, np.float64(3)]))
    assert found.tolist() == [1.5, 2.0, 3.0]


@pytest.mark.parametrize(
    "names", [["ant", "ant"], "ant", 3, ["ant", None], ["ant", "dog"]]
)
def test_class_names_that_are_none(names, photos):
    with pytest.raises(ConfigurationError, match="class_names must"):
        datasets.image_folder(photos, class_names=names)


@pytest.mark.parametrize(
    "size", [0, 8, (8,), (0, 8), (8, 8, 3), ("8", "8"), (8.5, 8), None]
)
def test_image_sizes_that_are_none(size, photos):
    with pytest.raises(ConfigurationError, match="image_size must be"):
        datasets.image_folder(photos, image_size=size)


def test_a_pipe_among_images_is_named(tmp_path):
    (tmp_path / "ant").mkdir()
    os.mkfifo(tmp_path / "ant" / "a.png")
    with pytest.raises(ConfigurationError, match=r"a\.png.*Not a regular file"):
        datasets.image_folder(tmp_path)


def test_an_image_that_cannot_be_decoded_is_named(photos, tmp_path, strategies):
    folder = tmp_path / "photos"
    shutil.copytree(photos, folder)
    (folder / "bee" / "1.png").write_bytes(b"\x89PNG\r\n\x1a\nbroken")
    trainer = mgpu_tf.Trainer(classifier, strategies["one_device"])
    images = datasets.image_folder(folder, image_size=(8, 8))
    with pytest.raises(ConfigurationError, match=r"bee/1\.png") as error:
        trainer.fit(images, batch_size=3, verbose=0)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("kind", ["truncated", "corrupted"])
@pytest.mark.parametrize("name", ["one_device", "mirrored_x3"])
def test_records_that_are_damaged(name, kind, strategies, tmp_path):
    path = tmp_path / "a.tfrecord"
    with tf.io.TFRecordWriter(str(path)) as writer:
        for number in range(20):
            writer.write(np.full(2, number, "float32").tobytes())
    content = bytearray(path.read_bytes())
    if kind == "truncated":
        del content[-7:]
    else:
        content[200] ^= 255
    path.write_bytes(content)

    def parse(record):
        values = tf.io.decode_raw(record, "float32")
        return values[:1], values[1:]

    trainer = mgpu_tf.Trainer(build, strategies[name])
    data = datasets.records(str(path), parse, batch_size=8)
    with pytest.raises(
        ConfigurationError, match=rf"Received: {kind} record at \d+[^.]*\. Wr"
    ) as caught:
        trainer.fit(data, verbose=0)
    assert "\n" not in str(caught.value)


def classifier():
    model = keras.Sequential(
        [keras.Input((8, 8, 3)), keras.layers.Flatten(), keras.layers.Dense(3)]
    )
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(True))
    return model


@pytest.mark.parametrize("compression", ["LZ4", "gzip", None, 3])
def test_compressions_that_are_none(compression, tmp_path):
    with pytest.raises(ConfigurationError, match="ompression"):
        datasets.records(
            str(tmp_path / "*"),
            tf.identity,
            batch_size=2,
            compression=compression,
        )


INDEXES = {
    "empty": b"",
    "no array": b"\x93NUMPY",
    "text": b"[[1, 2]]",
    "pickled": np.array([{}], object),
    "floats": np.zeros((3, 2)),
    "one column": np.zeros((3, 1), np.int64),
    "no rows": np.zeros((0, 2), np.int64),
    "beyond the end": "shifted",
    "negative": "negative",
    "fewer": "fewer",
}


@pytest.mark.parametrize("kind", INDEXES)
def test_an_index_that_is_damaged_is_made_anew(kind, tmp_path):
    path = tmp_path / "a.tfrecord"
    with tf.io.TFRecordWriter(str(path)) as writer:
        for number in range(4):
            writer.write(b"%d" % number * 10)
    expected = list(RecordFiles(str(path)))
    index = f"{path}.index"
    table = np.load(index).copy()
    damage = INDEXES[kind]
    if isinstance(damage, bytes):
        with open(index, "wb") as file:
            file.write(damage)
    else:
        if isinstance(damage, np.ndarray):
            table = damage
        elif kind == "fewer":
            table = table[:-1]
        else:
            table[2:] *= -1 if kind == "negative" else 1000
        np.save(index, table, allow_pickle=True)
        os.replace(f"{index}.npy", index)
    found = list(RecordFiles(str(path)))
    assert [bytes(one) for one in found] == [bytes(one) for one in expected]


def test_records_that_are_cut_while_they_are_read(tmp_path):
    path = tmp_path / "a.tfrecord"
    with tf.io.TFRecordWriter(str(path)) as writer:
        writer.write(b"a" * 100)
    source = RecordFiles(str(path))
    os.truncate(path, 50)
    with pytest.raises(ConfigurationError, match=r"no record of 100 bytes"):
        source[0]


def test_a_page_of_parquet_that_is_damaged_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"x": np.random.default_rng(0).normal(size=1000)})
    files.write_table(table, path, compression="gzip")
    data = bytearray(path.read_bytes())
    data[100:400] = bytes(300)
    path.write_bytes(data)
    with pytest.raises(ConfigurationError, match=r"a\.parquet.*row group 0"):
        ParquetRows(str(path))[0]
