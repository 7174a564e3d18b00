"""Which layers a stage has, against cuts found by trying all."""

import itertools

import keras
import numpy as np
import pytest
from keras import layers

from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.synchronous.pipeline.split import costs_of, stages_of
from mgpu_tf.errors import ConfigurationError


def chain(*widths, size=8):
    inputs = keras.Input((size,))
    x = inputs
    for i, width in enumerate(widths):
        x = layers.Dense(width, name=f"layer_{i}")(x)
    return keras.Model(inputs, x)


def names(stages):
    return [
        [call.names[0] for call in stage.calls if call.names]
        for stage in stages.every
    ]


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("seed", range(4))
def test_the_most_expensive_stage_is_as_cheap_as_can_be(count, seed):
    generator = np.random.default_rng(seed)
    model = chain(*map(int, generator.integers(1, 40, size=7)))
    calls, _, _ = keras_internals.graph_of(model)
    costs = costs_of(calls)

    def worst(cuts):
        bounds = [0, *cuts, len(calls)]
        return max(sum(costs[a:b]) for a, b in itertools.pairwise(bounds))

    best = min(
        worst(cuts)
        for cuts in itertools.combinations(range(1, len(calls)), count - 1)
    )
    found = stages_of(model, count)
    lengths = [len(stage.calls) for stage in found.every]
    cuts = list(itertools.accumulate(lengths))[:-1]
    assert worst(cuts) == pytest.approx(best)
    assert sum(costs) == pytest.approx(1)


def test_work_counts_as_parameters_do():
    # The convolution has few parameters and most of the work.
    inputs = keras.Input((16, 16, 3))
    x = layers.Conv2D(8, 3, name="conv")(inputs)
    x = layers.Flatten()(x)
    model = keras.Model(inputs, layers.Dense(4, name="dense")(x))
    calls, _, _ = keras_internals.graph_of(model)
    conv, _, dense = costs_of(calls)
    work = 14 * 14 * (3 * 3 * 3 * 8 + 8 + 8), 1568, 1568 * 4 + 4 + 4
    assert conv == pytest.approx(0.5 * 224 / 6500 + 0.5 * work[0] / sum(work))
    assert dense == pytest.approx(0.5 * 6276 / 6500 + 0.5 * work[2] / sum(work))


def test_named_stages_and_a_skip_over_one():
    inputs = keras.Input((6,))
    a = layers.Dense(5, name="a")(inputs)
    b = layers.Dense(5, name="b")(a)
    c = layers.Dense(5, name="c")(b)
    model = keras.Model(inputs, layers.Add(name="sum")([a, c]))
    first, second, third = stages_of(model, 3, ["b", "c"]).every
    assert names(stages_of(model, 3, ["b", "c"])) == [
        ["a"],
        ["b"],
        ["c", "sum"],
    ]
    # What `a` makes goes to the third stage, not through the second.
    assert len(first.outputs) == len(second.outputs) == 1
    assert set(third.inputs) == {*first.outputs, *second.outputs}
    assert [v.path for v in second.variables] == ["b/kernel", "b/bias"]


def test_models_inside_are_opened():
    inner = keras.Sequential(
        [keras.Input((8,)), layers.Dense(8, name="x"), layers.Dense(8)],
        name="inner",
    )
    inputs = keras.Input((8,))
    model = keras.Model(inputs, layers.Dense(8, name="y")(inner(inputs)))
    first = stages_of(model, 2).every[0]
    assert "x" in [n for call in first.calls for n in call.names]
    with pytest.raises(ConfigurationError, match="without the first"):
        stages_of(model, 2, ["inner"])


def test_models_of_named_inputs_are_opened():
    """As the backbones of keras-hub are."""
    named = {"a": keras.Input((8,), name="a"), "b": keras.Input((8,), name="b")}
    x = layers.Add()([layers.Dense(8, name="x")(named["a"]), named["b"]])
    inner = keras.Model(named, layers.Dense(8, name="y")(x))
    model = keras.Model(named, layers.Dense(8, name="z")(inner(named)))
    found = [
        n for call in stages_of(model, 2).every[0].calls for n in call.names
    ]
    assert "x" in found and "z" not in found


