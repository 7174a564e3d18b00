"""Rows and weights that cross the boundary of a call, and their gradients.

    on a replica            forward                        backward
    local_rows(x, cut)      its rows of a global tensor    all_rows
    all_rows(y, cut)        the rows of all, in order      local_rows
    shared(w)               the weight                     summed
    summed(g)               the sum over replicas          shared

Each is the gradient of the other, so that gradients of gradients are right too.
Outside of a call every replica computes the same, so what flows back through
`all_rows` is whole on each, and a replica takes its rows of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.exchange import composites
from mgpu_tf.engine.exchange.embedding_rows import RowGather
from mgpu_tf.engine.exchange.reduction import Reduction, of_shape
from mgpu_tf.engine.exchange.shared_rows import shared_once
from mgpu_tf.engine.trace_again import TraceAgain
from mgpu_tf.options import StepOptions
from mgpu_tf.strategies.replicas import turns
from mgpu_tf.strategies.replicas.collectives import Groups, carrier_of
from mgpu_tf.strategies.replicas.own_gradient import own_gradient
from mgpu_tf.strategies.replicas.tensorflow_internals import this_replica
from mgpu_tf.strategies.replicas.topology import LocalReplicas


class Cut:
    """How the rows of a global tensor are divided between replicas.

    All that is computed of it is computed once, where it is made: calls in
    inner graphs may be the first to ask.

    Args:
        counts: The rows of each replica, `[replicas]`, int64.
        replica: This replica.
        replicas: How many there are.

    Attributes:
        low: The first row of this replica, an int64 scalar.
        count: The number of its rows, the same.
        total: The number of all rows, the same.
    """

    def __init__(self, counts: tf.Tensor, replica: int, replicas: int) -> None:
        self.counts, self.replica, self.replicas = counts, replica, replicas
        self._none = tf.constant([0], tf.int64)
        self._one = tf.constant([1], tf.int64)
        own = tf.slice(counts, [replica], [1])
        until = tf.slice(counts, [0], [replica + 1])
        self._end = tf.reduce_sum(until, keepdims=True)
        self._begin = self._end - own
        self._own = own
        self.low = tf.reshape(self._begin, [])
        self.count = tf.reshape(own, [])
        self.total = tf.reduce_sum(counts)
        # The first row of all, where this replica has none.
        has_rows = own > 0
        self._first = tf.where(has_rows, self._begin, 0)
        self._after = tf.where(has_rows, self._end, 1)

    @classmethod
    def equal(cls, rows: tf.Tensor, replica: int, replicas: int) -> Cut:
        """Cuts a number of rows as the batches of a data set are cut."""
        bounds = rows * tf.range(replicas + 1, dtype=tf.int64) // replicas
        return cls(bounds[1:] - bounds[:-1], replica, replicas)

    def rows_of(self, value: tf.Tensor) -> tf.Tensor:
        """Returns this replica's rows of those of all."""
        return tf.strided_slice(value, self._begin, self._end, self._one)

    def rows_or_another(self, value: tf.Tensor) -> tf.Tensor:
        """Returns this replica's rows; another's first where it has none."""
        return tf.strided_slice(value, self._first, self._after, self._one)

    def without_another(self, rows: tf.Tensor) -> tf.Tensor:
        """Returns this replica's rows of what `rows_or_another` became."""
        return tf.strided_slice(rows, self._none, self._own, self._one)


# The name scope in which `tf.vectorized_map` and Jacobians trace their body.
_LOOP = "loop_body"


class ExchangedInLoop(RuntimeError):
    """Something was to be exchanged in a loop that TensorFlow vectorizes.

    It is no `ValueError`, which a Jacobian of TensorFlow's replaces.
    """


