"""Whether a `tf.data.Dataset` has the same order in every process.

    order = order_of(dataset)
    order.fingerprint     the same for the same pipeline, in any process
    order.unrepeatable    why the order does not repeat; "" if it repeats

The graph of a dataset has its operations, their seeds and their functions. It
is read without reading an element: an iterator would use up an order that the
training needs. Names of nodes and functions are generated, and functions come
in any order, so neither counts (`data.graph`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import tensorflow as tf
from google.protobuf import message

from mgpu_tf.data.tf_data.graph import Graph, Node

# TensorFlow's number for: ignore the state of a dataset's functions.
_IGNORE_STATE = 1


@dataclasses.dataclass(frozen=True)
class Order:
    """The order of a dataset.

    Attributes:
        fingerprint: The operations of the pipeline and a hash of its graph;
            empty if TensorFlow cannot serialize the graph.
        unrepeatable: Why the order differs between processes, and the remedy,
            as two sentences; empty if the order is the same.
    """

    fingerprint: str
    unrepeatable: str


def serialized(dataset: tf.data.Dataset) -> tf.Tensor:
    """Returns the graph of a dataset as a scalar string, without devices."""
    return tf.raw_ops.DatasetToGraphV2(
        input_dataset=tf.data.experimental.to_variant(dataset),
        external_state_policy=_IGNORE_STATE,
        strip_device_assignment=True,
    )


def anew(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a dataset whose first iteration is that of a new process.

    The iterations of a shuffled dataset share a generator of seeds, which
    goes on from one to the next. The copy has generators of its own.

    Args:
        dataset: Any dataset, read or not.

    Raises:
        tf.errors.OpError: TensorFlow cannot serialize its graph.
    """
    text = serialized(dataset).numpy()
    graph = tf.compat.v1.GraphDef.FromString(text)
    for node in graph.node:
        handles = node.attr["value"].tensor.resource_handle_val
        if any("SeedGenerator" in handle.name for handle in handles):
            name = node.name
            node.Clear()
            node.name, node.op = name, "DummySeedGenerator"
    variant = tf.raw_ops.DatasetFromGraph(graph_def=graph.SerializeToString())
    return tf.data.experimental.from_variant(variant, dataset.element_spec)


def order_of(dataset: tf.data.Dataset) -> Order:
    """Reads the order of a dataset from its graph.

    Args:
        dataset: Any dataset. The result is empty for a dataset with more than
            2 GB in memory.

    Returns:
        The fingerprint, and why the order does not repeat.
    """
    try:
        text = serialized(dataset).numpy()
        graph = Graph(tf.compat.v1.GraphDef.FromString(text))
    except (tf.errors.OpError, message.DecodeError):
        return Order("", "")
    operations = ", ".join(
        node.op + _described(node.seeds)
        for node in graph.nodes()
        if "Dataset" in node.op
    )
    reason = _search(graph, graph.body()).reason
    return Order(f"{operations} ({graph.fingerprint()})", reason)


def _described(seeds: tuple[int, ...]) -> str:
    return str(seeds) if seeds else ""


# Operations whose functions choose rows.
_DECIDERS = {
    "FilterDataset": "filter",
    "ParallelFilterDataset": "filter",
    "TakeWhileDataset": "take_while",
    "FlatMapDataset": "flat_map",
    "InterleaveDataset": "interleave",
    "ParallelInterleaveDataset": "interleave",
    "ParallelInterleaveDatasetV2": "interleave",
    "ParallelInterleaveDatasetV3": "interleave",
    "ParallelInterleaveDatasetV4": "interleave",
    "LegacyParallelInterleaveDatasetV2": "interleave",
    "GroupByWindowDataset": "group_by_window",
    "GroupByReducerDataset": "group_by_reducer",
}


@dataclasses.dataclass(frozen=True)
class _Found:
    """The randomness in a graph, or in the functions of an operation.

    Attributes:
        reason: Why rows do not repeat; empty if they repeat.
        drawn: The unseeded random operation that draws values, if any. It is
            harmless augmentation, unless rows are chosen by these values.
        chooses: The unseeded random operation that chooses rows, if any.
    """

    reason: str = ""
    drawn: str = ""
    chooses: str = ""


def _search(graph: Graph, nodes: list[Node]) -> _Found:
    """Looks through the nodes of a graph, inputs first."""
    drawn_of: dict[str, str] = {}
    for node in nodes:
        reason = _own_reason(node)
        if reason:
            return _Found(reason)
        within = _within(graph, node)
        if within.reason:
            return within
        upstream = _first(drawn_of.get(name, "") for name in node.inputs)
        chooses = upstream or within.chooses
        if node.op in _DECIDERS and chooses:
            return _Found(_of_decider(_DECIDERS[node.op], chooses))
        drawn_of[node.name] = upstream or within.drawn or drawn_by(node)
    return _Found(drawn=_first(drawn_of.values()))


def _within(graph: Graph, node: Node) -> _Found:
    """Looks through the functions of an operation.

    In a function that makes a dataset, random numbers of the function's own
    operations can choose rows. Random numbers of the dataset's maps cannot:
    they only augment values.
    """
    drawn, chooses = "", ""
    for name in node.functions:
        body = graph.body(name)
        found = _search(graph, body)
        if found.reason:
            return found
        own = [inner for inner in body if "Dataset" not in inner.op]
        drawn = drawn or found.drawn
        chooses = chooses or _search(graph, own).drawn
    return _Found(drawn=drawn, chooses=chooses)


def _first(texts: Iterable[str]) -> str:
    return next(filter(None, texts), "")


def _own_reason(node: Node) -> str:
    """Returns why an operation itself does not repeat; "" if it does."""
    if node.seeds == (0, 0):
        if node.op.startswith("Shuffle"):
            return (
                "a tf.data.Dataset with a shuffle that has no seed. Write "
                "shuffle(..., seed=1)."
            )
        return (
            "a tf.data.Dataset with a random choice that has no seed, as of "
            "sample_from_datasets or Dataset.random. Pass seed=1 to it."
        )
    if node.unordered:
        name = node.op.partition("Dataset")[0]
        return (
            f"a tf.data.Dataset with {name}(deterministic=False), whose order "
            "of elements depends on timing. Leave deterministic=False out."
        )
    return ""


def _of_decider(name: str, drawn: str) -> str:
    return (
        f"a tf.data.Dataset with a {name} that chooses rows by random numbers "
        f"without a seed ({drawn}). Draw them by tf.random.stateless_uniform "
        "with a seed of each row, such as its number from enumerate(), or put "
        "random augmentation after it."
    )


# Random operations that TensorFlow seeds by itself.
_DRAWING = {
    "RandomUniform",
    "RandomUniformInt",
    "RandomStandardNormal",
    "TruncatedNormal",
    "ParameterizedTruncatedNormal",
    "RandomShuffle",
    "RandomGamma",
    "RandomPoisson",
    "RandomPoissonV2",
    "Multinomial",
    "RandomCrop",
    "SampleDistortedBoundingBox",
    "SampleDistortedBoundingBoxV2",
}


def drawn_by(node: Node) -> str:
    """Returns the operation if it draws without a seed, else ""."""
    unseeded = node.op in _DRAWING and node.seed_attributes == (0, 0)
    return node.op if unseeded else ""
