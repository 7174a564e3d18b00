"""Fails on the release of Keras that moves what the engine relies on."""

import contextlib
import functools
import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend.tensorflow.optimizer import TFOptimizer

import mgpu_tf
from mgpu_tf.engine import keras_internals, throwaway


def build():
    model = keras.Sequential([keras.layers.Dense(2)])
    model.compile("adam", "mse", metrics=["mae"])
    return model


SPEC = (tf.TensorSpec([None, 3]), tf.TensorSpec([None, 2]), None)


def test_build_creates_everything_without_data():
    model = build()
    keras_internals.build(model, SPEC)
    assert model.built
    assert model.optimizer.built
    assert len(model.optimizer.variables) == 6
    names = [v.name for m in model.metrics for v in m.variables]
    assert names.count("total") == 2
    assert keras_internals.loss_tracker(model).name == "loss"


def test_build_layers_leaves_the_rest():
    model = build()
    keras_internals.build_layers(model, tf.TensorSpec([None, 3]))
    assert model.built
    assert not model.optimizer.built


def test_compiled_state_changes_with_compile():
    model = build()
    before = keras_internals.compiled_state(model)
    assert keras_internals.compiled_state(model) == before
    model.compile("sgd", "mse")
    assert keras_internals.compiled_state(model) != before


def test_weights_have_the_types_in_which_their_layers_read_them():
    class Block(keras.layers.Layer):
        def build(self, shape):
            self.scale = self.add_weight((3,), name="scale", autocast=False)
            self.inner = keras.layers.Dense(2, dtype="float64")
            self.inner.build(shape)
            self.kernel = self.add_weight((3, 3), name="kernel")

    block = Block(dtype="mixed_bfloat16")
    block.build((None, 3))
    found = keras_internals.types_of_reads(block)
    assert found == {
        id(block.kernel): "bfloat16",
        id(block.inner.kernel): "float64",
        id(block.inner.bias): "float64",
    }


def test_losses_are_replaced_in_a_copy():
    model = build()
    keras_internals.build(model, SPEC)
    container = keras_internals.compiled_loss(model)
    twin = keras_internals.with_losses_replaced(
        container, lambda loss: lambda y, p, w: tf.constant(42.0)
    )
    y = tf.zeros([1, 2])
    assert float(twin(y, y)) == 42.0
    assert float(container(y, y)) == 0.0


def test_optimizer_sums_last_and_through_one_method():
    """`_backend_update_step` reduces by `_all_reduce_sum_gradients`.

    It updates all weights by `_distributed_tf_update_step`.
    """
    source = inspect.getsource(TFOptimizer._backend_update_step)
    assert "self._distributed_tf_update_step," in source
    assert "self._all_reduce_sum_gradients(grads_and_vars)" in source


@pytest.mark.parametrize(
    "make",
    [
        keras.optimizers.SGD,
        keras.optimizers.Nadam,
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
    ],
)
def test_reduced_gradients_are_taken_as_they_are(make, strategies):
    """Applied on 2 replicas, a gradient of 1 counts once, not twice."""
    strategy = strategies["mirrored_x2"]

    def change(context):
        with strategy.scope():
            variable = keras.Variable(tf.zeros([3]))
            optimizer = make()
            optimizer.build([variable])

        @tf.function
        def step():
            def apply():
                optimizer.apply([tf.ones([3])], [variable])

            with context(optimizer):
                strategy.run(apply)

        step()
        return variable.numpy(), optimizer

    reduced, optimizer = change(keras_internals.engine_order)
    alone = keras.Variable(tf.zeros([3]))
    single = make()
    single.build([alone])
    single.apply([tf.ones([3])], [alone])
    np.testing.assert_allclose(reduced, alone.numpy(), rtol=1e-6)
    assert "_all_reduce_sum_gradients" not in vars(optimizer)
    assert "_backend_apply_gradients" not in vars(optimizer)


