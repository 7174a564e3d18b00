"""A model on a strategy, and the workers that have it.

    distributed = DistributedModel(build_model, strategy, seed=0)
    engine = distributed.prepare(source)

What the calls of a `Trainer` share. Where variables are lost with a parameter
server, `again` makes all of it anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf import data as data_lib
from mgpu_tf.cluster import watchdog
from mgpu_tf.engine import create_engine, keras_internals
from mgpu_tf.engine.asynchronous.schedule.staleness import PREFIX
from mgpu_tf.engine.recomputed import chosen_layers
from mgpu_tf.engine.step.base import DataFeed, Engine
from mgpu_tf.errors import (
    ConfigurationError,
    OutOfMemoryError,
    is_integer,
)
from mgpu_tf.folders import check_local, check_path
from mgpu_tf.launch import noise
from mgpu_tf.options import StepOptions
from mgpu_tf.planner.choice.remedies import explain, layout_here
from mgpu_tf.runtime import determinism
from mgpu_tf.strategies.peers import Peers
from mgpu_tf.strategies.registry import is_chief, topology_of
from mgpu_tf.training import agreement, opening
from mgpu_tf.training import callbacks as callbacks_lib
from mgpu_tf.training.call_arguments import (
    check_real,
    check_seeded,
    check_verbose,
    data_facts,
)
from mgpu_tf.training.data_errors import explained
from mgpu_tf.training.pace import Pace, Trial

_log = logging.getLogger("mgpu_tf")

BuildModel = Callable[[], keras.Model]

# Of a step whose rows are not known before they are there.
_MOST_PARTS = 64


class DistributedModel:
    """A model that `build_model` has made in the scope of a strategy.

    Args:
        build_model: Returns a compiled model; or that model.
        strategy: Any strategy.
        seed: As for `Trainer`.
        steps_per_execution: As for `Trainer`.
        options: How steps are made.

    Attributes:
        strategy: The strategy.
        model: The model.
        configuration: How the model was configured when it was built.
        peers: The workers that have the same.
        is_chief: Whether this one writes files and prints.

    Raises:
        ConfigurationError: `build_model` does not return a compiled model
            made inside of it, or another on another worker.
    """

    def __init__(
        self,
        build_model: BuildModel | keras.Model,
        strategy: tf.distribute.Strategy,
        *,
        seed: int | str | None,
        steps_per_execution: int | str = "auto",
        options: StepOptions | None = None,
    ) -> None:
        watchdog.begin(None)
        self._build_model = build_model
        self._lines: set[str] = set()
        seed = _seed_of(seed)
        self._seed = seed
        self._steps_per_execution = steps_per_execution
        self._options = options or StepOptions()
        self.strategy = strategy
        self.is_chief = is_chief(strategy)
        self.peers = Peers(strategy)
        self._is_apart = getattr(strategy, "is_apart", False)
        _check_given(build_model, self._options.precision, self._is_apart)
        if self._is_apart:
            strategy.meeting = self.peers.reading
        self._trial: Trial | None = None
        if seed is not None:
            keras.utils.set_random_seed(seed)
        with self.peers.together("Trainer"):
            self.peers.compare(self._facts())
            with strategy.scope(), self.peers.same_variables():
                self.model = _model_of(build_model, self._options.precision)
            if seed is not None:
                # A build_model that sets a seed leaves the next Trainer's.
                keras_internals.give_seed(seed)
            self._engine = self._new_engine()
            keras_internals.quantizes_in(self.model, strategy.scope)
            self.configuration = agreement.configuration(self.model)
            self._compare_model()

    def again(self) -> DistributedModel:
        """Returns the same, made anew where a parameter server was lost.

        Raises:
            ConfigurationError: There is no function that builds the model.
        """
        if isinstance(self._build_model, keras.Model):
            raise ConfigurationError(
                "A model whose parameter server was lost is built again. "
                "Received: a model in place of the function that builds it. "
                "Write Trainer(build_model, strategy)."
            )
        return DistributedModel(
            self._build_model,
            self.strategy.again(),
            seed=self._seed,
            steps_per_execution=self._steps_per_execution,
            options=self._options,
        )

    @property
    def engine(self) -> Engine:
        """Returns the engine, a new one where the model was recompiled."""
        if not self._engine.is_current():
            self._engine = self._new_engine()
            self._trial = None
        return self._engine

    def _new_engine(self) -> Engine:
        engine = create_engine(self.model, self.strategy, self._options)
        for optimizer in keras_internals.optimizers_of(self.model):
            keras_internals.make_readable(keras_internals.state_of(optimizer))
        return engine

    def print_once(self, line: str) -> None:
        """Prints a line once: on the chief, or in the log of another task."""
        if not line or line in self._lines:
            return
        self._lines.add(line)
        if self.is_chief:
            print(f"mgpu_tf: {line}", flush=True)
        else:
            noise.print_to_log(f"mgpu_tf: {line}")

    def print_what_runs(self, source: data_lib.Source) -> None:
        """Prints what runs where, and in which batches."""
        batch = opening.batch_size_of(source)
        self.print_once(opening.what_runs(self.strategy, batch))
        if self._options.batch_normalization == "keras":
            replicas = topology_of(self.strategy).data_parallel_degree
            self.print_once(opening.of_normalization(self.model, replicas))

    @property
    def options(self) -> StepOptions:
        """Returns how steps are made."""
        return self._options

    @property
    def is_lost(self) -> bool:
        """Whether the variables are gone with a parameter server."""
        return self._engine.is_lost()

    def prepare(self, source: data_lib.Source) -> Engine:
        """Returns the engine, its variables made.

        Args:
            source: Has the shapes and types of a batch.
        """
        engine = self.engine
        with (
            explained(source),
            self.strategy.scope(),
            self.peers.same_variables(),
        ):
            engine.prepare(source)
        return engine

    def prepare_training(self, source: data_lib.Source) -> Engine:
        """Returns the engine, and checks that all workers begin alike.

        Args:
            source: As for `prepare`.

        Raises:
            ConfigurationError: Another worker has other weights, or layers
                that are configured in another way.
        """
        engine = self.prepare(source)
        self._compare_model()
        return engine

    def fit_memory(self, source: data_lib.Source) -> None:
        """Cuts steps into parts until the gradients of a batch fit.

        All workers take the same number of parts.

        Args:
            source: The batches of training.

        Raises:
            OutOfMemoryError: A part of one row does not fit.
        """
        rows = self.rows(source) or _MOST_PARTS
        while True:
            engine = self.prepare(source)
            lacks = engine.lacks_memory(source)
            if not self.peers.any(lacks):
                return
            parts = 2 * self._options.step_parts
            if parts > rows:
                raise self.out_of_memory(source)
            self._options = dataclasses.replace(self._options, step_parts=parts)
            _log.warning(
                "a batch does not fit: step_parts=%d, the same global batch "
                "in parts of %d rows on each replica",
                parts,
                -(-rows // parts),
            )
            self._engine = create_engine(
                self.model, self.strategy, self._options
            )

    def rows(self, source: data_lib.Source) -> int:
        """Returns the most rows that a replica gets; 0 where not known."""
        rows = source.rows()
        replicas = topology_of(self.strategy).data_parallel_degree
        return 0 if rows is None else -(-rows.batch_size // replicas)

    def out_of_memory(self, source: data_lib.Source) -> OutOfMemoryError:
        """Returns the error that says what takes the memory of a step.

        Args:
            source: The batches of training.
        """
        layout = layout_here(self.strategy, self._options)
        rows = self.rows(source)
        return OutOfMemoryError(
            explain(self._build_model, layout, rows * layout.replicas)
        )

    def source(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        batch_size: int | None = None,
        shuffle: bool | str = False,
        steps: int | None = None,
    ) -> data_lib.Source:
        """Returns data of any kind as global batches; as `data.as_source`.

        A task of keras-hub takes raw data, such as texts; arrays of them keep
        their order, as in the task's own `fit`.
        """
        preprocess = data_lib.preprocess_of(self.model)
        if preprocess is not None and not data_lib.is_batched(x):
            shuffle = data_lib.kept_order(shuffle)
            x, y, sample_weight = self.arrays(x, y, sample_weight)
        source = data_lib.as_source(
            x,
            y,
            sample_weight,
            strategy=self.strategy,
            batch_size=batch_size,
            shuffle=shuffle,
            seed=self._seed or 0,
            steps=steps,
        )
        if preprocess is None:
            check_real(source, self.model)
            return source
        return data_lib.PreprocessedSource(source, preprocess, self.model.name)

    def arrays(self, *data: Any) -> tuple[Any, ...]:
        """Returns arrays as they are, or by the rule of keras-hub for a task.

        Args:
            *data: Arrays, nested, or None.
        """
        if data_lib.preprocess_of(self.model) is None:
            return data
        return data_lib.arrays_of(data)

    def feed_once(self, source: data_lib.Source, steps: int | None) -> DataFeed:
        """Returns a feed of whole passes, for evaluations."""
        whole = steps is None or steps == source.steps
        return self.engine.feed(
            source, chain=source.seekable and whole, training=False
        )

    def compare_data(self, source: data_lib.Source, steps: int | None) -> None:
        """Compares what the workers pass to `evaluate` or `predict`.

        Raises:
            ConfigurationError: A worker has other data or steps.
        """
        if not self.peers.alone:
            check_seeded(source)
            facts = data_facts(source) | {"steps": str(steps)}
            self.peers.compare(facts)

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Lets the chief read the model alone, where it is split.

        All workers enter the block together. A variable is gathered when the
        chief reads it, and no worker holds more than one whole.
        """
        if not self._is_apart:
            yield
            return
        variables = list(self.model.variables)
        for optimizer in keras_internals.optimizers_of(self.model):
            variables += keras_internals.state_of(optimizer)
        held = {id(v): keras_internals.stored(v) for v in variables}
        with self.strategy.whole(held.values(), reads=self.is_chief):
            yield

    def write(self, name: str, path: str, write: Callable[[], Any]) -> None:
        """Writes a file on the chief; the others wait until it is there.

        Args:
            name: The method that was called.
            path: What it was called with.
            write: Writes.

        Raises:
            ConfigurationError: The file cannot be written.
        """
        with self.peers.together(name):
            self.peers.compare({"path": str(path)})
            check_local("path", str(path))
            with self.whole():
                if self.is_chief:
                    _write(name, path, write)
            self.peers.any(False)

    def write_together(
        self, name: str, path: str, write: Callable[[Peers], None]
    ) -> None:
        """Writes what each worker has its own part of.

        Args:
            name: The method that was called.
            path: What it was called with.
            write: Writes the part of this worker; called on all of them.

        Raises:
            ConfigurationError: The part cannot be written.
        """
        with self.peers.together(name):
            self.peers.compare({"path": str(path)})
            check_path("path", str(path))
            _write(name, path, lambda: write(self.peers))
            self.peers.any(False)

    def hooks(
        self,
        callbacks: list[keras.callbacks.Callback],
        verbose: int | str,
        epochs: int,
        steps: int | None,
        *,
        training: bool = False,
        examples: Callable[[], int] | None = None,
    ) -> keras.callbacks.CallbackList:
        """Returns what runs callbacks on this worker.

        Args:
            callbacks: The user's.
            verbose: As in Keras.
            epochs: How many.
            steps: Of an epoch, None for unknown.
            training: Whether it is `fit`, which returns a history.
            examples: Returns the examples trained on so far.

        Raises:
            ConfigurationError: `verbose` is none that Keras knows.
        """
        check_verbose(verbose)
        if self._is_apart:
            callbacks = callbacks_lib.saving_together(
                callbacks, self.whole, is_chief=self.is_chief
            )
        if not self.is_chief:
            verbose = 0
            callbacks = callbacks_lib.for_other_workers(callbacks)
        own = any(
            isinstance(callback, keras.callbacks.ProgbarLogger)
            for callback in callbacks
        )
        if verbose != 0 and not own:
            callbacks = [
                *callbacks,
                callbacks_lib.ProgressLine(PREFIX, examples),
            ]
        return keras.callbacks.CallbackList(
            callbacks,
            add_history=training,
            model=self.model,
            verbose=_auto_verbosity() if verbose == "auto" else verbose,
            epochs=epochs,
            steps=steps,
        )

    @property
    def fixed_steps(self) -> int | None:
        """Steps to an execution, where somebody has said how many."""
        if self._steps_per_execution != "auto":
            return int(self._steps_per_execution)
        compiled = self.model.steps_per_execution
        return compiled if compiled > 1 else None

    def pace(
        self, callbacks: list[keras.callbacks.Callback], *, exact: bool
    ) -> Pace:
        """Returns how many steps of training go into an execution.

        Args:
            callbacks: The user's; one that sees every batch wants one step.
            exact: Whether the number must not depend on time.
        """
        fixed = self.fixed_steps
        watched = self.peers.any(
            any(map(keras_internals.sees_every_batch, callbacks))
        )
        if fixed is None and watched:
            fixed = 1
        if fixed is None and exact and self._engine.boundaries_matter:
            fixed = Pace.EXACT_STEPS
        trial = self._trial_of_jit(exact)
        return Pace(fixed, trial, steps_per_execution=self.fixed_steps)

    def _trial_of_jit(self, exact: bool) -> Trial | None:
        """Returns the trial that `jit_compile="auto"` asks for.

        One that a `fit` was too short for begins again in the next.
        """
        if self._options.jit_compile != "auto":
            return None
        if exact or determinism.is_enabled():
            _log.info(
                "jit_compile='auto': steps are not compiled. Another run "
                "could choose otherwise, and its bits would not repeat"
            )
            return None
        if not self._engine.can_be_compiled:
            _log.info(
                "jit_compile='auto': steps are not compiled, since the "
                "strategy, the loss or a layer does not go with XLA"
            )
            return None
        if self._trial is None or not self._trial.over:
            self._engine.compile_steps(False)
            self._trial = Trial(self._engine.compile_steps)
        return self._trial

    def _compare_model(self) -> None:
        """Compares how models are configured, and what their weights are."""
        if not self.peers.alone:
            chosen = None
            if self.model.built:
                chosen = chosen_layers(self.model, self._options.recompute)
            self.peers.compare(
                agreement.configuration(self.model)
                | agreement.values(self.model)
                | {"recompute": str([layer.name for layer in chosen or ()])}
            )

    def _facts(self) -> dict[str, str]:
        options = self._options
        if callable(options.recompute):
            # What it chooses is compared with the model.
            options = dataclasses.replace(options, recompute="function")
        return {
            "seed": str(self._seed),
            "steps_per_execution": str(self._steps_per_execution),
            "options": str(options),
        }


