"""What is read from a model."""

import keras
import numpy as np
import pytest

from mgpu_tf.errors import ConfigurationError
from mgpu_tf.planner.operations.tracing import trace


def compiled(inputs, outputs, optimizer="adam", loss="mse"):
    model = keras.Model(inputs, outputs)
    model.compile(optimizer, loss)
    return model


def dense():
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(5, activation="relu")(inputs)
    return compiled(inputs, keras.layers.Dense(3)(hidden))


def test_weights_gradients_slots_and_layers():
    graph = trace(dense)
    assert graph.parameters == 6 * 5 + 5 + 5 * 3 + 3
    assert graph.slots == [8.0] * 4
    assert [layer.kind for layer in graph.layers[-2:]] == ["Dense", "Dense"]
    for weight in graph.trainable:
        assert graph.tensors[weight.gradient].shape == weight.shape
        assert weight.layer >= 0
    assert graph.optimizer == "Adam"
    backward = [each for each in graph.operations if each.backward]
    assert any(each.kind == "ReluGrad" for each in backward)
    assert not any(each.kind == "ReluGrad" for each in graph.forward())
    assert any(each.layer >= 0 for each in backward)


def test_sizes_scale_with_rows():
    graph = trace(dense)
    hidden = next(
        each.outputs[0] for each in graph.operations if each.kind == "Relu"
    )
    assert graph.bytes_of(hidden, 1) == 5 * 4
    assert graph.bytes_of(hidden, 100) == 100 * 5 * 4


def test_a_table_has_a_gradient_of_rows():
    def build():
        inputs = keras.Input((7,), dtype="int32")
        hidden = keras.layers.Embedding(50, 4)(inputs)
        hidden = keras.layers.GlobalAveragePooling1D()(hidden)
        return compiled(inputs, keras.layers.Dense(1)(hidden))

    table = trace(build).weights[0]
    assert (table.sparse, table.table) == (True, True)


def test_a_loop_runs_as_often_as_its_sequence_is_long():
    def build():
        inputs = keras.Input((9, 3))
        hidden = keras.layers.LSTM(4)(inputs)
        return compiled(inputs, keras.layers.Dense(1)(hidden))

    graph = trace(build)
    loops = [each for each in graph.operations if "inside" in each.attributes]
    assert [loop.backward for loop in loops] == [False, True]
    assert all(
        one.times == 9 for loop in loops for one in loop.attributes["inside"]
    )


def test_averages_and_clipping_are_known():
    def build():
        inputs = keras.Input((4,))
        optimizer = keras.optimizers.SGD(use_ema=True, global_clipnorm=1.0)
        return compiled(inputs, keras.layers.Dense(2)(inputs), optimizer)

    graph = trace(build)
    assert (graph.averaged, graph.clips) == (True, True)
    assert graph.slots == [4.0, 4.0]


def test_a_model_that_tells_nothing_of_its_inputs_needs_a_batch():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(2)

        def call(self, inputs):
            return self.dense(inputs)

    def build():
        model = Own()
        model.compile("sgd", "mse")
        return model

    with pytest.raises(ConfigurationError, match="what the model takes"):
        trace(build)
    batch = np.zeros((3, 5), "float32"), np.zeros((3, 2), "float32")
    assert trace(build, batch).parameters == 5 * 2 + 2


class _Scaled(keras.layers.Layer):
    """A layer whose name begins with an underscore, as its class does."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), name="scale")

    def call(self, x):
        return x * self.scale


@pytest.mark.filterwarnings("ignore:.build... was called on layer")
def test_a_model_whose_own_build_leaves_its_layers_unbuilt():
    class Words(keras.Model):
        def __init__(self):
            super().__init__()
            self.table = keras.layers.Embedding(11, 4)
            self.head = keras.layers.Dense(3)

        def call(self, x):
            return self.head(self.table(x))

    def build():
        model = Words()
        model.build((None, 5))
        model.compile("adam", "mse")
        return model

    batch = np.zeros((2, 5), "int32"), np.zeros((2, 5, 3), "float32")
    assert trace(build, batch).parameters == 11 * 4 + 4 * 3 + 3


def stateful():
    inputs = keras.Input((4, 6), batch_size=12)
    hidden = keras.layers.LSTM(5, stateful=True)(inputs)
    return compiled(inputs, keras.layers.Dense(3)(hidden))


def reshaped():
    inputs = keras.Input((6,), batch_size=12)
    return compiled(inputs, keras.ops.reshape(inputs, (12, 2, 3)))


TWELVE = np.zeros((12, 4, 6), "float32"), np.zeros((12, 3), "float32")


@pytest.mark.parametrize(
    ("build", "data"), [(stateful, None), (stateful, TWELVE), (reshaped, None)]
)
def test_layers_that_need_a_number_of_rows_are_refused(build, data):
    with pytest.raises(
        ConfigurationError, match="batch_size=12; its call says: Exc"
    ):
        trace(build, data)


def test_a_number_of_rows_that_no_layer_needs():
    inputs = keras.Input((6,), batch_size=12)

    def build():
        return compiled(inputs, keras.layers.Dense(3)(inputs))

    assert trace(build).parameters == 6 * 3 + 3


def test_names_that_no_graph_begins_with():
    def build():
        inputs = keras.Input((6,))
        hidden = _Scaled()(inputs)
        return compiled(inputs, keras.layers.Dense(3, name="_head")(hidden))

    graph = trace(build)
    assert [layer.kind for layer in graph.layers[-2:]] == ["_Scaled", "Dense"]
    assert graph.parameters == 6 + 6 * 3 + 3
    assert all(weight.layer >= 0 for weight in graph.trainable)


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(5)
        self.outer = keras.layers.Dense(3)

    def call(self, x):
        return self.outer(self.hidden(x))


class Predicting(keras.Model):
    def predict_step(self, data):
        return super().predict_step(data) + 1.0


def subclassed():
    model = Subclassed()
    model.compile("adam", "mse")
    return model


def synchronized():
    inputs = keras.Input((6,))
    layer = keras.layers.BatchNormalization(synchronized=True)
    return compiled(inputs, keras.layers.Dense(3)(layer(inputs)))


def predicting():
    inputs = keras.Input((6,))
    model = Predicting(inputs, keras.layers.Dense(3)(inputs))
    model.compile("adam", "mse")
    return model


def with_shared_statistics():
    inputs = keras.Input((6,))
    shared = keras.layers.BatchNormalization()
    hidden = keras.layers.Dense(6)(shared(inputs))
    return compiled(inputs, keras.layers.Dense(3)(shared(hidden)))


@pytest.mark.parametrize(
    ("build", "stages"),
    [
        (dense, 2),
        (subclassed, 1),
        (synchronized, 1),
        (predicting, 1),
        (with_shared_statistics, 2),
    ],
)
def test_a_pipeline_has_the_stages_that_the_engine_can_cut(build, stages):
    data = np.zeros((4, 6), "float32"), np.zeros((4, 3), "float32")
    graph = trace(build, data)
    assert graph.most_stages == stages


def test_what_is_no_compiled_model_is_refused():
    with pytest.raises(ConfigurationError, match="returns a compiled"):
        trace(lambda: keras.Sequential([keras.Input((2,))]))
