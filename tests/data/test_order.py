"""What the graph of a dataset tells: the same pipeline, one order or not."""

import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from mgpu_tf.data.tf_data.order import order_of
from tests import clusters

REBUILDS = 40


def numbers():
    x = np.arange(24, dtype="float32").reshape(8, 3)
    return tf.data.Dataset.from_tensor_slices((x, np.arange(8)))


def two_maps():
    data = numbers().map(lambda x, y: (x / 255.0, y))
    return data.map(lambda x, y: (x, tf.one_hot(y, 8))).batch(2).prefetch(1)


def branching():
    """Many functions: branches, inner datasets, Python."""

    def several(x, y):
        inner = tf.data.Dataset.from_tensors((x, y)).repeat(2)
        return inner.map(lambda x, y: (x + 1.0, y))

    def either(x, y):
        return tf.cond(y > 3, lambda: x, lambda: -x), y

    data = numbers().map(either).interleave(several, cycle_length=2)
    data = data.filter(lambda x, y: y < 6).shuffle(4, seed=1)
    python = tf.data.Dataset.from_generator(
        lambda: iter(range(8)), output_signature=tf.TensorSpec((), tf.int64)
    )
    return tf.data.Dataset.zip((data, python)).batch(2)


PIPELINES = {
    "two_maps": two_maps,
    "branching": branching,
    "plain": lambda: numbers().batch(2),
    "other_batch": lambda: numbers().batch(4),
    "swapped": lambda: (
        numbers()
        .map(lambda x, y: (x, tf.one_hot(y, 8)))
        .map(lambda x, y: (x / 255.0, y))
        .batch(2)
        .prefetch(1)
    ),
    "other_constant": lambda: (
        numbers()
        .map(lambda x, y: (x / 127.0, y))
        .map(lambda x, y: (x, tf.one_hot(y, 8)))
        .batch(2)
        .prefetch(1)
    ),
    "other_order_of_results": lambda: (
        numbers().map(lambda x, y: (y, x)).batch(2)
    ),
    "same_order_of_results": lambda: (
        numbers().map(lambda x, y: (x, y)).batch(2)
    ),
    "other_data": lambda: numbers().skip(1).batch(2),
    "other_seed": lambda: numbers().shuffle(4, seed=2).batch(2),
    "seed": lambda: numbers().shuffle(4, seed=1).batch(2),
    "files": lambda: tf.data.TextLineDataset(["/a/part-0", "/a/part-1"]),
    "other_files": lambda: tf.data.TextLineDataset(["/a/part-1", "/a/part-0"]),
}


def fingerprints():
    return {
        name: order_of(make()).fingerprint for name, make in PIPELINES.items()
    }


@pytest.mark.parametrize("name", ["two_maps", "branching"])
def test_rebuilt_is_the_same(name):
    found = {order_of(PIPELINES[name]()).fingerprint for _ in range(REBUILDS)}
    assert len(found) == 1


def test_other_pipelines_differ():
    found = fingerprints()
    assert len(set(found.values())) == len(found), found


@pytest.mark.full
def test_processes_agree():
    code = (
        "import json; from tests.data.test_order import fingerprints;"
        "print(json.dumps(fingerprints()))"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=clusters.environment(PYTHONHASHSEED=seed),
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()[-1]
        for seed in ("1", "2")
    }
    assert len(printed) == 1


def test_folder_of_a_file_does_not_count():
    here, there = (
        tf.data.TextLineDataset([f"{folder}/part-0"]) for folder in "ab"
    )
    assert order_of(here).fingerprint == order_of(there).fingerprint


def of_row(x, y):
    return tf.random.stateless_uniform([], [1, tf.cast(y, tf.int32)]) > 0.5


def random_length(x, y):
    count = tf.random.uniform([], 0, 3, tf.int64)
    return tf.data.Dataset.from_tensors((x, y)).repeat(count)


def augmented(x, y):
    return x + tf.random.uniform([3]), y


def inner_augmented(x, y):
    return tf.data.Dataset.from_tensors((x, y)).map(augmented)


