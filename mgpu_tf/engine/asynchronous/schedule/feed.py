"""Where the epochs of an asynchronous run read from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mgpu_tf.data import Source
from mgpu_tf.engine.asynchronous.schedule.run import Run
from mgpu_tf.engine.asynchronous.schedule.work import (
    FedWork,
    RowReader,
    RowWork,
    Shards,
    ShardWork,
    StreamWork,
    Work,
    batches_of,
    calls_python,
)
from mgpu_tf.engine.asynchronous.schedule.workers import Workers
from mgpu_tf.errors import ConfigurationError


class AsynchronousFeed:
    """What the coordinator deals, epoch by epoch.

    Args:
        engine: Who does the work.
        source: The global batches.
        first: The first pass.
        training: Whether steps of training read from it.
    """

    def __init__(
        self,
        engine: Workers,
        source: Source,
        first: int,
        *,
        training: bool,
    ) -> None:
        self.source = source
        self._engine, self._training = engine, training
        self._skipped = 0
        self._position = first * (source.steps or 0)
        self._fed = source.rows() is None and calls_python(source)
        self._rows: RowReader | None = None
        self._shards: Shards | None = None
        self._readers: Any = None

    def iterator(self, epoch: int, limit: int | None = None) -> Run:
        """Returns the work of an epoch."""
        del epoch
        skipped, self._skipped = self._skipped, 0
        if limit is not None:
            limit -= skipped
        if self.source.rows() is not None:
            work = self._row_work(limit)
        elif self._fed:
            work = self._fed_work(limit)
        else:
            work = self._shard_work(limit)
        return Run(self._engine, work)

    def resume(self, finished: Sequence[int], step: int) -> None:
        """Goes to where a run that was broken off had come.

        Arrays are entered there; streams of datasets begin again.
        """
        self._position += sum(finished) + step
        self._skipped = step
        if self._fed:
            self._readers = batches_of(self.source, self._position, once=False)

    def restart(self) -> None:
        """Does nothing: every epoch says where it begins."""

    def cut_anew(self, finished: Sequence[int]) -> None:
        """Does nothing: workers take pieces of work as they come."""
        del finished

    def _row_work(self, limit: int | None) -> Work:
        assert limit is not None
        engine = self._engine
        if self._rows is None:
            self._rows = RowReader(engine.coordinator, self.source)
        first = 0
        if self._training:
            first = self._position
            self._position += limit
        most, every = engine.most_steps, engine.every
        return RowWork(self._rows, first, limit, most, every)

    def _fed_work(self, limit: int | None) -> Work:
        if not self._training or (limit is None and self.source.repeats):
            once = batches_of(self.source, once=True)
            return FedWork(self.source, once, limit)
        if self._readers is None:
            self._readers = batches_of(self.source, self._position, once=False)
        return FedWork(self.source, self._readers, limit)

    def _shard_work(self, limit: int | None) -> Work:
        if self._shards is None:
            self._shards = Shards(
                self._engine.coordinator,
                self.source,
                self._engine.strategy.num_workers,
                None if self._training else limit,
            )
        if not self._training:
            if self._readers is None:
                self._readers = self._shards.texts()
            return ShardWork(self._shards, self._readers, limit)
        if limit is None:
            raise ConfigurationError(
                "On 'parameter_server' data of unknown length needs "
                "steps_per_epoch. Received: steps_per_epoch=None. Call "
                "fit(..., steps_per_epoch=N)."
            )
        if self._readers is None:
            self._readers = self._shards.streams()
        return StreamWork(self._shards, self._readers, limit)
