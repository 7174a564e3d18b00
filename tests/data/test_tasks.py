"""Tasks of keras-hub on raw text, against their own `fit` on one device."""

import functools
import itertools
import pathlib
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import mgpu_tf
from mgpu_tf import data
from mgpu_tf.strategies.replicas.topology import LocalReplicas
from tests import clusters
from tests.jobs import tasks
from tests.tiers import tiered

# A dataset of raw text, and arrays whose batches are padded.
WORKERS = ["dataset", "padded"]
DOCS = pathlib.Path(__file__).parents[2] / "docs" / "data.md"
# Keras keeps the matrices of LoRA in float32, whatever the model is in.
NEAR = dict.fromkeys(tasks.PROGRAMS, 1e-12) | {"low_rank": 1e-5}


@functools.cache
def reference(name):
    return tasks.observe(name, None)


def check(name, observed):
    expected = reference(name)
    assert observed.keys() == expected.keys()
    for part in ("history", "evaluation"):
        assert observed[part].keys() == expected[part].keys()
        for key, values in expected[part].items():
            np.testing.assert_allclose(
                observed[part][key], values, rtol=1e-6, err_msg=key
            )
    for part in ("before", "weights", "slots", "predictions"):
        assert len(observed[part]) == len(expected[part])
        for found, wanted in zip(observed[part], expected[part], strict=True):
            np.testing.assert_allclose(
                found, wanted, rtol=NEAR[name], atol=NEAR[name]
            )
    moved = [
        before != after
        for before, after in zip(
            observed["before"], observed["weights"], strict=True
        )
    ]
    assert moved == observed["trainable"]


ON = ["mirrored_x3", "one_device", "fsdp_x3"]
ON += ["data_2_fsdp_2", "data_2_tensor_2"]
FULL = [
    ("mirrored_x3", "lists"),
    ("mirrored_x3", "padded"),
    ("mirrored_x3", "low_rank"),
    ("mirrored_x3", "language_model"),
]


@pytest.mark.parametrize(
    ("column", "name"),
    tiered(list(itertools.product(ON, tasks.PROGRAMS)), [], FULL),
)
def test_raw_text(column, name, strategies):
    check(name, tasks.observe(name, strategies[column]))


@pytest.fixture(scope="module")
def of_workers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    return clusters.run_jobs(tasks, 2, str(folder), WORKERS)


@pytest.mark.full
@pytest.mark.parametrize("name", WORKERS)
def test_two_workers(name, of_workers):
    first, second = of_workers[name]
    assert first == second
    check(name, first)


class PipelineModel:
    """Of the name of keras-hub's, and from elsewhere."""

    def preprocess_samples(self, x):
        return x


def test_what_is_a_task():
    task = tasks.classifier()
    assert data.is_task(task)
    assert data.preprocess_of(task) == task.preprocess_samples
    task.preprocessor = None
    assert data.is_task(task)
    assert data.preprocess_of(task) is None
    assert not data.is_task(task.backbone)
    assert data.preprocess_of(task.backbone) is None
    assert data.preprocess_of(PipelineModel()) is None


def test_a_list_is_one_array():
    found = data.arrays_of((["a", "b"], {"n": [1.5, 2.0]}, None))
    assert found[0].numpy().tolist() == [b"a", b"b"]
    assert found[1]["n"].dtype == tf.float32
    assert found[2] is None


@pytest.fixture
def trainer(strategies):
    return mgpu_tf.Trainer(tasks.classifier, strategies["mirrored_x3"])


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            {"x": np.ones((4, 3)), "y": [0, 1, 2, 0]},
            "must take the data. Received: .*must have string dtype.*set "
            "preprocessor=None",
        ),
        ({"x": "a film", "y": [0]}, r"the text 'a film'. Pass \[text\]"),
        ({"x": ["a", 1], "y": [0, 1]}, "texts alone.*several inputs as a tup"),
        ({"x": ["a", "b"], "y": [0]}, "the same number of examples"),
        ({"x": ["a"], "y": [0], "shuffle": "batch"}, "shuffle='batch'"),
    ],
)
def test_data_that_it_cannot_preprocess(trainer, arguments, line):
    with pytest.raises(mgpu_tf.ConfigurationError, match=line) as error:
        trainer.fit(**arguments)
    assert "\n" not in str(error.value)


