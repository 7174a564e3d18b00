"""What every engine does: the one seam between the trainer and a strategy.

    feed = engine.feed(source, first=0, chain=True, training=True)
    iterator = feed.iterator(epoch, limit)
    execution = engine.train(iterator, steps, source)

The trainer, with its callbacks, `History` and progress, is the same code for
all of them.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import keras
import tensorflow as tf

from mgpu_tf.data import Source
from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.kernels import Kernels
from mgpu_tf.engine.snapshot import Snapshot, Variables
from mgpu_tf.engine.step import building
from mgpu_tf.engine.step.moments import normalizations
from mgpu_tf.engine.step_watch import Watched
from mgpu_tf.engine.untracked import untracked_variables
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.options import StepOptions
from mgpu_tf.reports.pipeline_plan import PipelinePlan
from mgpu_tf.reports.pipeline_trace import ShareTrace, StepTrace
from mgpu_tf.strategies.registry import kind_of, topology_of

Logs = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Votes:
    """What workers ask for between two executions.

    Attributes:
        save: To save the state of the run.
        end: To save it and end.
    """

    save: bool = False
    end: bool = False


NO_VOTES = Votes()


@dataclasses.dataclass(frozen=True)
class Execution:
    """What one call of the engine did.

    Attributes:
        steps: Steps done; fewer than asked for where the data ended.
        examples: Examples in those steps, over all replicas.
        logs: The metrics since they were last reset, over all replicas.
        seconds: The mean over workers of the time given to the call.
        votes: What any worker asked for in the call.
        input_seconds: What this worker waited for data, where the engine
            can tell.
        traced: Whether the call traced or compiled, where it can tell.
        watched: What was seen of each step; None where nobody asked.
        computing_seconds: What this worker took for the gradients of its own
            rows, where there are several workers or shares are measured.
        sections: What this worker took in a step to get its rows, and to
            compute their gradients, in seconds. None with one worker.
        returned: What a `train_step` or `test_step` of the author's own has
            returned in the last step. Keras has that at the end of a batch.
    """

    steps: int
    examples: int
    logs: Logs
    seconds: float
    votes: Votes = NO_VOTES
    input_seconds: float = 0.0
    traced: bool = False
    watched: Watched | None = None
    computing_seconds: float = 0.0
    sections: tuple[float, float] | None = None
    returned: Logs = dataclasses.field(default_factory=dict)


class UnevenData(ConfigurationError):
    """The data of some workers has ended, that of others has not.

    Args:
        ended: The workers whose data has ended.
        workers: How many there are.
        steps: Batches that all of them had.
    """

    def __init__(
        self, ended: Sequence[int], workers: int, steps: int = 0
    ) -> None:
        self.ended, self.workers, self.steps = ended, workers, steps
        received = ", ".join(
            f"{steps if w in ended else f'more than {steps}'} on worker {w}"
            for w in range(workers)
        )
        super().__init__(
            "All workers must have the same number of batches. Received: "
            f"{received}. Give all of them the same data, or ask for no more "
            "steps than each has."
        )

    def after(self, steps: int) -> UnevenData:
        """Returns the same, with a number of steps done before."""
        return UnevenData(self.ended, self.workers, self.steps + steps)


class DataFeed(Protocol):
    """Where the epochs of a run read from."""

    source: Source

    def iterator(self, epoch: int, limit: int | None = None) -> Any:
        """Returns where an epoch reads from.

        Args:
            epoch: Index of the epoch.
            limit: Steps that will be asked for; None until the data ends.
        """

    def resume(self, finished: Sequence[int], step: int) -> None:
        """Goes to where a run that was broken off had read to.

        Args:
            finished: The steps of each epoch since the first.
            step: Steps of the epoch after them.
        """

    def restart(self) -> None:
        """Forgets where an epoch that was cut short has stopped."""

    def cut_anew(self, finished: Sequence[int]) -> None:
        """Reads from here on with the shares that replicas have now.

        Args:
            finished: The steps of each epoch since the first.
        """


class Engine(abc.ABC):
    """Trains, evaluates and predicts with a compiled model on a strategy.

    Args:
        model: A compiled model, made in the strategy's scope.
        strategy: A strategy.
        options: How steps are made.

    Attributes:
        kernels: The fused forms of layers and optimizers.
        step_graphs: The graphs that have the operations of a training step,
            where the steps of this process are in its own graphs.

    Raises:
        ConfigurationError: The model is not compiled, or was made elsewhere.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: tf.distribute.Strategy,
        options: StepOptions,
    ) -> None:
        _check_compiled(model, strategy)
        _complete(model, strategy)
        _check_optimizers(model, strategy)
        check_rounding(strategy, options.gradient_dtype)
        if options.batch_normalization == "synchronized":
            for layer in normalizations(model):
                layer.synchronized = True
        topology = topology_of(strategy)
        several = topology.data_parallel_degree > 1 or topology.local.total > 1
        # What was made outside would count once for each replica.
        self._counts_apart = several or not kind_of(strategy).in_step
        if self._counts_apart:
            _check_made_inside(model, strategy)
            _check_stateless(model)
        self._model = model
        self._strategy = strategy
        self._found = building.StepFound()
        # Compiled metrics were made here, and nothing was evaluated since.
        self._as_made = False
        self._compiled = keras_internals.compiled_state(model)
        self._traced_for = keras_internals.loop_functions(model)
        self._jit_compile = bool(model.jit_compile)
        self.kernels = Kernels(model, strategy, options.kernels)
        self.step_graphs: list[tf.Graph] = []

    def is_current(self) -> bool:
        """Returns whether the model is compiled as when this was made."""
        return self._compiled == keras_internals.compiled_state(self._model)

    def _traces_anew(self) -> bool:
        """Whether the author has asked for a new trace since this was made."""
        return self._traced_for != keras_internals.loop_functions(self._model)

    @abc.abstractmethod
    def prepare(self, source: Source) -> None:
        """Creates what training and evaluation need, once.

        Args:
            source: Has the shapes and types of a batch.
        """

    def reset_metrics(self, *, first: bool = False) -> None:
        """Sets every metric of the model to its beginning.

        Args:
            first: Whether no step was trained before. Then compiled metrics
                keep the values that they were made with, as in Keras, until
                something is evaluated.
        """
        keras_internals.reset_metrics(
            self._model, as_made=first and self._as_made
        )

    @abc.abstractmethod
    def feed(
        self, source: Source, first: int = 0, *, chain: bool, training: bool
    ) -> DataFeed:
        """Returns where the epochs of a run read from.

        Args:
            source: The global batches.
            first: The first pass.
            chain: Whether every pass is read to its end, or goes on into
                the next epoch.
            training: Whether steps of training read from it.
        """

    @property
    def boundaries_matter(self) -> bool:
        """Whether it changes bits of the result where executions end."""
        return False

    @property
    def waits_for_callbacks(self) -> bool:
        """Whether a step must be held back until hooks of batches are done."""
        return False

    @property
    def can_be_compiled(self) -> bool:
        """Whether XLA can compile steps of training, of a prepared engine."""
        return False

    def lacks_memory(self, source: Source) -> bool:
        """Computes the gradients of a batch; whether they do not fit.

        Nothing is updated, and no batch is taken.

        Args:
            source: The global batches.
        """
        del source
        return False

    def compile_steps(self, jit_compile: bool) -> None:
        """Says whether XLA compiles the steps of training that follow.

        Args:
            jit_compile: Whether; by default as the model was compiled.
        """
        self._jit_compile = jit_compile

    @property
    def rate(self) -> float | None:
        """Rows per second of this worker since this was last asked for.

        None where shares are not measured; 0 where nothing was.
        """
        return None

    def rebalance(self, rates: Sequence[float]) -> bool:
        """Chooses the shares of workers where others would save time.

        Args:
            rates: Rows per second of each worker.

        Returns:
            Whether they have changed.
        """
        del rates
        return False

    def take_shares(self, shares: Sequence[int] | None) -> None:
        """Sets the shares of workers, where they are measured.

        Args:
            shares: A number for each, as a checkpoint has them. None for
                equal ones; so are those of another number of workers.
        """
        del shares

    def staleness(self) -> list[float]:
        """Returns how late gradients were in the last epoch, where measured."""
        return []

    def snapshot(self) -> Snapshot:
        """Returns what takes and puts back all that training changes."""
        optimizers = keras_internals.optimizers_of(self._model)
        every = [
            *self._model.variables,
            *(v for o in optimizers for v in keras_internals.state_of(o)),
            *(v for metric in self._model.metrics for v in metric.variables),
            *untracked_variables(self._model),
        ]
        variables = Variables.of(every)
        snapshot = Snapshot(variables, self._strategy, stored_once=True)
        return snapshot.after_putting(self._adapt)

    def _adapt(self) -> None:
        """Lets layers compute with adapted numbers that were put back."""
        if keras_internals.finalize_adapted(self._model):
            keras_internals.trace_anew(self._model)

    def check_replicas(self, step: int) -> None:
        """Checks that all replicas hold the same weights; all workers call it.

        Args:
            step: The global step, for the message.

        Raises:
            DivergedError: A replica differs.
        """
        del step  # One copy has nothing to be compared with.

    @property
    def pipeline(self) -> PipelinePlan | None:
        """Returns the stages of the model, None where it has none."""
        return None

    @abc.abstractmethod
    def train(
        self,
        iterator: Any,
        steps: int,
        source: Source,
        seconds: float = 0.0,
        votes: Votes = NO_VOTES,
        ahead: int | None = None,
    ) -> Execution:
        """Runs training steps.

        Args:
            iterator: From a feed.
            steps: How many steps at most.
            source: Where the iterator comes from.
            seconds: Any time of this worker; its mean over workers comes
                back, equal on all of them.
            votes: What this worker asks for; what any asks for comes back.
            ahead: How many steps may have begun when this returns, where
                that may be more than are done.

        Returns:
            What was done.
        """

    @abc.abstractmethod
    def evaluate(
        self, iterator: Any, steps: int, source: Source, seconds: float = 0.0
    ) -> Execution:
        """Runs evaluation steps; arguments and result as for `train`."""

    @abc.abstractmethod
    def predict(self, iterator: Any, source: Source) -> Any | None:
        """Runs one prediction step.

        Args:
            iterator: From a feed.
            source: Where the iterator comes from.

        Returns:
            The outputs for one global batch as arrays, in the order of its
            rows and the same on every worker; None where the data has ended.
        """

    @abc.abstractmethod
    def trace(self, source: Source) -> StepTrace:
        """Runs the first step of training, and puts everything back.

        Args:
            source: The global batches.

        Returns:
            What the step did, on the devices of this process.

        Raises:
            ConfigurationError: The step does not end with an update, or the
                model has a `train_step` of its own.
        """

    @abc.abstractmethod
    def trace_outputs(self, source: Source) -> list[ShareTrace]:
        """Predicts the batches of a source.

        Args:
            source: The inputs: one global batch, or on parameter servers one
                batch for each worker.

        Returns:
            What each device of this process computed.
        """

    def is_lost(self) -> bool:
        """Returns whether the variables are gone with who kept them."""
        return False

    def finish(self, iterator: Any) -> Execution:
        """Ends an epoch, however far it went.

        Args:
            iterator: What the epoch read from.

        Returns:
            What was still under way, with the logs that belong to the whole
            epoch.
        """
        del iterator
        return Execution(0, 0, {}, 0.0)

    def build(self, source: Source) -> None:
        """Creates the variables of the model, its metrics and optimizers."""
        if not keras_internals.compiled_parts_are_built(self._model):
            self._as_made = True
        with self._strategy.scope():
            self._found = building.build(
                self._model, source.example(), self._found
            )
        if self._counts_apart:
            # Keras has the metrics of `compile` in the model from here on.
            _check_made_inside(self._model, self._strategy)

    def build_layers(self, source: Source, *, training: bool = False) -> None:
        """Creates the variables of the model's layers, and nothing else.

        Args:
            source: The batches.
            training: Whether they are for training.
        """
        with self._strategy.scope():
            self._found = building.build_layers(
                self._model, source.example(), training=training
            )
        # Replicas write where the generator of unseeded draws is.
        keras_internals.global_seed_of(self._strategy)


