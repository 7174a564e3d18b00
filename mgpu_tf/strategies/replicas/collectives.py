"""Sums and joins of tensors over groups of replicas, with their gradients.

    groups = Groups(strategy, [[0, 1], [2, 3]])      # every replica in one

    on a replica                     group of n, value of s bytes    gradient
    groups.all_reduce(x)             the sum, to each                all_reduce
    groups.all_gather(part, axis)    the parts in order, to each     the next
    groups.reduce_scatter(x, axis)   its part of the sum, to each    the one
                                                                     before
    groups.all_to_all(x, cut, join)  its part along one axis, to     the way
                                     each, joined along another      back

Part r of n has the elements from `length * r // n` to `length * (r + 1) // n`
of an axis. Members get the same bits, and the same bits again in each run.

A gradient here is that of the sum of the losses of all replicas. Where
replicas compute the same loss, each takes its share of it first.

Members on CPUs of one process copy tensors between its devices and sum in the
order of the group. All others use TensorFlow's collective operations, one for
each member: ring on CPUs, NCCL on GPUs, which TensorFlow takes where it is
named and nowhere else. TensorFlow has no reduce-scatter on CPUs; there it is an
all-to-all of parts, summed in the order of the group, with the same bytes:
(n - 1)/n of s.

    line = Line(strategy, devices)
    line.send(x, device, pair, number)                     # from one device
    x = line.receive(shape, dtype, device, pair, number)   # on another

All members call the same functions in the same order. NCCL begins them in that
order on each device, with what TensorFlow's strategy exchanges itself: two
processes that began two exchanges in different orders would wait for each other
for ever. For a member that is missing the others wait until
`strategies/peers.py` or TensorFlow's coordination service ends the collectives
of the cluster, or for `timeout_seconds`.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import tensorflow as tf

from mgpu_tf.errors import ConfigurationError
from mgpu_tf.strategies.replicas import tensorflow_internals, turns
from mgpu_tf.strategies.replicas.own_gradient import own_gradient
from mgpu_tf.strategies.replicas.tensorflow_internals import this_replica
from mgpu_tf.strategies.replicas.topology import synchronous_topology

# Groups of TensorFlow's own strategies have small numbers.
_FIRST_KEY = 1_000_000
# What values are sent as; see `carrier_of`.
_CARRIERS = (tf.float32, tf.float64, tf.float16, tf.int32, tf.int64)
# Arguments of sums that broadcasts do not have.
_OF_SUMS = ("ordering_token", "is_stateless")
# A prime, so that numbers of rows that are in use differ by no multiple of it.
_SHAPES = 8191


class Groups:
    """Groups of replicas that exchange tensors.

    Make the same groups in the same order in all processes, outside of
    replicas.

    Args:
        strategy: A `MirroredStrategy`, or one of several workers.
        members: The replicas of each group, by their number among all of the
            strategy, and in that order. Groups have one size, and each replica
            is in one.
        communication: `auto` is as above; `ring` uses TensorFlow's operations
            between CPUs of one process too, and no NCCL between GPUs.
        timeout_seconds: How long a member waits for the others. Default: as
            long as it takes. With a limit, TensorFlow makes a thread for each
            operation that it runs, and the thread sleeps until the limit,
            also after the operation has ended.
        beside: Whether a replica has several devices. Members then copy
            tensors, and each computes on the device of its own.

    Attributes:
        size: The members of a group.
        first: The first replica of this process.
        is_here: Whether the members of each group are in one process.
        calls: How often each replica of this process has called.

    Raises:
        ConfigurationError: A replica is in no group, or in two, or groups
            differ in size, or there is no NCCL between the devices.
    """

    _keys = itertools.count(start=_FIRST_KEY, step=10_000)
    _every: ClassVar[weakref.WeakSet[Groups]] = weakref.WeakSet()

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        members: Sequence[Sequence[int]],
        *,
        communication: str = "auto",
        timeout_seconds: float = 0.0,
        beside: bool = False,
    ) -> None:
        total = strategy.num_replicas_in_sync
        every = sorted(replica for group in members for replica in group)
        if every != list(range(total)) or len({len(g) for g in members}) != 1:
            raise ConfigurationError(
                "Groups must have one size and each replica once. Received: "
                f"{[list(group) for group in members]} for {total} replicas."
            )
        # TensorFlow's operations number the members by their devices.
        self._members = [sorted(group) for group in members]
        self.size = len(self._members[0])
        self._communication = communication
        self._timeout_seconds = timeout_seconds
        local = synchronous_topology(strategy).local
        self.first = local.first
        self._here = range(local.first, local.first + local.count)
        self._devices = strategy.extended.worker_devices
        self.is_here = all(
            group[0] // local.count == member // local.count
            for group in self._members
            for member in group
        )
        self._beside = beside
        self._has_nccl = not beside and has_nccl(self._devices, communication)
        self._copies = (
            communication == "auto" and self.is_here and not self._has_nccl
        )
        self._key = next(self._keys)
        self.calls = dict.fromkeys(self._here, 0)
        self._every.add(self)
        self._tokens: dict[int, tf.Variable] = {}
        if self._copies or self.size == 1:
            return
        sharing = strategy if self._has_nccl else None
        tokens = _tokens(sharing, self._devices).values()
        self._tokens = dict(zip(self._here, tokens, strict=True))

    @classmethod
    def counted(cls) -> Callable[[], None]:
        """Returns a function that forgets the calls from now on, of all groups.

        For a trace that is not kept. Some members may have called more often
        than others when it ended, and other processes may keep theirs.
        """
        before = [(groups, dict(groups.calls)) for groups in cls._every]

        def forget() -> None:
            for groups, calls in before:
                groups.calls = dict(calls)

        return forget

    def rank(self, replica: int | None = None) -> int:
        """Returns the place of a replica in its group. On a replica.

        Args:
            replica: Its number. Default: this one.
        """
        replica = this_replica() if replica is None else replica
        return self._group(replica).index(replica)

    def places(self, place: int) -> list[int]:
        """Returns the members of a group, by their places in this process.

        Args:
            place: The place of one of them.
        """
        group = self._group(self.first + place)
        return [member - self.first for member in group]

    def all_reduce(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the sum over the group. On a replica.

        Args:
            value: A tensor of the same shape on each member.
        """
        if self.size == 1:
            return tf.identity(value)

        @own_gradient
        def summed(value: tf.Tensor) -> Any:
            return self._all_reduce(value), self.all_reduce

        return summed(value)

    def all_gather(
        self, part: tf.Tensor, axis: int = 0, length: Any = None
    ) -> tf.Tensor:
        """Returns the parts of the group, one after another. On a replica.

        Args:
            part: The part of this member.
            axis: The axis along which parts lie.
            length: The length of the whole axis, an integer or a tensor.
                Default: that of a part times the members.
        """
        if self.size == 1:
            return tf.identity(part)
        axis %= part.shape.rank
        if length is None:
            length = _length(part, axis) * self.size

        @own_gradient
        def gathered(part: tf.Tensor) -> Any:
            whole = self._all_gather(part, axis, length)
            return whole, lambda up: self.reduce_scatter(
                tf.convert_to_tensor(up), axis
            )

        return gathered(part)

    def gather_rows(self, rows: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
        """Returns the rows of the group, in order, without a gradient.

        On a replica whose group is in several processes.

        Args:
            rows: The rows of this member, `[count, ...]`.
            counts: How many rows each member has, `[members]`.
        """
        counts = tf.cast(counts, tf.int32)
        longest = tf.reduce_max(counts)
        sent = _padded(rows, longest)
        every = self._gathered(sent)
        places = tf.range(self.size * longest)
        owner = places // longest
        held = places - owner * longest < tf.gather(counts, owner)
        return tf.boolean_mask(every, held)

    def reduce_scatter(
        self,
        value: tf.Tensor,
        axis: int = 0,
        dtype: tf.DType | None = None,
    ) -> tf.Tensor:
        """Returns this member's part of the sum over the group. On a replica.

        Args:
            value: A tensor of the same shape on each member.
            axis: The axis that is divided.
            dtype: The type in which members add up. Default: that of `value`,
                in which it is sent.
        """
        dtype = value.dtype if dtype is None else dtype
        if self.size == 1:
            return tf.cast(tf.identity(value), dtype)
        axis %= value.shape.rank
        length = _length(value, axis)

        @own_gradient
        def scattered(value: tf.Tensor) -> Any:
            part = self._reduce_scatter(value, axis, length, dtype)
            return part, lambda up: tf.cast(
                self.all_gather(up, axis, length), value.dtype
            )

        return scattered(value)

    def all_to_all(
        self, value: tf.Tensor, cut: int, join: int, length: Any
    ) -> tf.Tensor:
        """Returns this member's part of what all have. On a replica.

        A member has a part of one axis and all of another, and gets a part of
        the other and all of the one. It receives (n - 1)/n of `value`, where
        to gather first is n - 1 times it.

        Args:
            value: What this member has, its part of axis `join`.
            cut: The axis that is divided.
            join: The axis along which what the members have lies.
            length: The length of `join` with all parts, an integer or a tensor.
        """
        if self.size == 1:
            return tf.identity(value)
        cut, join = cut % value.shape.rank, join % value.shape.rank
        whole = _length(value, cut)

        @own_gradient
        def moved(value: tf.Tensor) -> Any:
            part = self._all_to_all(value, cut, join, (whole, length))
            return part, lambda up: self.all_to_all(
                tf.convert_to_tensor(up), join, cut, whole
            )

        return moved(value)

    def own_part(self, value: tf.Tensor, axis: int = 0) -> tf.Tensor:
        """Returns this member's part of a tensor. On a replica."""
        low, high = _bounds(_length(value, axis), self.rank(), self.size)
        return _slice(value, axis, low, high)

    def broadcast(
        self, value: tf.Tensor, root: int, shape: Sequence[int]
    ) -> tf.Tensor:
        """Returns the value of one member, to each. On a replica.

        Args:
            value: That of this member, read where it is the root.
            root: The place of the one that sends.
            shape: Of what it sends.
        """
        if self.size == 1:
            return tf.reshape(value, shape)
        carrier = _carrier(value.dtype, self._has_nccl)
        call = self._call(tf.zeros(shape, carrier))
        sent = None
        if self.rank() == root:
            sent = tf.cast(tf.reshape(value, shape), carrier)
        found = _from_one(sent, tf.constant(shape, tf.int32), carrier, call)
        return tf.cast(tf.ensure_shape(found, shape), value.dtype)

    # What a member sends and receives.

    def _all_reduce(self, value: tf.Tensor) -> tf.Tensor:
        if self._copies:
            return self._exchanged(value, self._sums)
        return tf.raw_ops.CollectiveReduceV2(
            input=value, merge_op="Add", final_op="Id", **self._call(value)
        )

    def _all_gather(self, part: tf.Tensor, axis: int, length: Any) -> tf.Tensor:
        if self._copies:
            return self._exchanged(part, lambda g: self._joins(g, axis))
        longest = -(-length // self.size)
        moved = _moved(part, axis, 0)
        sent = _padded(moved, longest)
        every = self._gathered(sent)
        if not _divides(length, self.size):
            chunks = [
                every[rank * longest : rank * longest + high - low]
                for rank in range(self.size)
                for low, high in [_bounds(length, rank, self.size)]
            ]
            every = tf.concat(chunks, 0)
        whole = _moved(every, 0, axis)
        shape = part.shape.as_list()
        shape[axis] = length if isinstance(length, int) else None
        return tf.ensure_shape(whole, shape)

    def _gathered(self, sent: tf.Tensor) -> tf.Tensor:
        """Returns what all members send, one after another."""
        if sent.dtype == tf.bfloat16:
            # TensorFlow's operation has none. Bits are sent as they are.
            bits = self._gathered(tf.bitcast(sent, tf.float16))
            return tf.bitcast(bits, tf.bfloat16)

        def gathered(sent: tf.Tensor) -> tf.Tensor:
            return tf.raw_ops.CollectiveGatherV2(input=sent, **self._call(sent))

        if _has_elements(sent):
            return gathered(sent)
        sizes = tf.unstack(tf.shape(sent))
        every = gathered(_not_empty(tf.reshape(sent, [-1])))
        every = tf.reshape(every, [self.size, -1])[:, : tf.size(sent)]
        every = tf.reshape(every, [self.size * sizes[0], *sizes[1:]])
        return tf.ensure_shape(every, [None, *sent.shape[1:]])

    def _dealt_chunks(self, chunks: tf.Tensor) -> tf.Tensor:
        """Returns the chunks for this member, of all members, `[members, ...]`.

        Args:
            chunks: What this member has for each, `[members, ...]`.
        """

        def dealt(chunks: tf.Tensor) -> tf.Tensor:
            return tf.raw_ops.CollectiveAllToAllV2(
                input=chunks, **self._call(chunks)
            )

        if _has_elements(chunks):
            return dealt(chunks)
        each = tf.size(chunks) // self.size
        sent = tf.reshape(chunks, [self.size, each])
        sent = tf.pad(sent, [[0, 0], [0, tf.maximum(1 - each, 0)]])
        received = tf.reshape(dealt(sent)[:, :each], tf.shape(chunks))
        return tf.ensure_shape(received, chunks.shape)

    def _all_to_all(
        self, value: tf.Tensor, cut: int, join: int, lengths: tuple[Any, Any]
    ) -> tf.Tensor:
        if self._copies:
            return self._exchanged(
                value,
                lambda group: self._dealt(group, cut, join, lengths[0]),
            )
        # Chunks of one size travel: each is as long as the longest.
        rank, (whole, length) = self.rank(), lengths
        most, longest = (-(-each // self.size) for each in lengths)
        moved = _moved(_moved(value, join, 0), cut + (join > cut), 0)
        pieces = [
            _padded(moved[low:high], most)
            for low, high in _every_bounds(whole, self.size)
        ]
        # [member, cut, join, ...]
        chunks = _padded(tf.stack(pieces), longest, 2)
        received = self._dealt_chunks(chunks)
        mine, after = _bounds(whole, rank, self.size)
        parts = [
            received[place, : after - mine, : high - low]
            for place, (low, high) in enumerate(
                _every_bounds(length, self.size)
            )
        ]
        # [cut, join, ...]
        joined = _moved(tf.concat(parts, 1), 0, cut + (join > cut))
        dealt = _moved(joined, 0, join)
        shape = value.shape.as_list()
        shape[cut] = after - mine if isinstance(whole, int) else None
        shape[join] = length if isinstance(length, int) else None
        return tf.ensure_shape(dealt, shape)

    def _reduce_scatter(
        self, value: tf.Tensor, axis: int, length: Any, dtype: tf.DType
    ) -> tf.Tensor:
        if self._copies:
            return self._exchanged(
                value,
                lambda group: self._summed_parts(group, axis, length, dtype),
            )
        longest = -(-length // self.size)
        sent = _moved(value, axis, 0)
        if not _divides(length, self.size):
            # Slices are no copies, so that there is one copy in all.
            pieces = []
            for rank in range(self.size):
                low, high = _bounds(length, rank, self.size)
                chunk = sent[low:high]
                pieces += [chunk, _missing(chunk, high - low, longest)]
            sent = tf.concat(pieces, 0)
        summed = self._summed_chunk(sent, dtype)
        low, high = _bounds(length, self.rank(), self.size)
        part = _moved(summed[: high - low], 0, axis)
        shape = value.shape.as_list()
        shape[axis] = high - low if isinstance(length, int) else None
        return tf.ensure_shape(part, shape)

    def _summed_chunk(self, chunks: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        """Returns the sum of this member's chunks, `[chunk, ...]`.

        Args:
            chunks: The chunks of all members, one after another.
            dtype: The type of the sum.
        """
        if self._has_nccl:
            chunks = tf.cast(chunks, dtype)
            return tf.raw_ops.CollectiveReduceScatterV2(
                input=chunks,
                merge_op="Add",
                final_op="Id",
                **self._call(chunks),
            )
        # On CPUs the operation above ends all collectives of the process.
        length, *rest = [_length(chunks, a) for a in range(chunks.shape.rank)]
        chunks = tf.reshape(chunks, [self.size, length // self.size, *rest])
        received = self._dealt_chunks(chunks)
        return tf.add_n(
            [tf.cast(each, dtype) for each in tf.unstack(received, self.size)]
        )

    def _call(self, value: tf.Tensor) -> dict[str, Any]:
        """Returns the arguments that each of TensorFlow's operations takes.

        Args:
            value: What is sent.
        """
        replica = this_replica()
        group = self._group(replica)
        if len(self._here) > 1:
            _trace_others_until_here()
        call = self.calls[replica]
        self.calls[replica] += 1
        return {
            "group_size": self.size,
            "group_key": self._key + self._members.index(group),
            # One for each operation of a graph, the same on all members.
            "instance_key": _instance(call, value),
            "ordering_token": [self._tokens[replica].handle],
            "communication_hint": "nccl"
            if self._has_nccl
            else self._communication,
            "timeout_seconds": self._timeout_seconds,
            "is_stateless": False,
        }

    # In one process, outside of replicas.

    def _exchanged(
        self,
        value: tf.Tensor,
        exchange: Callable[[dict[int, tf.Tensor]], dict[int, tf.Tensor]],
    ) -> tf.Tensor:
        """Lets the members of each group of this process exchange values."""

        def merged(strategy: tf.distribute.Strategy, value: Any) -> Any:
            values = strategy.experimental_local_results(value)
            held = dict(zip(self._here, values, strict=True))
            found: dict[int, tf.Tensor] = {}
            for group in self._members:
                if group[0] in held:
                    found |= exchange(
                        {member: held[member] for member in group}
                    )
            return strategy.experimental_distribute_values_from_function(
                lambda context: found[context.replica_id_in_sync_group]
            )

        return turns.merged(merged, [value])

    def _sums(self, group: dict[int, tf.Tensor]) -> dict[int, tf.Tensor]:
        first = next(iter(group))
        with tf.device(self._device(first, group)):
            total = tf.add_n(list(group.values()))
        found = {}
        for member in group:
            with tf.device(self._device(member, group)):
                found[member] = tf.identity(total)
        return found

    def _joins(
        self, group: dict[int, tf.Tensor], axis: int
    ) -> dict[int, tf.Tensor]:
        found = {}
        for member in group:
            with tf.device(self._device(member, group)):
                found[member] = tf.concat(list(group.values()), axis)
        return found

    def _summed_parts(
        self,
        group: dict[int, tf.Tensor],
        axis: int,
        length: Any,
        dtype: tf.DType,
    ) -> dict[int, tf.Tensor]:
        cut = {}
        for sender, value in group.items():
            with tf.device(self._device(sender, group)):
                cut[sender] = _parts(value, axis, length, self.size)
        found = {}
        for rank, member in enumerate(group):
            with tf.device(self._device(member, group)):
                found[member] = tf.add_n(
                    [tf.cast(parts[rank], dtype) for parts in cut.values()]
                )
        return found

    def _dealt(
        self, group: dict[int, tf.Tensor], cut: int, join: int, whole: Any
    ) -> dict[int, tf.Tensor]:
        pieces = {}
        for sender, value in group.items():
            with tf.device(self._device(sender, group)):
                pieces[sender] = _parts(value, cut, whole, self.size)
        found = {}
        for rank, member in enumerate(group):
            with tf.device(self._device(member, group)):
                found[member] = tf.concat(
                    [parts[rank] for parts in pieces.values()], join
                )
        return found

    def _device(self, replica: int, group: dict[int, tf.Tensor]) -> str:
        if self._beside:
            return group[replica].device
        return self._devices[replica - self.first]

    def _group(self, replica: int) -> list[int]:
        return next(group for group in self._members if replica in group)


class Line:
    """Sends between two devices of different processes, without gradients.

    Make it in the same order in all processes. Both sides of a message meet:
    it has been sent once it is received. So devices that begin their messages
    one after another, in an order that all derive from one list of all
    messages, do not wait for each other for ever.

    Args:
        strategy: As for `Groups`.
        devices: The devices of this process: those of the replicas of the
            strategy, and others beside them.
        communication: As for `Groups`.
    """

    # Those of `Groups` are below.
    _line_keys = itertools.count(start=500_000_000, step=1_000_000)

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        devices: Sequence[str],
        communication: str = "auto",
    ) -> None:
        nccl = has_nccl(devices, communication)
        self._communication = "nccl" if nccl else communication
        self._key = next(self._line_keys)
        self._tokens = _tokens(strategy, devices) if nccl else {}

    def send(
        self, value: tf.Tensor, device: str, pair: int, number: int
    ) -> tf.Tensor:
        """Sends a tensor; returns what is there once it has been received.

        Args:
            value: The tensor.
            device: The one that sends, of this process.
            pair: The number of the two devices, below a million and the same
                in all processes.
            number: Of the message, another for each between these two that is
                in one graph. Those of one number have the same sender.
        """
        carrier = _carrier(value.dtype, self._communication == "nccl")
        with tf.device(device):
            sent = tf.reshape(tf.cast(value, carrier), [-1])
            call = self._call(device, pair, number, carrier, tf.size(sent))
            sent = _not_empty(sent)
            return _from_one(sent, tf.shape(sent), carrier, call)

    def receive(
        self,
        shape: tf.Tensor,
        dtype: tf.DType,
        device: str,
        pair: int,
        number: int,
    ) -> tf.Tensor:
        """Returns a tensor that is sent.

        Args:
            shape: Its shape, `[rank]`, int32.
            dtype: Its type.
            device: The one that receives, of this process.
            pair: As for `send`.
            number: As for `send`.
        """
        carrier = _carrier(dtype, self._communication == "nccl")
        with tf.device(device):
            size = tf.reduce_prod(shape)
            call = self._call(device, pair, number, carrier, size)
            length = tf.maximum(size, 1)[tf.newaxis]
            found = _from_one(None, length, carrier, call)
            return tf.cast(tf.reshape(found[:size], shape), dtype)

    def _call(
        self,
        device: str,
        pair: int,
        number: int,
        dtype: tf.DType,
        size: tf.Tensor,
    ) -> dict[str, Any]:
        # TensorFlow remembers the type and the shape of a number.
        number = number * len(_CARRIERS) + _CARRIERS.index(dtype)
        return {
            "group_size": 2,
            "group_key": self._key + pair,
            "instance_key": number * _SHAPES + size % _SHAPES,
            "ordering_token": [
                token.handle
                for of, token in self._tokens.items()
                if of == device
            ],
            "communication_hint": self._communication,
            "timeout_seconds": 0.0,
            "is_stateless": False,
        }


def _has_elements(value: tf.Tensor) -> bool:
    """Whether it is known of a tensor that it has elements.

    One without does not arrive, or ends TensorFlow's process.
    """
    return bool(value.shape.num_elements())


def _not_empty(value: tf.Tensor) -> tf.Tensor:
    """Returns a vector, one zero where it has no element."""
    if _has_elements(value):
        return value
    missing = tf.maximum(1 - tf.size(value), 0)
    return tf.pad(value, [[0, missing]])


def _from_one(
    value: tf.Tensor | None,
    shape: tf.Tensor,
    dtype: tf.DType,
    call: dict[str, Any],
) -> tf.Tensor:
    """Returns what one member of a group sends, on each member.

    With NCCL it is a sum, in which the others have the number that changes no
    bit of a sum, minus zero. TensorFlow's NcclManager lets a receive write its
    memory while kernels before it still use that: only collectives that have
    an input wait for them.

    Args:
        value: What is sent; None where it is received.
        shape: Its shape.
        dtype: Its type.
        call: The arguments of a collective operation.
    """
    if call["communication_hint"] == "nccl":
        if value is None:
            value = tf.fill(shape, -tf.zeros([], dtype))
        return tf.raw_ops.CollectiveReduceV2(
            input=value, merge_op="Add", final_op="Id", **call
        )
    call = {k: v for k, v in call.items() if k not in _OF_SUMS}
    if value is None:
        return tf.raw_ops.CollectiveBcastRecvV2(T=dtype, shape=shape, **call)
    return tf.raw_ops.CollectiveBcastSendV2(input=value, **call)


def _carrier(dtype: tf.DType, by_nccl: bool) -> tf.DType:
    """Returns `carrier_of`; TensorFlow's GPU operations on int32 are few."""
    carrier = carrier_of(dtype)
    return tf.int64 if by_nccl and carrier == tf.int32 else carrier


def carrier_of(dtype: tf.DType) -> tf.DType:
    """Returns the type in which a value is sent to another process.

    Raises:
        ConfigurationError: No number that TensorFlow sends holds it.
    """
    if dtype == tf.bfloat16:
        return tf.float32
    if dtype in (tf.float16, tf.float32, tf.float64):
        return dtype
    if dtype == tf.bool or (dtype.is_integer and dtype.size <= 4):
        return tf.int64 if dtype == tf.uint32 else tf.int32
    if dtype.is_integer:
        return tf.int64
    if dtype == tf.string:
        raise ConfigurationError(
            "Processes send each other numbers. Received: text. Turn it into "
            "numbers in the data set, or by Keras's StringLookup or "
            "TextVectorization with output_sequence_length before it is sent."
        )
    raise ConfigurationError(
        "Processes send each other real numbers. Received: values of "
        f"{dtype.name}. Turn them into real numbers, such as by "
        "keras.ops.real and keras.ops.imag."
    )


def has_nccl(devices: Sequence[str], communication: str) -> bool:
    """Returns whether devices exchange tensors by NCCL.

    NCCL takes each GPU once: parts of one GPU copy, as CPUs do.

    Args:
        devices: The devices of this process.
        communication: As for `Groups`.

    Raises:
        ConfigurationError: NCCL is asked for, and there is none.
    """
    on_gpu = all("GPU" in device for device in devices)
    cards = len(tf.config.get_visible_devices("GPU"))
    can = on_gpu and len(devices) <= cards
    if communication == "nccl" and not can:
        raise ConfigurationError(
            "communication='nccl' works between GPUs only, each of them once. "
            f"Received: {', '.join(map(_short, devices))} on a machine with "
            f"{cards} GPUs. Use communication='auto'."
        )
    return can and communication != "ring"


def _tokens(
    sharing: tf.distribute.Strategy | None, devices: Sequence[str]
) -> dict[str, tf.Variable]:
    """Returns what orders operations on each device.

    Args:
        sharing: The strategy whose own operations are in the same order.
        devices: Of this process.
    """
    tokens: dict[str, tf.Variable] = {}
    if sharing is not None:
        owners = sharing.extended.worker_devices
        shared = tensorflow_internals.ordering_tokens(sharing)
        tokens = dict(zip(owners, shared, strict=True))
    for device in devices:
        if device not in tokens:
            with tf.init_scope(), tf.device(device):
                tokens[device] = tf.Variable(0.0, trainable=False)
    return {device: tokens[device] for device in devices}


def _short(device: str) -> str:
    return device.rpartition("device:")[2]


def _instance(call: int, value: tf.Tensor) -> Any:
    """Returns the number of an operation, another for each shape of a value.

    TensorFlow remembers the first shape of a number, and refuses others: such
    as those of the last batch of an epoch, which may have fewer rows.
    """
    shape = value.shape.as_list()
    unknown = [axis for axis, length in enumerate(shape) if length is None]
    number = call % (2**31 // _SHAPES - 1) * _SHAPES
    if not unknown:
        return number
    sizes = tf.gather(tf.shape(value, out_type=tf.int64), unknown)
    return number + tf.cast(tf.reduce_prod(sizes) % _SHAPES, tf.int32)


def _trace_others_until_here() -> None:
    """Lets the other replicas of this process be traced up to this point.

    TensorFlow runs operations that have effects in the order in which they
    were traced: checks, prints, Python functions. One of this replica that
    comes after a collective must not stand before one of another replica that
    comes before it: then each would wait for the other.
    """
    turns.merged(lambda strategy: None)


def _length(value: tf.Tensor, axis: int) -> Any:
    """Returns the length of an axis, a tensor where it is not known yet."""
    known = value.shape[axis]
    return tf.shape(value)[axis] if known is None else int(known)


def _bounds(length: Any, rank: int, size: int) -> tuple[Any, Any]:
    return length * rank // size, length * (rank + 1) // size


def _every_bounds(length: Any, size: int) -> list[tuple[Any, Any]]:
    return [_bounds(length, rank, size) for rank in range(size)]


def _parts(
    value: tf.Tensor, axis: int, length: Any, size: int
) -> list[tf.Tensor]:
    """Returns the parts of a tensor, cut by one operation where it can be."""
    if isinstance(length, int):
        every = _every_bounds(length, size)
        return tf.split(value, [high - low for low, high in every], axis)
    every = _every_bounds(_length(value, axis), size)
    return [_slice(value, axis, low, high) for low, high in every]


def _divides(length: Any, size: int) -> bool:
    """Whether parts of an axis are known to be of one length."""
    return isinstance(length, int) and length % size == 0


def _slice(value: tf.Tensor, axis: int, low: Any, high: Any) -> tf.Tensor:
    before = (slice(None),) * (axis % value.shape.rank)
    return value[(*before, slice(low, high))]


def _moved(value: tf.Tensor, source: int, target: int) -> tf.Tensor:
    """Returns a tensor with an axis moved to another place."""
    if source == target:
        return value
    order = [axis for axis in range(value.shape.rank) if axis != source]
    order.insert(target, source)
    return tf.transpose(value, order)


def _missing(value: tf.Tensor, length: Any, full: Any) -> tf.Tensor:
    """Returns the zeros that an axis of a tensor lacks up to a length."""
    rest = [_length(value, axis) for axis in range(1, value.shape.rank)]
    return tf.zeros([full - length, *rest], value.dtype)


def _padded(value: tf.Tensor, length: Any, axis: int = 0) -> tf.Tensor:
    """Returns a tensor with zeros at the end of an axis up to a length."""
    missing = length - _length(value, axis)
    if isinstance(missing, int) and missing == 0:
        return value
    pads = [[0, 0]] * value.shape.rank
    pads[axis] = [0, missing]
    return tf.pad(value, pads)