def test_mask_and_weights():
    values = tf.ones([2, 3])
    mask = tf.constant([[True, True, False], [True, False, False]])
    weights = tf.constant([[2.0], [1.0]])
    merged = keras_internals.merged_weights(values, weights, mask)
    np.testing.assert_array_equal(merged, [[2, 2, 0], [1, 0, 0]])
    assert keras_internals.merged_weights(values, None, None) is None
    embedded = keras.layers.Embedding(5, 2, mask_zero=True)
    masked = embedded(tf.constant([[1, 0]]))
    assert keras_internals.mask_of(masked) is not None
    assert keras_internals.mask_of(tf.zeros([2])) is None


def test_synchronized_statistics():
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.BatchNormalization(synchronized=True),
            keras.layers.BatchNormalization(),
        ]
    )
    found = keras_internals.synchronized_statistics(model)
    assert [id(v) for v in found] == [
        id(v) for v in model.layers[0].non_trainable_variables
    ]


class Silent(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        pass


class Watching(keras.callbacks.Callback):
    def on_batch_end(self, batch, logs=None):
        pass


def given_a_hook():
    callback = keras.callbacks.Callback()
    callback.on_train_batch_end = lambda batch, logs=None: None
    return callback


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (Silent, False),
        (given_a_hook, True),
        (Watching, True),
        (keras.callbacks.EarlyStopping, False),
        (keras.callbacks.TerminateOnNaN, False),
        (lambda: keras.callbacks.ModelCheckpoint("model.keras"), False),
        (
            lambda: keras.callbacks.ModelCheckpoint("m.keras", save_freq=2),
            True,
        ),
        (lambda: keras.callbacks.BackupAndRestore("b", save_freq=3), True),
        (lambda: keras.callbacks.BackupAndRestore("b", save_freq=False), False),
        (lambda: keras.callbacks.TensorBoard("logs", update_freq=2), True),
        (lambda: keras.callbacks.LambdaCallback(), False),
        (
            lambda: keras.callbacks.LambdaCallback(
                on_train_batch_end=lambda batch, logs: None
            ),
            True,
        ),
    ],
)
def test_sees_every_batch(make, expected):
    assert keras_internals.sees_every_batch(make()) is expected


def test_random_layers():
    model = keras.Sequential(
        [
            keras.Input((4, 6)),
            keras.layers.Dropout(0.0),
            keras.layers.Dropout(0.5, name="drop"),
        ]
    )
    [(layer, state)] = keras_internals.random_layers(model)
    assert layer is model.get_layer("drop")
    before = state.numpy()
    model(np.ones([2, 4, 6]), training=True)
    assert state.numpy()[0] == before[0]
    assert state.numpy()[1] == before[1] + 1


def test_given_seed():
    keras.utils.clear_session()
    assert keras_internals.given_seed() is None
    keras.utils.set_random_seed(7)
    assert keras_internals.given_seed() == 7
    keras_internals.give_seed(3)
    assert keras_internals.given_seed() == 3


def test_global_seed_state():
    keras.utils.set_random_seed(3)
    keras_internals.global_seed_state(create=True)
    state = keras_internals.global_seed_state()
    before = state.numpy()
    drawn = float(keras.random.uniform([]))
    assert list(state.numpy()) != list(before)
    state.assign(before)
    assert float(keras.random.uniform([])) == drawn