def _check_compiled(
    model: keras.Model, strategy: tf.distribute.Strategy
) -> None:
    if not isinstance(model, keras.Model):
        raise ConfigurationError(
            "build_model must return a compiled keras.Model. Received: "
            f"{type(model).__name__}. End it with `return model`."
        )
    if not model.compiled:
        raise ConfigurationError(
            "build_model must return a compiled model. Received: the model "
            f"{model.name!r}, not compiled. Call `model.compile(...)` before "
            "returning it."
        )
    if model.distribute_strategy is not strategy:
        raise ConfigurationError(
            "The model must be made in the strategy's scope. Received: the "
            f"model {model.name!r}, made outside. Create it inside "
            "build_model, or in `with strategy.scope():`."
        )


def _complete(model: keras.Model, strategy: tf.distribute.Strategy) -> None:
    """Gives a model the optimizer that its own `train_step` does not use.

    `compile` gives it one, but for `optimizer=None`.
    """
    authored = keras_internals.overrides(model, "train_step")
    if model.optimizer is None and authored:
        with strategy.scope():
            model.optimizer = keras.optimizers.SGD()


def check_rounding(strategy: tf.distribute.Strategy, name: str | None) -> None:
    """Refuses a type that TensorFlow does not sum between GPUs.

    Args:
        strategy: A strategy.
        name: The `gradient_dtype`.
    """
    if name != "bfloat16" or strategy.num_replicas_in_sync == 1:
        return
    devices = strategy.extended.worker_devices
    if any("GPU" in device for device in devices):
        raise ConfigurationError(
            "TensorFlow sums no bfloat16 between GPUs. Received: "
            f"gradient_dtype={name!r} with {len(devices)} GPUs here. Use "
            "gradient_dtype='float16' with a loss scale, or leave it out."
        )


