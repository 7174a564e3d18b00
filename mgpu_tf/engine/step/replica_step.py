"""One replica's part of a step: forward pass, loss contribution, gradients.

The forward pass runs in a `keras.StatelessScope`: what layers and metrics
would write is collected, and the engine decides where it goes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.data import structures
from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.author.contributions import BatchShare, sharing
from mgpu_tf.engine.author.rules import Rule, rule_of_part, sent_of_part
from mgpu_tf.engine.author.state import ReplicaState, Writes
from mgpu_tf.engine.author.step_scope import (
    Part,
    StepScope,
    is_alike,
    leaves_of,
    proof_of,
)
from mgpu_tf.engine.author.written import by_rule
from mgpu_tf.engine.exchange.composites import without_another
from mgpu_tf.engine.exchange.crossing import Exchange
from mgpu_tf.engine.exchange.shared_rows import (
    lookups_of,
    refuse_mixed,
    shared_once,
)
from mgpu_tf.engine.logs import flat_logs
from mgpu_tf.engine.random_rows import (
    DrawnRows,
    RowScope,
    entered_again,
    rows_of_global_draws,
    seed_for_rows,
)
from mgpu_tf.engine.row_proof import (
    FIXED,
    UNPROVEN,
    RowProof,
    Rows,
    as_fixed,
    note_drawn,
    noting,
    proving,
)
from mgpu_tf.engine.step.apart import Apart
from mgpu_tf.engine.step.calls.layer_calls import LayerCalls
from mgpu_tf.engine.step.global_metrics import GlobalMetrics, reads_late
from mgpu_tf.engine.step.losses import GlobalLoss
from mgpu_tf.engine.step.moments import Moments
from mgpu_tf.engine.step.per_layer import LayerByLayer
from mgpu_tf.engine.step.plain_variables import check_parts, check_rows
from mgpu_tf.engine.step.tensor_parallel.parts import TensorParallel
from mgpu_tf.engine.trace_again import TraceAgain
from mgpu_tf.engine.untracked import seed_generators
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.strategies.replicas import turns
from mgpu_tf.strategies.replicas.mirrored import as_one_replica
from mgpu_tf.strategies.replicas.own_gradient import sum_over_replicas
from mgpu_tf.strategies.replicas.tensorflow_internals import this_replica

_log = logging.getLogger("mgpu_tf")

Logs = dict[str, tf.Tensor]


class ReplicaStep:
    """The computation of one replica.

    Args:
        model: A compiled and built model.
        loss: Its loss in contributions.
        state: What a step may write besides weights.
        replicas: Number of replicas that step together.
        layers: What computes layer by layer, where the model is computed so.
        tensor: What computes with parts of weights, where weights are split
            so.
        same_rows: How many replicas have the same rows.
        exchange: Gives replicas the rows of all; None where they never have
            them at once.
        in_parts: Whether parts of a batch are computed one after another.

    Attributes:
        alike: Of each gradient, whether it is of rows that all replicas
            look up, whatever their examples; known like `present`.
        present: Which trainable variables have a gradient; known once a step
            was traced.
        in_parts: Of each gradient, whether it is that of this replica's part,
            summed over replicas.
        written: The variables that a step writes, in the order of the values
            that `gradients` returns.
        log_names: The names of what a `compute_metrics` of the author's own
            returned, none where they are the model's metrics.
    """

    def __init__(
        self,
        model: keras.Model,
        loss: GlobalLoss,
        state: ReplicaState,
        replicas: int,
        layers: LayerByLayer | None = None,
        tensor: TensorParallel | None = None,
        same_rows: int = 1,
        exchange: Exchange | None = None,
        *,
        in_parts: bool = False,
    ) -> None:
        self._model = model
        self._exchange = exchange
        self._metrics = GlobalMetrics(model)
        self._calls = LayerCalls(
            model,
            state,
            exchange,
            in_parts=in_parts,
            plainly=None if layers is None else layers.compute_plainly,
        )
        self._layers = layers
        self._apart = Apart()
        self._tensor = tensor
        self._same_rows = same_rows
        self._loss = loss
        self._state = state
        self._replicas = replicas
        self._moments = Moments(model, replicas, same_rows)
        # Whose regularizers count with the loss; by default those of all.
        self._regularized: list[keras.Variable] | None = None
        # State that is written within functions, branches and loops.
        self._direct: dict[int, keras.Variable] = {}
        self._writes_directly = not in_parts
        self._own_logs = keras_internals.overrides(model, "compute_metrics")
        self.log_names: list[str] = []
        # Whether a metric reads what the update of weights writes. Then the
        # outputs, and the scope in which they were made, wait for it.
        self.updates_metrics_after = False
        self._metrics_can_wait = not in_parts
        self._outputs: dict[int, tuple[Any, StepScope]] = {}
        self.alike: list[bool] = []
        self.present: list[bool] = []
        self.in_parts: list[bool] = []
        self.written: list[keras.Variable] = []

    def forward(
        self,
        data: Any,
        share: BatchShare,
        training: bool,
        given: Writes | None = None,
        gathered: Sequence[tuple[keras.Variable, tf.Tensor]] = (),
    ) -> tuple[tf.Tensor, Writes, Logs]:
        """Computes the loss and what is to be written.

        Args:
            data: The rows of this replica.
            share: This replica's part of the global batch.
            training: Whether this is a step of training.
            given: Values that variables have for this step in place of
                their own, weights too; by default the seeds of this replica.
            gathered: Weights that are not stored whole, with their values.

        Returns:
            The loss contribution, the writes, and logs of the author's own.
        """
        return self._forward(data, share, training, given, gathered)[1:]

    def _forward(
        self,
        data: Any,
        share: BatchShare,
        training: bool,
        given: Writes | None,
        gathered: Sequence[tuple[keras.Variable, tf.Tensor]],
        tape: tf.GradientTape | None = None,
        sources: Writes | None = None,
        *,
        compiled: bool = False,
    ) -> tuple[StepScope, tf.Tensor, Writes, Logs]:
        if self._state.generator is not None:
            keras_internals.lend_global_seed(self._state.generator)
        if self._replicas > 1 or self._state.reads_rules:
            given_rows, owners = data, self._calls.owners
            data = tf.nest.map_structure(of_unknown_length, data)
            if self._replicas > 1:
                owners.note([given_rows, data], place_of(share))
        x, y, sample_weight = structures.unpacked(data)
        sources = sources or []
        given, join = self._given(given, gathered, sources)
        if self._tensor is not None:
            self._tensor.begin()
        with contextlib.ExitStack() as stack:
            scope = stack.enter_context(
                self._scope(data, share, given, join, tape, sources, compiled)
            )
            y_pred = self._outputs_of_model(x, training)
            loss, terms = self._loss(
                x,
                y,
                y_pred,
                sample_weight,
                scope.losses,
                share,
                training,
                self._regularized,
            )
            grown = self._grown(loss, terms, _counted(x, share))
            if self._own_logs or self._state.reads_metrics:
                # What else is read may be of these means as well.
                self._write_grown(grown, scope, given)
            given_metrics = x, y, y_pred, sample_weight
            returned: Any = {}
            if training and self.updates_metrics_after:
                self._outputs[_replica()] = y_pred, scope
            elif training:
                returned = self._computed_before(given_metrics, scope)
            else:
                returned = self._metrics.computed(given_metrics)
        if scope.within:
            self._write_in_place(scope.within)
        scope.check_known(self._state.variables)
        if self._tensor is not None:
            self._tensor.check_left()
        if not self._writes_directly:
            check_parts(scope)
        elif self._replicas > 1:
            check_rows(scope)
        # By variable, since Keras writes to some of these means as well.
        if self._own_logs or self._state.reads_metrics:
            grown = []  # They are written already.
        writes = self._written(scope, given, share, grown)
        before = {id(variable): value for variable, value in given}
        for variable, increment in grown:
            base = before.get(id(variable), variable)
            self._state.follow(variable, Rule.SUM)
            writes[id(variable)] = (variable, base + increment)
        return scope, loss, list(writes.values()), self._logs_of(returned)

    def metrics_after(
        self,
        data: Any,
        share: BatchShare,
        gathered: Sequence[tuple[keras.Variable, tf.Tensor]] = (),
    ) -> tuple[Writes, Logs]:
        """Updates metrics that read what the update of weights has written.

        Args:
            data: The rows of this replica.
            share: This replica's part of the global batch.
            gathered: As for `forward`.

        Returns:
            What is to be written, and logs of the author's own.
        """
        y_pred, before = self._outputs.pop(_replica())
        if self._replicas > 1 or self._state.reads_rules:
            data = tf.nest.map_structure(of_unknown_length, data)
        x, y, sample_weight = structures.unpacked(data)
        given, join = self._given(None, gathered, [])
        with self._scope(data, share, given, join) as scope:
            scope.kinds, scope.whole = before.kinds, before.whole
            scope.has_rows |= before.has_rows
            for leaf in leaves_of(y_pred):
                if tf.is_symbolic_tensor(leaf):
                    scope.proof.take([leaf], before.proof.of(leaf))
            returned = self._metrics.computed((x, y, y_pred, sample_weight))
        if scope.within:
            self._write_in_place(scope.within)
        scope.check_known(self._state.variables)
        writes = self._written(scope, given, share, [])
        return list(writes.values()), self._logs_of(returned)

    def _computed_before(self, given: Any, scope: StepScope) -> Any:
        """Updates metrics while weights are those of before the step.

        Raises:
            TraceAgain: One reads what the update writes. In another trace
                metrics are updated after it, as Keras does.
        """
        returned, late = self._metrics.computed_before(given, scope)
        if late is None or self._state.asynchronous:
            return returned
        if not self._metrics_can_wait:
            raise reads_late(late)
        self.updates_metrics_after = True
        raise TraceAgain

    def _logs_of(self, returned: Any) -> Logs:
        """Returns logs of the author's own, and notes their names."""
        logs: Logs = {}
        results = self._model.get_metrics_result
        if self._own_logs and returned and set(returned) != set(results()):
            flat = flat_logs(returned)
            logs = {name: tf.convert_to_tensor(v) for name, v in flat.items()}
        self.log_names = list(logs)
        return logs

    def _given(
        self,
        given: Writes | None,
        gathered: Sequence[tuple[keras.Variable, tf.Tensor]],
        sources: Writes,
    ) -> tuple[Writes, Any]:
        """Returns the values of a step, and what joins parts of weights."""
        if given is None:
            given = [*self._state.replica_seeds(), *self._state.values()]
        weights = [*gathered]
        if self._layers is not None:
            weights += self._layers.given(sources)
        join = None
        if self._tensor is not None:
            join = self._tensor.join(sources)
            weights += [*self._tensor.given(join), *self._loss.joined(join)]
        if self._replicas > 1:
            # Where replicas are processes, no graph shows it.
            self._calls.owners.note([v for _, v in [*sources, *weights]], None)
        given = [*given, *weights]
        if self._own_logs or self._state.reads_metrics:
            given = [*given, *self._state.metric_values(given)]
        return given, join

    @contextlib.contextmanager
    def _scope(
        self,
        data: Any,
        share: BatchShare,
        given: Writes,
        join: Any,
        tape: tf.GradientTape | None = None,
        sources: Writes | None = None,
        compiled: bool = False,
    ) -> Iterator[StepScope]:
        """Yields the scope of a step."""
        with contextlib.ExitStack() as stack:
            # Keras would divide a loss by the number of replicas.
            stack.enter_context(as_one_replica())
            stack.enter_context(sharing(share, exchange=self._exchange))
            scope = stack.enter_context(
                StepScope(
                    self._model,
                    [
                        (variable, value)
                        for variable, value in [
                            *given,
                            *self._loss.regularized(given),
                        ]
                        if id(variable) not in self._direct
                    ],
                    tape,
                    self._read,
                    {id(v): source for v, source in sources or ()},
                    join,
                    self._write_directly,
                    self._calls.owners,
                    place_of(share),
                )
            )
            scope.share, scope.state = share, self._state
            scope.read_aside = self._calls.read_aside
            scope.inline = self._calls.inline
            scope.read_part = self._calls.read_part
            know_rows(scope, data, share)
            stack.enter_context(noting(scope.proof))
            stack.enter_context(self._apart.replica())
            # Of losses and metrics too.
            scope.draws = stack.enter_context(
                drawing(share, data, compiled=compiled)
            )
            yield scope

    def _read(self, variable: keras.Variable) -> tf.Tensor | None:
        """Returns a value that a step is not given; None for the variable's."""
        return None if self._layers is None else self._layers.read(variable)

    def _outputs_of_model(self, x: Any, training: bool) -> Any:
        if keras_internals.takes_training(self._model):
            return self._model(x, training=training)
        return self._model(x)

    def _grown(
        self, loss: tf.Tensor, terms: list[tf.Tensor], share: BatchShare
    ) -> Writes:
        """Returns what the means of losses grow by."""
        tracker = keras_internals.loss_tracker(self._model)
        increments = mean_increments(tracker, loss, share)
        for mean, contribution in zip(self._loss.trackers, terms, strict=False):
            increments += batch_increments(mean, contribution, share)
        return increments

    def _write_grown(
        self, grown: Writes, scope: StepScope, given: Writes
    ) -> None:
        """Lets the means of losses grow by what all replicas have.

        From what they held before the step: Keras has written to some since.
        """
        before = {id(variable): value for variable, value in given}
        for variable, increment in grown:
            if not self._state.is_metric(variable):
                continue  # The author's own property `metrics` has left it out.
            if self._replicas > 1:
                total = sum_over_replicas(increment)
                same = tf.cast(self._same_rows, total.dtype)
                increment = total / same
            scope.add_update((variable, before[id(variable)] + increment))
            if self._replicas > 1 or self._same_rows > 1:
                scope.agree(variable)

    def _written(
        self,
        scope: StepScope,
        given: Writes,
        share: BatchShare,
        grown: Writes,
    ) -> dict[int, tuple[keras.Variable, tf.Tensor]]:
        """Returns what layers and metrics wrote, by variable.

        Without what Keras itself adds to the means of losses that grow
        otherwise.
        """
        state = self._state
        others = {id(variable) for variable, _ in grown}
        before = {id(variable): value for variable, value in given}
        seeds = {id(variable) for variable in state.seeds}
        writes = {}
        for variable in state.variables:
            if not (scope.is_written(variable) or state.is_metric(variable)):
                continue
            if id(variable) in others - scope.agreed:
                continue
            value = scope.get_current_value(variable)
            base = before.get(id(variable))
            if value is None:
                continue
            if id(variable) in seeds and base is not None:
                value = state.next_seed(variable, value)
            elif id(variable) in scope.agreed:
                self._state.agree(variable)
            elif id(variable) in scope.added:
                state.follow(variable, Rule.SUM)
                value = share.select(value, variable if base is None else base)
            elif id(variable) in scope.parts:
                value = self._of_part(scope.parts[id(variable)], value, share)
            elif scope.is_written(variable):
                value = self._by_rule(variable, value, base, scope.proof, share)
            writes[id(variable)] = (variable, value)
        return writes

    def _write_in_place(self, written: dict[int, keras.Variable]) -> None:
        """Lets variables be written in place, in another trace."""
        self._check_direct(written)
        if self._layers is not None:
            # A layer that is computed again would write twice.
            self._layers.compute_writers_plainly(written)
        self._direct |= written
        raise TraceAgain

    def _write_directly(self, variable: keras.Variable, value: Any) -> bool:
        """Writes to a variable in place, wherever in a step that is."""
        if id(variable) not in self._direct:
            return False
        self._state.agree(variable)
        self._state.write_in_place(variable, value)
        return True

    def _check_direct(self, written: dict[int, keras.Variable]) -> None:
        """Refuses writes in place where a step is computed in parts."""
        shared = self._state.asynchronous or (
            self._state.stored_once and self._replicas > 1
        )
        weights = set(map(id, self._model.trainable_variables))
        if written and (
            shared
            or not self._writes_directly
            or weights & written.keys()
            or any(map(keras_internals.is_split, written.values()))
        ):
            raise ConfigurationError(
                "Where a batch is computed in parts, one copy is for all "
                "replicas, state is split or workers do not wait for each "
                "other, a layer writes its state outside "
                "of tf.function, tf.cond and loops of TensorFlow; a weight "
                "everywhere. Received: "
                f"{next(iter(written.values())).path}, which is written "
                "within one. Write it in the call itself, or use 'mirrored'."
            )

    def _of_part(
        self, part: Part, value: tf.Tensor, share: BatchShare
    ) -> tf.Tensor:
        """What a replica sends of state that a layer wrote of its rows."""
        variable, before, kind = part
        metric = self._state.is_metric(variable)
        rule = rule_of_part(kind, value.dtype, of_metric=metric)
        assert rule is not None
        self._state.follow(variable, rule)
        return share.select(sent_of_part(kind, before, value, share), before)

    def _by_rule(
        self,
        variable: keras.Variable,
        value: tf.Tensor,
        before: tf.Tensor | None,
        proof: RowProof,
        share: BatchShare,
    ) -> tf.Tensor:
        """What a replica writes, to be brought together by the rule."""
        return by_rule(
            *(self._state, variable, value, before, proof, share),
            otherwise=self._calls.compute_whole,
        )

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Lets the model's parts act as the engine needs, while traced.

        Outside of replicas, around the steps of all.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(
                keras_internals.seeds_replaced(
                    [*seed_generators(self._model), self._state.generator],
                    seed_for_rows,
                )
            )
            layers = keras_internals.layers_of(self._model)
            objects = keras_internals.objects_of(layers)
            stack.enter_context(
                turns.kept(lambda: keras_internals.snapshot(layers, objects))
            )
            if self._tensor is not None:
                # Within calls of layers: it computes activations itself.
                stack.enter_context(self._tensor.in_place())
            stack.enter_context(self._loss.in_place())
            stack.enter_context(self._metrics.in_place())
            stack.enter_context(self._calls.in_place())
            stack.enter_context(self._moments.in_place())
            if self._layers is not None:
                stack.enter_context(self._layers.in_place())
            stack.enter_context(self._apart.checked())
            yield

    def gradients(
        self,
        data: Any,
        share: BatchShare,
        scale: Callable[[tf.Tensor], tf.Tensor],
        given: Writes | None = None,
        gathered: Sequence[tuple[keras.Variable, tf.Tensor]] = (),
        jit_compile: bool = False,
    ) -> tuple[list[Any], list[tf.Tensor], Logs]:
        """Computes gradients.

        Args:
            data: The rows of this replica.
            share: This replica's part of the global batch.
            scale: Scales the loss.
            given: As for `forward`.
            gathered: As for `forward`.
            jit_compile: Whether XLA compiles this, where it can.

        Returns:
            The gradients that there are, the values to be written to
            `written`, and logs of the author's own.
        """

        def compute(
            data: Any, *rows: tf.Tensor
        ) -> tuple[list[Any], list[tf.Tensor], Logs]:
            part = share.with_places(rows)
            variables = self._model.trainable_variables
            sources = [] if self._layers is None else self._layers.sources()
            if self._tensor is not None:
                sources += self._tensor.sources()
            values = {
                id(variable): value
                for variable, value in [*(given or ()), *gathered, *sources]
            }
            weights = [values.get(id(v), v) for v in variables]
            with tf.GradientTape() as tape:
                tape.watch(
                    [
                        w
                        for w in tf.nest.flatten(weights)
                        if isinstance(w, tf.Tensor | tf.Variable)
                    ]
                )
                scope, loss, writes, logs = self._forward(
                    data,
                    part,
                    True,
                    given,
                    gathered,
                    tape,
                    sources,
                    compiled=jitted,
                )
                loss = scale(loss)
                eager = tf.executing_eagerly()
                if self._same_rows > 1 and not eager:
                    # Each of them computes the loss of the same rows.
                    loss = loss / tf.cast(self._same_rows, loss.dtype)
            with entered_again(scope.draws):
                gradients, parts = scope.gradients(
                    tape, loss, variables, weights
                )
            if self._same_rows > 1 and eager:
                # An author's gradient need not be linear; a graph shows it.
                gradients, parts = (
                    [_divided(each, self._same_rows) for each in found]
                    for found in (gradients, parts)
                )
            if self._layers is not None:
                gradients = self._layers.joined(
                    gradients, parts, variables, scope
                )
            check_gradients(gradients, variables)
            if self._replicas > 1 or not self._writes_directly:
                gradients = self._shared_once(
                    gradients, variables, scope, share
                )
            self.in_parts = [
                part is not None
                for gradient, part in zip(gradients, parts, strict=True)
                if gradient is not None
            ]
            self.present = [g is not None for g in gradients]
            self.alike = [
                isinstance(gradient, tf.IndexedSlices)
                and scope.is_alike(gradient.indices)
                for gradient in gradients
                if gradient is not None
            ]
            self.written = [variable for variable, _ in writes]
            present = [g for g in gradients if g is not None]
            return present, [value for _, value in writes], logs

        jitted = (
            jit_compile
            and not self.updates_metrics_after
            and not tf.executing_eagerly()
            and self._compiled_by_xla()
        )
        rows = share.places
        if not jitted:
            return compute(data, *rows)
        function = tf.function(compute, jit_compile=True, autograph=False)
        if self._exchange is None:
            return function(data, *rows)
        with self._exchange.within_xla():
            return function(data, *rows)

    def held(self) -> list[keras.Variable]:
        """Returns the weights that have a gradient, of a traced step."""
        weights = self._model.trainable_variables
        return list(itertools.compress(weights, self.present))

    def _shared_once(
        self,
        gradients: list[Any],
        variables: list[keras.Variable],
        scope: StepScope,
        share: BatchShare,
    ) -> list[Any]:
        """Lets rows that all replicas look up alike count once.

        Those beside rows of their own: others are folded (`RowGather`).
        """
        mixed = [
            variable.path
            for gradient, variable in zip(gradients, variables, strict=True)
            if isinstance(gradient, tf.IndexedSlices)
            and tf.is_symbolic_tensor(gradient.indices)
            and len({*map(scope.is_alike, lookups_of(gradient.indices))}) > 1
        ]
        if not mixed:
            return gradients
        exchange = self._exchange
        if exchange is None:
            raise refuse_mixed(mixed[0])
        return [
            shared_once(
                gradient,
                scope.is_alike,
                lambda value: exchange.over_rows(share.select(value, 0)),
                is_first=place_of(share) == 0,
            )
            for gradient in gradients
        ]

    @property
    def can_be_compiled(self) -> bool:
        """Returns whether XLA can compile forward and backward pass."""
        alone = self._replicas == 1
        apart = alone or not (
            keras_internals.communicates(self._model)
            or (self._exchange is not None and self._exchange.is_needed)
        )
        whole = self._layers is None and self._tensor is None
        whole &= not self._calls.inlines
        return apart and whole and not self._state.stored_once

    def _compiled_by_xla(self) -> bool:
        can_be = self.can_be_compiled
        if not can_be:
            _log.info(
                "jit_compile=True: the replicas of %s exchange values or "
                "share variables in the forward pass, which XLA does not "
                "compile; it runs without",
                self._model.name,
            )
        return can_be


