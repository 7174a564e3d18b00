"""How a model is cut into the stages of a pipeline, as one value.

trainer.pipeline.text()

2 stages from dense, dense_2 (1,200 + 1,090 parameters), 8 micro-batches
in the order 1f1b: 11% of the time without work, activations of 2, 1
micro-batches
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class PipelinePlan:
    """The stages of a pipeline and their work.

    Attributes:
        stages: The name of the first layer of each stage.
        parameters: The number of parameters of each stage.
        micro_batches: Into how many parts the rows of a replica are cut.
        schedule: `1f1b` or `gpipe`.
        bubble: The part of the time of a step in which a stage has no work,
            where all stages have equal work: the order in which the passes
            run, played from its beginning to its end.
        live: The most micro-batches whose activations each stage keeps.
    """

    stages: Sequence[str]
    parameters: Sequence[int]
    micro_batches: int
    schedule: str
    bubble: float
    live: Sequence[int]

    def text(self) -> str:
        """Returns one line."""
        sizes = " + ".join(f"{size:,}" for size in self.parameters)
        live = ", ".join(map(str, self.live))
        return (
            f"{len(self.stages)} stages from {', '.join(self.stages)} "
            f"({sizes} parameters), {self.micro_batches} micro-batches in the "
            f"order {self.schedule}: {self.bubble:.0%} of the time without "
            f"work, activations of {live} micro-batches"
        )