def normalized():
    """Moving statistics that two calls write, with a layer between."""
    norm = layers.BatchNormalization(name="norm")
    inputs = keras.Input((8,))
    x = layers.Dense(8, name="middle")(norm(layers.Identity()(inputs)))
    return keras.Model(inputs, norm(x))


def test_shared_state_is_in_one_stage():
    with pytest.raises(ConfigurationError, match="share norm/moving_mean"):
        stages_of(normalized(), 2)
    with pytest.raises(ConfigurationError, match="must be in one stage"):
        stages_of(normalized(), 2, ["middle"])


def test_the_calls_compute_what_the_model_does():
    inner = keras.Sequential([layers.Dense(4), layers.Dense(3)])
    inputs = {
        "a": keras.Input((5,), name="a"),
        "b": keras.Input((3,), name="b"),
    }
    x = layers.Concatenate()([inner(inputs["a"]), inputs["b"]])
    outputs = {"one": layers.Dense(2)(x), "two": inputs["b"]}
    model = keras.Model(inputs, outputs)
    generator = np.random.default_rng(0)
    x = {
        "a": generator.normal(size=(4, 5)).astype("float32"),
        "b": generator.normal(size=(4, 3)).astype("float32"),
    }
    stages = stages_of(model, 2)
    values = dict(
        zip(stages.inputs, keras_internals.flat_inputs(model, x), strict=True)
    )
    for stage in stages.every:
        # Nothing else than what was sent is at hand.
        here = {key: values[key] for key in stage.inputs}
        for call in stage.calls:
            made = call.run([here[key] for key in call.inputs], False)
            here.update(zip(call.outputs, made, strict=True))
        values |= {key: here[key] for key in stage.outputs}
    found = keras_internals.structured(
        model, [values[key] for key in stages.outputs]
    )
    expected = model(x)
    for name in ("one", "two"):
        np.testing.assert_array_equal(found[name], expected[name])


def shared():
    dense = layers.Dense(8, name="shared")
    inputs = keras.Input((8,))
    x = layers.Dense(8, name="before")(inputs)
    x = layers.Dense(8, name="middle")(dense(x))
    return keras.Model(inputs, layers.Dense(8, name="after")(dense(x)))


def test_a_shared_weight_is_stored_where_it_is_used_first():
    model = shared()
    first, second = stages_of(model, 2, ["middle"]).every
    kernel, bias = model.get_layer("shared").variables
    assert {id(kernel), id(bias)} <= set(map(id, first.variables))
    assert list(map(id, second.borrowed)) == [id(kernel), id(bias)]
    assert not first.borrowed
    assert first.parameters + second.parameters == model.count_params()
    # It counts as a parameter once, and as work of each call.
    calls, _, _ = keras_internals.graph_of(model)
    costs = dict.fromkeys(["before", "shared", "again", "middle", "after"])
    for call, cost in zip(calls, costs_of(calls), strict=True):
        name = call.names[0] if call.names else None
        costs["again" if costs.get(name) else name] = cost
    assert costs["shared"] == pytest.approx(costs["before"])
    assert costs["again"] == pytest.approx(
        costs["shared"] - 0.5 * 72 / model.count_params()
    )


@pytest.mark.parametrize(
    ("begins", "rule"),
    [
        (["layer_2", "layer_1"], "in the order"),
        (["layer_1", "layer_1"], "in the order"),
        (["layer_0", "layer_1"], "without the first"),
        (["layer_1", "other"], "'other'. The model has: layer_0, layer_1"),
    ],
)
def test_names_that_are_wrong(begins, rule):
    with pytest.raises(ConfigurationError, match=rule) as error:
        stages_of(chain(4, 4, 4), 3, begins)
    assert "\n" not in str(error.value)


def test_too_few_layers():
    with pytest.raises(ConfigurationError, match="2 layers, for 3 stages"):
        stages_of(chain(4, 4), 3)
