"""What part of a training step waited for data.

    python -m experiments.benchmarks.waits images 5

Prints, for each round of about `ROUND_SECONDS`, the steps of `Trainer.fit`,
the seconds they took, and those of them in which they waited for data, as
`Trainer.goodput` has them.
"""

from __future__ import annotations

import dataclasses
import json
import sys

from experiments.benchmarks.jobs import JOBS
from experiments.benchmarks.runner import Rates
from experiments.benchmarks.starts import python
from experiments.benchmarks.table import Ratio

ROUND_SECONDS = 3.0


@dataclasses.dataclass(frozen=True)
class Waits:
    """A run in which it is told how long steps waited.

    Attributes:
        job: A key of `jobs.SETS`.
        unit: Of the rates.
    """

    job: str
    unit: str = "examples/s"

    @property
    def name(self) -> str:
        """The name of the benchmark."""
        return f"input/{self.job}_waited"

    @property
    def ratios(self) -> tuple[Ratio, ...]:
        """Returns the ratio: 1 is a step that never waited."""
        return (Ratio("mgpu_tf", "mgpu_tf_less_waiting"),)

    def measure(self, rounds: int) -> Rates:
        """Trains for some rounds.

        Raises:
            Failed: The process failed.
        """
        module = "experiments.benchmarks.waits"
        output = python(["-m", module, self.job, str(rounds)])
        told = json.loads(output.splitlines()[-1])
        batch = JOBS[self.job].batch(1)
        return Rates(
            {
                "mgpu_tf": [
                    steps * batch / seconds for steps, seconds, _ in told
                ],
                "mgpu_tf_less_waiting": [
                    steps * batch / (seconds - waited)
                    for steps, seconds, waited in told
                ],
            },
            {},
            {},
        )


def _train(job_name: str, rounds: int) -> list[tuple[int, float, float]]:
    import mgpu_tf
    from experiments.benchmarks.contestants import datasets, tensorflow_model

    job = JOBS[job_name]
    trainer = mgpu_tf.Trainer(
        lambda: tensorflow_model.build(job),
        mgpu_tf.create_one_device_strategy("CPU:0"),
    )
    data = datasets.for_fit(job, 1)

    def fit(epochs: int) -> tuple[int, float, float]:
        before = trainer.goodput
        begun = trainer.global_step
        trainer.fit(**data, epochs=epochs, verbose=0)
        after = trainer.goodput
        waited = after.input_seconds - before.input_seconds
        useful = after.step_seconds - before.step_seconds
        return trainer.global_step - begun, useful + waited, waited

    fit(3)  # Traces, and finds how many steps go into a call.
    steps, seconds, _ = fit(3)
    epochs = max(1, round(ROUND_SECONDS * steps / seconds / job.pass_steps))
    return [fit(epochs) for _ in range(rounds)]


WAITS = tuple(Waits(job) for job in ("tabular", "digits", "images"))

if __name__ == "__main__":
    print(json.dumps(_train(sys.argv[1], int(sys.argv[2]))))
