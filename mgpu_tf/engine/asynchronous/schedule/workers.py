"""What a run and a feed need of the engine that they belong to."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from mgpu_tf.engine.asynchronous.schedule.work import Work
from mgpu_tf.engine.step.base import Logs
from mgpu_tf.strategies.parameter_server import ParameterServerStrategy


class Workers(Protocol):
    """The workers of a cluster, and the metrics on its servers.

    Attributes:
        strategy: The strategy of the coordinator.
        coordinator: TensorFlow's, which hands out work.
        next_step: Index of the next step to hand out, among all of the run.
        current: The epoch of training that is under way, or was last.
    """

    strategy: ParameterServerStrategy
    coordinator: tf.distribute.coordinator.ClusterCoordinator
    next_step: int
    current: Any

    @property
    def most_steps(self) -> int:
        """The most steps of a piece of work: whole updates."""

    @property
    def every(self) -> int:
        """Steps in an update."""

    def function(self, kind: str, work: Work, measured: bool) -> Any:
        """Returns the function of a piece of work."""

    def steps_made(self) -> int:
        """Returns the count of steps on the parameter server."""

    def metrics(self, sums: np.ndarray) -> Logs:
        """Returns the metrics by name from the sums of their state."""

    def read_metrics(self) -> np.ndarray:
        """Returns the state of the metrics on the parameter servers."""

    def write_metrics(self, sums: np.ndarray) -> None:
        """Writes the state of the metrics on the parameter servers."""