def _write(name: str, path: str, write: Callable[[], Any]) -> None:
    try:
        write()
    except ConfigurationError:
        raise
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        remedy = "Free some space" if is_full else "Make the folder"
        raise ConfigurationError(
            f"{name} must be able to write its file. Received: "
            f"{str(path)!r} ({error.strerror or error}). {remedy}, or give "
            "another path."
        ) from error
    except ValueError as error:  # Such as another ending.
        said = " ".join(str(error).split())
        raise ConfigurationError(
            f"{name} must be able to write its file. Received: {path!r}. "
            f"Keras says: {said}"
        ) from error


def _auto_verbosity() -> int:
    """Returns 1, a bar that moves, where it can; else 2, a line an epoch."""
    moves = sys.stdout.isatty() or "ipykernel" in sys.modules
    return 1 if moves else 2


def _check_given(
    given: BuildModel | keras.Model, precision: str | None, is_apart: bool
) -> None:
    """Refuses a model that is built where only a function will do."""
    if not isinstance(given, keras.Model):
        return
    if precision is not None:
        raise ConfigurationError(
            "precision is set before a model is built. Received: "
            f"precision={precision!r} with a model. Pass a function that "
            "builds it, or call keras.config.set_dtype_policy before."
        )
    if is_apart:
        raise ConfigurationError(
            "A model whose weights are split over several processes is built "
            "by a function. Received: a model. Write Trainer(build_model, "
            "strategy)."
        )


def _model_of(given: BuildModel | keras.Model, precision: str | None) -> Any:
    if isinstance(given, keras.Model):
        return given
    if precision is None:
        return given()
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(precision)
    try:
        return given()
    finally:
        keras.config.set_dtype_policy(before)


def _seed_of(given: int | str | None) -> int | None:
    if given is None:
        return None
    if isinstance(given, str) and given == "auto":
        return keras_internals.given_seed() or 0
    # Of more, Keras would have set a part of the generators and then failed.
    if not is_integer(given) or not 0 <= int(given) < 2**32:
        raise ConfigurationError(
            "seed must be an integer from 0 to 4294967295, None or 'auto'. "
            f"Received: seed={given!r}."
        )
    return int(given)
