"""Your own training loop, on any synchronous strategy.

    def build():
        model, optimizer = make_model(), keras.optimizers.Adam()
        optimizer.build(model.trainable_variables)
        return {"model": model, "optimizer": optimizer}

    def train_step(objects, batch):
        x, y = batch
        model = objects["model"]
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.square(model(x) - y))
        variables = model.trainable_variables
        gradients = tape.gradient(loss, variables)
        objects["optimizer"].apply(gradients, variables)
        return {"loss": loss}

    loop = mgpu_tf.Loop(build, strategy)
    position = loop.restore("run/checkpoints") or {"epoch": 0}
    for epoch in range(position["epoch"], 10):
        for batch in dataset:                         # global batches
            logs = loop.run(train_step, batch)
        loop.save("run/checkpoints", epoch=epoch + 1)

Write a step as on one device, by the rules of an overridden `train_step`:
losses are means over the rows that the step receives. Every worker of a cluster
runs the same loop over the same batches.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from mgpu_tf.checkpoints import storage, store
from mgpu_tf.checkpoints.reading import Stored
from mgpu_tf.checkpoints.recovery import Owner
from mgpu_tf.checkpoints.run_state import generators, restore_generators
from mgpu_tf.checkpoints.saving.writer import Variables, Writer, read_state
from mgpu_tf.engine import create_engine, keras_internals
from mgpu_tf.engine.step.base import Engine, Logs
from mgpu_tf.errors import ConfigurationError, check_integer
from mgpu_tf.folders import is_address
from mgpu_tf.options import StepOptions
from mgpu_tf.runtime import determinism
from mgpu_tf.strategies.peers import Peers
from mgpu_tf.strategies.registry import kind_of, strategy_from
from mgpu_tf.training.data_errors import explained
from mgpu_tf.training.distributed_model import DistributedModel

_log = logging.getLogger("mgpu_tf")

Objects = dict[str, Any]
Step = Callable[[Objects, Any], dict[str, Any]]


class Loop:
    """Runs your own training steps on a strategy.

    Args:
        build: A function that returns a dict of models, layers, optimizers and
            metrics, by names of your choice. All of them must be built. It is
            called in the strategy's scope.
        strategy: From `create_strategy` or a factory, or a name for
            `create_strategy`. Default: `auto`.
        seed: The seed for `keras.utils.set_random_seed`, which is called before
            `build`. "auto" takes the seed that it was given last, or 0. None
            sets no seed.

    Attributes:
        objects: The dict that `build` returned.
        global_step: The number of steps that were run.

    Raises:
        ConfigurationError: `build` does not return such a dict, or the strategy
            is not synchronous.
    """

    def __init__(
        self,
        build: Callable[[], Objects],
        strategy: tf.distribute.Strategy | str | None = None,
        *,
        seed: int | str | None = "auto",
    ) -> None:
        strategy = strategy_from(strategy)
        if not (kind_of(strategy).in_step and kind_of(strategy).trains):
            raise ConfigurationError(
                "A Loop needs a synchronous strategy. "
                "Received: 'parameter_server'. Use 'mirrored' or "
                "'multi_worker_mirrored'."
            )
        self._distributed = DistributedModel(
            lambda: _holder(build()), strategy, seed=seed
        )
        self._engines: dict[Step, Engine] = {}
        # Of each folder that it has saved to.
        self._owners: dict[str, Owner] = {}
        self.objects: Objects = self._distributed.model.objects
        self.global_step = 0

    @property
    def strategy(self) -> tf.distribute.Strategy:
        """Returns the strategy."""
        return self._distributed.strategy

    def run(self, step: Step, batch: Any) -> Logs:
        """Runs a step on a global batch.

        Args:
            step: A function of `objects` and the rows of a replica, in the
                structure of the batch. It returns a dict. It is traced once.
            batch: An array or tensor `[global_batch_size, ...]`, or a tuple,
                list or dict of them.

        Returns:
            The dict of the step, over all replicas: the results of metrics,
            and means over the batch.

        Raises:
            ConfigurationError: The step breaks a rule.
        """
        distributed = self._distributed
        distributed.model.step = step
        leaves = tf.nest.flatten(batch)
        with distributed.peers.together("Loop.run"):
            source = distributed.source(
                {"batch": batch}, batch_size=len(leaves[0])
            )
            engine = self._engines.get(step)
            if engine is None:
                engine = self._engines[step] = self._engine()
            feed = engine.feed(source, chain=True, training=True)
            with explained(source):
                done = engine.train(feed.iterator(0, 1), 1, source)
        self.global_step += 1
        return done.logs

    def save(self, folder: str, keep: int = 3, **position: Any) -> None:
        """Saves a checkpoint. Every worker must call this method.

        Args:
            folder: A folder that every worker sees, or an address of object
                storage such as s3://bucket/run.
            keep: The number of checkpoints to keep.
            **position: Numbers or strings with the position of the loop, which
                `restore` returns.
        """
        check_integer("keep", keep, 1)
        distributed = self._distributed
        state = {
            "loop": position,
            "global_step": self.global_step,
            "num_replicas": distributed.strategy.num_replicas_in_sync,
            "generators": generators(),
            "environment": determinism.environment(),
        }
        snapshot = self._engine().snapshot()

        where = folder if is_address(folder) else os.path.realpath(folder)
        owner = self._owners.setdefault(where, Owner(folder))

        def write(peers: Peers) -> None:
            if peers.worker == 0 and not owner.shown:
                storage.of(folder, "folder").make("folder", folder)
                owner.take()
            writer = Writer(
                folder,
                peers.token(),
                peers.worker,
                peers.num_workers,
                check=owner.check,
            )
            writer.begin(self.global_step, snapshot.pieces())
            writer.finish(state, keep, why="Loop.save")

        distributed.write_together("Loop.save", folder, write)

    def restore(
        self, folder: str, *, restart_from_nothing: bool = False
    ) -> dict[str, Any] | None:
        """Restores the newest usable checkpoint.

        Every worker must call this method.

        Args:
            folder: A folder that every worker sees.
            restart_from_nothing: Whether None is returned where the folder
                has checkpoints and all of them are damaged.

        Returns:
            The saved position; None if there is no checkpoint.

        Raises:
            CheckpointError: A checkpoint cannot be read, or is of a later
                release.
            ConfigurationError: The checkpoint has other objects, or all of
                them are damaged.
        """
        storage.check("folder", folder)
        with self._distributed.peers.together("Loop.restore"):
            path = self._newest(folder)
            if path is None and not restart_from_nothing:
                store.refuse_to_lose("folder", folder)
            if path is None:
                return None
            stored = Stored(path)
            state = read_state(stored)
            if "loop" not in state:
                raise ConfigurationError(
                    "A loop goes on from what Loop.save has written. "
                    f"Received: {path}, of a fit(). Use another folder."
                )
            determinism.warn_of_other_environment(state["environment"])
            self._engine().snapshot().put(Variables(stored))
        self.global_step = state["global_step"]
        restore_generators(state["generators"])
        return dict(state["loop"])

    def _newest(self, folder: str) -> str | None:
        """Returns the path of the checkpoint that all workers read."""
        entry = store.newest(
            folder,
            lambda damaged: _log.warning(
                "refused a damaged checkpoint, which stays: %s",
                damaged.problem,
            ),
        )
        step = self._distributed.peers.of_first(
            -1 if entry is None else entry.step
        )
        return store.paths(folder).get(step)

    def _engine(self) -> Engine:
        """Returns a prepared engine for the objects."""
        distributed = self._distributed
        engine = create_engine(
            distributed.model, distributed.strategy, StepOptions()
        )
        # All objects are built, so nothing is read from the source.
        engine.prepare(distributed.source(np.zeros([1]), batch_size=1))
        return engine


def _holder(objects: Any) -> keras.Model:
    """Returns a model that has the objects as attributes."""
    if not isinstance(objects, dict) or not objects:
        raise ConfigurationError(
            "build must return a dict of models, optimizers and metrics by "
            f"name. Received: {type(objects).__name__}."
        )
    holder = _Holder(objects)
    every = [
        *keras_internals.layers_of(holder)[1:],
        *keras_internals.optimizers_of(holder)[1:],
    ]
    for part in every:
        if not part.built:
            raise ConfigurationError(
                "What a loop trains is built before it begins, so that it "
                f"can be restored. Received: {part.name!r}, not built. Call "
                "its build(...) in build."
            )
    return holder


class _Holder(keras.Model):
    """The objects of a loop as one model with the loop's step."""

    def __init__(self, objects: Objects) -> None:
        super().__init__(name="loop")
        self.objects = objects
        self.step: Step
        self.compile()
        self.built = True

    def train_step(self, data: Any) -> dict[str, Any]:
        """Runs the current step of the loop."""
        return self.step(self.objects, data["batch"])

    def get_metrics_result(self) -> dict[str, Any]:
        """Returns an empty dict: the step returns its own logs."""
        return {}
