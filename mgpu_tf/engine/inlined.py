"""Functions of the author's that are traced in the graph of a step.

A `tf.function` keeps what it has captured of the graph in which it was traced.
What a step lends to layers is in its own graph, so a function that reads it is
computed as the Python function that it was made of.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.trace_again import ReadRefused, TraceAgain
from mgpu_tf.errors import ConfigurationError


class Inlined:
    """Functions of the author's that are traced in the graph of a step.

    Code that needs AutoGraph is converted by it, as TensorFlow does.
    """

    def __init__(self) -> None:
        # Raised where they cannot be traced so; None where none is.
        self._refusal: ConfigurationError | None = None
        # Of those that need AutoGraph, what it makes of them.
        self._converted: dict[Any, Any] = {}

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Lets each `tf.function` be the Python function that it was made of.

        Nothing changes where no function has to be.

        Raises:
            TraceAgain: Another function needs AutoGraph.
            ConfigurationError: A function cannot be traced so.
        """
        if self._refusal is None:
            yield
            return
        before = tf.config.functions_run_eagerly()
        tf.config.run_functions_eagerly(True)
        try:
            with keras_internals.python_replaced(self._converted.items()):
                yield
        except tf.errors.OperatorNotAllowedInGraphError as error:
            raise self._after(error) from error
        finally:
            tf.config.run_functions_eagerly(before)

    def begin(self, refusal: ConfigurationError) -> None:
        """Lets functions be traced with the step.

        Args:
            refusal: What to raise where they cannot be.

        Raises:
            TraceAgain: They will be, in another trace.
            ConfigurationError: They cannot be.
        """
        again = not tf.config.functions_run_eagerly()
        self._refusal = refusal
        raise TraceAgain if again else refusal

    @property
    def is_begun(self) -> bool:
        """Whether functions are traced with the step."""
        return self._refusal is not None

    def _after(self, error: Exception) -> Exception:
        """Returns what to raise in the place of an error of plain Python."""
        function = keras_internals.function_around(error)
        if function is None or function in self._converted:
            assert self._refusal is not None
            return self._refusal
        self._converted[function] = keras_internals.by_autograph(function)
        return TraceAgain()


def refused(variable: keras.Variable) -> ReadRefused:
    """Returns what to raise where functions cannot be traced with a step.

    Args:
        variable: What one of them reads or writes.
    """
    return ReadRefused(
        "A tf.function that reads or writes what a step lends to layers is "
        "traced as plain Python, with AutoGraph where it needs it. Received: "
        f"one with {variable.path!r} that cannot be. Leave tf.function out "
        "there."
    )


def check_lent(variable: keras.Variable) -> None:
    """Refuses a weight that is lent to what cannot compute with it.

    `tf.custom_gradient` sends gradients to its arguments and to variables. A
    lent weight is neither, and would have none. A CPU needs XLA for the
    gradient of a convolution in groups, and plain Python has no XLA.

    Raises:
        ConfigurationError: The step reads it there.
    """
    plain = tf.config.functions_run_eagerly()
    if plain and keras_internals.is_within_compiled_convolution():
        raise ReadRefused(
            "Where functions of tf.function are traced as plain Python, since "
            "one of them reads what a step lends to layers, no convolution "
            f"is in groups. Received: one with {variable.path!r}. Leave "
            "tf.function out of layers and optimizers."
        )
    if keras_internals.is_within_own_gradient():
        raise ConfigurationError(
            "Where weights are split, and in a train_step of your own, a "
            "function of tf.custom_gradient, keras.remat or "
            "tf.recompute_grad takes weights as arguments. Received: one that "
            f"reads {variable.path!r}. Pass it "
            "tf.convert_to_tensor(weight). Leave keras.remat and "
            "tf.recompute_grad out: with Keras's train_step, recompute of "
            "the Trainer does as much."
        )


def is_within_function(graph: Any) -> bool:
    """Returns whether a `tf.function` is traced inside of a graph.

    One that Keras makes for a single call keeps nothing for another.

    Args:
        graph: That of a step. Branches and loops in it are traced with it.
    """
    here = tf.compat.v1.get_default_graph()
    plain = tf.config.functions_run_eagerly()
    if not plain and keras_internals.is_within_compiled_convolution():
        here = here.outer_graph
    while here is not None and here is not graph:
        if type(here) is tf.__internal__.FuncGraph:
            return True
        here = getattr(here, "outer_graph", None)
    return False
