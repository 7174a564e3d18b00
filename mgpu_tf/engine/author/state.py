"""What a step writes besides weights: metrics, state of layers, seeds.

Two kinds of strategy, two ways to make the replicas' values one, each variable
by its rule (`rules.py`):

    a copy on each replica    metrics and moving statistics are written
                              locally, and combined at the end of an
                              execution, all in one reduction; what else
                              layers keep is made one in every step, since
                              the next step may read it. Between executions
                              replicas hold parts of a metric, whatever its
                              rule: their sum is what it holds
    one copy for all          the replicas' values are brought together before
                              they are written, in every step

Only what a step has written is touched: weights that are frozen stay as they
are, bit for bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.author.rules import (
    DECLARED,
    Rule,
    rule_of,
)
from mgpu_tf.engine.row_proof import FIXED, RowProof, as_fixed
from mgpu_tf.engine.trace_again import TraceAgain
from mgpu_tf.engine.untracked import seed_generators, untracked_variables
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.strategies.registry import kind_of
from mgpu_tf.strategies.replicas import turns
from mgpu_tf.strategies.replicas.own_gradient import sum_over_replicas
from mgpu_tf.strategies.replicas.tensorflow_internals import this_replica
from mgpu_tf.strategies.replicas.topology import LocalReplicas

Writes = list[tuple[keras.Variable, tf.Tensor]]

# A prime; Keras takes seeds modulo 2**31 - 2, which keeps multiples apart.
SEED_STRIDE = 1_181_783_497


class ReplicaState:
    """State of which every replica has a copy.

    Args:
        model: A built model.
        replicas: Number of replicas; those with the same rows are one.
        asynchronous: Whether several workers write when they like.
        same_rows: How many replicas have the same rows. The first of them
            has what adds up, the others have none of it.

    Attributes:
        metrics: The variables of the model's metrics.
        seeds: The states of random layers, and of unseeded draws.
        generator: Keras's generator of unseeded draws, where there is one.
        layers: The state of other layers; frozen weights are not among it.
        variables: All that a step may write, weights too.
        draws_alike: Whether replicas draw from the same seeds, each its rows;
            otherwise each has seeds of its own.
        stored_once: Whether there is one copy for all replicas.
        restored_alike: How many neighbours of them a checkpoint gives the
            same part of a metric.
        asynchronous: As given.
    """

    stored_once = False

    def __init__(
        self,
        model: keras.Model,
        replicas: int,
        *,
        asynchronous: bool = False,
        same_rows: int = 1,
    ) -> None:
        self._replicas = replicas
        self._same_rows = same_rows
        self._total = replicas * same_rows
        self.restored_alike = same_rows
        self.asynchronous = asynchronous
        self._several = replicas > 1 or asynchronous
        self.metrics = _unique(
            variable
            for metric in keras_internals.metrics_of(model)
            for variable in metric.variables
        )
        self.seeds = [each.state for each in seed_generators(model)]
        frozen = keras_internals.frozen_weights(model)
        self.layers = _unique(
            [
                *_without(
                    model.non_trainable_variables, [*self.seeds, *frozen]
                ),
                *keras_internals.row_states(model),
                *(
                    variable
                    for variable in _without(
                        untracked_variables(model), self.seeds
                    )
                    if isinstance(variable, keras.Variable)
                    and not variable.trainable
                ),
            ]
        )
        self.variables = _unique(
            [*model.variables, *self.seeds, *self.layers, *self.metrics]
        )
        self._of_metrics = {id(variable) for variable in self.metrics}
        known = _known_rules(model)
        self._moving = {id(v) for v in keras_internals.moving_statistics(model)}
        synchronized = keras_internals.synchronized_statistics(model)
        self._proven = (
            set(map(id, [*self.layers, *self.metrics]))
            - self._moving
            - set(map(id, synchronized))
        )
        # What an author declares holds where each step has a whole batch.
        self._declared = (
            known
            if asynchronous
            else {
                key: rule
                for key, rule in known.items()
                if key in self._of_metrics or key not in self._proven
            }
        )
        # Of the step that was traced last; each notes them for all it writes.
        self._rules: dict[int, Rule] = {}
        # The losses, metrics and models whose code does more than return
        # something, by identity.
        self.acting: set[int] = set()
        self._touched: dict[int, keras.Variable] = {}
        # Metrics that a step computes of the rows of all replicas: each
        # execution begins with what they hold together, `_entered` this one.
        self._begin_whole: set[int] = set()
        # Those that something else reads in a step than their update.
        self._read_whole: set[int] = set()
        self._entered: list[keras.Variable] = []
        self.generator: Any = None
        self.draws_alike = False

    @property
    def reads_rules(self) -> bool:
        """Whether the rule of some variable is read from the graph."""
        return self._several and any(
            id(variable) not in self._declared
            for variable in [*self.metrics, *self.layers]
        )

    def add_global_seed(
        self, strategy: tf.distribute.Strategy, *, create: bool = False
    ) -> None:
        """Counts Keras's generator of unseeded draws among the seeds.

        Args:
            strategy: The model's strategy.
            create: Whether to make it where nothing has drawn from it yet,
                since no variable can be made on a replica.
        """
        if create:
            with strategy.scope():
                keras_internals.global_seed_state(create=True)
        seed = keras_internals.global_seed_of(strategy)
        self.generator = keras_internals.global_seed_generator()
        if seed is not None and all(seed is not s for s in self.seeds):
            self.seeds.append(seed)
            self.variables = _unique([*self.variables, seed])
            self._declared[id(seed)] = Rule.AGREED

    def is_metric(self, variable: keras.Variable) -> bool:
        """Returns whether a variable belongs to a metric."""
        return id(variable) in self._of_metrics

    @property
    def averages(self) -> bool:
        """Whether state is averaged, or may be."""
        return any(self.rule(variable) is Rule.MEAN for variable in self.layers)

    def rule(self, variable: keras.Variable) -> Rule:
        """Returns by which rule replicas' values become one.

        Where it has not been read it is what Keras's own state of that kind
        does: metrics add up, moving statistics are means, counts agree.
        """
        key = id(variable)
        if key in self._read_whole:
            return Rule.AGREED
        known = self._rules.get(key, self._declared.get(key))
        if known is not None:
            return known
        if self.is_metric(variable):
            return Rule.SUM
        return Rule.MEAN if _is_float(variable) else Rule.AGREED

    def read_rule(
        self,
        variable: keras.Variable,
        written: tf.Tensor,
        before: tf.Tensor | None,
        proof: RowProof,
    ) -> Rule:
        """Returns the rule of a variable that a step writes. On a replica.

        Args:
            variable: The variable.
            written: What is written to it.
            before: What was there; None where it is not known.
            proof: Knows what is proven of values of the step.

        Raises:
            ConfigurationError: The replicas' values cannot become one.
        """
        if not self._several:
            return self.rule(variable)
        declared = self._declared.get(id(variable))
        if declared is not None and id(variable) not in self._read_whole:
            self._rules[id(variable)] = declared
            return declared
        found: Rule | None
        if self.asynchronous:
            found = rule_of(written, before, proof)
        else:
            alike = as_fixed(proof.of(written)) == FIXED
            # Of a metric each replica holds a part, and adds to it.
            split = self.is_split(variable) and not self.is_whole(variable)
            found = Rule.AGREED if alike and not split else None
        if found is None:
            raise ConfigurationError(
                "What a step makes of its rows is written to state in the "
                "call of a layer, where it can be proven how replicas bring "
                f"it together. Received: {variable.path}, which is written "
                "elsewhere. Write it in the call of the layer that made it, "
                "or of the model."
            )
        self._rules[id(variable)] = found
        return found

    def is_proven(self, variable: keras.Variable) -> bool:
        """Returns whether it is proven of calls what they write to it."""
        return id(variable) in self._proven

    def is_read(self, variable: keras.Variable) -> bool:
        """Returns whether its rule is read from a graph, as of a weight."""
        return id(variable) not in self._proven | self._declared.keys()

    def agree(self, variable: keras.Variable) -> None:
        """Notes that all replicas write the same to a variable."""
        self.follow(variable, Rule.AGREED)

    def follow(self, variable: keras.Variable, rule: Rule) -> None:
        """Notes by which rule what replicas write becomes one."""
        self._rules[id(variable)] = rule

    def keep_metrics_whole(self) -> None:
        """Lets all replicas hold what metrics hold, in all steps."""
        self._declared |= dict.fromkeys(self._of_metrics, Rule.AGREED)

    def is_whole(self, variable: keras.Variable) -> bool:
        """Whether all replicas hold what a metric holds, in all steps."""
        known = self._declared.get(id(variable))
        return known is Rule.AGREED or id(variable) in self._read_whole

    def read_whole(self, variable: keras.Variable) -> bool:
        """Lets all replicas hold what a metric holds, where a step reads it.

        Args:
            variable: Of the metric.

        Returns:
            Whether they do not do so in the trace at hand.
        """
        if not self._holds_parts or not self.is_split(variable):
            return False
        known = id(variable) in self._read_whole & self._begin_whole
        self._read_whole.add(id(variable))
        self._begin_whole.add(id(variable))
        return not known

    @property
    def reads_metrics(self) -> bool:
        """Whether steps read metrics elsewhere than in their updates."""
        return bool(self._read_whole)

    @property
    def _holds_parts(self) -> bool:
        """Whether replicas hold parts of metrics between executions."""
        one = self.stored_once or self.asynchronous or self._total == 1
        return not one and not tf.executing_eagerly()

    def is_split(self, variable: keras.Variable) -> bool:
        """Whether replicas hold parts of a metric between executions."""
        declared = self._declared.get(id(variable), Rule.SUM)
        return self.is_metric(variable) and declared is Rule.SUM

    def join_metrics(self) -> None:
        """Notes which metrics a step has computed of the rows of all replicas.

        Outside of replicas, once the steps of an execution are traced.

        Raises:
            TraceAgain: It is to begin with what replicas hold together.
        """
        found = {
            id(variable)
            for variable in self.metrics
            if self.is_split(variable) and self.rule(variable) is Rule.AGREED
        }
        if self._total > 1 and not found <= set(map(id, self._entered)):
            self._begin_whole |= found
            raise TraceAgain

    def values(self) -> Writes:
        """Returns variables whose rule is read, with what they hold.

        For a step: what is written is compared with these. On a replica.
        """
        if not self._several:
            return []
        return [
            (variable, tf.identity(variable.value))
            for variable in self._here([*self.metrics, *self.layers])
            if id(variable) not in self._declared
        ]

    def _here(self, variables: list[keras.Variable]) -> list[keras.Variable]:
        """Returns those of some variables that this process has."""
        return variables

    def metric_values(self, given: Writes) -> Writes:
        """Returns what other metrics hold than those given. On a replica."""
        return _others(self.metrics, given)

    def seed_offsets(self) -> Writes:
        """Returns what is added to each seed on this replica. On a replica."""
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        number = tf.cast(replica // self._same_rows, tf.int64) * SEED_STRIDE
        offset = tf.stack([number, tf.zeros([], tf.int64)])
        return [(state, tf.cast(offset, state.dtype)) for state in self.seeds]

    def replica_seeds(self) -> Writes:
        """Returns the seeds of this replica, for a step. On a replica.

        Random layers draw from (seed, count); the replica is added to the
        seed, so that masks differ between replicas while the state that is
        kept is one for all.
        """
        if self._replicas == 1 or self.draws_alike:
            return []
        context = tf.distribute.get_replica_context()
        replica = tf.cast(
            context.replica_id_in_sync_group // self._same_rows, tf.int64
        )
        offset = tf.stack([replica * SEED_STRIDE, tf.zeros([], tf.int64)])
        return [
            (state, state.value + tf.cast(offset, state.dtype))
            for state in self.seeds
        ]

    @contextlib.contextmanager
    def replica_seeds_in_place(self) -> Iterator[None]:
        """Gives random layers this replica's seeds, and takes them again."""
        if self.draws_alike:
            yield
            return
        seeds = self.replica_seeds()
        own = [tf.identity(state.value) for state, _ in seeds]
        self.write(seeds)
        yield
        self.write(
            [
                (state, tf.stack([before[0], state.value[1]]))
                for (state, _), before in zip(seeds, own, strict=True)
            ]
        )

    def next_seed(self, state: keras.Variable, drawn: tf.Tensor) -> tf.Tensor:
        """Returns the state after a step: the seed, and the new count."""
        if self.draws_alike:
            return drawn
        return tf.stack([state.value[0], drawn[1]])

    def write_in_place(self, variable: keras.Variable, value: Any) -> None:
        """Writes this replica's copy within a step, whatever scope is open."""
        self._touched[id(variable)] = variable
        _assign_here(variable, value)

    def write(self, writes: Writes) -> None:
        """Writes what a step on this replica gave. On a replica."""
        alone: Writes = []
        joined: Writes = []
        for variable, value in writes:
            self._touched[id(variable)] = variable
            if (
                self._adds_nothing()
                and self.is_metric(variable)
                and self.rule(variable) is Rule.SUM
            ):
                continue
            (joined if self._is_joined(variable) else alone).append(
                (variable, value)
            )
        for variable, value in [*alone, *self._joined(joined)]:
            _assign_here(variable, value)

    def _is_joined(self, variable: keras.Variable) -> bool:
        """Whether the values of replicas are made one in every step."""
        return (
            self._replicas > 1
            and not self.is_metric(variable)
            and id(variable) not in self._moving
            and self.rule(variable) is not Rule.AGREED
        )

    def _joined(self, writes: Writes) -> Writes:
        """Makes what replicas write one, in a reduction. On a replica."""
        if not writes:
            return []
        before = [tf.identity(variable.value) for variable, _ in writes]
        rules = [self.rule(variable) for variable, _ in writes]
        summed = self._sums_over_copies(
            [
                self._sent(rule, value, start)
                for rule, (_, value), start in zip(
                    rules, writes, before, strict=True
                )
            ]
        )
        return [
            (variable, self._received(rule, value, start))
            for (variable, _), rule, value, start in zip(
                writes, rules, summed, before, strict=True
            )
        ]

    def made_with(
        self,
        reset: dict[int, tf.Tensor],
        kept: dict[int, tf.Tensor],
        *,
        as_made: bool,
    ) -> Writes:
        """Returns what metrics begin at. Outside of replicas.

        A metric that nothing has reset yet holds its initial value on each
        replica, or a share of what its author has assigned by a reset.

        Args:
            reset: What a reset sets, by identity of the variable.
            kept: The same of metrics that were reset.
            as_made: Whether the others were not.
        """
        found = []
        for variable in self.metrics:
            held = variable.value
            value = reset.get(id(variable))
            copies = isinstance(held, tf.distribute.DistributedValues)
            if as_made and id(variable) not in kept and copies:
                own = tf.convert_to_tensor(held.values[0])
                shared = value is not None and bool(
                    tf.reduce_all(
                        own == tf.cast(value / self._total, own.dtype)
                    )
                )
                value = value if shared and np.any(own) else own
            if value is not None:
                found.append((variable, value))
        return found

    def begin_metrics_at(self, values: Writes, first: int) -> None:
        """Writes what metrics begin at. Outside of replicas.

        TensorFlow gives each replica a share of it, which is no whole number
        of a count, and not where a largest value begins.

        Args:
            values: Metric variables, with what their reset has set.
            first: The first replica of this process.
        """
        for variable, value in values:
            held = variable.value
            if not isinstance(held, tf.distribute.DistributedValues):
                continue
            for replica, copy in enumerate(held.values, first):
                here = self._counts(replica) or not self.is_split(variable)
                own = value if here else tf.zeros_like(value)
                copy.assign(tf.cast(own, copy.dtype))

    def begin(self) -> list[tf.Tensor]:
        """Begins an execution. On a replica.

        Returns:
            The state of layers, and of metrics that replicas hold together,
            as it is now, for `collect`.
        """
        self._touched = {}
        if self._total == 1:
            return []
        layers = [
            tf.identity(variable.value) for variable in self._here(self.layers)
        ]
        return [*layers, *self._enter()]

    def _enter(self) -> list[tf.Tensor]:
        """Gives each replica what all hold together of some metrics."""
        eager = tf.executing_eagerly()  # It is not traced again.
        self._entered = [
            variable
            for variable in self.metrics
            if id(variable) in self._begin_whole
            or (eager and self.is_split(variable))
        ]
        if not self._entered:
            return []
        whole = self._whole(self._entered)
        for variable, value in zip(self._entered, whole, strict=True):
            _assign_here(variable, value)
        return whole

    def leave(self, written: Iterable[keras.Variable]) -> None:
        """Leaves the parts of metrics that replicas have entered whole.

        On a replica, after a prediction has written the same on all.

        Args:
            written: What it wrote to.

        Raises:
            TraceAgain: It is to begin with what replicas hold together.
        """
        if self._total == 1:
            return
        split = {id(v) for v in written if self.is_split(v)}
        if not split <= set(map(id, self._entered)):
            self._begin_whole |= split
            raise TraceAgain
        if not self._counts(this_replica()):
            for variable in self._entered:
                _assign_here(variable, tf.zeros_like(variable.value))

    def _whole(self, variables: list[keras.Variable]) -> list[tf.Tensor]:
        """Returns what replicas hold together of metrics. On a replica."""
        held = [tf.identity(variable.value) for variable in variables]
        if not self._holds_part(this_replica()):
            held = list(map(tf.zeros_like, held))
        return self._sums_over_copies(held)

    def whole_metrics(self) -> list[tf.Tensor]:
        """Returns what metrics hold between executions. On a replica."""
        every, _ = self._known_to_all(self._whole(self.metrics), tf.zeros([1]))
        return [
            whole if self.is_split(variable) else tf.identity(variable.value)
            for variable, whole in zip(self.metrics, every, strict=True)
        ]

    def collect(
        self, notes: tf.Tensor, before: list[tf.Tensor]
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Makes the state that of all replicas. On a replica.

        Args:
            notes: Numbers of this replica's worker, `[notes]`.
            before: From `begin`.

        Returns:
            The metric variables' values over all replicas, and the means of
            the notes.
        """
        if self._total == 1:
            return [tf.identity(v.value) for v in self.metrics], notes
        stateful = self._here(self.layers)
        starts = zip(self._entered, before[len(stateful) :], strict=True)
        entered = {id(variable): start for variable, start in starts}
        metrics = [self._held(v, entered.get(id(v))) for v in self.metrics]
        layers = [
            (variable, start)
            for variable, start in zip(stateful, before, strict=False)
            if self._replicas > 1
            and id(variable) in self._touched
            and not self._is_joined(variable)
            and self.rule(variable) is not Rule.AGREED
        ]
        sent = [
            self._sent(self.rule(v), value, tf.zeros_like(value))
            for v, value in zip(self.metrics, metrics, strict=True)
        ]
        summed = self._sums(
            sent,
            [
                self._sent(self.rule(v), tf.identity(v.value), start)
                for v, start in layers
            ],
            notes,
        )
        for place, (variable, start) in enumerate(layers, len(metrics)):
            _assign_here(
                variable,
                self._received(self.rule(variable), summed[place], start),
            )
        together = [
            self._received(self.rule(v), value, tf.zeros_like(own))
            for v, value, own in zip(
                self.metrics, summed[: len(metrics)], metrics, strict=True
            )
        ]
        together, notes = self._known_to_all(together, summed[-1])
        for variable, own, value in zip(
            self.metrics, metrics, together, strict=True
        ):
            if self.rule(variable) is Rule.SUM:
                if id(variable) in entered:
                    _assign_here(variable, own)
            elif self.is_split(variable) and not self._counts(this_replica()):
                _assign_here(variable, tf.zeros_like(value))
            else:
                _assign_here(variable, value)
        return together, notes / self._total

    def _held(
        self, variable: keras.Variable, start: tf.Tensor | None
    ) -> tf.Tensor:
        """Returns what this replica holds of a metric.

        A part of it, where replicas add up what they hold: all have begun at
        `start`, if that is given.
        """
        value = tf.identity(variable.value)
        adds = self.rule(variable) is Rule.SUM
        if start is None or not adds or self._counts(this_replica()):
            return value
        # A beginning may be infinite.
        return tf.where(value == start, tf.zeros_like(value), value - start)

    def _holds_part(self, replica: int) -> bool:
        """Whether a replica has a part of metrics that no neighbour has."""
        return replica % self.restored_alike == 0

    def _counts(self, replica: int) -> bool:
        """Whether a replica holds what a metric begins at. Others add to it."""
        return replica == 0

    def _sums_over_copies(self, values: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns sums of what replicas with the same state send of it."""
        return sum_tensors(values, sum_over_replicas)

    def _known_to_all(
        self, metrics: list[tf.Tensor], notes: tf.Tensor
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Returns metrics and sums of notes where they are known in part.

        On a replica.
        """
        return metrics, notes

    def _sums(
        self,
        metrics: list[tf.Tensor],
        layers: list[tf.Tensor],
        notes: tf.Tensor,
    ) -> list[tf.Tensor]:
        """Returns the sums of what replicas send, in one list. On a replica."""
        return sum_tensors([*metrics, *layers, notes], sum_over_replicas)

    def _sent(
        self, rule: Rule, value: tf.Tensor, start: tf.Tensor
    ) -> tf.Tensor:
        """What a replica gives to the sum over replicas."""
        if rule is Rule.SUM and self._adds_nothing():
            return tf.zeros_like(value)
        if rule in (Rule.SUM, Rule.MEAN):
            return value - start
        context = tf.distribute.get_replica_context()
        place = context.replica_id_in_sync_group
        return row_among_zeros(value, place, self._total)

    def _received(
        self, rule: Rule, summed: tf.Tensor, start: tf.Tensor
    ) -> tf.Tensor:
        """What the sum over replicas makes of a variable."""
        if rule is Rule.SUM:
            return start + summed
        if rule is Rule.MEAN:
            return start + summed / self._total
        return rule.joined(start, tf.unstack(summed))

    def _adds_nothing(self) -> bool:
        """Whether another replica counts the rows of this one. On a replica."""
        if self._same_rows == 1:
            return False
        return this_replica() % self._same_rows > 0


class AgreedState(ReplicaState):
    """State of steps in which every replica computes the same.

    Only moving statistics, which layers take of the rows of their replica,
    are brought together.
    """

    def __init__(
        self, model: keras.Model, replicas: int, *, same_rows: int = 1
    ) -> None:
        super().__init__(model, replicas, same_rows=same_rows)
        self.keep_metrics_whole()

    def rule(self, variable: keras.Variable) -> Rule:
        """Returns by which rule replicas' values become one."""
        apart = id(variable) in self._moving
        return super().rule(variable) if apart else Rule.AGREED

    def held(self) -> Writes:
        """Returns what a step may write, with what it holds. On a replica."""
        every = _unique([*self.metrics, *self.layers, *self.seeds])
        return [(variable, tf.identity(variable.value)) for variable in every]


class SharedState(ReplicaState):
    """State with one copy for all replicas."""

    stored_once = True

    @contextlib.contextmanager
    def replica_seeds_in_place(self) -> Iterator[None]:
        """Does not change the seeds: replicas cannot have their own."""
        yield

    def write(self, writes: Writes) -> None:
        """Writes what the replicas gave, brought together. On a replica."""
        variables = [variable for variable, _ in writes]

        def write_once(
            strategy: tf.distribute.Strategy, values: list[tf.Tensor]
        ) -> None:
            for variable, value in zip(variables, values, strict=True):
                parts = strategy.experimental_local_results(value)
                before = tf.identity(variable.value)
                alike = self._replicas == 1
                rule = Rule.AGREED if alike else self.rule(variable)
                variable.assign(rule.joined(before, parts))

        turns.merged(write_once, [[v for _, v in writes]])

    def join_metrics(self) -> None:
        """Does nothing: no replica has parts of its own."""

    def leave(self, written: Iterable[keras.Variable]) -> None:
        """Does nothing, as `join_metrics`."""

    def begin(self) -> list[tf.Tensor]:
        """Begins an execution; nothing has to be known of it."""
        return []

    def collect(
        self, notes: tf.Tensor, before: list[tf.Tensor]
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Reads the state; it is already that of all replicas."""
        del before
        return [tf.identity(v.value) for v in self.metrics], notes


def state_for(
    model: keras.Model, strategy: tf.distribute.Strategy, local: LocalReplicas
) -> ReplicaState:
    """Returns the rule that fits how a strategy stores variables.

    Args:
        model: A built model.
        strategy: The strategy.
        local: Its replicas here, and how many have the same rows.
    """
    if kind_of(strategy).stored_once and local.total > 1:
        return SharedState(model, local.ranges, same_rows=local.same_rows)
    return ReplicaState(model, local.ranges, same_rows=local.same_rows)


def _known_rules(model: keras.Model) -> dict[int, Rule]:
    """Returns the rules that need not be read: declared ones, and Keras's."""
    rules = {
        id(variable): DECLARED[variable.aggregation]
        for variable in model.non_trainable_variables
        if variable.aggregation in DECLARED
    }
    for variable in keras_internals.moving_statistics(model):
        rules[id(variable)] = Rule.MEAN
    for variable in keras_internals.synchronized_statistics(model):
        rules[id(variable)] = Rule.AGREED
    for generator in seed_generators(model):
        rules[id(generator.state)] = Rule.AGREED
    for metric in keras_internals.single_metrics(model.metrics):
        for variable in metric.variables:
            declared = DECLARED.get(variable.aggregation)
            own = keras_internals.is_keras_own(
                metric
            ) and keras_internals.is_unpatched(metric, "update_state")
            if own or declared in (Rule.MEAN, Rule.FIRST):
                rules[id(variable)] = declared or Rule.SUM
    return rules


def _is_float(variable: keras.Variable) -> bool:
    return keras.backend.is_float_dtype(variable.dtype)


def _assign_here(variable: keras.Variable, value: tf.Tensor) -> None:
    """Writes this replica's copy of a variable, and no other. On a replica.

    TensorFlow brings the values of replicas together by itself where a
    variable has an `aggregation`.
    """
    held = variable.value
    if variable.aggregation not in DECLARED or not isinstance(
        held, tf.distribute.DistributedValues
    ):
        keras_internals.write_here(variable, tf.cast(value, variable.dtype))
        return
    context = tf.distribute.get_replica_context()
    copies = context.strategy.experimental_local_results(held)
    copies[this_replica() % len(copies)].assign(tf.cast(value, held.dtype))


def row_among_zeros(value: tf.Tensor, place: Any, count: int) -> tf.Tensor:
    """Returns `[count, ...]`, with a value, which may be infinite, at a place.

    Args:
        value: The value.
        place: Where it is.
        count: How many places there are.
    """
    mine = tf.one_hot(place, count, True, False, dtype=tf.bool)
    mine = tf.reshape(mine, [count, *[1] * value.shape.rank])
    return tf.where(mine, value, tf.zeros_like(value))


def sum_tensors(
    values: list[tf.Tensor], total: Callable[[tf.Tensor], tf.Tensor]
) -> list[tf.Tensor]:
    """Sums tensors over replicas with one reduction for each dtype.

    Args:
        values: Those of this replica.
        total: Returns the sum of a vector over replicas.
    """
    summed: list[tf.Tensor] = list(values)
    for dtype in sorted({v.dtype for v in values}, key=lambda d: d.name):
        places = [i for i, v in enumerate(values) if v.dtype == dtype]
        flat = tf.concat([tf.reshape(values[i], [-1]) for i in places], 0)
        flat = total(flat)
        sizes = [values[i].shape.num_elements() for i in places]
        for i, part in zip(places, tf.split(flat, sizes), strict=True):
            summed[i] = tf.reshape(part, values[i].shape)
    return summed


def _others(variables: list[keras.Variable], given: Writes) -> Writes:
    return [
        (variable, tf.identity(variable.value))
        for variable in _without(variables, [known for known, _ in given])
    ]


def _without(
    variables: Iterable[keras.Variable], others: Iterable[keras.Variable]
) -> list[keras.Variable]:
    left_out = {id(variable) for variable in others}
    return [v for v in variables if id(v) not in left_out]


def _unique(variables: Iterable[keras.Variable]) -> list[keras.Variable]:
    return list({id(variable): variable for variable in variables}.values())