def counting_ops(count):
    graph = tf.function(count).get_concrete_function().graph
    return {op.type for op in graph.get_operations()}


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: keras.optimizers.SGD(momentum=0.9), ["momentum"]),
        (
            lambda: keras.optimizers.Adam(amsgrad=True),
            ["momentum", "velocity", "velocity_hat"],
        ),
        (keras.optimizers.AdamW, ["momentum", "velocity"]),
        (keras.optimizers.Adamax, ["momentum", "norm"]),
        (keras.optimizers.Nadam, ["momentum", "velocity"]),
        (
            lambda: keras.optimizers.RMSprop(momentum=0.9),
            ["velocity", "momentum"],
        ),
        (
            keras.optimizers.Adadelta,
            ["accumulated_grad", "accumulated_delta_var"],
        ),
        (keras.optimizers.Ftrl, ["accumulator", "linear"]),
    ],
)
def test_what_an_optimizer_keeps_for_a_weight(make, names):
    variables = [keras.Variable(np.ones(3)), keras.Variable(np.ones(2))]
    optimizer = make()
    optimizer.build(variables)
    found = keras_internals.slots(optimizer, variables[1].value)
    assert all(slot.shape == (2,) for slot in found)
    paths = {id(v.value): v.path for v in optimizer.variables}
    kinds = [paths[id(slot)].rpartition("variable_")[2] for slot in found]
    assert [kind.partition("_")[2] for kind in kinds] == names
    every = {id(v.value) for v in optimizer.variables}
    assert every >= {id(slot) for slot in found}


def test_the_product_of_the_momentums_of_nadam():
    optimizer = keras.optimizers.Nadam(beta_1=0.5)
    variable = keras.Variable(1.0)
    optimizer.build([variable])
    optimizer.apply([tf.constant(1.0)])
    product = keras_internals.product_of_momentums(optimizer)
    assert float(product) == pytest.approx(0.5 * (1 - 0.5 * 0.96))


def test_steps_are_counted_by_one_operation():
    optimizer = keras.optimizers.SGD()
    optimizer.build([keras.Variable(1.0)])
    optimizer.optimizers = ()  # As one has that hands on to others.

    def count():
        optimizer._iterations.assign_add(1)

    # Keras reads and writes; what comes between the two is lost.
    assert "AssignAddVariableOp" not in counting_ops(count)
    with keras_internals.applied_by(optimizer, lambda *given: None):
        ops = counting_ops(count)
    assert "AssignAddVariableOp" in ops
    assert "AssignVariableOp" not in ops
    assert "AssignAddVariableOp" not in counting_ops(count)


def test_the_state_of_what_an_optimizer_wraps():
    class Around(keras.optimizers.SGD):
        inner = None

    outer, inner = Around(), keras.optimizers.Adam()
    outer.inner = inner
    for optimizer in (outer, inner):
        optimizer.build([keras.Variable(1.0)])
    held = {id(variable) for variable in keras_internals.state_of(outer)}
    assert {id(v) for v in (*outer.variables, *inner.variables)} == held
    scaled = keras.optimizers.LossScaleOptimizer(inner)
    scaled.build([keras.Variable(1.0)])
    state = keras_internals.state_of(scaled)
    assert len(set(map(id, state))) == len(state)


def test_who_wrote_what_sees_gradients():
    class Own(keras.optimizers.SGD):
        def apply(self, grads, trainable_variables=None):
            super().apply(grads, trainable_variables)

    class Clips(keras.optimizers.SGD):
        def _clip_gradients(self, grads):
            return grads

    sgd = keras.optimizers.SGD()
    assert keras_internals.applies_itself(Own())
    assert keras_internals.handles_gradients(Clips())
    assert not keras_internals.applies_itself(Clips())
    assert not keras_internals.handles_gradients(sgd)
    multi = keras.optimizers.LossScaleOptimizer(sgd)
    assert not keras_internals.handles_gradients(multi)


@pytest.mark.parametrize("wrap", [tf.recompute_grad, tf.custom_gradient])
def test_within_a_function_with_its_own_gradient(wrap):
    seen = []

    def look(x):
        seen.append(keras_internals.is_within_own_gradient())
        return (
            x if wrap is tf.recompute_grad else (x, lambda upstream: upstream)
        )

    @tf.function
    def step(x):
        look(x)
        # What was shown is no variable.
        with contextlib.suppress(AttributeError):
            wrap(look)(x)
        look(x)

    step(tf.constant(1.0))
    assert seen == [False, True, False]