def options(**values):
    found = tf.data.Options()
    for name, value in values.items():
        setattr(found, name, value)
    return found


# What does not repeat, and what the line must hold.
UNREPEATABLE = {
    "shuffle": (lambda: numbers().shuffle(8), "shuffle(..., seed=1)"),
    "sample": (
        lambda: tf.data.Dataset.sample_from_datasets([numbers(), numbers()]),
        "sample_from_datasets",
    ),
    "map": (
        lambda: numbers().map(
            lambda x, y: (x, y), num_parallel_calls=2, deterministic=False
        ),
        "ParallelMap(deterministic=False)",
    ),
    "interleave": (
        lambda: numbers().interleave(
            inner_augmented, num_parallel_calls=2, deterministic=False
        ),
        "ParallelInterleave(deterministic=False)",
    ),
    "batch": (
        lambda: numbers().batch(2, num_parallel_calls=2, deterministic=False),
        "ParallelBatch(deterministic=False)",
    ),
    "filter": (
        lambda: numbers().filter(lambda x, y: tf.random.uniform([]) > 0.5),
        "filter that chooses rows",
    ),
    "filter_of_a_branch": (
        lambda: numbers().filter(
            lambda x, y: tf.cond(
                y > 3,
                lambda: tf.random.uniform([]) > 0.5,
                lambda: True,
            )
        ),
        "RandomUniform",
    ),
    "filter_of_drawn": (
        lambda: (
            numbers()
            .map(lambda x, y: (x, tf.random.uniform([])))
            .batch(2)
            .filter(lambda x, y: y[0] > 0.5)
        ),
        "filter that chooses rows",
    ),
    "take_while": (
        lambda: numbers().take_while(lambda x, y: tf.random.uniform([]) > 0.1),
        "take_while that chooses rows",
    ),
    "flat_map": (
        lambda: numbers().flat_map(random_length),
        "flat_map that chooses rows",
    ),
    "inner_shuffle": (
        lambda: numbers().interleave(
            lambda x, y: tf.data.Dataset.from_tensors((x, y)).shuffle(2)
        ),
        "shuffle(..., seed=1)",
    ),
    "rejection": (
        lambda: numbers().rejection_resample(
            lambda x, y: tf.cast(y % 2, tf.int32), [0.5, 0.5]
        ),
        "random choice",
    ),
}

REPEATABLE = {
    "seeded_shuffle": lambda: numbers().shuffle(8, seed=1),
    "seeded_sample": lambda: tf.data.Dataset.sample_from_datasets(
        [numbers(), numbers()], seed=1
    ),
    "stateless_filter": lambda: numbers().filter(of_row),
    "seeded_filter": lambda: numbers().filter(
        lambda x, y: tf.random.uniform([], seed=1) > 0.5
    ),
    "parallel": lambda: numbers().map(lambda x, y: (x, y), 2),
    # The order that training asks for overrides these options.
    "options": lambda: (
        numbers()
        .map(lambda x, y: (x, y), 2)
        .with_options(options(deterministic=False))
    ),
    "augmentation": lambda: numbers().map(augmented),
    "augmentation_of_batches": lambda: (
        numbers().batch(2).map(lambda x, y: (x + tf.random.normal([2, 3]), y))
    ),
    "augmentation_after_filter": lambda: (
        numbers().filter(lambda x, y: y > 2).map(augmented)
    ),
    "inner_augmentation": lambda: numbers().interleave(inner_augmented),
    "python": lambda: tf.data.Dataset.from_generator(
        lambda: iter(range(3)), output_signature=tf.TensorSpec((), tf.int64)
    ),
}


@pytest.fixture
def unseeded():
    """No seed from an earlier test, which would make all repeatable."""
    tf.random.set_seed(None)


@pytest.mark.parametrize("name", UNREPEATABLE)
def test_unrepeatable(name, unseeded):
    make, part = UNREPEATABLE[name]
    assert part in order_of(make()).unrepeatable


@pytest.mark.parametrize("name", REPEATABLE)
def test_repeatable(name, unseeded):
    assert order_of(REPEATABLE[name]()).unrepeatable == ""