def drawing(
    share: BatchShare,
    data: Any,
    *,
    compiled: bool = False,
) -> contextlib.AbstractContextManager[RowScope | None]:
    """Returns the scope in which a replica draws its rows of global draws.

    Args:
        share: The part of the replica in the global batch.
        data: Its rows.
        compiled: Whether XLA compiles what is traced.
    """
    if share.low is None or share.replicas == 1:
        return contextlib.nullcontext()

    def take(values: tf.Tensor, rows: DrawnRows) -> None:
        note_drawn(values, rows.shape, rows.axis, rows.block)

    low, after = share.low, share.low + share.local
    low, after = structures.or_another(low, after, share.total)
    return rows_of_global_draws(
        low,
        after - low,
        share.total,
        data,
        compiled=compiled,
        taken=take,
    )


def outputs_of(model: keras.Model, data: Any, generator: Any) -> Any:
    """Returns what a model predicts for the rows of one replica.

    Args:
        model: The model.
        data: The rows.
        generator: That of unseeded draws; None where there is none.
    """
    if generator is not None:
        keras_internals.lend_global_seed(generator)
    if keras_internals.overrides(model, "predict_step"):
        return model.predict_step(data)
    x, _, _ = structures.unpacked(data)
    if keras_internals.takes_training(model):
        return model(x, training=False)
    return model(x)