# What an author may write anew in a class of an optimizer.
_METHODS = (
    *("apply", "apply_gradients", "update_step", "_clip_gradients"),
    *("assign", "assign_add", "assign_sub", "_apply_weight_decay"),
)


def _check_optimizers(
    model: keras.Model, strategy: tf.distribute.Strategy
) -> None:
    """Refuses optimizers of another strategy, and with replaced methods."""
    for optimizer in keras_internals.optimizers_of(model):
        for part in keras_internals.parts(optimizer):
            replaced = keras_internals.replaced_by_author(part, _METHODS)
            if replaced is not None:
                raise ConfigurationError(
                    "Methods of an optimizer are those of its class. "
                    f"Received: {part.name!r}, an object whose {replaced} was "
                    f"replaced. Write a subclass of {type(part).__name__}."
                )
            if keras_internals.strategy_of(part) is not strategy:
                raise _made_outside("optimizer", part.name)


def _made_outside(
    kind: str, name: str, variable: keras.Variable | None = None
) -> ConfigurationError:
    which = "" if variable is None else f" ({variable.path})"
    return ConfigurationError(
        "What a model uses must be made in the strategy's scope. Received: "
        f"the {kind} {name!r}, made outside{which}. Create it inside "
        "build_model, or compile again, quantize or enable_lora inside "
        "trainer.strategy.scope()."
    )


