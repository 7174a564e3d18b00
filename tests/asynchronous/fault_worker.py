"""What every process of a cluster runs in which tasks are killed.

Epoch k says "AT k" when it is under way, and ends when the file `killed-k` is
in the folder, so that whoever reads that can kill something meanwhile.
"""

import json
import os
import sys
import time

import mgpu_tf
from mgpu_tf.runtime import quiet_import


def main():
    folder = sys.argv[1]
    cluster = mgpu_tf.ClusterConfig.from_environment()
    print("PID", cluster.task_name.replace(" ", "-"), os.getpid(), flush=True)
    quiet_import.import_tensorflow()
    strategy = mgpu_tf.create_strategy("auto")
    import keras

    from tests.asynchronous import cases

    class Gate(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.epoch, self.told = epoch, False

        def on_train_batch_end(self, batch, logs=None):
            if batch > 20 and not self.told:
                self.told = True
                print("AT", self.epoch, flush=True)

        def on_epoch_end(self, epoch, logs=None):
            while not os.path.exists(f"{folder}/killed-{epoch}"):
                time.sleep(0.1)

    trainer = mgpu_tf.Trainer(
        cases.model_of(lambda: keras.optimizers.Adam(0.01)), strategy
    )
    x, y = cases.arrays(960)
    history = trainer.fit(
        x,
        y,
        batch_size=4,
        epochs=5,
        verbose=0,
        callbacks=[Gate()],
        validation_data=(x, y),
        checkpoint_dir=os.path.join(folder, "checkpoints"),
    )
    if cluster.task_type == "evaluator":
        with open(os.path.join(folder, "evaluator.json"), "w") as file:
            json.dump([history.epoch, history.history], file)
        return
    scores = trainer.evaluate(x, y, batch_size=50, verbose=0, return_dict=True)
    result = {
        "global_step": trainer.global_step,
        "examples_seen": trainer.examples_seen,
        "iterations": int(trainer.model.optimizer.iterations.numpy()),
        "losses": history.history["loss"],
        "val_loss": history.history["val_loss"],
        "val_accuracy": history.history["val_accuracy"],
        "test loss": scores["loss"],
        "restarts": trainer.recovery.restarts,
        "lost_steps": trainer.recovery.lost_steps,
        "lost_workers": trainer.recovery.lost_workers,
    }
    with open(os.path.join(folder, "result.json"), "w") as file:
        json.dump(result, file)
    print("RESULT", json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