@pytest.mark.full
def test_single_batches(strategies):
    texts, labels = tasks.texts()[:7], tasks.labels()[:7].tolist()
    with tasks.float64():
        keras.utils.set_random_seed(0)
        own = tasks.classifier()
        trainer = mgpu_tf.Trainer(tasks.classifier, strategies["mirrored_x3"])
        for runner in (own, trainer):
            runner.train_on_batch(texts, np.array(labels))
        wanted = own.predict_on_batch(texts)
        found = trainer.predict_on_batch(texts)
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.full
def test_without_a_preprocessor(strategies):
    """The data is preprocessed already, and the model like any other."""
    preprocess = tasks.preprocessor()
    inputs, labels = preprocess(tasks.texts()), tasks.labels()
    weights = []
    for preprocessed, x in ((False, tasks.texts()), (True, inputs)):
        trainer = mgpu_tf.Trainer(
            lambda given=preprocessed: tasks.classifier(given),
            strategies["one_device"],
        )
        trainer.fit(x, labels, batch_size=8, shuffle=False, verbose=0)
        weights.append(trainer.model.get_weights())
    for first, second in zip(*weights, strict=True):
        np.testing.assert_array_equal(first, second)


def mapped(x, strategy, **options):
    source = data.as_source(x, strategy=strategy, **options)
    return data.PreprocessedSource(source, SEEN.preprocess, "task")


class Seen:
    """A preprocessor that needs whole batches, and notes them."""

    def __init__(self):
        self.sums = []

    def preprocess(self, x, y=None, sample_weight=None):
        total = tf.reduce_sum(x)
        [total] = tf.py_function(self._note, [total], [total.dtype])
        return x - tf.reshape(total, [])

    def _note(self, total):
        self.sums.append(int(total))
        return total


SEEN = Seen()


def test_batches_are_whole_and_none_is_preprocessed_for_nothing(strategies):
    strategy = strategies["mirrored_x3"]
    x = np.arange(10)
    for source in (
        mapped(x, strategy, batch_size=4),
        mapped(tf.data.Dataset.from_tensor_slices(x).batch(4), strategy),
    ):
        assert source.steps == 3
        local = LocalReplicas(0, 3, 3)
        rows = [
            (int(size), int(total), values.numpy().tolist())
            for values, size, total in source.pass_dataset(0, local)
        ]
        # The sums are 6, 22 and 17.
        assert rows[:4] == [
            (1, 4, [-6]),
            (1, 4, [-5]),
            (2, 4, [-4, -3]),
            (1, 4, [-18]),
        ]
        # A replica without a row computes another one.
        assert rows[6:] == [(0, 2, [-9]), (1, 2, [-9]), (1, 2, [-8])]
    source = mapped(x, strategy, batch_size=4)
    SEEN.sums.clear()
    rest = list(source.pass_from(0, local, 2))
    assert [v.numpy().tolist() for v, _, _ in rest] == [[-9], [-9], [-8]]
    assert SEEN.sums == [17]


def test_a_dataset_fn_is_preprocessed_by_replica(strategies):
    def batches(context):
        size = context.get_per_replica_batch_size(6)
        return tf.data.Dataset.range(4).batch(size)

    source = mapped(batches, strategies["mirrored_x3"])
    assert not source.totals_known
    local = LocalReplicas(0, 3, 3)
    found = [v.numpy().tolist() for v, _, _ in source.pass_dataset(0, local)]
    assert found == [[-1, 0], [-3, -2]]


@pytest.mark.full
def test_the_documents_example(tmp_path, monkeypatch):
    text = DOCS.read_text().partition("## Tasks of keras-hub")[2]
    [example] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    tasks.classifier().save_to_preset("my_bert")
    keras.utils.set_random_seed(1)
    known = {"texts": tasks.texts(), "labels": tasks.labels() % 2}
    exec(example, known)
    trainer = known["trainer"]
    assert known["scores"].shape == (2, 2)
    assert trainer.global_step == 2
    names = [v.path for v in trainer.model.trainable_variables]
    assert any("lora" in name for name in names)
