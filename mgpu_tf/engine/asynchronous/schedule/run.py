"""An epoch or an evaluation on the workers, while it is done."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorflow as tf

from mgpu_tf.engine.asynchronous.schedule.dispatch import Dispatcher
from mgpu_tf.engine.asynchronous.schedule.staleness import (
    Admission,
    StalenessRecord,
)
from mgpu_tf.engine.asynchronous.schedule.work import Work
from mgpu_tf.engine.asynchronous.schedule.workers import Workers
from mgpu_tf.engine.step.base import Execution, Logs
from mgpu_tf.errors import ConfigurationError


class Run:
    """The work of one epoch or evaluation while it is done.

    Args:
        engine: Who does it.
        work: What to do.

    Attributes:
        work: What is done.
        staleness: What was measured of it so far.
    """

    def __init__(self, engine: Workers, work: Work) -> None:
        self._engine, self.work = engine, work
        self._dispatcher = Dispatcher(engine.strategy)
        self.staleness = StalenessRecord()
        self._admission = Admission(None)
        self._sums: Any = None
        self._handed = self._pieces = 0
        self._waiting: tuple[int, Any] | None = None
        self._done = self._examples = self._reported = (
            self._reported_examples
        ) = 0
        self._ended = self._finished = False
        self._kind = ""
        self._outputs: dict[int, Any] = {}
        self._begins: list[int] = []

    def advance(
        self,
        kind: str,
        wanted: int,
        ahead: int | None = None,
        settle: bool = False,
    ) -> tuple[int, int]:
        """Goes on until the wanted number of further steps is done, or all.

        Args:
            kind: `train` or `evaluate`.
            wanted: How many.
            ahead: How many more may have begun by then; any number by
                default.
            settle: Whether nothing may be under way by then.

        Returns:
            Steps done since the last call, and the examples in them; they
            go on to the end of an update.
        """
        if not self._kind:
            self._begin(kind)
        if settle:
            ahead = max(self._handed - self._reported, wanted)
        if ahead is not None and kind == "train":
            # A piece that ended within an update would lose what it has
            # accumulated.
            ahead = -(-ahead // self._engine.every) * self._engine.every
        end = math.inf if ahead is None else self._reported + ahead
        while self._done - self._reported < wanted:
            self._hand_out(wanted, end)
            if self._dispatcher.idle:
                break
            self._take_in()
        while settle and not self._dispatcher.idle:
            self._take_in()
        if kind == "evaluate" and self._engine.current is not None:
            self._engine.current.evaluated(self._sums)
        return self._totals()

    def finish(self) -> Execution:
        """Waits for what is under way, without handing out more."""
        while not self._dispatcher.idle:
            self._take_in()
        self._finished = True
        steps, examples = self._totals()
        return Execution(
            steps, examples, self.logs() | self.staleness.logs(), 0.0
        )

    def evaluated(self, sums: Any) -> None:
        """Goes on from the metrics of an evaluation in a callback, as in Keras.

        Args:
            sums: Of the state of the metrics.
        """
        if not self._finished:
            self._sums = sums

    def publish(self) -> None:
        """Writes the sums of the metrics where they are saved from."""
        if self._sums is not None:
            self._engine.write_metrics(self._sums)

    def logs(self) -> Logs:
        """Returns the metrics over the steps whose values have come."""
        if self._sums is None:
            return {}
        return self._engine.metrics(self._sums)

    def next_outputs(self) -> Any | None:
        """Returns the model's outputs for the next batch in order."""
        if not self._kind:
            self._kind = "predict"
            self._dispatcher.settle()
        while self._reported not in self._outputs:
            self._hand_out(self._engine.most_steps, math.inf)
            if self._dispatcher.idle:
                return None
            name, (sizes, rows) = self._dispatcher.next()
            self._admission.release(name)
            ends = np.cumsum(sizes)[:-1]
            leaves = [np.split(leaf, ends) for leaf in tf.nest.flatten(rows)]
            for place, batch in enumerate(zip(*leaves, strict=True)):
                if sizes[place]:
                    at = self._begins[name] + place * self.work.stride
                    self._outputs[at] = tf.nest.pack_sequence_as(
                        rows, list(batch)
                    )
        self._reported += 1
        return self._outputs.pop(self._reported - 1)

    def _begin(self, kind: str) -> None:
        engine = self._engine
        self._kind = kind
        # Of a run that has ended early, or one that a callback is in.
        self._dispatcher.settle()
        self._sums = engine.read_metrics()
        if kind != "train":
            return
        engine.current = self
        limit, every = self.work.limit, engine.every
        if limit is not None and limit % every:
            raise ConfigurationError(
                "On 'parameter_server' gradient_accumulation_steps must "
                "divide the steps of an epoch. Received: "
                f"gradient_accumulation_steps={every}, {limit} steps. Pass "
                f"steps_per_epoch={max(limit // every, 1) * every}."
            )
        options = engine.strategy.staleness
        engine.next_step = engine.steps_made()
        if options.late_gradients == "hold":
            self._admission = Admission(options.max_staleness)

    def _size(self, wanted: int) -> int:
        """Returns the steps of the next piece of work.

        Pieces get shorter towards the end, so that all workers end together.
        """
        engine = self._engine
        workers = engine.strategy.num_workers
        most = min(engine.most_steps, wanted // workers)
        options = engine.strategy.staleness
        if options.max_staleness is not None and self._kind == "train":
            most = min(most, options.max_staleness // (2 * workers))
        if self.work.limit is not None:
            left = self.work.limit - self._handed
            most = min(most, left // (2 * workers))
        if self._kind != "train":
            return max(1, most)
        every = engine.every
        return max(1, most // every) * every

    def _hand_out(self, wanted: int, end: float) -> None:
        """Hands out work until the workers have enough.

        Args:
            wanted: Steps that the trainer waits for.
            end: No step beyond this one is handed out.
        """
        while self._dispatcher.has_room and not self._ended:
            if self._waiting is None:
                if self._handed >= end:
                    return
                size = min(self._size(wanted), end - self._handed)
                self._waiting = self.work.take(int(size))
            if self._waiting is None:
                self._ended = True
                return
            steps, arguments = self._waiting
            if not self._admission.admit(self._pieces, steps):
                return
            self._waiting = None
            self._schedule(steps, arguments)

    def _schedule(self, steps: int, arguments: Any) -> None:
        engine = self._engine
        options = engine.strategy.staleness
        # Not the first ones of an epoch, which nothing runs beside.
        place = min(engine.strategy.num_workers, options.sample_every - 1)
        measured = self._kind == "train" and (
            self._pieces % options.sample_every == place
        )
        function = engine.function(self._kind, self.work, measured)
        self._dispatcher.schedule(
            self._pieces,
            function,
            (
                self.work.per_worker,
                arguments,
                tf.constant(steps, tf.int64),
                tf.constant(engine.next_step, tf.int64),
            ),
        )
        stride = self.work.stride
        self._begins.append(self._handed if stride == 1 else self._pieces)
        self._pieces += 1
        self._handed += steps
        if self._kind == "train":
            engine.next_step += steps

    def _take_in(self) -> None:
        name, values = self._dispatcher.next()
        self._admission.release(name)
        counts, sums, staleness = np.split(values, [2, 2 + len(self._sums)])
        self._done += int(counts[0])
        self._examples += int(counts[1])
        self.staleness.add(staleness)
        self._sums = self._sums + sums

    def _totals(self) -> tuple[int, int]:
        steps = self._done - self._reported
        examples = self._examples - self._reported_examples
        self._reported, self._reported_examples = self._done, self._examples
        return steps, examples
