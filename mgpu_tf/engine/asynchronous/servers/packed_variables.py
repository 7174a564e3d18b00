"""Small weights and gradients that cross the network together.

    server -> worker    a, b, c on one server: one tensor, taken apart there
    worker -> server    their gradients: the same

A message costs more processor time than copying some ten thousand numbers,
on both sides, and a small model is little else than messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.engine.asynchronous.servers.sections import whole
from mgpu_tf.engine.author.state import Writes

# A larger weight goes by itself: copying it would cost more than a message.
MOST_BYTES = 65_536


class Packs:
    """Which of some variables go together.

    Args:
        variables: Variables of a model.
        also: Those of them that `read` returns in any case.
    """

    def __init__(
        self,
        variables: Sequence[keras.Variable],
        also: Sequence[keras.Variable] = (),
    ) -> None:
        alike: dict[tuple[str, tf.DType], list[keras.Variable]] = {}
        for variable in variables:
            held = variable.value
            if held.shape.num_elements() * held.dtype.size <= MOST_BYTES:
                key = (held.device, held.dtype)
                alike.setdefault(key, []).append(variable)
        self._packs = [
            (device, dtype, members)
            for (device, dtype), members in alike.items()
            if len(members) > 1
        ]
        packed = {id(v) for *_, members in self._packs for v in members}
        self._alone = [v for v in also if id(v) not in packed]

    def groups(
        self, variables: Sequence[keras.Variable]
    ) -> dict[str, list[keras.Variable]]:
        """Returns by name which of some variables are updated as one.

        Args:
            variables: Some of those that were given at first, or others,
                each of which is then by itself.
        """
        names = {
            id(member): members[0].path
            for *_, members in self._packs
            for member in members
        }
        found: dict[str, list[keras.Variable]] = {}
        for variable in variables:
            name = names.get(id(variable), variable.path)
            found.setdefault(name, []).append(variable)
        return found

    def read(self) -> Writes:
        """Returns variables with their values, each as an update left it.

        On a worker.
        """
        found: Writes = []
        for device, _, members in self._packs:
            (pack,) = whole(
                members[0].path,
                device,
                lambda members=members: [
                    _together([variable.value for variable in members])
                ],
                [],
            )
            found += zip(members, _apart(pack, members), strict=True)
        for variable in self._alone:
            (value,) = whole(
                variable.path,
                variable.value.device,
                lambda variable=variable: [variable.value.read_value()],
                [],
            )
            found.append((variable, value))
        return found

    def sent(
        self, gradients: Sequence[Any], variables: Sequence[keras.Variable]
    ) -> list[Any]:
        """Returns gradients on the devices of their variables.

        Those of a pack are sent together.

        Args:
            gradients: One for each variable. On a worker.
            variables: Some of those that were given at first.
        """
        result = list(gradients)
        places = {id(v): place for place, v in enumerate(variables)}
        for device, dtype, members in self._packs:
            dense = [
                variable
                for variable in members
                if id(variable) in places
                and isinstance(gradients[places[id(variable)]], tf.Tensor)
                and gradients[places[id(variable)]].dtype == dtype
            ]
            if len(dense) < 2:
                continue
            pack = _together([gradients[places[id(v)]] for v in dense])
            with tf.device(device):
                parts = _apart(pack, dense)
            for variable, part in zip(dense, parts, strict=True):
                result[places[id(variable)]] = part
        return result


def _together(values: Sequence[Any]) -> tf.Tensor:
    return tf.concat([tf.reshape(value, [-1]) for value in values], 0)


def _apart(
    pack: tf.Tensor, variables: Sequence[keras.Variable]
) -> list[tf.Tensor]:
    shapes = [variable.value.shape for variable in variables]
    parts = tf.split(pack, [shape.num_elements() for shape in shapes])
    return [
        tf.reshape(part, shape)
        for part, shape in zip(parts, shapes, strict=True)
    ]