@pytest.mark.parametrize("groups", [1, 2])
def test_within_a_convolution_that_is_a_function(groups):
    seen = []

    class Kernel:
        shape = (3, 4 // groups, 8)

        def __tf_tensor__(self, dtype=None, name=None):
            seen.append(keras_internals.is_within_compiled_convolution())
            return tf.ones(self.shape)

    kernel = Kernel()
    keras.src.backend.tensorflow.nn.conv(tf.ones((2, 6, 4)), kernel)
    assert set(seen) == {groups == 2}


def test_apply_counts_with_the_counter(monkeypatch):
    """`apply` adds to the count by the method that is replaced."""
    optimizer = keras.optimizers.SGD()
    variable = keras.Variable(1.0)
    optimizer.build([variable])
    apply = functools.partial(optimizer.apply, [tf.constant(1.0)])
    assert "AssignVariableOp" in counting_ops(apply)
    with keras_internals.applied_by(optimizer, lambda *given: None):
        assert "AssignVariableOp" not in counting_ops(apply)


def in_parts(optimizer, variables, gradients):
    """Applies as parameter servers do: weight by weight."""

    def apply(part, gradients, variables):
        values, rate = keras_internals.count_update(part, 1, [])
        for gradient, variable in zip(gradients, variables, strict=True):
            keras_internals.update_weights(
                part, [gradient], [variable], values, rate
            )
            keras_internals.average_weights(
                part, [variable], values, tf.constant(False)
            )

    @tf.function
    def step():
        with keras_internals.applied_by(optimizer, apply):
            optimizer.apply(gradients, variables)

    for _ in range(3):
        step()


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.1),
        lambda: keras.optimizers.Adam(0.1, global_clipnorm=0.5, use_ema=True),
        lambda: keras.optimizers.Nadam(0.1),
        lambda: keras.optimizers.Adafactor(
            keras.optimizers.schedules.CosineDecay(0.1, 5)
        ),
        lambda: keras.optimizers.Muon(0.1, weight_decay=0.1),
        pytest.param(
            lambda: keras.optimizers.MultiOptimizer(
                lambda v, made=[]: (
                    made.append(keras.optimizers.Lion()) or made[0]
                )
            ),
            marks=pytest.mark.skipif(
                not hasattr(keras.optimizers, "MultiOptimizer"),
                reason="This Keras has no MultiOptimizer.",
            ),
        ),
    ],
)
def test_an_update_in_parts_is_the_whole_update(make):
    gradients = [tf.ones([3, 2]), tf.constant([0.5, -2.0])]
    results = []
    for apart in (False, True):
        variables = [
            keras.Variable(tf.ones([3, 2]), name="kernel"),
            keras.Variable(tf.ones([2]), name="bias"),
        ]
        optimizer = make()
        optimizer.build(variables)
        if apart:
            in_parts(optimizer, variables, gradients)
        else:
            for _ in range(3):
                optimizer.apply(gradients, variables)
        results.append([*variables, *optimizer.variables])
        for part in keras_internals.parts(optimizer):
            assert "_backend_apply_gradients" not in vars(part)
    for expected, held in zip(*results, strict=True):
        np.testing.assert_allclose(held.numpy(), expected.numpy(), rtol=1e-5)


def test_what_belongs_to_a_weight_is_built_beside_it():
    """Adafactor's factors, Nadam's product: Keras says nothing about them."""
    placed = []

    def creator(next_creator, **options):
        placed.append(options.pop("colocate_with", None))
        return next_creator(**options)

    weights = [keras.Variable(tf.ones([3, 2])) for _ in range(2)]
    for optimizer, beside in (
        (keras.optimizers.Adafactor(), [weights[0]] * 2 + [weights[1]] * 2),
        (keras.optimizers.Nadam(), None),
    ):
        placed.clear()
        with (
            tf.variable_creator_scope(creator),
            keras_internals.built_beside(optimizer),
        ):
            optimizer.build(weights)
        assert "build" not in vars(optimizer)
        if beside is None:
            assert placed[-1] is optimizer._iterations.value
        else:
            found = [each for each in placed if each is not None]
            assert {id(each) for each in found} == {
                id(weight.value) for weight in weights
            }


