"""Any sizes: counts are exact, every example is seen, nothing hangs."""

import keras
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mgpu_tf

# Traced once for each strategy: the shapes of a batch are left open.
TRAINERS = {}


class Sum(keras.metrics.Metric):
    """The sum of the targets, which tell which examples there were."""

    def __init__(self):
        super().__init__(name="sum")
        self.total = self.add_weight(name="total", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(keras.ops.sum(y_true))

    def result(self):
        return self.total + 0.0


def build():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.001), "mse", metrics=[Sum()])
    return model


def trainer_of(strategies, name, steps):
    if (name, steps) not in TRAINERS:
        TRAINERS[name, steps] = mgpu_tf.Trainer(
            build, strategies[name], steps_per_execution=steps
        )
    return TRAINERS[name, steps]


@settings(
    deadline=None,
    database=None,
    max_examples=8,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(
    name=st.sampled_from(["one_device", "mirrored_x4"]),
    steps=st.sampled_from([1, 3]),
    size=st.integers(1, 40),
    batch=st.integers(1, 50),
    epochs=st.integers(1, 3),
    limit=st.none() | st.integers(1, 7),
)
def test_counts(strategies, name, steps, size, batch, epochs, limit):
    trainer = trainer_of(strategies, name, steps)
    x = np.ones((size, 2), "float32")
    y = np.arange(1, size + 1, dtype="float32")[:, None]
    before = trainer.global_step, trainer.examples_seen
    history = trainer.fit(
        x,
        y,
        batch_size=batch,
        epochs=epochs,
        steps_per_epoch=limit,
        shuffle=False,
        verbose=0,
    ).history
    whole = -(-size // batch)
    done = epochs * (limit or whole)
    assert trainer.global_step - before[0] == done
    order = [y[i : i + batch, 0] for i in range(0, size, batch)]
    read = [order[k % whole] for k in range(done)]
    assert trainer.examples_seen - before[1] == sum(map(len, read))
    per_epoch = np.array_split(np.arange(done), epochs)
    expected = [sum(read[k].sum() for k in part) for part in per_epoch]
    np.testing.assert_allclose(history["sum"], expected, rtol=1e-6)
    scores = trainer.evaluate(
        x, y, batch_size=batch, verbose=0, return_dict=True
    )
    np.testing.assert_allclose(scores["sum"], y.sum(), rtol=1e-6)
    outputs = trainer.predict(x, batch_size=batch, verbose=0)
    assert outputs.shape == (size, 1)
