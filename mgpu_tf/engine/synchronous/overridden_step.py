"""Running a `train_step` or `test_step` that the model's author wrote.

The author writes for one device, and that is what each replica does: it runs
the method on the global batch. Only calls of the model and of its layers are
cut: inside of one, a replica has its rows (`engine/step/calls/boundary.py`). So
losses, sums, ratios, clipping, draws, metrics and logs are those of one device,
and gradients are whole on every replica when the author gets them. An optimizer
does not reduce them again.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.author.author_scope import AuthorScope, graph_here
from mgpu_tf.engine.author.state import AgreedState, ReplicaState
from mgpu_tf.engine.exchange.composites import without_another
from mgpu_tf.engine.exchange.crossing import Exchange, ExchangedInLoop
from mgpu_tf.engine.exchange.global_batch import of_all
from mgpu_tf.engine.inlined import Inlined, refused
from mgpu_tf.engine.logs import flat_logs
from mgpu_tf.engine.random_rows import seed_for_rows
from mgpu_tf.engine.step.calls.boundary import Boundary
from mgpu_tf.engine.step.moments import Moments
from mgpu_tf.engine.step.same_draws import SameDraws
from mgpu_tf.engine.step.update import Update, hand_over
from mgpu_tf.engine.synchronous.whole_weights import WholeWeights
from mgpu_tf.engine.trace_again import TraceAgain, refusal_within
from mgpu_tf.engine.untracked import seed_generators
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.options import StepOptions
from mgpu_tf.strategies.replicas import turns
from mgpu_tf.strategies.replicas.mirrored import OneReplicaView, as_one_replica
from mgpu_tf.strategies.replicas.topology import LocalReplicas

Around = Callable[[], contextlib.AbstractContextManager[None]]


def check_held(model: keras.Model) -> None:
    """Refuses an optimizer that is used in train_step and found nowhere.

    Args:
        model: A model with a `train_step` of its own.

    Raises:
        ConfigurationError: There is one.
    """
    held = {id(part) for part in keras_internals.optimizers_of(model)}
    function = inspect.unwrap(type(model).train_step)
    if not inspect.isfunction(function):
        return
    names = inspect.getclosurevars(function)
    for name, value in {**names.nonlocals, **names.globals}.items():
        known = not isinstance(value, keras.optimizers.Optimizer)
        if not known and id(value) not in held:
            raise ConfigurationError(
                "The optimizers of a train_step must be attributes of the "
                f"model. Received: {name!r}, a variable around train_step. "
                "Set it on the model in build_model."
            )


# What TensorFlow says where replicas exchange something in a function.
_IN_FUNCTION = "`merge_call` called while defining a new graph"


class AuthorStep:
    """One overridden step method of a model.

    Args:
        model: A built model.
        method: "train_step" or "test_step".
        strategy: The model's strategy.
        local: Its replicas here; those that are given the same rows are one.
        state: What the step writes besides weights.
        options: How steps are made.
        returned: The specs of what the method returns, where they are known.
        update: Makes what applies gradients, of the arguments of `Update`.
        around: Returns a block in which the step is traced.

    Attributes:
        state: As given.
        cuts_each: Whether arrays of a batch have numbers of rows of their own.
    """

    def __init__(
        self,
        model: keras.Model,
        method: str,
        strategy: tf.distribute.Strategy,
        local: LocalReplicas,
        state: ReplicaState,
        options: StepOptions,
        returned: Mapping[str, tf.TensorSpec] | None = None,
        update: Callable[..., Update] = Update,
        around: Around = contextlib.nullcontext,
    ) -> None:
        # What it returns, as far as is known, and as a trace has assumed.
        self._returns = returned
        self._assumed: Mapping[str, tf.TensorSpec] | None = None
        self._model = model
        self._method = method
        self._strategy = strategy
        self.state = state
        self._options = options
        self._make_update = update
        self._around = around
        self._replicas = strategy.num_replicas_in_sync
        self._optimizers = keras_internals.optimizers_of(model)
        self._names: list[str] = []
        self._generator: Any = None
        # State that is written within functions, branches and loops, or read
        # within functions.
        self._direct: dict[int, keras.Variable] = {}
        self.cuts_each = False
        self._inlined = Inlined()
        # Each replica is a thread of its own.
        self._here = threading.local()
        # With one replica of `MirroredStrategy`, optimizers apply as with more.
        self._applies = self._replicas > 1 or isinstance(
            strategy, OneReplicaView
        )
        if self._replicas == 1:
            return
        self._exchange = Exchange(strategy, local, options)
        self._boundary = Boundary(model, state, self._exchange)
        self._moments = Moments(model, local.ranges, local.same_rows)
        self._weights = WholeWeights(model)
        self._draws = SameDraws(strategy)

    def begin(self) -> dict[str, tf.Tensor] | None:
        """Returns logs to begin with, of no step; None if it is unknown which.

        They are zeros like what the method returns.
        """
        specs, self._assumed = self._returns, None
        if specs is None or tf.executing_eagerly():
            return None
        if not all(each.shape.is_fully_defined() for each in specs.values()):
            return None
        self._assumed = specs
        return {n: tf.zeros(s.shape, s.dtype) for n, s in specs.items()}

    def __call__(
        self, data: Any, local: Any, total: tf.Tensor, low: Any
    ) -> dict[str, tf.Tensor]:
        """Runs the method once on every replica. Outside of replicas.

        Returns:
            What the method returned.

        Raises:
            TraceAgain: It returned other logs than it was known to return.
        """
        del total, low  # The method sees the global batch.
        self._generator = keras_internals.global_seed_generator()
        with self._around(), self._as_alone():
            values = self._strategy.run(self._on_replica, args=(data, local))
        values = {
            name: self._strategy.experimental_local_results(value)[0]
            for name, value in values.items()
        }
        if not tf.executing_eagerly():
            self._check_returns(values)
        return values

    def _check_returns(self, values: dict[str, tf.Tensor]) -> None:
        found = {n: tf.TensorSpec(v.shape, v.dtype) for n, v in values.items()}
        if self._assumed not in (None, found):
            self._returns = None
            raise TraceAgain
        self._returns = found

    def logs(self, values: dict[str, tf.Tensor]) -> dict[str, Any]:
        """Returns the logs of an execution.

        Args:
            values: What the method returned in the last step.
        """
        scores = flat_logs(self._model.get_metrics_result())
        # As Keras distinguishes them.
        return scores if set(scores) == set(self._names) else values

    # On a replica.

    def _on_replica(self, data: Any, local: tf.Tensor) -> dict[str, tf.Tensor]:
        self._here.graph = graph_here()
        if self._replicas > 1:
            keras_internals.lend_global_seed(self._generator)
            if not self.cuts_each:
                data = without_another(data, local)
            values = self._on_global_batch(data, local)
        else:
            values = flat_logs(getattr(self._model, self._method)(data))
        self._names = list(values)
        return {name: tf.convert_to_tensor(v) for name, v in values.items()}

    def _on_global_batch(self, data: Any, local: tf.Tensor) -> dict[str, Any]:
        cut = self._exchange.cut(local)
        data, others = of_all(
            self._exchange, data, cut, cuts_each=self.cuts_each
        )
        assert isinstance(self.state, AgreedState)
        given = [
            (variable, value)
            for variable, value in self.state.held()
            if id(variable) not in self._direct
        ]
        draws = self._draws.begin()
        with (
            as_one_replica(),
            AuthorScope(given, self._write) as scope,
            self._weights.begun(),
            self._boundary.entered(scope, cut, data, others),
        ):
            scope.inline = self._inline
            scope.read_within = self._read_directly
            values = self._returned(data)
            writes = [(v, scope.value(v)) for v in scope.written.values()]
        if scope.within:
            self._direct |= scope.within
            raise TraceAgain
        self._draws.end(draws)
        self.state.write(writes)
        return values

    def _returned(self, data: Any) -> dict[str, Any]:
        try:
            return flat_logs(getattr(self._model, self._method)(data))
        except Exception as error:
            refusal = refusal_within(error)
            # Other loops than vectorized ones are functions of their own.
            in_loop = isinstance(error, ExchangedInLoop) or (
                isinstance(error, RuntimeError) and _IN_FUNCTION in str(error)
            )
            if in_loop and self._boundary.open():
                raise TraceAgain from None
            if isinstance(error, ExchangedInLoop):
                raise ConfigurationError(str(error)) from None
            if refusal is None:
                raise
            raise refusal from None

    def _write(self, variable: keras.Variable, value: tf.Tensor) -> None:
        """Writes to a variable that the scope does not keep."""
        if id(variable) in self._direct:
            self._check_in_step(variable)
            self.state.write_in_place(variable, value)
            return
        self._boundary.check_write(value)
        with self._exchange.apart():
            keras_internals.write_here(variable, value)
        self._weights.forget([variable])
        self._boundary.lend_again(variable)

    def _read_directly(self, variable: keras.Variable) -> None:
        """Lets a step read and write a variable itself, in another trace.

        A layer does so where its functions are traced with the step.
        """
        if self._boundary.is_in_call:
            self._inline(variable)
        self._direct[id(variable)] = variable
        raise TraceAgain

    def _inline(self, variable: keras.Variable) -> None:
        """Lets functions be traced with the step, in another trace."""
        self._inlined.begin(refused(variable))

    def _check_in_step(self, variable: keras.Variable) -> None:
        if self._boundary.is_in_call:
            raise ConfigurationError(
                "On several replicas state that a step writes within a "
                "tf.function, a tf.cond or a loop of TensorFlow is written by "
                f"no layer. Received: {variable.path}, which a layer writes "
                "as well. Write it in the step itself."
            )

    @contextlib.contextmanager
    def _as_alone(self) -> Iterator[None]:
        """Lets optimizers and calls do what one device would.

        All replicas have the same ones, so this is entered once for all.
        """
        with contextlib.ExitStack() as stack:
            if self._applies:
                stack.enter_context(
                    keras_internals.caught_by(self._optimizers, self._apply)
                )
            if self._replicas > 1:
                seeds = keras_internals.seeds_replaced(
                    [*seed_generators(self._model), self._generator],
                    seed_for_rows,
                )
                stack.enter_context(seeds)
                layers = keras_internals.layers_of(self._model)
                objects = keras_internals.objects_of(layers)
                stack.enter_context(
                    turns.kept(
                        lambda: keras_internals.snapshot(layers, objects)
                    )
                )
                stack.enter_context(self._moments.in_place())
                stack.enter_context(self._boundary.around())
                stack.enter_context(self._weights.around())
                stack.enter_context(self._inlined.in_place())
            yield

    def _apply(
        self,
        optimizer: keras.optimizers.Optimizer,
        gradients: list[Any],
        variables: list[keras.Variable],
        by_pairs: bool,
    ) -> None:
        """Applies gradients, which all replicas have alike."""
        within = graph_here() is not self._here.graph
        if within and self._replicas == 1:
            with keras_internals.applying_itself(optimizer):
                hand_over(optimizer, gradients, variables, by_pairs=by_pairs)
            return
        if within:
            self._inlined.begin(
                ConfigurationError(
                    "On several replicas an optimizer applies outside of "
                    "tf.cond, loops of TensorFlow and what AutoGraph makes of "
                    f"them. Received: {optimizer.name!r}, inside of one in "
                    f"{self._method} of {type(self._model).__name__}. Apply "
                    "in the step itself; the option "
                    "gradient_accumulation_steps of an optimizer accumulates."
                )
            )
        present = [gradient is not None for gradient in gradients]
        given = [gradient for gradient in gradients if gradient is not None]

        def apply(strategy: tf.distribute.Strategy, gradients: Any) -> None:
            update = self._make_update(
                optimizer,
                variables,
                strategy,
                stored_once=False,
                options=self._options,
                by_pairs=by_pairs,
                reduced=True,
            )
            update.present = present
            with keras_internals.applying_itself(optimizer):
                update(gradients)

        if self._replicas == 1:
            turns.merged(apply, [given])
            return
        with self._exchange.apart():
            turns.merged(apply, [given])
        self._weights.forget(variables)