def test_state_of_an_optimizer_within_loss_scaling():
    """Keras lists Nadam's product where Nadam is built alone, and not here."""
    inner = keras.optimizers.Nadam()
    optimizer = keras.optimizers.LossScaleOptimizer(inner)
    optimizer.build([keras.Variable(tf.ones([3]))])
    held = keras_internals.state_of(optimizer)
    assert any(each is inner._u_product for each in held)
    assert len(set(map(id, held))) == len(held)


def test_shares_that_moving_statistics_keep():
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.BatchNormalization(momentum=0.7)]
    )
    layer = model.layers[0]
    assert keras_internals.kept_shares(model) == {
        id(layer.moving_mean): 0.7,
        id(layer.moving_variance): 0.7,
    }


def test_weights_that_an_update_writes_more_than_once():
    model = keras.Sequential(
        [
            keras.Input((2,)),
            keras.layers.Embedding(5, 3, embeddings_constraint="non_neg"),
            keras.layers.Dense(2, kernel_constraint="non_neg"),
        ]
    )
    model.compile(keras.optimizers.SGD())
    (kernel,) = keras_internals.written_in_steps(model)
    assert kernel is model.layers[1].kernel
    model.compile(keras.optimizers.AdamW())
    found = keras_internals.written_in_steps(model)
    assert [id(v) for v in found] == [
        id(v) for v in model.layers[1].trainable_variables
    ]


def test_unreduced_has_the_mask_that_a_loss_sets():
    loss = keras.losses.SparseCategoricalCrossentropy(ignore_class=0)
    y = tf.constant([[0, 1], [1, 0]])
    p = tf.fill([2, 2, 3], 1 / 3)
    weighted, raw = keras_internals.unreduced(
        loss, y, p, tf.constant([[2.0], [1]])
    )
    mask = keras_internals.mask_of_loss(p, raw)
    assert mask.numpy().tolist() == [[False, True], [True, False]]
    np.testing.assert_allclose(weighted, raw * [[2.0], [1.0]])
    assert loss.reduction == "sum_over_batch_size"


def test_compute_loss_is_made_of_the_parts_that_are_replaced():
    model = build()
    model.layers[0].kernel_regularizer = keras.regularizers.L2(1.0)
    keras_internals.build(model, SPEC)
    x, y = tf.ones([1, 3]), tf.zeros([1, 2])
    before = float(model.compute_loss(x, y, model(x)))

    def container(y, y_pred, sample_weight):
        return tf.constant(40.0)

    with keras_internals.losses_replaced(
        model, container, lambda loss: tf.constant(2.0)
    ):
        assert float(model.compute_loss(x, y, model(x))) == 42.0
    assert float(model.compute_loss(x, y, model(x))) == before


@pytest.mark.parametrize("mask", [None, [[True, False]]])
def test_batch_normalization_takes_its_statistics_by_one_method(mask):
    layer = keras.layers.BatchNormalization()
    model = keras.Sequential([keras.Input((2, 3)), layer])
    mask = None if mask is None else tf.constant(mask)
    seen = []

    def take(layer, own, inputs, mask):
        seen.append(mask)
        return own(inputs, mask)

    with keras_internals.moments_replaced(model, take):
        layer(tf.ones([1, 2, 3]), training=True, mask=mask)
    layer(tf.ones([1, 2, 3]), training=True, mask=mask)
    assert len(seen) == 1
    assert seen[0] is mask


