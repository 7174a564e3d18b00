"""What workers tell each other: a difference is named, a failure ends all."""

import pytest

from tests import clusters
from tests.tiers import tiered

JOB = """
import sys
import numpy as np
import mgpu_tf
from mgpu_tf.runtime import quiet_import

quiet_import.import_tensorflow()
import keras

strategy = mgpu_tf.create_multi_worker_mirrored_strategy()
worker = mgpu_tf.ClusterConfig.from_environment().worker_index
case = sys.argv[1]
x, y = np.ones((8, 4), "float32"), np.ones((8, 1), "float32")


def build():
    units = 5 + worker if case == "model" else 5
    layers = [keras.layers.Dense(units), keras.layers.Dense(1)]
    if case != "model_of_first_batch":
        layers.insert(0, keras.Input((4,)))
    elif worker:
        layers.append(keras.layers.Dense(1))
    model = keras.Sequential(layers)
    model.compile("sgd", "mse")
    if case == "variable" and worker:
        keras.Variable([1.0, 2.0])
    return model


class Broken(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1 and worker == int(case[-1]):
            raise ArithmeticError("of worker " + case[-1])


options = {}
if case == "batch_size":
    options["batch_size"] = 4 + worker
if case.startswith("callback"):
    options |= {"epochs": 4, "callbacks": [Broken()]}
try:
    trainer = mgpu_tf.Trainer(build, strategy)
    if case == "call" and worker:
        trainer.evaluate(x, y, verbose=0)
    trainer.fit(x, y, verbose=0, **options)
    if case == f"after_{worker}":
        trainer.evaluate(x, y, verbose=0)
except Exception as error:
    print("ENDED", type(error).__name__, " ".join(str(error).split()))
    raise SystemExit(7)
"""

SAME = "All workers must have the same "
# What both workers must say.
DIFFERENCES = {
    "model": SAME + "model (its variable number 0). Received: kernel of shape "
    "[4, 5] on worker 0, kernel of shape [4, 6] on worker 1.",
    "model_of_first_batch": SAME + "layers of the model. Received: Sequential, "
    "Dense, Dense on worker 0, Sequential, Dense, Dense, Dense on worker 1.",
    "variable": SAME + "model (its variable number 8). Received: none on "
    "worker 0, another one, variable, on worker 1.",
    "batch_size": SAME + "data's length. Received: 8 examples in batches of 4 "
    "on worker 0, 8 examples in batches of 5 on worker 1.",
    "call": SAME + "call. Received: fit on worker 0, evaluate on worker 1.",
}


def ended(case, tmp_path):
    script = tmp_path / "job.py"
    script.write_text(JOB)
    done = clusters.mgpu_tf(
        "launch",
        "--num_workers=2",
        "--startup_seconds=0",
        "--",
        clusters.PYTHON,
        str(script),
        case,
    )
    lines = {
        worker: line.partition("ENDED ")[2]
        for line in done.stdout.splitlines()
        for worker in (0, 1)
        if line.startswith(f"[worker {worker}] ENDED ")
    }
    assert done.returncode == 7, done.stdout + done.stderr
    return lines


@pytest.mark.parametrize(
    "case", tiered(list(DIFFERENCES), [], ["variable", "call"])
)
def test_difference_is_named_on_both(case, tmp_path):
    lines = ended(case, tmp_path)
    expected = "ConfigurationError " + DIFFERENCES[case]
    # A worker may be ended before it has printed.
    assert lines
    for line in lines.values():
        assert line.startswith(expected)


@pytest.mark.parametrize("worker", tiered([0, 1], [], [1]))
def test_exception_of_a_callback_ends_all_with_it(worker, tmp_path):
    lines = ended(f"callback_{worker}", tmp_path)
    own = f"ArithmeticError of worker {worker}"
    other = f"WorkerError worker {worker}: ArithmeticError: of worker {worker}"
    assert lines
    assert set(lines.values()) <= {own, other}
    assert lines.get(worker, own) == own
    assert lines.get(1 - worker, other) == other


@pytest.mark.parametrize("worker", tiered([0, 1], [], [0]))
def test_a_call_when_the_others_have_ended(worker, tmp_path):
    lines = ended(f"after_{worker}", tmp_path)
    assert list(lines) == [worker]
    assert (
        f"evaluate on worker {worker}, the end of the program"
        in (lines[worker])
    )
