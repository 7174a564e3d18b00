"""What the replicas of this process had, and what they made of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from mgpu_tf.data import structures
from mgpu_tf.engine.step.traced import excerpts
from mgpu_tf.reports.pipeline_trace import Excerpt, ShareTrace
from mgpu_tf.strategies.registry import topology_of


class TracedReplicas:
    """The replicas of this process in one step, which runs eagerly.

    Args:
        strategy: A strategy whose replicas step together.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self._strategy = strategy
        self._local = topology_of(strategy).local
        self._shares: list[ShareTrace] = []
        self._factors: list[float] = []
        self._scale = self._factor = 1.0

    def begin(
        self,
        data: Any,
        local: Any,
        total: tf.Tensor,
        optimizer: keras.optimizers.Optimizer | None = None,
        scaler: keras.optimizers.LossScaleOptimizer | None = None,
    ) -> None:
        """Notes what the replicas get.

        Args:
            data: The rows of each replica.
            local: How many they are.
            total: Rows of the global batch.
            optimizer: The optimizer inside of the loss scaling.
            scaler: The loss scaling, or None.
        """
        if optimizer is not None:
            self._factor = float(optimizer.loss_scale_factor or 1.0)
        dynamic = 1.0
        if scaler is not None:
            dynamic = float(tf.convert_to_tensor(scaler.dynamic_scale))
        self._scale = self._factor * dynamic
        parts = [
            self._by_replica(part) for _, part in structures.parts_of(data)
        ]
        sizes = self._strategy.experimental_local_results(local)
        rows = int(total)
        for place, size in enumerate(map(int, sizes)):
            first, after = self._local.rows_of(rows, place)
            if after - first != size:
                first, after = 0, size  # A function of the user's cuts it.
            self._factors.append(rows / max(size, 1))
            own = tuple(part[place] for part in parts)
            shown = excerpts(own)
            device = shown[0].device if shown else ""
            self._shares.append(
                ShareTrace(device, 0, first, after, size / rows, shown)
            )

    def note_losses(self, sums: Any) -> None:
        """Notes the loss of each replica that has one of its own.

        Args:
            sums: Of each replica the sum of losses, the number of examples and
                another number, as `StepWatch.row` returns them.
        """
        for place, ((own,), share) in enumerate(
            zip(self._by_replica(sums), self._shares, strict=True)
        ):
            loss, examples, _ = own.numpy()
            # Else one copy is for all, or another replica counts these rows.
            if examples and examples == share.after - share.first:
                self._shares[place] = dataclasses.replace(
                    share, loss=float(loss / examples)
                )

    def trained(self, paths: list[str], gradients: Any) -> list[ShareTrace]:
        """Returns what the replicas did in a step of training.

        Args:
            paths: The weights that have a gradient.
            gradients: The contributions to theirs, a scaled loss included. A
                contribution is divided by the rows of the global batch.
        """
        found = []
        for share, factor, own in zip(
            self._shares,
            self._factors,
            self._by_replica(gradients),
            strict=True,
        ):
            shown = [
                self._shown(path, gradient, factor / self._scale)
                for path, gradient in zip(paths, own, strict=True)
            ]
            found.append(
                dataclasses.replace(
                    share, device=shown[0].device, gradients=shown
                )
            )
        return found

    def received(self, paths: list[str], gradients: Any) -> list[Excerpt]:
        """Returns what the optimizer got, on each device that got it."""
        if gradients is None:
            return []  # The scaled loss has overflowed: there is no update.
        every = self._by_replica(gradients)
        return [
            self._shown(path, own[place], 1 / self._factor)
            for place, path in enumerate(paths)
            for own in every
        ]

    def predicted(self, outputs: Any) -> list[ShareTrace]:
        """Returns what the replicas did in a step of prediction."""
        found = []
        for share, own in zip(
            self._shares, self._by_replica(outputs), strict=True
        ):
            shown = excerpts(own, ("outputs", "", ""))
            found.append(
                dataclasses.replace(
                    share, device=shown[0].device, outputs=shown
                )
            )
        return found

    def _shown(self, path: str, gradient: Any, factor: float) -> Excerpt:
        value = np.asarray(tf.convert_to_tensor(gradient)) * factor
        values = getattr(gradient, "values", gradient)
        return Excerpt.of(path, value, values.device)

    def _by_replica(self, values: Any) -> list[list[Any]]:
        """Returns the tensors that each replica of this process has."""
        leaves = [
            self._strategy.experimental_local_results(leaf)
            for leaf in tf.nest.flatten(values)
            if leaf is not None
        ]
        return [
            [leaf[place] for leaf in leaves]
            for place in range(self._local.count)
        ]