def outputs_of_share(
    model: keras.Model,
    data: Any,
    state: ReplicaState,
    share: BatchShare,
    exchange: Exchange | None,
    calls: LayerCalls,
) -> Any:
    """Returns what a model predicts for the rows of one replica of several.

    Args:
        model: The model.
        data: The rows.
        state: What the model may write.
        share: The part of the replica in the global batch.
        exchange: Gives replicas the rows of all.
        calls: Computes layers whole that are not proven.

    Raises:
        ConfigurationError: The model writes what it makes of the rows.
        TraceAgain: More is to be computed whole, in another trace.
    """
    generator = state.generator
    if share.replicas == 1:
        if share.same_rows == 1:
            with drawing(share, data):
                return outputs_of(model, data, generator)
        # Layers in parts exchange nothing within branches and loops.
        with StepScope(model, [], None) as scope:
            scope.share, scope.state = share, state
            scope.inline = calls.inline
            scope.read_part = calls.read_part
            outputs = outputs_of(model, data, generator)
        scope.check_known(state.variables)
        written = list(filter(scope.is_written, state.variables))
        for variable in written:
            state.agree(variable)
        state.write([(variable, scope.value(variable)) for variable in written])
        state.leave(written)
        return outputs
    eager = tf.executing_eagerly()
    if not eager:
        given = data
        data = tf.nest.map_structure(of_unknown_length, data)
        calls.owners.note([given, data], place_of(share))
    with (
        sharing(share, exchange=exchange),
        drawing(share, data),
        StepScope(
            model, [], None, owners=calls.owners, place=place_of(share)
        ) as scope,
        noting(scope.proof),
    ):
        scope.share, scope.state = share, state
        scope.read_aside = calls.read_aside
        scope.inline = calls.inline
        scope.read_part = calls.read_part
        know_rows(scope, data, share)
        if keras_internals.overrides(model, "predict_step"):
            outputs = _outputs_of_step(model, data, generator, scope, exchange)
        else:
            outputs = outputs_of(model, data, generator)
        outputs = tf.nest.map_structure(
            lambda leaf: _predicted(leaf, share), outputs
        )
    seeds = set(map(id, state.seeds)) if eager else set()
    scope.check_known(state.variables)
    if scope.within:
        variable = next(iter(scope.within.values()))
        raise ConfigurationError(
            "On several replicas, predict writes no state within tf.function, "
            f"tf.cond or loops of TensorFlow. Received: {variable.path}. "
            "Write state with training=True alone, or use 'one_device'."
        )
    writes = [
        (variable, scope.value(variable))
        for variable in state.variables
        if scope.is_written(variable)
    ]
    for variable, value in writes:
        alike = id(variable) in scope.agreed | seeds
        if not alike and as_fixed(scope.proof.of(value)) != FIXED:
            raise ConfigurationError(
                "On several replicas, predict may write only state that is "
                "the same on all of them. Received: a layer that writes what "
                f"it makes of its rows to {variable.path}. Write state with "
                "training=True alone, or use 'one_device'."
            )
        state.agree(variable)
    state.write(writes)
    state.leave(variable for variable, _ in writes)
    return outputs