def test_losses_that_are_known_by_example():
    known = keras_internals.is_known_by_example
    assert known(keras.losses.Hinge())
    assert known(keras.losses.CTC())
    assert not known(keras.losses.Circle())
    wrapper = keras.losses.get(lambda y, p: y)
    assert not known(type(keras.losses.Hinge()).__mro__[1](wrapper))


def test_a_variable_is_written_whatever_scope_is_open():
    variable = keras.Variable(1.0)
    with keras.StatelessScope():
        keras_internals.write_here(variable, 2.0)
    assert float(variable) == 2.0
    handle = keras_internals.stored(variable).handle
    assert keras_internals.handles_of([variable]) == {id(handle)}


def test_gradients_are_caught_whichever_method_gets_them():
    optimizer = keras.optimizers.SGD(1.0)
    variable = keras.Variable([1.0])
    optimizer.build([variable])
    gradient = tf.constant([0.25])
    seen = []

    def note(optimizer, gradients, variables, by_pairs):
        seen.append((len(gradients), variables, by_pairs))
        if by_pairs:
            with keras_internals.applying_itself(optimizer):
                pairs = zip(gradients, variables, strict=True)
                optimizer.apply_gradients(pairs)

    with keras_internals.caught_by([optimizer], note):
        optimizer.apply([gradient], [variable])
        optimizer.apply([gradient])
        optimizer.apply_gradients([(gradient, variable)])
    assert [n for n, _, _ in seen] == [1, 1, 1]
    assert all(variables[0] is variable for _, variables, _ in seen)
    assert [by_pairs for _, _, by_pairs in seen] == [False, False, True]
    # One of them applied; afterwards nothing is caught.
    assert float(variable[0]) == 0.75
    optimizer.apply([gradient], [variable])
    assert float(variable[0]) == 0.5


def test_what_tensorflow_keeps_of_functions_and_operations():
    @tf.function
    def inner(x):
        return x + 1.0

    @tf.function
    def outer(x):
        drawn = tf.random.normal([2])
        keras_internals.set_integer(drawn.op, "seed", 7)
        assert drawn.op.get_attr("seed") == 7
        (call,) = [inner(x).op]
        while not call.type.endswith("PartitionedCall"):
            call = call.inputs[0].op
        name = call.get_attr("f").name
        body = keras_internals.body_of_function(call.graph, name)
        assert [op.type for op in body.get_operations()][-2:] != []
        assert keras_internals.body_of_function(call.graph, "none") is None
        return drawn

    outer.get_concrete_function(tf.constant(0.0))


def test_what_a_graph_may_write_to():
    read, added, set_ = (tf.Variable(1.0) for _ in range(3))

    @tf.function
    def step(x):
        for _ in tf.range(2):
            if x > 0.0:
                added.assign_add(x)
            x += tf.gather(tf.reshape(read, [1]), 0)
        tf.function(lambda: set_.assign(2.0))()
        return x

    graph = step.get_concrete_function(tf.constant(0.0)).graph
    written = keras_internals.written_in(graph)
    found = {
        id(outer) for outer, inner in graph.captures if id(inner) in written
    }
    assert found == {id(added.handle), id(set_.handle)}


def test_functions_that_need_autograph():
    class Holder:
        @tf.function
        def branch(self, x):
            return x + 1.0 if x > 0.0 else x

        @tf.function
        def around(self, x):
            return self.branch(x)

    holder, forms = Holder(), []

    def step(x):
        with keras_internals.python_replaced(forms):
            return holder.around(x)

    def traced():
        return tf.function(step, autograph=False).get_concrete_function(
            tf.TensorSpec([])
        )

    tf.config.run_functions_eagerly(True)
    try:
        with pytest.raises(tf.errors.OperatorNotAllowedInGraphError) as error:
            throwaway.graph_of(step, tf.TensorSpec([]))
        function = keras_internals.function_around(error.value)
        assert function is holder.branch
        forms.append((function, keras_internals.by_autograph(function)))
        throwaway.graph_of(step, tf.TensorSpec([]))
    finally:
        tf.config.run_functions_eagerly(False)
    assert float(traced()(tf.constant(1.0))) == 2.0
    assert keras_internals.function_around(ValueError()) is None


