"""Whether a `tf.data.Dataset` comes in the same order each time it is made.

The graph of a dataset tells its random operations and their seeds, without
reading an element: an iterator would take an order that training was to have.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf
from google.protobuf import message

# As TensorFlow numbers what is done about the state of a dataset's functions.
_IGNORE_STATE = 1


@dataclasses.dataclass(frozen=True)
class Order:
    """What decides the order of a dataset.

    Attributes:
        operations: The operations of the pipeline, with the seeds of those
            that are random; empty where TensorFlow cannot tell.
        unseeded: Whether one of them draws its own seed.
    """

    operations: tuple[str, ...]
    unseeded: bool


def serialized(dataset: tf.data.Dataset) -> tf.Tensor:
    """Returns the graph of a dataset, a scalar string, of no device."""
    return tf.raw_ops.DatasetToGraphV2(
        input_dataset=tf.data.experimental.to_variant(dataset),
        external_state_policy=_IGNORE_STATE,
        strip_device_assignment=True,
    )


def order_of(dataset: tf.data.Dataset) -> Order:
    """Returns what decides the order of a dataset.

    Args:
        dataset: Any; one of Python functions tells nothing, and one above
            2 GB in memory does not either.

    Returns:
        Its operations and seeds.
    """
    try:
        graph = tf.compat.v1.GraphDef.FromString(serialized(dataset).numpy())
    except (tf.errors.OpError, message.DecodeError):
        return Order((), False)
    operations: list[str] = []
    unseeded = False
    for nodes in (graph.node, *(f.node_def for f in graph.library.function)):
        constants = {
            node.name: node.attr["value"].tensor
            for node in nodes
            if node.op == "Const"
        }
        for node in nodes:
            if "Dataset" not in node.op:
                continue
            seeds = _seeds(node, constants)
            operations.append(node.op + (str(seeds) if seeds else ""))
            unseeded |= seeds == (0, 0)
    return Order(tuple(operations), unseeded)


# Which inputs of an operation are its two seeds.
_SEEDS = {
    "ShuffleDataset": slice(2, 4),
    "ShuffleDatasetV2": slice(2, 4),
    "ShuffleDatasetV3": slice(2, 4),
    "ShuffleAndRepeatDataset": slice(2, 4),
    "ShuffleAndRepeatDatasetV2": slice(2, 4),
    "RandomDataset": slice(0, 2),
    "RandomDatasetV2": slice(0, 2),
}


def _seeds(
    node: tf.compat.v1.NodeDef, constants: dict[str, Any]
) -> tuple[int, ...]:
    """Returns the two seeds of a random operation, none of another one."""
    if node.op not in _SEEDS:
        return ()
    names = [name.partition(":")[0] for name in node.input[_SEEDS[node.op]]]
    if not all(name in constants for name in names):
        return ()
    return tuple(int(tf.make_ndarray(constants[name])) for name in names)
