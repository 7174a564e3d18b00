"""What a trainer has done so far, and what saving and failures have cost.

The loops write it, the trainer shows it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from mgpu_tf.checkpoints.run_state import EpochRecord
from mgpu_tf.checkpoints.saving.saver import Saver
from mgpu_tf.reports.goodput import Meter
from mgpu_tf.reports.report import LeftOut
from mgpu_tf.reports.stragglers import Slow


@dataclasses.dataclass
class Totals:
    """Counts over all calls of a trainer.

    Attributes:
        global_step: Training steps.
        examples_seen: Examples trained on.
        records: One `EpochRecord` for each epoch trained.
        saver: What saved in the last `fit`.
        meter: Where the time of the run went.
        left_out: The batches that the last `fit` has left out.
        slow: The workers that the last `fit` has found slow.
        step_times: The times of all workers, epoch by epoch of the last `fit`.
        distributions: Of each worker, how often a step took how long.
    """

    global_step: int = 0
    examples_seen: int = 0
    records: list[EpochRecord] = dataclasses.field(default_factory=list)
    saver: Saver = dataclasses.field(default_factory=Saver)
    meter: Meter = dataclasses.field(default_factory=Meter)
    left_out: list[LeftOut] = dataclasses.field(default_factory=list)
    slow: list[Slow] = dataclasses.field(default_factory=list)
    step_times: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    distributions: list[dict[str, Any]] = dataclasses.field(
        default_factory=list
    )
