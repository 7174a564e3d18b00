"""TensorFlow's fused operations in place of Keras's elementary ones.

    kernels = Kernels(model, strategy, "fused")
    with kernels.in_place():                 # around the steps of all replicas
        ...                                  # traces steps
    kernels.replaced                         # {"BatchNormalization": 19, ...}

A layer or an optimizer is replaced where a table says that the fused form
computes the same. What does not fit runs as before. The model itself is left
as it is: its layers and optimizers have other methods only while a step is
traced.

Where TensorFlow has no such operation, a gradient written by hand saves passes
over memory: of LayerNormalization and GELU.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.kernels import (
    activations,
    batch_normalization,
    layer_normalization,
    lookups,
    optimizers,
)
from mgpu_tf.strategies.registry import kind_of

_log = logging.getLogger("mgpu_tf")

# The modules of other forms of layers, and the methods that they stand for.
_FORMS: dict[Any, tuple[str, ...]] = {
    batch_normalization: ("call", "_moments"),
    layer_normalization: ("call",),
    lookups: ("call",),
}


class Kernels:
    """The fused forms for a model.

    Args:
        model: A compiled model.
        strategy: Its strategy. On TPUs XLA fuses operations by itself.
        choice: "fused", or "keras" for Keras's own operations.
    """

    def __init__(
        self, model: keras.Model, strategy: tf.distribute.Strategy, choice: str
    ) -> None:
        self._model = model
        self._active = choice == "fused" and kind_of(strategy).name != "tpu"
        self._replicas = strategy.num_replicas_in_sync
        self._splits_layers = getattr(strategy, "splits_later", False)
        # By identity, since a step may be traced several times.
        self._replaced: dict[tuple[int, str], str] = {}
        self._logged = 0
        self._settings = optimizers.Settings()

    @property
    def replaced(self) -> dict[str, int]:
        """Returns how many layers and optimizers are fused, by their class."""
        return dict(
            sorted(collections.Counter(self._replaced.values()).items())
        )

    @property
    def _in_parts(self) -> bool:
        """Whether layers are computed in parts.

        Their operations are repeated on the parts, with TensorFlow's own
        gradients.
        """
        return self._splits_layers or any(
            map(keras_internals.is_spread, self._model.variables)
        )

    def around(self, python: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that traces another with fused forms."""

        # TensorFlow counts the traces of what is wrapped.
        @functools.wraps(python)
        def traced(*arguments: Any) -> Any:
            with self.in_place():
                return python(*arguments)

        return traced

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Puts fused forms in place, while traced. Outside of replicas."""
        if not self._active:
            yield
            return
        every = list(keras_internals.layers_of(self._model))
        forms = {id(layer): self._form_of(layer) for layer in every}
        layers = [layer for layer in every if forms[id(layer)] is not None]
        ending = [] if self._in_parts else every
        gelus = [layer for layer in ending if activations.is_gelu(layer)]
        updated = [
            part
            for optimizer in keras_internals.optimizers_of(self._model)
            for part in keras_internals.parts(optimizer)
            # What an author wraps may be given values in place of variables.
            if (part is optimizer or keras_internals.is_keras_own(optimizer))
            and optimizers.is_fused(part)
            and keras_internals.is_unpatched(part, "update_step")
        ]
        with (
            keras_internals.calls_replaced(
                layers, functools.partial(self._call, forms)
            ),
            keras_internals.activations_replaced(gelus, self._activate),
            keras_internals.updates_replaced(
                updated, self._update, self._renew_settings
            ),
        ):
            yield
        if len(self._replaced) > self._logged:
            self._logged = len(self._replaced)
            # The routine of every run, so not on a quiet terminal.
            _log.debug(
                "kernels='fused': %s",
                ", ".join(f"{n} {name}" for name, n in self.replaced.items()),
            )

    def _form_of(self, layer: keras.layers.Layer) -> Any:
        """Returns the module of a layer's other form, None without one."""
        for form, methods in _FORMS.items():
            if (
                form.is_same(layer, self._replicas)
                and keras_internals.is_unpatched(layer, *methods)
                and not (form is layer_normalization and self._in_parts)
            ):
                return form
        return None

    def _activate(self, layer: keras.layers.Layer, inputs: Any) -> Any:
        if not isinstance(inputs, tf.Tensor):
            return keras.activations.gelu(inputs)
        self._replaced[id(layer), "gelu"] = "GELU"
        return activations.gelu(inputs)

    def _call(
        self,
        forms: dict[int, Any],
        layer: keras.layers.Layer,
        own: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        form = forms[id(layer)]
        outputs, fused = form.call(layer, own, *args, **kwargs)
        if fused:
            self._replaced[id(layer), "call"] = type(layer).__name__
        return outputs

    def _renew_settings(self) -> None:
        # The next update has another number.
        self._settings = optimizers.Settings()

    def _update(
        self,
        optimizer: keras.optimizers.Optimizer,
        own: Callable[..., None],
        gradient: Any,
        variable: Any,
        rate: Any,
    ) -> None:
        rows = isinstance(gradient, tf.IndexedSlices)
        update = optimizers.update_of(optimizer, rows=rows)
        weight = optimizers.weight_of(
            optimizer, gradient, variable, rate, self._settings
        )
        if update is None or weight is None:
            own(gradient, variable, rate)
            return
        update(optimizer, weight)
        self._replaced[id(optimizer), "update"] = type(optimizer).__name__
