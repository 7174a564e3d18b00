"""A run on a pipeline over two processes, one of which kills itself once.

    mgpu-tf launch --num_workers=2 --max_restarts=1 -- \
        python -m tests.engine.pipeline.killed --folder=FOLDER
"""

import argparse
import os
import signal

import keras

import mgpu_tf
from mgpu_tf.reports.report import weights_sha256
from tests.jobs import staged

STEP = 7


class Kills(keras.callbacks.Callback):
    """Kills a process after some steps, unless a file says it has.

    All processes have the same callbacks.
    """

    def __init__(self, once, is_this):
        super().__init__()
        self._once, self._is_this, self._steps = once, is_this, 0

    def on_train_batch_end(self, batch, logs=None):
        self._steps += 1
        if not self._is_this or os.path.exists(self._once):
            return
        if self._steps == STEP:
            open(self._once, "x").close()
            os.kill(os.getpid(), signal.SIGKILL)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    folder = parser.parse_args().folder
    strategy = mgpu_tf.create_model_parallel_strategy(
        pipeline=2, micro_batches=2
    )
    me = mgpu_tf.ClusterConfig.from_environment().worker_index
    for name in ("killed", "whole"):
        saves = mgpu_tf.SaveOptions(
            os.path.join(folder, name), save_every_steps=2
        )
        kills = Kills(os.path.join(folder, "once"), name == "killed" and me)
        trainer = mgpu_tf.Trainer(
            staged.plain(), strategy, steps_per_execution=1
        )
        staged.fit(trainer, checkpoint=saves, callbacks=[kills])
        sha = weights_sha256(trainer.model.get_weights())
        restarts = trainer.recovery.restarts
        print(f"RESULT {name} {restarts} {sha}", flush=True)


if __name__ == "__main__":
    main()