def test_what_layers_have_added():
    inner = keras.layers.Dense(1, activity_regularizer="l2")
    model = keras.Sequential([keras.Input((2,)), inner])
    with keras.StatelessScope(collect_losses=True) as scope:
        model(tf.ones([3, 2]))
        [before], loss = scope.losses, tf.constant(1.0)
        keras_internals.own_loss_instead(model, before, loss)
        scope.losses[:] = [loss]
        assert inner.losses[0] is model.losses[0] is loss
    assert keras_internals.loss_ids(inner) == {id(before), id(loss)}


def test_texts_of_a_known_length_are_rows():
    def is_by_row(**options):
        layer = keras.layers.TextVectorization(**options)
        return keras_internals.is_by_row(layer)

    assert is_by_row(output_sequence_length=3)
    assert is_by_row(output_mode="multi_hot")
    assert not is_by_row()
    assert not is_by_row(output_sequence_length=3, ragged=True)
    assert not is_by_row(output_sequence_length=3, split=tf.strings.split)


def test_layers_regularize_in_another_way():
    layer = keras.layers.Dense(1, activity_regularizer="l2")
    other = keras_internals.regularization_of(layer)
    own, seen = layer.activity_regularizer, []

    def regularize(layer, output):
        seen.append(output.shape)
        other(output)

    with keras.StatelessScope(collect_losses=True) as scope:
        layer.add_loss(tf.constant(2.0))
        with keras_internals.regularizers_replaced([layer], regularize):
            output = layer(tf.ones([3, 2]))
            layer.add_loss(tf.constant(3.0))
        assert len(layer.losses) == 2  # A call forgets those before.
    assert seen == [(3, 1)]
    expected = float(own(output)) / 3
    np.testing.assert_allclose(float(scope.losses[0]), expected, rtol=1e-6)
    assert layer.activity_regularizer is own
    assert "add_loss" not in vars(layer)


def test_compiled_losses():
    model = build()
    assert keras_internals.losses_of(model) == []
    keras_internals.build(model, SPEC)
    [loss] = keras_internals.losses_of(model)
    assert loss(tf.zeros([1, 2]), 2.0 * tf.ones([1, 2])) == 4.0


def test_compiled_metrics_are_reset_once_they_are_built():
    model = build()
    keras_internals.build(model, SPEC)
    compiled = model.metrics[1]
    (_, count) = compiled.variables
    count.assign(3.0)
    keras_internals.reset_metrics(model, as_made=True)
    assert (compiled.built, float(count)) == (True, 3.0)
    keras_internals.reset_metrics(model, as_made=False)
    assert float(count) == 0.0


@pytest.mark.parametrize("name", ["sigmoid", "softmax"])
def test_logits_are_found_by_an_output(name):
    """Beside it, and by its operation; crossentropies are computed of them."""
    plain = getattr(tf.nn, name)
    of = {
        "sigmoid": keras.losses.binary_crossentropy,
        "softmax": keras.losses.categorical_crossentropy,
    }[name]
    targets = tf.constant([[1.0, 0.0]])

    @tf.function
    def losses(given):
        logits = 1.0 * given
        outputs = getattr(keras.activations, name)(logits)
        assert outputs._keras_logits is logits
        found = [of(targets, outputs), of(targets, plain(logits))]
        for each in (outputs, plain(logits)):
            moved = keras_internals.carried(each, tf.identity)
            assert moved.op.type == each.op.type
            found.append(of(targets, moved))
        aside = tf.identity(outputs)
        aside._keras_logits = logits
        found.append(of(targets, keras_internals.carried(aside, tf.identity)))
        return found, of(targets, tf.identity(outputs))

    found, of_outputs = losses(tf.constant([[-40.0, 40.0]]))
    assert np.unique(found).size == 1
    assert float(found[0][0]) >= 40.0 - 1e-5
    assert float(of_outputs[0]) < 20.0