def _outputs_of_step(
    model: keras.Model,
    data: Any,
    generator: Any,
    scope: StepScope,
    exchange: Exchange | None,
) -> Any:
    """Returns what a `predict_step` of the author's returns.

    Of the rows of this replica where it is proven to keep them apart, and of
    those of all replicas otherwise.
    """
    mark = scope.mark()
    if exchange is None or scope.may_try(model):
        proof = proof_of(data)
        with proving(proof):
            outputs = outputs_of(model, data, generator)
        kinds = map(proof.of, tf.nest.flatten(outputs, expand_composites=True))
        if set(kinds) <= {Rows(), FIXED}:
            return outputs
        if exchange is None:
            raise ConfigurationError(
                "With step_parts no replica has all rows at once. Received: a "
                "predict_step that is not proven to make each row of its own "
                "row. Predict with another Trainer, without step_parts."
            )
        scope.give_up(mark, model)
    assert scope.share is not None
    fraction = scope.share.fraction(tf.float64)
    local = scope.share.local
    every = exchange.whole(data, local, fraction, scope.has_rows)
    scope.take_alike(leaves_of(every))
    with scope.of_all_rows():
        outputs = outputs_of(model, every, generator)
    leaves = leaves_of(outputs)
    scope.take_alike(leaves)
    scope.has_rows |= {id(leaf): (leaf, False) for leaf in leaves}
    return outputs