def _check_made_inside(
    model: keras.Model, strategy: tf.distribute.Strategy
) -> None:
    """Refuses variables that were made outside of the strategy's scope.

    An optimizer or a metric with such variables counts once for each replica.
    """
    optimizers = [
        part
        for optimizer in keras_internals.optimizers_of(model)
        for part in keras_internals.parts(optimizer)
    ]
    owned = [
        ("optimizer", optimizer.name, variable)
        for optimizer in optimizers
        for variable in optimizer.variables
    ]
    owned += [
        ("metric", each.name, variable)
        for metric in keras_internals.metrics_of(model)
        # Those of `compile` are in one that has the variables of all.
        for each in [*getattr(metric, "metrics", ()), metric]
        for variable in each.variables
    ]
    owned += [
        ("layer", layer.name, variable)
        for layer in keras_internals.layers_of(model)
        for variable in layer.variables
        if layer is not model
    ]
    owned += [("model", model.name, variable) for variable in model.variables]
    for kind, name, variable in owned:
        if not strategy.extended.variable_created_in_scope(variable.value):
            raise _made_outside(kind, name, variable)


def _check_stateless(model: keras.Model) -> None:
    """Refuses layers that keep a state for each row of a batch."""
    for layer in keras_internals.layers_of(model):
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            raise ConfigurationError(
                "A recurrent layer with stateful=True keeps a state for each "
                "row of a batch, which replicas share out. Received: the "
                f"layer {layer.name!r} on several replicas. Use 'one_device', "
                "or return_state=True and pass initial_state yourself."
            )