def test_logits_of_one_axis_are_not_computed_again():
    """A softmax of the rows is not one of some of the rows."""

    @tf.function
    def first(scores):
        outputs = keras.activations.softmax(scores)
        return keras_internals.carried(outputs, lambda each: each[:1])

    found = first(tf.constant([1.0, 1.0]))
    np.testing.assert_allclose(found, [0.5])


def test_zeros_have_an_attribute_that_is_not_the_authors():
    @tf.function
    def moved(like):
        zeros = [tf.zeros([2]), tf.zeros_like(like)]
        assert all(vars(each) for each in zeros)
        return [keras_internals.carried(each, tf.identity) for each in zeros]

    assert not np.any(moved(tf.ones([2])))


def test_attributes_of_an_author_do_not_move():
    @tf.function(autograph=False)
    def moved(given):
        made = 2.0 * given
        made.noted = given
        return keras_internals.carried(made, tf.identity)

    with pytest.raises(mgpu_tf.ConfigurationError, match="'noted'"):
        moved(tf.ones([2]))


def test_only_the_newest_value_of_a_float8_history_is_of_the_rows():
    """And a scale follows from the history of before."""
    layer = keras.layers.Dense(2, dtype="float8_from_float32")
    layer.build((None, 3))
    model = keras.Sequential([layer])
    kept = [
        v
        for v in layer.trainable_variables
        if keras_internals.is_overwritten(v)
    ]
    assert keras_internals.variables_of_float8(model) == set(map(id, kept))
    assert [len(v.shape) for v in kept] == [0, 1, 0, 1, 0, 1]

    @tf.function(autograph=False)  # Keras's own fails eagerly.
    def given(x):
        with tf.GradientTape() as tape:
            loss = keras.ops.sum(layer(x, training=True) ** 2)
        return tape.gradient(loss, [v.value for v in kept])

    for v in kept:
        v.assign(np.linspace(1.0, 2.0, v.shape.num_elements()).reshape(v.shape))
    one, other = given(tf.ones([4, 3])), given(tf.fill([4, 3], 2.0))
    for first, second in zip(one, other, strict=True):
        np.testing.assert_array_equal(
            tf.reshape(first, [-1])[1:], tf.reshape(second, [-1])[1:]
        )
    newest = [
        np.ravel(first)[0] == np.ravel(second)[0]
        for first, second in zip(one, other, strict=True)
    ]
    assert newest == [True, False, True, True, True, False]


def test_an_optimizer_overwrites_variables_by_one_method():
    layer = keras.layers.Dense(2, dtype="float8_from_float32")
    layer.build((None, 3))
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(layer.trainable_variables)
    written = []

    def overwrite(variable, gradient):
        written.append(variable)
        assert gradient.shape == variable.shape

    with keras_internals.engine_order(optimizer, overwrite=overwrite):
        optimizer.apply(
            [tf.ones(v.shape) for v in layer.trainable_variables],
            layer.trainable_variables,
        )
    assert len(written) == 6
    assert float(layer.bias[0]) == pytest.approx(-0.1)
    assert float(layer.inputs_scale) == 1.0


def test_rates_of_optimizers_that_are_made_of_others():
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        pytest.skip("This Keras has no MultiOptimizer.")
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    one, other = keras.optimizers.SGD(0.5), keras.optimizers.Adam(0.25)
    several = keras.optimizers.MultiOptimizer(
        lambda v: one if "kernel" in v.path else other
    )
    model.compile(several, "mse")
    several.build(model.trainable_variables)
    assert sorted(keras_internals.learning_rates(model)) == [0.25, 0.5]
    model.compile(keras.optimizers.LossScaleOptimizer(one), "mse")
    assert set(keras_internals.learning_rates(model)) == {0.5}