def _predicted(output: Any, share: BatchShare) -> Any:
    """Returns a replica's rows; what all have, of the first replica alone."""
    if isinstance(output, tf.Tensor) and is_alike(output):
        return output if place_of(share) == 0 else output[:0]
    return without_another(output, share.local)


def place_of(share: BatchShare) -> int:
    """Returns which part of the global batch this replica has."""
    return _replica() // share.same_rows


def _replica() -> int:
    return this_replica(where_all_are_one=0)


def know_rows(scope: StepScope, data: Any, share: BatchShare) -> None:
    """Lets proofs know what differs between replicas.

    Args:
        scope: The scope of a step.
        data: The rows of this replica.
        share: Its part of the global batch.
    """
    leaves = [
        leaf
        for leaf in tf.nest.flatten(data, expand_composites=True)
        if tf.is_symbolic_tensor(leaf)
    ]
    rows = [leaf for leaf in leaves if leaf.shape.rank]
    scope.proof.take(rows, Rows())
    scope.proof.take([leaf for leaf in leaves if not leaf.shape.rank], UNPROVEN)
    places = [share.local, share.low]
    scope.proof.take([each for each in places if each is not None], UNPROVEN)
    scope.proof.take([share.total], FIXED)


def _divided(gradient: Any, count: int) -> Any:
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        values = _divided(gradient.values, count)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient / tf.cast(count, gradient.dtype)