class Exchange:
    """Moves rows and gradients between the replicas of a strategy.

    Make it outside of replicas, in the same order in all processes.

    Args:
        strategy: A strategy whose replicas step together.
        local: Its replicas here. Those with the same rows are one.
        options: How gradients are sent.

    Attributes:
        replicas: How many replicas have rows of their own.
        is_needed: Whether something was to be exchanged where XLA compiles.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        local: LocalReplicas,
        options: StepOptions,
    ) -> None:
        self._compiled = self.is_needed = False
        self.replicas = local.ranges
        self._same_rows = local.same_rows
        members = [
            list(range(first, local.total, local.same_rows))
            for first in range(local.same_rows)
        ]
        self._groups = Groups(strategy, members)
        # Of replicas with the same rows one counts.
        groups = None if local.same_rows == 1 else self._groups
        self._reduction = Reduction(options, groups)
        self._gather = RowGather(
            strategy,
            options,
            apart=local.num_processes > 1,
            groups=groups,
        )

    def local_rows(self, value: tf.Tensor, cut: Cut) -> tf.Tensor:
        """Returns this replica's rows. On a replica.

        Args:
            value: `[rows, ...]`, the same on all replicas.
            cut: How rows are divided.
        """

        @own_gradient
        def taken(value: tf.Tensor) -> Any:
            rows = cut.rows_of(value)
            return rows, lambda up: self.all_rows(_dense(up), cut)

        return taken(value)

    def rows_to_call(self, value: tf.Tensor, cut: Cut) -> tf.Tensor:
        """Returns this replica's rows, to compute with. On a replica.

        As `local_rows`; where it has none, another's, to which nothing flows
        back.
        """

        @own_gradient
        def taken(value: tf.Tensor) -> Any:
            def backward(up: Any) -> tf.Tensor:
                return self.all_rows(cut.without_another(_dense(up)), cut)

            return cut.rows_or_another(value), backward

        return taken(value)

    def all_rows(self, rows: tf.Tensor, cut: Cut) -> tf.Tensor:
        """Returns the rows of all replicas, in order. On a replica.

        Args:
            rows: `[rows of this replica, ...]`.
            cut: How rows are divided.
        """

        @own_gradient
        def gathered(rows: tf.Tensor) -> Any:
            with self.apart():
                every = self._gathered(rows, cut)
            return every, lambda up: self.local_rows(_dense(up), cut)

        return gathered(rows)

    def joined(self, rows: tf.Tensor, cut: Cut) -> tf.Tensor:
        """Returns the rows of all, where replicas do not go on alike.

        As `all_rows`, but what flows back is summed over replicas.
        """

        @own_gradient
        def gathered(rows: tf.Tensor) -> Any:
            with self.apart():
                every = self._gathered(rows, cut)

            def backward(up: Any) -> tf.Tensor:
                with self.apart():
                    total = self._groups.all_reduce(_dense(up))
                return cut.rows_of(total)

            return every, backward

        every = gathered(rows)
        return tf.ensure_shape(every, [None, *rows.shape[1:]])

    def _gathered(self, rows: tf.Tensor, cut: Cut) -> tf.Tensor:
        if self._groups.is_here:
            return self._groups.all_gather(rows, 0, cut.total)
        carrier = carrier_of(rows.dtype)
        every = self._groups.gather_rows(tf.cast(rows, carrier), cut.counts)
        return tf.cast(every, rows.dtype)

    def cut(self, local: tf.Tensor) -> Cut:
        """Returns how rows are divided. On a replica.

        Args:
            local: How many rows this replica has.
        """
        with self.apart():
            counts = self._groups.all_gather(tf.reshape(local, [1]))
        place = this_replica() // self._same_rows
        return Cut(counts, place, self.replicas)

    def cuts(self, local: list[tf.Tensor]) -> list[Cut]:
        """Returns how the rows of several arrays are divided. On a replica.

        Args:
            local: How many rows of each this replica has.
        """
        with self.apart():
            counts = self._groups.all_gather(tf.stack(local)[tf.newaxis])
        place = this_replica() // self._same_rows
        return [
            Cut(each, place, self.replicas)
            for each in tf.unstack(counts, axis=1)
        ]

    def whole(
        self,
        values: Any,
        local: tf.Tensor,
        fraction: tf.Tensor,
        has_rows: Mapping[int, tuple[Any, bool]],
    ) -> Any:
        """Returns values of all rows, for what is added up over replicas.

        What is computed from them is the same on all replicas, and each adds
        its fraction of it. So what flows back is divided by the fraction.

        Args:
            values: A structure of tensors, whose first axis is that of the
                rows where the graph does not know its length, or where they
                are ragged or sparse. Without a graph it is where `has_rows`
                says so, and otherwise where the length is a multiple of the
                rows on all replicas.
            local: The number of rows of this replica, an int64 scalar.
            fraction: Its share of the rows, a float64 scalar.
            has_rows: Of tensors without a graph, by identity.
        """
        eager = tf.executing_eagerly()
        known = self._cuts_of(values, local, has_rows) if eager else {}

        def undivided(value: tf.Tensor) -> tf.Tensor:
            @own_gradient
            def same(value: tf.Tensor) -> Any:
                def backward(up: Any) -> Any:
                    part = tf.cast(fraction, up.dtype)
                    return tf.math.divide_no_nan(_dense(up), part)

                return tf.identity(value), backward

            return same(value) if value.dtype.is_floating else value

        def gathered(value: tf.Tensor, cut: Cut) -> tf.Tensor:
            return self.all_rows(undivided(value), cut)

        def every(value: Any) -> Any:
            if isinstance(value, composites.COMPOSITES):
                own = composites.own_rows(value, local)
                return composites.joined(own, self.cut, gathered)
            if not isinstance(value, tf.Tensor) or not value.shape.rank:
                return value
            # The graph does not know the number of rows.
            has_rows = id(value) in known if eager else value.shape[0] is None
            if not has_rows:
                return value
            own = composites.own_rows(value, local)
            cut = known[id(value)] if eager else self.cut_of(own)
            return keras_internals.carried(
                value,
                lambda each: gathered(composites.own_rows(each, local), cut),
            )

        return tf.nest.map_structure(
            lambda value: None if value is None else every(value), values
        )

    def cut_of(self, rows: tf.Tensor) -> Cut:
        """Returns how rows are divided, given those of this replica."""
        return self.cut(composites.number_of_rows(rows))

    def _cuts_of(
        self,
        values: Any,
        local: tf.Tensor,
        has_rows: Mapping[int, tuple[Any, bool]],
    ) -> dict[int, Cut]:
        """Returns how rows are divided, of the tensors that have rows.

        By the identity of the tensor. Replicas find the same ones.
        """
        leaves = [
            leaf
            for leaf in tf.nest.flatten(values)
            if isinstance(leaf, tf.Tensor) and leaf.shape.rank
        ]
        sizes = [
            composites.number_of_rows(composites.own_rows(leaf, local))
            for leaf in leaves
        ]
        rows, *cuts = self.cuts([local, *sizes])
        of_rows, total = rows.counts.numpy(), int(rows.total)

        def fits(cut: Cut) -> bool:
            alike = cut.counts.numpy() * total == int(cut.total) * of_rows
            return alike.all() and int(cut.total) % total == 0

        return {
            id(leaf): cut
            for leaf, cut in zip(leaves, cuts, strict=True)
            if has_rows.get(id(leaf), (leaf, fits(cut)))[1]
        }

    def shared(
        self, weights: list[tf.Tensor], is_alike: Callable[[Any], bool]
    ) -> list[tf.Tensor]:
        """Returns weights as a call reads them. On a replica.

        Args:
            weights: The weights.
            is_alike: Whether a tensor is the same on all replicas: the places
                that each of them looks up in a table, whatever its rows.
        """
        reached: set[int] = set()

        def marked(place: int, weight: tf.Tensor) -> tf.Tensor:
            @own_gradient
            def mark(weight: tf.Tensor) -> Any:
                def backward(up: Any) -> Any:
                    reached.add(place)
                    return up

                return weight, backward

            return mark(weight)

        @own_gradient
        def gate(*weights: tf.Tensor) -> Any:
            def backward(*upstream: Any) -> list[Any]:
                places = sorted(reached)
                reached.clear()
                found: list[Any] = [None] * len(upstream)
                given = [upstream[place] for place in places]
                summed = self._summed(given, weights, places, is_alike)
                for place, gradient in zip(places, summed, strict=True):
                    found[place] = gradient
                return found

            return list(weights), backward

        if not weights:
            return []
        return [marked(place, w) for place, w in enumerate(gate(*weights))]

    def _summed(
        self,
        gradients: list[Any],
        weights: Any,
        places: list[int],
        is_alike: Callable[[Any], bool],
    ) -> list[Any]:
        """Sums gradients over replicas; rows of tables are gathered."""
        sparse = [isinstance(g, tf.IndexedSlices) for g in gradients]
        dense = [
            of_shape(gradient, weights[place].shape)
            for gradient, place, rows in zip(
                gradients, places, sparse, strict=True
            )
            if not rows
        ]
        slices = [g for g, rows in zip(gradients, sparse, strict=True) if rows]
        sums = iter(self.summed(dense))
        gathered = iter(self._rows_of_all(slices, is_alike))
        return [next(gathered) if rows else next(sums) for rows in sparse]

    def summed(self, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns sums over replicas. On a replica."""

        @own_gradient
        def total(*gradients: tf.Tensor) -> Any:
            with self.apart():
                found = self._reduction(list(gradients))
            return found, lambda *up: self._again(list(map(_dense, up)))

        return list(total(*gradients)) if gradients else []

    def over_rows(self, value: tf.Tensor) -> tf.Tensor:
        """Returns a sum over the replicas with other rows. On a replica.

        Nothing flows back through it.
        """
        with self.apart():
            return self._groups.all_reduce(tf.stop_gradient(value))

    def _again(self, values: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns values whose gradients are sums over replicas."""

        @own_gradient
        def same(*values: tf.Tensor) -> Any:
            found = [tf.identity(value) for value in values]
            return found, lambda *up: self.summed(list(map(_dense, up)))

        return list(same(*values))

    def _rows_of_all(
        self, slices: list[Any], is_alike: Callable[[Any], bool]
    ) -> list[Any]:
        if not slices:
            return []
        replica = this_replica()
        slices = [
            shared_once(
                *(each, is_alike, self.over_rows),
                is_first=replica < self._same_rows,
            )
            for each in slices
        ]
        alike = [is_alike(each.indices) for each in slices]

        def merged(strategy: tf.distribute.Strategy, slices: Any) -> Any:
            return self._gather(slices, alike)

        with self.apart():
            return turns.merged(merged, [slices])

    @contextlib.contextmanager
    def within_xla(self) -> Iterator[None]:
        """Around what XLA compiles, which exchanges nothing.

        Raises:
            TraceAgain: Something was to be exchanged: XLA cannot compile it.
        """
        self._compiled = True
        try:
            yield
        finally:
            self._compiled = False

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Around an exchange: other replicas of this process have their turn.

        Raises:
            ExchangedInLoop: A loop would exchange something.
            TraceAgain: XLA would compile it.
        """
        if self._compiled:
            self.is_needed = True
            raise TraceAgain
        if _in_vectorized_loop():
            raise ExchangedInLoop(
                "Replicas exchange nothing within a Jacobian or another loop "
                "that TensorFlow vectorizes. Received: one that goes through "
                "a value of all replicas. Take it within a layer, or in a "
                "train_step of your own."
            )
        with turns.taken():
            yield


def _in_vectorized_loop() -> bool:
    """Whether TensorFlow traces the body of a loop that it will vectorize.

    What comes from other replicas counts there as the same in all iterations.
    """
    scope = tf.compat.v1.get_default_graph().get_name_scope()
    return any(part.startswith(_LOOP) for part in scope.split("/"))


def _dense(gradient: Any) -> tf.Tensor:
    return tf.convert_to_tensor(gradient)
