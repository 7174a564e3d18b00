"""The graph of a dataset, without the names that TensorFlow generates.

    graph = Graph(graph_def)
    graph.fingerprint()       the same for the same pipeline
    for node in graph.nodes(): ...

A node is identified by its operation and its inputs, a function by what it
computes. The fingerprint does not depend on the order of functions, on the
names of functions and nodes, or on the numbers of Python functions and
resources.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

# Attributes that name objects of the process, or the device.
_NAMES = {"metadata", "token", "shared_name", "container", "config_proto"}

# The inputs of an operation that are its two seeds.
_SEEDS = {
    "ShuffleDataset": slice(2, 4),
    "ShuffleDatasetV2": slice(2, 4),
    "ShuffleDatasetV3": slice(2, 4),
    "ShuffleAndRepeatDataset": slice(2, 4),
    "ShuffleAndRepeatDatasetV2": slice(2, 4),
    "RandomDataset": slice(0, 2),
    "RandomDatasetV2": slice(0, 2),
}


@dataclasses.dataclass(frozen=True)
class Node:
    """An operation of a graph.

    Attributes:
        name: The name of the node in its graph.
        op: The type of the operation.
        inputs: The names of the input nodes, by position.
        functions: The names of the functions that the node calls.
        seeds: The two seeds of a random dataset; empty for other operations.
        definition: The definition of the node, as TensorFlow has it.
    """

    name: str
    op: str
    inputs: tuple[str, ...]
    functions: tuple[str, ...]
    seeds: tuple[int, ...]
    definition: Any

    @property
    def unordered(self) -> bool:
        """Returns whether the order of elements depends on timing."""
        attributes = self.definition.attr
        if "Dataset" not in self.op:
            return False
        return (
            attributes["deterministic"].s == b"false"
            if "deterministic" in attributes
            else "sloppy" in attributes and attributes["sloppy"].b
        )

    @property
    def seed_attributes(self) -> tuple[int, int]:
        """Returns the seeds among the attributes; 0 for a missing seed."""
        attributes = self.definition.attr
        names = ("seed", "seed2")
        first, second = (
            attributes[name].i if name in attributes else 0 for name in names
        )
        return int(first), int(second)


class Graph:
    """The graph of a dataset, and its functions.

    Args:
        definition: The serialized graph of TensorFlow.
    """

    def __init__(self, definition: tf.compat.v1.GraphDef) -> None:
        self._main = _sorted(definition.node)
        self._functions = {
            function.signature.name: function
            for function in definition.library.function
        }
        self._bodies = {
            name: _sorted(function.node_def)
            for name, function in self._functions.items()
        }
        self._hashes: dict[str, str] = {}

    def body(self, function: str | None = None) -> list[Node]:
        """Returns the nodes of a function, or of the graph, inputs first."""
        if function is None:
            return self._main
        return self._bodies.get(function, [])

    def nodes(self) -> Iterator[Node]:
        """Returns all nodes; those of a function follow its first caller."""
        seen: set[str] = set()

        def of(body: list[Node]) -> Iterator[Node]:
            for node in body:
                yield node
                for name in node.functions:
                    if name not in seen:
                        seen.add(name)
                        yield from of(self.body(name))

        return of(self._main)

    def fingerprint(self) -> str:
        """Returns a hash of what the graph computes."""
        hashes = self._hashes_of(self._main, {})
        ends = [hashes[n.name] for n in self._main if n.op == "_Retval"]
        return _hash(*sorted(ends))[:12]

    def _hash_of_function(self, name: str) -> str:
        """Returns a hash of what a function computes."""
        if name not in self._functions:
            return "unknown"
        if name not in self._hashes:
            # A function that calls itself ends here.
            self._hashes[name] = "itself"
            function = self._functions[name]
            signature = function.signature
            known = {
                argument.name: f"argument {position}"
                for position, argument in enumerate(signature.input_arg)
            }
            hashes = self._hashes_of(self._bodies[name], known)
            results = [
                _input(function.ret[result.name], hashes)
                for result in signature.output_arg
            ]
            effects = sorted(hashes[n] for n in function.control_ret.values())
            self._hashes[name] = _hash(*results, "then", *effects)
        return self._hashes[name]

    def _hashes_of(
        self, body: list[Node], known: dict[str, str]
    ) -> dict[str, str]:
        hashes = dict(known)
        for node in body:
            definition = node.definition
            data = [i for i in definition.input if not i.startswith("^")]
            after = [i for i in definition.input if i.startswith("^")]
            hashes[node.name] = _hash(
                node.op,
                *self._attributes(definition),
                "of",
                *(_input(name, hashes) for name in data),
                "after",
                *sorted(_input(name, hashes) for name in after),
            )
        return hashes

    def _attributes(self, definition: Any) -> Iterator[str]:
        for name in sorted(definition.attr):
            if name in _NAMES or name.startswith("_"):
                continue
            value = definition.attr[name]
            kind = value.WhichOneof("value")
            if kind == "tensor":
                yield _hash_of_tensor(value.tensor)
            elif kind == "func":
                yield self._hash_of_function(value.func.name)
            elif kind == "list" and value.list.func:
                for function in value.list.func:
                    yield self._hash_of_function(function.name)
            else:
                text = value.SerializeToString(deterministic=True)
                yield _hash(name, text)


def _sorted(definitions: Any) -> list[Node]:
    """Returns nodes, each after its inputs."""
    constants = {d.name: d for d in definitions if d.op == "Const"}
    nodes = {d.name: _node(d, constants) for d in definitions}
    # Start at the results of the graph, so that their inputs come first.
    starts = sorted(nodes, key=lambda name: nodes[name].op != "_Retval")
    done: dict[str, Node] = {}
    begun: set[str] = set()
    # Without recursion, since a graph may be deeper than Python's stack.
    for start in starts:
        stack = [start]
        while stack:
            name = stack[-1]
            begun.add(name)
            waits = [
                i
                for i in reversed(nodes[name].inputs)
                if i in nodes and i not in begun
            ]
            stack.extend(waits)
            if not waits:
                done.setdefault(name, nodes[name])
                stack.pop()
    return list(done.values())


def _node(definition: Any, constants: dict[str, Any]) -> Node:
    functions: list[str] = []
    for name in sorted(definition.attr):
        value = definition.attr[name]
        if value.WhichOneof("value") == "func":
            functions.append(value.func.name)
        functions.extend(f.name for f in value.list.func)
    inputs = tuple(
        i.removeprefix("^").partition(":")[0] for i in definition.input
    )
    seeds: tuple[int, ...] = ()
    names = inputs[_SEEDS.get(definition.op, slice(0, 0))]
    if all(name in constants for name in names):
        seeds = tuple(
            int(tf.make_ndarray(constants[name].attr["value"].tensor))
            for name in names
        )
    return Node(
        definition.name,
        definition.op,
        inputs,
        tuple(functions),
        seeds,
        definition,
    )


def _input(text: str, hashes: dict[str, str]) -> str:
    """Returns the hash of an input, with the number of its output."""
    name, _, output = text.removeprefix("^").partition(":")
    return f"{hashes.get(name, '')}:{output or '0'}"


def _hash_of_tensor(tensor: Any) -> str:
    """Returns a hash of a constant.

    Only the last part of a file's path counts, since workers may keep the same
    files in different folders. Handles are all equal.
    """
    kind = tf.as_dtype(tensor.dtype)
    if kind in (tf.resource, tf.variant):
        return "handle"
    if kind == tf.string:
        texts = tf.io.parse_tensor(tensor.SerializeToString(), tf.string)
        return _hash(*map(_without_folder, np.ravel(texts.numpy())))
    return _hash(tensor.SerializeToString(deterministic=True))


def _without_folder(text: bytes) -> bytes:
    """Returns the last part of a path; other texts are not changed."""
    return text if b" " in text else os.path.basename(text)


def _hash(*parts: str | bytes) -> str:
    found = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else part.encode()
        found.update(len(data).to_bytes(8, "little"))
        found.update(data)
    return found.hexdigest()