def of_unknown_length(tensor: Any) -> Any:
    """The rows of a replica, whose number the graph does not know.

    The author's code takes it from the shape then, where a proof sees it,
    and not as a number that is another one on each replica.
    """
    if not isinstance(tensor, tf.Tensor) or not tensor.shape.rank:
        return tensor
    shape = [None, *tensor.shape[1:]]
    return tf.compat.v1.placeholder_with_default(tensor, shape)


def batch_increments(
    mean: keras.metrics.Mean, value: tf.Tensor, share: BatchShare
) -> Writes:
    """What a contribution adds to a mean over batches.

    Keras has the single losses of several outputs so, large batches and
    small ones alike.
    """
    value = tf.cast(tf.stop_gradient(value), mean.total.dtype)
    return [
        (mean.total, value),
        (mean.count, share.fraction(mean.count.dtype)),
    ]


def _counted(x: Any, share: BatchShare) -> BatchShare:
    """Returns the share by which Keras weighs the loss of a batch.

    It counts the rows of the first input. On one replica these may be others
    than the rows of the targets.
    """
    if share.replicas > 1 or not structures.with_rows(x):
        return share
    rows = structures.batch_size([x])
    return dataclasses.replace(share, local=rows, total=rows)


def mean_increments(
    mean: keras.metrics.Mean, value: tf.Tensor, share: BatchShare
) -> Writes:
    """What a contribution adds to a global mean over examples."""
    weight = tf.cast(share.total, mean.total.dtype)
    value = tf.cast(tf.stop_gradient(value), mean.total.dtype)
    return [
        (mean.total, value * weight),
        (mean.count, tf.cast(share.local, mean.count.dtype)),
    ]


def check_gradients(
    gradients: list[Any], variables: list[keras.Variable]
) -> None:
    """Refuses a loss that depends on no weight, where there is one.

    Args:
        gradients: Of each weight, None where it has none.
        variables: The weights.
    """
    if not variables:  # Its layers may still write their state.
        warnings.warn("The model has no trainable weights.", stacklevel=2)
    elif all(gradient is None for gradient in gradients):
        raise ConfigurationError(
            "The loss must depend on the trainable variables. Received: a "
            f"loss that depends on none of {len(variables)}. Check that the "
            "loss is computed from the model's outputs and that layers are "
            "trainable."
        )
