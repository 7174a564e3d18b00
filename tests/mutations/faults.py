"""Faults to plant in the package, and the tests that are to see them.

Each is one edit of one file. A test that sees none of them is of no use; a
fault that no test sees is a hole in the suite. `run` plants them.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Fault:
    """An edit that makes the package wrong.

    Attributes:
        name: What goes wrong, in a few words.
        file: Of the package.
        right: What stands there, once.
        wrong: What is put in its place.
        tests: Files and tests that may see it.
    """

    name: str
    file: str
    right: str
    wrong: str
    tests: tuple[str, ...]


PARITY = "tests/parity/test_one_machine.py"
LOSSES = "tests/engine/test_loss_parity.py"
WORKERS = "tests/parity/test_two_workers.py"
KEEPING = "tests/checkpoints/test_keeping.py"
RESUME = "tests/checkpoints/test_resume.py"
WHOLE = "tests/engine/test_whole_batch.py"
WRITTEN = "tests/engine/test_written_state.py"
SLICE = "tests/conformance/test_slice.py::test_row"
MIXED = (
    "tests/engine/test_overridden_step.py"
    "::test_layers_that_mix_rows_are_computed_whole"
)


def row(column, name):
    return f"{PARITY}::test_row[{column}-{name}]"


def loss(name):
    return f"{LOSSES}::test_same_as_keras[{name}-mirrored_x3]"


NO_ROWS = "tests/engine/test_no_rows.py"
TENSOR = "tests/engine/test_tensor_parallel.py"
SEQUENCE = "tests/engine/test_sequence_parallel.py"
OF_ONE = "test_three_devices_have_the_numbers_of_one"
TWO_ROWS = "a step that normalizes a batch of two rows"
FIXED_NUMBER = "test_a_fixed_number_of_rows_is_not_taken_for_those_of_the_batch"
ENGINE = (
    Fault(
        "a sum counts the row that a replica without one computes",
        "engine/author/contributions.py",
        "return sum_over_replicas(self.select(value, 0))",
        "return sum_over_replicas(value)",
        (NO_ROWS,),
    ),
    Fault(
        "gathered rows have those of a replica without one",
        "engine/exchange/composites.py",
        "    return value[:count]\n",
        "    return value\n",
        (NO_ROWS,),
    ),
    Fault(
        "moments of all rows have those of a replica without one",
        "engine/step/moments.py",
        "            inputs = own_rows(inputs, share.local)\n",
        "",
        (NO_ROWS, f"{SLICE}[mirrored_x3-{TWO_ROWS}]"),
    ),
    Fault(
        "a split layer takes no row of a device without one",
        "engine/step/tensor_parallel/forms.py",
        "        total = tf.maximum(total, size)\n",
        "",
        (
            "tests/engine/test_tensor_parallel.py"
            "::test_weights_split_over_the_data_axis",
        ),
    ),
    Fault(
        "an output without rows counts once for each replica",
        "engine/author/step_scope.py",
        "return scope.proof.found(leaf) == FIXED",
        "return False",
        (f"{SLICE}[mirrored_x3-outputs that have no rows]",),
    ),
    Fault(
        "a step of predictions compares the rows of one replica",
        "engine/step/replica_step.py",
        "        if set(kinds) <= {Rows(), FIXED}:\n",
        "if True:",
        (f"{SLICE}[fsdp_x3-predictions compared with those of the batch]",),
    ),
    Fault(
        "a fixed number of rows is taken for one for each example",
        "engine/step/calls/whole_layers.py",
        "                output = _not_of_rows(output, cut, layer.name)\n",
        "                pass\n",
        (f"{WHOLE}::{FIXED_NUMBER}",),
    ),
    Fault(
        "a Jacobian has zeros for the rows of other replicas",
        "engine/exchange/crossing.py",
        "        if _in_vectorized_loop():\n",
        "        if False:\n",
        (f"{SLICE}[mirrored_x3-jacobians of a step of ones own]",),
    ),
    Fault(
        "a table of words and of places has a gradient for each replica",
        "engine/exchange/shared_rows.py",
        "    if all(alike) or not any(alike):\n",
        "    if True:\n",
        (f"{SLICE}[fsdp_x3-a table of words and of places]",),
    ),
    Fault(
        "what is looked up for all rows is looked up for each replica",
        "engine/step/replica_step.py",
        "                and scope.is_alike(gradient.indices)\n",
        "                and False\n",
        (f"{SLICE}[mirrored_x3-words of the batch looked up once]",),
    ),
    Fault(
        "metrics see the weights of before the update",
        "engine/step/replica_step.py",
        "if late is None or self._state.asynchronous:",
        "if True:",
        (f"{SLICE}[mirrored_x3-the rate of a schedule as a metric]",),
    ),
    Fault(
        "the losses of outputs count twice in metrics of the author's own",
        "engine/step/replica_step.py",
        "scope.add_update((variable, before[id(variable)] + increment))",
        "scope.add_update((variable, scope.hold(variable) + increment))",
        (f"{SLICE}[mirrored_x3-compute metrics of ones own with two outputs]",),
    ),
    Fault(
        "the mean of the loss is that of one replica, beside metrics of one's "
        "own",
        "engine/step/replica_step.py",
        "            grown = []  # They are written already.\n",
        "            pass\n",
        (f"{SLICE}[mirrored_x3-compute metrics of ones own with two outputs]",),
    ),
    Fault(
        "a class derived from a loss of Keras's is taken for it",
        "engine/keras_internals.py",
        "        is_keras_own(loss)\n        and is_unpatched(loss",
        "        is_unpatched(loss",
        (f"{SLICE}[mirrored_x3-a class of keras with means of the batch]",),
    ),
    Fault(
        "a layer of Keras's takes rows for features",
        "engine/keras_internals.py",
        "return min(ranks, default=2) > (counts or normalizes)",
        "return True",
        (
            "tests/engine/test_layers_of_keras.py::"
            "test_rows_are_apart[BatchNormalization]",
        ),
    ),
    Fault(
        "an axis of rows is not looked at",
        "engine/keras_internals.py",
        '    axes = keras.tree.flatten(named.get("axis"))\n',
        "    axes = []\n",
        (
            f"{SLICE}[mirrored_x3-BinaryCrossentropy as a loss over the first "
            "axis]",
        ),
    ),
    Fault(
        "a metric of outputs of one axis adds means of replicas",
        "engine/keras_internals.py",
        "return own and all(rank is not None and rank > 1 for rank in ranks)",
        "return own",
        (f"{SLICE}[mirrored_x3-outputs of one axis]",),
    ),
    Fault(
        "a batch without a row is taken for the end of the data",
        "data/structures.py",
        "        check = tf.debugging.assert_positive(size, NO_ROW)\n",
        "        check = tf.no_op()\n",
        ("tests/training/test_bad_input.py",),
    ),
    Fault(
        "callbacks that count batches see executions",
        "engine/keras_internals.py",
        "return any(isinstance(every, int) and every for every in of_each)",
        "return False",
        (f"{SLICE}[mirrored_x3-ModelCheckpoint, by batches]",),
    ),
    Fault(
        "what a callback stops training gets the gradient of another layer",
        "engine/synchronous/engine.py",
        "        self._check_trained()\n",
        "",
        ("tests/training/test_callbacks.py",),
    ),
    Fault(
        "gradients that an author gives are taken to keep rows apart",
        "engine/row_proof/gradients.py",
        "    return _sends_back(op, coming, walk)\n",
        "    return True\n",
        ("tests/engine/test_custom_gradient.py",),
    ),
    Fault(
        "gradients that an author gives are taken for linear ones",
        "engine/row_proof/gradients.py",
        "    return _sends_back(op, [SUM] * len(op.outputs), walk)\n",
        "    return True\n",
        ("tests/engine/test_custom_gradient.py",),
    ),
    Fault(
        "zeros of the shapes of all gradients stay with the graph",
        "engine/author/contributions.py",
        "tf.broadcast_to(tf.cast(none, value.dtype), tf.shape(value))",
        "tf.zeros(tf.shape(value), value.dtype)",
        ("tests/engine/test_memory_of_steps.py",),
    ),
    Fault(
        "what flows back to the row of another example counts",
        "engine/exchange/crossing.py",
        "self.all_rows(cut.without_another(_dense(up)), cut)",
        "self.all_rows(_dense(up), cut)",
        (
            "tests/engine/test_no_rows.py",
            "tests/engine/test_overridden_step.py",
        ),
    ),
    Fault(
        "logs of a step are taken for those of the trace before",
        "engine/synchronous/overridden_step.py",
        "if self._assumed not in (None, found):",
        "if False:",
        ("tests/engine/test_overridden_step.py",),
    ),
    Fault(
        "a part keeps the whole value that was assigned",
        "strategies/split/sharded_variable.py",
        "getattr(part, method)(own_buffer(kept))",
        "getattr(part, method)(kept)",
        ("tests/strategies/test_fully_sharded.py",),
    ),
    Fault(
        "weights that a collective gathers are not known as weights",
        "engine/step/per_layer.py",
        "        self._scope.take_alike(gathered)\n",
        "",
        ("tests/engine/test_over_collectives.py",),
    ),
    Fault(
        "a layer that is computed again draws other numbers",
        "engine/step/per_layer.py",
        "                entered_again(self._draws),\n",
        "",
        ("tests/engine/test_over_collectives.py",),
    ),
    Fault(
        "a length that no graph knows is taken for a number",
        "engine/random_rows/dimensions.py",
        "None if self._open else first // ROWS",
        "first // ROWS",
        ("tests/engine/test_random_rows.py::test_dimensions",),
    ),
    Fault(
        "a row of a draw is as long as in a copy of the step",
        "engine/random_rows/dimensions.py",
        "Dimension(Follows.OTHERS if first == second else Follows.MIXED)",
        "Dimension(Follows.OTHERS, first)",
        ("tests/engine/test_random_rows.py::test_dimensions",),
    ),
    Fault(
        "rows in parts are put together in another order",
        "engine/row_proof/rules.py",
        "if _block_of(op, kinds) == spread.block else UNPROVEN",
        "if _block_of(op, kinds) else UNPROVEN",
        ("tests/engine/test_row_proof.py",),
    ),
    Fault(
        "words of another size are taken for those of a row",
        "engine/row_proof/rules.py",
        "    return before == after and not axes\n",
        "    return before == after\n",
        ("tests/engine/test_row_proof.py",),
    ),
    Fault(
        "replicas compute in the memory of the program's arrays",
        "data/structures.py",
        "return _map_rows(lambda leaf: _copied(leaf[low:high]), data)",
        "return part(data, low, high)",
        ("tests/data/test_arrays_of_generators.py",),
    ),
    Fault(
        "exchanges by NCCL begin in an order of their own",
        "strategies/replicas/collectives.py",
        "sharing = strategy if self._has_nccl else None",
        "sharing = None",
        ("tests/strategies/test_collectives.py",),
    ),
    Fault(
        "calls of a trace that is not kept are counted",
        "strategies/replicas/collectives.py",
        "                groups.calls = dict(calls)\n",
        "                pass\n",
        (
            "tests/strategies/test_collectives.py"
            "::test_members_number_their_calls_alike_after_a_failed_trace",
        ),
    ),
    Fault(
        "blocks of a pipeline are not sent the metrics of the last",
        "engine/synchronous/pipeline/state.py",
        "        *metrics, notes = sum_tensors([*metrics, notes], "
        "sum_over_replicas)\n",
        "",
        (
            "tests/engine/pipeline/test_over_workers.py"
            "::test_the_numbers_of_one_device[2_workers-masked]",
        ),
    ),
    Fault(
        "only the first gradient of a pack is summed",
        "engine/exchange/reduction.py",
        "for places in of_one_type(pack, gradients):",
        "for places in of_one_type(pack[:1], gradients):",
        (
            "tests/engine/test_reduction.py",
            row("mirrored_x3", "adam_global_clipnorm"),
        ),
    ),
    Fault(
        "an accumulated update comes one micro-batch late",
        "engine/step/update.py",
        "tf.equal((count + 1) % self._every, 0),",
        "tf.equal(count % self._every, 0),",
        (row("mirrored_x3", "accumulation_3_uneven"),),
    ),
    Fault(
        "gradients keep the scale of the loss",
        "engine/step/update.py",
        "        return divided(gradient, scale)",
        "        return gradient",
        (row("mirrored_x3", "loss_scale_overflow"),),
    ),
    Fault(
        "an overflow on one replica is not sent to the others",
        "engine/step/update.py",
        "        if not self._are_alike:\n            count = sum",
        "        if False:\n            count = sum",
        (
            row("fsdp_x3", "loss_scale_overflow"),
            row("tensor_x3", "loss_scale_overflow"),
            "tests/engine/pipeline/test_training.py",
        ),
    ),
    Fault(
        "a constraint is left out where a weight is stored once",
        "engine/step/update.py",
        "variable.constraint = own\n        self._constrain()",
        "variable.constraint = own",
        (row("central_storage_x2", "constraint"),),
    ),
    Fault(
        "averages overwrite weights in the step after",
        "engine/step/update.py",
        "due = tf.equal(step % optimizer.ema_overwrite_frequency, 0)",
        "due = tf.equal(step % optimizer.ema_overwrite_frequency, 1)",
        (
            row("mirrored_x3", "ema_accumulation"),
            row("zero1_x2", "ema_overwrite"),
        ),
    ),
    Fault(
        "sample weights are summed on each replica alone",
        "engine/step/losses.py",
        "return share.sum_over_replicas(tf.reduce_sum(weights))",
        "return tf.reduce_sum(weights) * share.replicas",
        (
            loss("ignore_class_weighted_mean"),
            row("data_2_fsdp_2", "weighted_mean"),
        ),
    ),
    Fault(
        "what a mask keeps is counted on each replica alone",
        "engine/step/losses.py",
        "            share.sum_over_replicas(kept)\n",
        "            kept * share.replicas\n",
        (loss("ignore_class"), row("tensor_x3", "mask")),
    ),
    Fault(
        "regularizers count once for each replica",
        "engine/step/losses.py",
        "share.select(total * share.fraction(total.dtype), 0)",
        "total",
        (loss("regularizer"), row("mirrored_x3", "sgd")),
    ),
    Fault(
        "what fills a block of rows is taken for rows",
        "engine/exchange/embedding_rows.py",
        "held = indices != _NO_ROW",
        "held = indices >= _NO_ROW",
        (WORKERS,),
    ),
    Fault(
        "rows of a part are not counted from its first",
        "engine/exchange/embedding_rows.py",
        "tf.boolean_mask(indices, mine) - first,",
        "tf.boolean_mask(indices, mine),",
        (
            "tests/engine/test_embeddings.py",
            row("fsdp_2_tensor_2", "embedding_adam"),
        ),
    ),
    Fault(
        "rows that all replicas look up are averaged",
        "engine/exchange/embedding_rows.py",
        "tf.reduce_sum(tf.reshape(slices.values, shape), 0),",
        "tf.reduce_mean(tf.reshape(slices.values, shape), 0),",
        ("tests/engine/test_embeddings.py",),
    ),
    Fault(
        "a minimum over rows becomes a maximum over replicas",
        "engine/author/rules.py",
        "SMALLEST: Rule.MINIMUM}",
        "SMALLEST: Rule.MAXIMUM}",
        ("tests/engine/test_state.py", WRITTEN),
    ),
    Fault(
        "means of replicas are summed",
        "engine/author/state.py",
        "return start + summed / self._total",
        "return start + summed",
        ("tests/engine/test_batch_normalization.py",),
    ),
    Fault(
        "the count of a random layer stays",
        "engine/author/state.py",
        "return tf.stack([state.value[0], drawn[1]])",
        "return tf.stack([state.value[0], state.value[1]])",
        ("tests/engine/test_unseeded_draws.py",),
    ),
    Fault(
        "the last rows of a batch are left out",
        "strategies/replicas/topology.py",
        "                size * (index + 1) // self.ranges,",
        "                size * index // self.ranges + size // self.ranges,",
        ("tests/data/test_global_batches.py", row("mirrored_x3", "sgd")),
    ),
    Fault(
        "shares of rows are taken for equal ones",
        "strategies/replicas/topology.py",
        "            size * self._bound(index + 1) // whole,",
        "            size * (index + 1) // self.ranges,",
        ("tests/strategies/test_balance.py",),
    ),
    Fault(
        "the noise scale counts a replica as if it had all rows",
        "engine/exchange/noise_scale.py",
        "square = square * total / tf.maximum(local, 1.0)",
        "square = square * 1.0",
        ("tests/engine/test_noise_scale.py",),
    ),
    Fault(
        "Lamb by parts is biased to zero",
        "engine/whole_norms.py",
        "1.0 - ops.power(ops.cast(beta, dtype), step)",
        "1.0 - ops.cast(beta, dtype)",
        ("tests/engine/test_whole_norms.py",),
    ),
    Fault(
        "a pipeline clips by the norm of one stage",
        "engine/synchronous/sharded.py",
        "norm = tf.sqrt(tf.add_n(norms))",
        "norm = tf.sqrt(norms[0])",
        (
            "tests/engine/pipeline/test_training.py",
            row("pipeline_x2", "accumulation_clipped"),
        ),
    ),
    Fault(
        "a shared weight gets the gradient of one stage",
        "engine/synchronous/pipeline/run.py",
        "joined[key] = _of_stages(found[key])",
        "joined[key] = found[key][0]",
        ("tests/engine/pipeline/test_shared_weights.py",),
    ),
    Fault(
        "each device of a stage gets the gradient of the first part",
        "engine/synchronous/pipeline/update.py",
        "self._part_for(same[0], each, variable)",
        "self._part_for(0, each, variable)",
        (row("fsdp_3_pipeline_2", "adam_global_clipnorm"),),
    ),
    Fault(
        "parts of a weight are joined in another order",
        "engine/exchange/parts.py",
        "return tf.reshape(tf.concat(pieces, 0), split.shape)",
        "return tf.reshape(tf.concat(pieces[::-1], 0), split.shape)",
        (
            "tests/engine/test_parts.py",
            row("fsdp_x3", "adam_global_clipnorm"),
        ),
    ),
    Fault(
        "zeros behind a part of a gradient are taken for the next one",
        "engine/exchange/parts.py",
        "return tf.split(flat, cut)[::2]",
        "return tf.split(flat, cut)[: len(lengths)]",
        ("tests/engine/test_parts.py",),
    ),
    Fault(
        "a new trace that is asked for is not made",
        "engine/step/base.py",
        "self._traced_for != keras_internals.loop_functions(self._model)",
        "False",
        ("tests/training/test_traced_anew.py",),
    ),
    Fault(
        "draws that keep a state of their own are not known",
        "engine/random_rows/scope.py",
        'return op.op_def.is_stateful and {"seed", "seed2"} <= attributes',
        "return False",
        ("tests/engine/test_random_rows.py",),
    ),
    Fault(
        "a call that catches what asks for another trace is kept",
        "engine/step/calls/boundary.py",
        "self._attempts.give_up()  # Its author may catch what is raised.",
        "pass",
        (
            "tests/engine/test_overridden_step.py"
            "::test_a_call_reads_a_weight_of_another_layer",
        ),
    ),
    Fault(
        "a gradient may come later than the limit",
        "engine/asynchronous/schedule/staleness.py",
        "if max(others, latest + steps) > self._limit:",
        "if others > self._limit:",
        ("tests/asynchronous/test_staleness.py",),
    ),
    Fault(
        "vocabularies of workers are not compared",
        "training/agreement.py",
        'with_words = zlib.crc32("\\0".join(_words(layer)).encode())',
        "with_words = 0",
        ("tests/training/test_agreement.py",),
    ),
    Fault(
        "what flows back to gathered rows counts once for each replica",
        "engine/exchange/crossing.py",
        "return tf.math.divide_no_nan(_dense(up), part)",
        "return _dense(up)",
        (WHOLE,),
    ),
    Fault(
        "what others make of a row does not flow back to it",
        "engine/exchange/crossing.py",
        "total = self._groups.all_reduce(_dense(up))",
        "total = _dense(up)",
        (WHOLE,),
    ),
    Fault(
        "calls that mix rows are cut",
        "engine/step/calls/boundary.py",
        "and all(kind == Rows() for kind in kinds)",
        "and True",
        (MIXED,),
    ),
    Fault(
        "calls that add to the loss are cut",
        "engine/step/calls/boundary.py",
        "len(here.scope.losses) == losses",
        "True",
        (MIXED,),
    ),
    Fault(
        "a sum and a constant are a sum",
        "engine/row_proof/rules.py",
        "whole = moving == {SUM} and all(map(_is_zero, fixed))",
        "whole = moving == {SUM}",
        ("tests/engine/test_row_proof.py",),
    ),
    Fault(
        "layers that mix rows have those of one replica",
        "engine/step/calls/layer_calls.py",
        "if added and apart and parts is not None:",
        "if added and parts is not None:",
        (WHOLE,),
    ),
    Fault(
        "what a layer adds to its state is a sum, whatever it is",
        "engine/author/rules.py",
        "if added in (NOTHING, SUM) and (",
        "if added != MEAN and dtype.is_floating and (",
        (WRITTEN,),
    ),
    Fault(
        "what is computed of all rows reads what one replica has",
        "engine/author/step_scope.py",
        "elif self.proof.of(tensor) != FIXED:",
        "elif False:",
        (WRITTEN,),
    ),
    Fault(
        "replicas find in a layer what another has left there",
        "strategies/replicas/turns.py",
        "        each()",
        "        del each",
        (f"{WRITTEN}::test_what_passes_by_the_arguments",),
    ),
    Fault(
        "what a function writes of its rows counts as alike",
        "engine/row_proof/proof.py",
        """self.writes_rows |= any(
                kind != FIXED
""",
        """self.writes_rows |= any(
                False
""",
        ("tests/engine/test_row_proof.py", WRITTEN),
    ),
    Fault(
        "what a trace has tried and given up stays in the graph",
        "engine/author/step_scope.py",
        "        if self.acts_since(mark):\n            raise TraceAgain\n",
        "",
        ("tests/engine/test_acts_once.py",),
    ),
    Fault(
        "each part of a batch writes to a variable of TensorFlow's",
        "engine/step/plain_variables.py",
        "for op, _ in _not_of_keras(scope, graph, first):",
        "for op, _ in ():",
        ("tests/engine/test_acts_once.py",),
    ),
    Fault(
        "a metric of all rows is added up over replicas",
        "engine/step/global_metrics.py",
        "        for variable in scope.written_since(mark):\n"
        "            scope.agree(variable)\n",
        "        pass\n",
        (f"{WRITTEN}::test_a_metric_of_all_rows_is_added_once",),
    ),
    Fault(
        "a mean over the batch is one over a replica's rows",
        "engine/author/contributions.py",
        "rows = share.same_rows * tf.cast(share.total, summed.dtype)",
        "rows = share.replicas * tf.cast(share.local, summed.dtype)",
        (f"{WHOLE}::test_as_keras[a router that stays cut-mirrored_x3]",),
    ),
    Fault(
        "the regularizer of an activation that mixes rows is of a replica's",
        "engine/step/calls/layer_calls.py",
        "            self._called(regularization, regularization, output)",
        "            regularization(output)",
        (f"{SLICE}[mirrored_x3-a sparse autoencoder]",),
    ),
    Fault(
        "a loss that layers have added is the model's and not the layer's",
        "engine/keras_internals.py",
        "        if id(before) in each._loss_ids:",
        "        if each is layer:",
        ("tests/engine/test_keras_internals.py::test_what_layers_have_added",),
    ),
    Fault(
        "a gradient within a call goes through layers in parts",
        "engine/step/tensor_parallel/parts.py",
        "if isinstance(scope, StepScope) and not scope.is_over:",
        "if False:",
        (f"{SLICE}[tensor_x3-forces]",),
    ),
    Fault(
        "code in a step finds all replicas of a strategy of TensorFlow's",
        "engine/synchronous/engine.py",
        "            follow_one_replica(strategy)",
        "            pass",
        ("tests/training/test_tensorflow_strategies.py",),
    ),
    Fault(
        "compiled metrics are reset before their first epoch",
        "engine/step/base.py",
        "as_made=first and self._as_made",
        "as_made=False",
        ("tests/training/test_first_reset.py",),
    ),
    Fault(
        "checkpoints lack what Keras does not track",
        "engine/synchronous/engine.py",
        "            *untracked_variables(self._model),\n",
        "",
        ("tests/checkpoints/test_untracked.py",),
    ),
)

DATA = (
    Fault(
        "each pass has the order of the first",
        "data/sources/permutation.py",
        "key = _mixed(first + np.uint64(index))",
        "key = _mixed(first)",
        ("tests/data/test_permutation.py", "tests/data/test_indexed.py"),
    ),
    Fault(
        "a resumed pass begins at its first batch",
        "data/sources/indexed.py",
        "            return elements(start, self._passes)",
        "            return elements(0, self._passes)",
        ("tests/data/test_indexed.py", f"{RESUME}::test_same_bits"),
    ),
    Fault(
        "a resumed run reads its pass again",
        "data/feed.py",
        "self._start = done % self.source.steps",
        "self._start = 0",
        (f"{RESUME}::test_same_bits",),
    ),
    Fault(
        "a resumed run is one batch late in its epoch",
        "data/feed.py",
        "self._read(iterator, step)",
        "self._read(iterator, step + 1)",
        (
            f"{RESUME}::test_same_bits_whatever_the_data",
            f"{RESUME}::test_same_bits",
        ),
    ),
    Fault(
        "a class without a weight weighs nothing",
        "data/sources/weights.py",
        "            tf.ones([], dtype),\n",
        "            tf.zeros([], dtype),\n",
        ("tests/data/test_structures.py", "tests/data/test_kinds.py"),
    ),
    Fault(
        "an order that depends on timing is not named",
        "data/tf_data/order.py",
        "    if node.unordered:\n",
        "    if False:\n",
        ("tests/data/test_order.py",),
    ),
    Fault(
        "a dataset is cut before a map that mixes rows",
        "data/tf_data/early_cut.py",
        "if not _ordered(batch) or not _of_rows(batch):",
        "if not _ordered(batch):",
        ("tests/data/test_early_cut.py",),
    ),
)

CHECKPOINTS = (
    Fault(
        "a resumed run goes on in the order of another seed",
        "checkpoints/run_state.py",
        "                setattr(order, name, value)\n",
        "",
        ("tests/checkpoints/test_row_order.py",),
    ),
    Fault(
        "the seed of build_model is that of the next trainer",
        "training/distributed_model.py",
        "                keras_internals.give_seed(seed)\n",
        "                pass\n",
        ("tests/checkpoints/test_row_order.py",),
    ),
    Fault(
        "a validation generator that has ended ends a fit",
        "training/loops/loop.py",
        "if not at.step and not (again and not source.repeats):",
        "if not at.step:",
        ("tests/data/test_epochs.py",),
    ),
    Fault(
        "bytes that have changed are read",
        "checkpoints/reading.py",
        "if of_checkpoint(path, file.name, checksum) != file.sha256:",
        "if False:",
        ("tests/checkpoints/test_store.py",),
    ),
    Fault(
        "the oldest checkpoints are kept",
        "checkpoints/store.py",
        "for entry in there[-keep:]",
        "for entry in there[:keep]",
        ("tests/checkpoints/test_store.py",),
    ),
    Fault(
        "the worst checkpoints are kept for the best",
        "checkpoints/keeping.py",
        'sign = 1 if self.mode == "min"',
        'sign = 1 if self.mode == "max"',
        (KEEPING,),
    ),
    Fault(
        "what is kept for good is deleted",
        "checkpoints/keeping.py",
        "if so_far.kept == each.step:",
        "if False:",
        (KEEPING,),
    ),
    Fault(
        "a resumed run forgets what it has kept for good",
        "checkpoints/saving/saver.py",
        "self._for_good = keeping.for_good_of(state)\n        before",
        "before",
        (KEEPING,),
    ),
    Fault(
        "a checkpoint that was about to be replaced is lost",
        "checkpoints/storage/disk.py",
        "if name.startswith(REPLACED) and not os.path.lexists(path):",
        "if False:",
        ("tests/checkpoints/test_store.py",),
    ),
    Fault(
        "a deletion that is broken off on object storage leaves damage",
        "checkpoints/storage/objects.py",
        "key=lambda name: name != MANIFEST",
        "key=lambda name: name == MANIFEST",
        ("tests/checkpoints/test_storage.py",),
    ),
    Fault(
        "word that a process left of an earlier save counts",
        "checkpoints/parts.py",
        'if found.get("save") != save:',
        "if False:",
        ("tests/checkpoints/test_storage.py",),
    ),
    Fault(
        "steps done again are not counted",
        "checkpoints/recovery.py",
        "max(0, last_step - step)",
        "max(0, last_step - last_step)",
        ("tests/checkpoints/test_recovery.py",),
    ),
    Fault(
        "generators go on as they are",
        "checkpoints/run_state.py",
        "own=not self._drawn)",
        "own=False)",
        (f"{RESUME}::test_generators_of_random_numbers_go_on",),
    ),
    Fault(
        "data that draws goes on from other numbers",
        "checkpoints/run_state.py",
        "            _restore_own(begun)\n",
        "            pass\n",
        (f"{RESUME}::test_noise_goes_on_as_the_run_began",),
    ),
    Fault(
        "no epoch of a PyDataset ends",
        "training/loops/loop.py",
        "        if not self._model.stop_training:\n"
        "            source.epochs.end()\n",
        "",
        ("tests/data/test_epochs.py",),
    ),
    Fault(
        "adapted numbers stay those of before a checkpoint",
        "engine/snapshot.py",
        "                self._finish()\n",
        "                pass\n",
        ("tests/checkpoints/test_adapted.py",),
    ),
    Fault(
        "a step reads the part of a metric that a replica has",
        "engine/author/step_scope.py",
        "            self.read_part(variable)\n",
        "            pass\n",
        (f"{WRITTEN}::test_a_metric_that_a_step_reads",),
    ),
    Fault(
        "a worker may set a learning rate of its own",
        "training/loops/loop.py",
        "peers.compare({RATES: str(rates)})",
        "peers.compare({RATES: str(len(rates))})",
        ("tests/training/test_agreement.py",),
    ),
    Fault(
        "a callback begins anew",
        "checkpoints/callback_state.py",
        "            setattr(holder, name, value)\n",
        "            pass\n",
        (
            "tests/checkpoints/test_callback_state.py",
            f"{RESUME}::test_callbacks_go_on",
        ),
    ),
    Fault(
        "no save comes after so many steps",
        "checkpoints/saving/saver.py",
        "        due |= step >= self._due_at\n",
        "",
        (f"{RESUME}::test_same_bits",),
    ),
    Fault(
        "machines go on from a step that one of them lacks",
        "checkpoints/saving/local.py",
        "        whole = min(\n",
        "        whole = max(\n",
        ("tests/checkpoints/test_local.py",),
    ),
    Fault(
        "failures do not shorten the interval",
        "checkpoints/interval.py",
        "(self._hours + hours) / (failures + 1)",
        "(self._hours + hours)",
        ("tests/checkpoints/test_interval.py",),
    ),
)

LAUNCH = (
    Fault(
        "the pause does not grow",
        "launch/policy.py",
        "2.0 ** min(max(failures - 1, 0), 30)",
        "1.0",
        ("tests/launch/test_restarts.py",),
    ),
    Fault(
        "a job may shrink below its fewest workers",
        "launch/policy.py",
        "num_workers > self.min_workers",
        "num_workers >= self.min_workers",
        ("tests/launch/test_restarts.py",),
    ),
    Fault(
        "tasks outlive a supervisor that was killed",
        "launch/guard.py",
        "os.killpg(group, signal.SIGKILL)",
        "os.killpg(group, 0)",
        ("tests/launch/test_restarts.py", "tests/launch/test_local.py"),
    ),
    Fault(
        "a dead worker of a job is taken for one that has ended",
        "launch/local.py",
        "                if not task.exit_code:\n",
        "                if True:\n",
        ("tests/launch/test_local.py", "tests/launch/test_restarts.py"),
    ),
    Fault(
        "a signal ends one process of a task, not its children",
        "launch/processes/process.py",
        "os.killpg(self.process.pid, number)",
        "os.kill(self.process.pid, number)",
        ("tests/launch/test_local.py", "tests/launch/test_restarts.py"),
    ),
    Fault(
        "a task that makes no step is not late",
        "cluster/watchdog.py",
        "if 0 < self._limit(seen) <= now - self._since(seen)",
        "if 0 < self._limit(seen) <= now - now",
        # On real tasks it is a hang.
        ("tests/cluster/test_heartbeat.py::test_the_late_one_is_named",),
    ),
    Fault(
        "a job that Slurm preempts is not queued again",
        "launch/slurm.py",
        'grep -q " PreemptTime=[0-9]"; then\n  requeue=1',
        'grep -q " PreemptTime=[0-9]"; then\n  requeue=',
        ("tests/launch/test_slurm.py", "tests/cluster/test_slurm.py"),
    ),
    Fault(
        "names of nodes lose the zeros in front",
        "cluster/environments/node_list.py",
        "str(number).zfill(len(first))",
        "str(number)",
        ("tests/cluster/test_node_list.py",),
    ),
    Fault(
        "parameter servers of a step take the places of workers",
        "cluster/environments/slurm.py",
        "        tasks.sort(key=lambda task: (task[1], task[0]))\n",
        "        pass\n",
        ("tests/cluster/test_environments.py",),
    ),
)

LAYOUTS = (
    Fault(
        "attached: logits stay behind",
        "engine/keras_internals.py",
        "    activation, given = None, logits\n",
        "    return [tensor], lambda moved: moved[0]\n",
        (f"{SLICE}[fsdp_x3-a softmax that is certain]",),
    ),
    Fault(
        "attached: logits stay behind where rows are joined",
        "engine/keras_internals.py",
        "    parts, together = taken_apart(tensor)\n"
        "    moved = together(list(map(move, parts)))",
        "    moved = move(tensor)",
        (
            f"{SLICE}[mirrored_x3-a sigmoid that is certain, in a step of "
            "ones own]",
        ),
    ),
    Fault(
        "attached: logits stay behind in a part of a layer",
        "engine/step/tensor_parallel/parts.py",
        "outputs = keras_internals.carried(outputs, self._watched)",
        "outputs = self._watched(outputs)",
        (f"{SLICE}[tensor_x3-a softmax of kinds that is certain]",),
    ),
    Fault(
        "attached: stages send outputs without logits",
        "engine/synchronous/pipeline/step.py",
        "sent, self._together[key] = keras_internals.taken_apart(tensor)",
        "sent, self._together[key] = [tensor], lambda moved: moved[0]",
        (
            f"{SLICE}[data_2_pipeline_2-a sigmoid that is certain, with a "
            "median]",
        ),
    ),
    Fault(
        "attached: masks stay behind",
        "engine/keras_internals.py",
        "return moved if mask is None else with_mask(moved, move(mask))",
        "return moved",
        (f"{SLICE}[mirrored_x3-masked words in a step of ones own]",),
    ),
    Fault(
        "attached: augmentation is trusted with any axes",
        "engine/keras_internals.py",
        "return max(ranks, default=4) > 3",
        "return True",
        (f"{SLICE}[mirrored_x3-images without channels]",),
    ),
    Fault(
        "again: what a call of own rows leaves is read where all are",
        "engine/row_proof/operations.py",
        "id(reader) not in known",
        "False",
        (f"{SLICE}[mirrored_x3-an object that a step gives its model]",),
    ),
    Fault(
        "again: a layer reads what has a gradient and is no argument",
        "engine/step/per_layer.py",
        "if self._made.take_others(known, handles):",
        "if False:",
        (f"{SLICE}[fsdp_x3-tensors in functions and objects]",),
    ),
    Fault(
        "again: a layer that does something else the second time",
        "engine/row_proof/operations.py",
        "        if not alike:\n            return False\n",
        "",
        (f"{SLICE}[fsdp_x3-flags counters and last outputs]",),
    ),
    Fault(
        "again: a trace in which a call was given up is kept",
        "engine/trace_again.py",
        "        self._given_up = True",
        "        self._given_up = False",
        (f"{SLICE}[mirrored_x3-flags counters and last outputs]",),
    ),
    Fault(
        "again: a replica reads what another one has made",
        "engine/step/apart.py",
        "if tensor is not None:",
        "if False:",
        (
            "tests/conformance/test_slice.py::test_row_is_refused[mirrored_x3-"
            "an object of a module that a step reads]",
        ),
    ),
    Fault(
        "float8: the largest value is that of one replica",
        "engine/step/overwritten.py",
        "tf.reduce_max(every, 0)",
        "every[0]",
        (f"{SLICE}[mirrored_x3-two layers in float8]",),
    ),
    Fault(
        "float8: each replica adds its largest value",
        "engine/step/overwritten.py",
        "return tf.where(here[0], value, tf.zeros_like(value))",
        "return value",
        (f"{SLICE}[mirrored_x3-two layers in float8]",),
    ),
    Fault(
        "float8: a scale is divided by that of the loss",
        "engine/step/update.py",
        "            gradient\n"
        "            if keras_internals.is_overwritten(variable)\n"
        "            else self._unscaled(gradient, scale)",
        "            self._unscaled(gradient, scale)",
        (f"{SLICE}[mirrored_x3-a scaled and clipped loss in float8]",),
    ),
    Fault(
        "float8: accumulation takes means of largest values",
        "engine/step/update.py",
        "            gradient\n"
        "            if keras_internals.is_overwritten(variable)\n"
        "            else self._mean(gradient)",
        "            self._mean(gradient)",
        (f"{SLICE}[fsdp_x3-gradients accumulated in float8]",),
    ),
    Fault(
        "float8: a call in a step of one's own is cut",
        "engine/step/calls/boundary.py",
        "if any(map(keras_internals.is_overwritten, layer.variables))",
        "if False",
        (f"{SLICE}[mirrored_x3-a step of ones own in float8]",),
    ),
    Fault(
        "float8: micro-batches add largest values up",
        "engine/synchronous/pipeline/run.py",
        "return tf.maximum(before, gradient)",
        "return before + gradient",
        (f"{SLICE}[data_2_pipeline_2-two layers in float8]",),
    ),
    Fault(
        "float8: a backward pass scatters what is no sum",
        "engine/step/per_layer.py",
        "over = list(filter(keras_internals.is_overwritten, split))",
        "over = []",
        (f"{SLICE}[fsdp_x3-blocks with layers in float8]",),
    ),
    Fault(
        "float8: what an author overwrites counts as Keras's",
        "engine/step/overwritten.py",
        "if id(variable) not in of_keras:",
        "if False:",
        (
            "tests/conformance/test_slice.py::test_row_is_refused[mirrored_x3-"
            "a sum that overwrites a variable]",
        ),
    ),
    Fault(
        "forward derivatives stop where replicas exchange something",
        "strategies/replicas/own_gradient.py",
        "if tensorflow_internals.have_tangents(given):",
        "if False:",
        ("tests/strategies/test_own_gradient.py",),
    ),
    Fault(
        "quantized: no call of a quantized layer is proven",
        "engine/keras_internals.py",
        "return not (own and is_of_library(layer))",
        "return False",
        (f"{SLICE}[mirrored_x3-a quantized layer of ones own]",),
    ),
    Fault(
        "quantized: a quantizer of the author's counts as Keras's",
        "engine/keras_internals.py",
        "own = quantizer is None or is_keras_own(quantizer)",
        "own = True",
        (f"{SLICE}[fsdp_x3-a quantizer of ones own]",),
    ),
    Fault(
        "attached: what the engine replaces counts as the author's",
        "engine/keras_internals.py",
        "and _BEFORE.get((id(part), method), (method,))[0] is not None",
        "and True",
        (
            "tests/engine/test_whole_batch.py::"
            "test_metrics_of_keras_are_known_in_a_step[options1]",
        ),
    ),
    Fault(
        "attached: a class is trusted whose call was replaced",
        "engine/keras_internals.py",
        'if not is_unpatched(layer, "call"):',
        "if False:",
        (f"{SLICE}[mirrored_x3-a normalization whose call was replaced]",),
    ),
    Fault(
        "attached: a graph whose call was replaced is one of layers",
        "engine/keras_internals.py",
        'in own\n        and is_unpatched(layer, "call")',
        "in own\n        and True",
        (f"{SLICE}[mirrored_x3-methods that objects of keras were given]",),
    ),
    Fault(
        "attached: a loss whose call was replaced is Keras's",
        "engine/keras_internals.py",
        'and is_unpatched(loss, "call", "__call__")',
        "and True",
        (f"{SLICE}[mirrored_x3-methods that objects of keras were given]",),
    ),
    Fault(
        "attached: a list of keys is one tensor of keys",
        "engine/keras_internals.py",
        "if joins and not isinstance(layer, keras.layers.HashedCrossing):",
        "if False:",
        ("tests/engine/test_layers_of_keras.py::test_rows_are_apart[Hashing]",),
    ),
    Fault(
        "attached: numbers that are drawn have no rows after a loop",
        "engine/row_proof/proof.py",
        "return 1 if of_rows else None",
        "return None",
        (
            "tests/engine/test_random_rows.py::"
            "test_draws_of_what_a_loop_made_are_proven",
        ),
    ),
    Fault(
        "attached: a branch makes unknown what all replicas hold",
        "engine/row_proof/proof.py",
        "return FIXED if same else UNPROVEN",
        "return UNPROVEN",
        (
            "tests/engine/test_row_proof.py::"
            "test_either_of_what_all_replicas_hold_is_fixed",
        ),
    ),
    Fault(
        "attached: the call of a graph is that of layers around it",
        "engine/keras_internals.py",
        "        and not any(map(wrote_around_call, layer.layers))\n",
        "",
        (f"{SLICE}[mirrored_x3-a layer with a call around its call]",),
    ),
    Fault(
        "attached: losses of a property are left out",
        "engine/keras_internals.py",
        'return overrides(model, "compute_loss") or overrides(model, "losses")',
        'return overrides(model, "compute_loss")',
        (f"{SLICE}[mirrored_x3-losses that a model lists itself]",),
    ),
    Fault(
        "attached: what is computed anew has parts of weights",
        "engine/step/tensor_parallel/structure.py",
        "if tf.is_tensor(call.outputs) and call.outputs.op.name not in used",
        "if False",
        (f"{SLICE}[tensor_x3-rows of a map that is vectorized]",),
    ),
    Fault(
        "attached: a branch does not know the shape of a weight",
        "engine/synchronous/whole_weights.py",
        "source = tf.Variable(tf.zeros(held.shape, held.dtype))",
        "source = tf.Variable(\n"
        "            tf.zeros(held.shape, held.dtype), "
        "shape=tf.TensorShape(None)\n"
        "        )",
        (f"{SLICE}[fsdp_x3-branches and loops that read weights]",),
    ),
    Fault(
        "attached: a step has no gradients where it is built",
        "strategies/split/sharded_variable.py",
        "return self._with_gradient(value) if self._is_abstract() else value",
        "return value",
        (f"{SLICE}[fsdp_x3-an optimizer of some of the weights]",),
    ),
    Fault(
        "attached: an optimizer subtracts itself from parts",
        "engine/synchronous/sharded.py",
        "return keras_internals.writes_itself(optimizer) or all(",
        "return all(",
        (f"{SLICE}[fsdp_x3-an optimizer that subtracts itself]",),
    ),
    Fault(
        "attached: a batch ends with the results of metrics",
        "engine/synchronous/engine.py",
        "logs, last = step.logs(returned), returned",
        "logs = step.logs(returned)",
        (f"{SLICE}[mirrored_x3-logs of a step that no metric knows]",),
    ),
    Fault(
        "attached: a compiled metric may be made outside",
        "engine/step/base.py",
        "            _check_made_inside(self._model, self._strategy)\n",
        "            pass\n",
        (
            "tests/engine/test_overridden_step.py::"
            "test_what_was_made_outside_is_refused",
        ),
    ),
    Fault(
        "layouts: replicas add up metrics that each has whole",
        "engine/author/state.py",
        "if self._total > 1 and not found <= set(map(id, self._entered)):",
        "if False:",
        (f"{SLICE}[mirrored_x3-a loss that reads a metric of all rows]",),
    ),
    Fault(
        "layouts: predictions count a metric once for each replica",
        "engine/author/state.py",
        "for variable in self._entered:\n"
        "                _assign_here(variable, tf.zeros_like(variable.value))",
        "pass",
        (f"{SLICE}[mirrored_x3-a metric of a layer that predicts]",),
    ),
    Fault(
        "layouts: a metric that resets itself by itself reads each replica",
        "engine/synchronous/engine.py",
        "reads = not held.isdisjoint(scope.read)",
        "reads = False",
        (f"{SLICE}[mirrored_x3-a metric that halves itself in a reset]",),
    ),
    Fault(
        "layouts: a variable that a call reads first is taken for its own",
        "engine/row_proof/writes.py",
        "if given.name in captured:",
        "if False:",
        (f"{SLICE}[mirrored_x3-a variable of tensorflow that a step moves]",),
    ),
    Fault(
        "layouts: code may ask for the length of a part",
        "engine/step/tensor_parallel/lengths.py",
        "if not _same(left, right, one, other):",
        "if False:",
        (f"{SLICE}[data_2_tensor_2-code that asks for a length]",),
    ),
    Fault(
        "layouts: a function may ask for the length of a part",
        "engine/step/tensor_parallel/lengths.py",
        "[_body(op, function) for function in functions_of(op)],",
        "[],",
        (f"{SLICE}[data_2_tensor_2-a function that asks for a length]",),
    ),
    Fault(
        "layouts: code behind a dropout may ask for the length of a part",
        "engine/step/tensor_parallel/lengths.py",
        "if layer in through:",
        "if False:",
        (
            f"{TENSOR}::test_what_stays_split_with_the_numbers_of_one"
            "[asks_after_dropout]",
        ),
    ),
    Fault(
        "layouts: a layer in parts is another one when computed again",
        "engine/step/tensor_parallel/parts.py",
        "copy = tf.identity(part)",
        "copy = tf.identity(part) if self._notes else part",
        (f"{SEQUENCE}::test_blocks_are_computed_again",),
    ),
    Fault(
        "tables: a tied table in parts gives no mask",
        "engine/step/tensor_parallel/forms.py",
        "mask = keras_internals.mask_of_table(self.linear.layer, inputs)",
        "mask = self.linear.layer.compute_mask(inputs)",
        (f"{SEQUENCE}::{OF_ONE}[masks of a tied table]",),
    ),
    Fault(
        "plans: a block that draws is computed once",
        "planner/operations/tracing.py",
        "and operation.inputs[0].ref() not in seeds",
        "and True",
        ("tests/planner/test_splits.py",),
    ),
    Fault(
        "plans: what layers in parts take is a part of a sequence",
        "planner/operations/splits.py",
        "if not taken or each.inner in parts.whole_inputs:",
        "if not taken:",
        ("tests/planner/test_splits.py",),
    ),
    Fault(
        "sequences: code may ask for the length of a part",
        "engine/step/tensor_parallel/sequence.py",
        "more.whole |= whole",
        "more.whole |= set()",
        (f"{SEQUENCE}::{OF_ONE}[a block that asks for a length]",),
    ),
    Fault(
        "sequences: what is whole again has no length when code asks",
        "engine/step/tensor_parallel/sequence.py",
        "{key: each.whole for key, each in search.passages().items()},",
        "{},",
        (f"{SEQUENCE}::{OF_ONE}[code that compares lengths]",),
    ),
    Fault(
        "sequences: what is added to a part stays whole",
        "engine/step/tensor_parallel/sequence.py",
        "self.entering |= could.layers",
        "pass",
        (f"{SEQUENCE}::{OF_ONE}[norms before]",),
    ),
    Fault(
        "sequences: a layer writes a part to its state",
        "engine/step/tensor_parallel/structure.py",
        "return outputs, written",
        "return outputs, []",
        (f"{SEQUENCE}::{OF_ONE}[state of positions]",),
    ),
    Fault(
        "sequences: those of another length are cut as planned",
        "engine/step/tensor_parallel/forms.py",
        "if value.shape[cut.axis] != cut.length:",
        "if False:",
        (f"{SEQUENCE}::test_other_lengths",),
    ),
    Fault(
        "layouts: parts are computed with weights from before a step",
        "engine/step/tensor_parallel/parts.py",
        "return any(map(scope.is_written, layer.variables))",
        "return False",
        (f"{SLICE}[data_2_tensor_2-spectral normalization]",),
    ),
    Fault(
        "layouts: parts are computed with weights that were not lent",
        "engine/step/tensor_parallel/parts.py",
        "return scope is not None and not isinstance(scope, Replay)",
        "return False",
        (f"{SLICE}[data_2_tensor_2-weights lent to a layer]",),
    ),
    Fault(
        "layouts: a part of hidden rows is kept for a loss",
        "engine/step/tensor_parallel/parts.py",
        "if places.get(op.name, end) >= end:",
        "if False:",
        (f"{SLICE}[data_2_tensor_2-hidden rows kept for a loss]",),
    ),
    Fault(
        "layouts: a class computes with the part of a kernel of its own",
        "engine/keras_internals.py",
        "isinstance(layer, kind) and not _differs(type(layer), kind)",
        "isinstance(layer, kind)",
        (f"{SLICE}[data_2_tensor_2-a kernel that is standardized]",),
    ),
    Fault(
        "layouts: a pipeline gives zeros as gradients that are none",
        "engine/synchronous/pipeline/run.py",
        "gradient if place in reached[0] else None",
        "gradient",
        (f"{SLICE}[data_2_pipeline_2-weights that no loss reaches]",),
    ),
    Fault(
        "layouts: a pipeline counts a tensor twice that is returned twice",
        "engine/synchronous/pipeline/run.py",
        "pairs.append((target, arrived.pop(key)))",
        "pairs.append((target, arrived[key]))",
        (f"{SLICE}[data_2_pipeline_2-a tensor that is returned twice]",),
    ),
    Fault(
        "layouts: a loss of a pipeline has no gradient of weights",
        "engine/synchronous/pipeline/run.py",
        "            if head.has_own_loss\n",
        "            if False\n",
        (f"{SLICE}[data_2_pipeline_2-a loss that reads kernels]",),
    ),
    Fault(
        "layouts: numbers given to a layer have the gradient of a replica",
        "engine/step/calls/boundary.py",
        "and not made.take_others(known, self._handles)",
        "and True",
        (f"{SLICE}[mirrored_x3-numbers that a step gives to its layers]",),
    ),
    Fault(
        "layouts: a constant beside a sum counts once for each replica",
        "engine/row_proof/rules.py",
        "if left.added in (NOTHING, right):",
        "if left.added in (NOTHING, FIXED, right):",
        (f"{SLICE}[mirrored_x3-a constant and a sum in one update]",),
    ),
    Fault(
        "layouts: rows are taken as often as there are rows here",
        "engine/row_proof/rules.py",
        "if lengths is None or any(",
        "if lengths is None and any(",
        (f"{SLICE}[mirrored_x3-as many columns as rows]",),
    ),
    Fault(
        "layouts: rows are broadcast against those of a replica",
        "engine/keras_internals.py",
        "return None not in ranks and abs(ranks[0] - ranks[1]) <= 1",
        "return True",
        (f"{SLICE}[mirrored_x3-rows that are broadcast against rows]",),
    ),
    Fault(
        "layouts: draws of float64 skip those of float32",
        "engine/random_rows/seeds.py",
        "tries = _TRIES * _PER[tf.as_dtype(dtype).size] // 4",
        "tries = _TRIES",
        (f"{SLICE}[mirrored_x3-draws of float64 that are cut off]",),
    ),
    Fault(
        "layouts: a callback evaluates the rows of each replica",
        "training/trainer.py",
        "if kind.trains and (several or not kind.in_step):",
        "if False:",
        (
            "tests/engine/test_overridden_step.py"
            "::test_models_are_called_in_a_callback",
        ),
    ),
    Fault(
        "layouts: an eager step has the rows of a replica",
        "engine/synchronous/engine.py",
        "self._gathers = eager and self._local.ranges > 1",
        "self._gathers = False",
        ("tests/engine/test_run_eagerly.py",),
    ),
    Fault(
        "layouts: dropout between layers of the rows of all draws a share",
        "engine/step/tensor_parallel/forms.py",
        "            stack.enter_context(entered_again(None))\n",
        "",
        (f"{TENSOR}::test_what_is_between_layers_of_the_rows_of_all",),
    ),
    Fault(
        "layouts: a device without a row drops gradients of others' rows",
        "engine/synchronous/sharded.py",
        "if self._parts is not None and self._parts.has_rows_of_all:",
        "if False:",
        (f"{TENSOR}::test_what_is_between_layers_of_the_rows_of_all",),
    ),
    Fault(
        "layouts: tokens come back in the order of devices' experts",
        "engine/step/tensor_parallel/forms.py",
        "every = self.groups.all_to_all(outputs, rows, axis, length)",
        "every = self.groups.all_to_all(outputs, axis, rows, length)",
        ("tests/engine/test_experts.py",),
    ),
    Fault(
        "layouts: a weight that is stored anew has another name",
        "engine/keras_internals.py",
        '    getattr(held, "_primary", held)._unique_id = before._unique_id\n',
        "",
        ("tests/engine/test_names_of_weights.py",),
    ),
    Fault(
        "layouts: words count more than once beside what Keras adds",
        "engine/step/moments.py",
        "tf.cast(same_rows * keras.config.epsilon(), inputs.dtype)",
        "tf.cast(keras.config.epsilon(), inputs.dtype)",
        ("tests/engine/test_batch_normalization.py",),
    ),
    Fault(
        "a step of ones own computes on the devices of the first worker",
        "engine/synchronous/pipeline/engine.py",
        "            with tf.device(devices[replica - first]):\n",
        "            with tf.device(devices[replica]):\n",
        ("tests/engine/pipeline/test_over_workers.py",),
    ),
    Fault(
        "a call that cannot take a part of the rows ends a step",
        "engine/step/calls/boundary.py",
        "            if refusal_within(error) is None:\n",
        "            if False:\n",
        ("tests/engine/test_experts.py::test_a_step_of_ones_own",),
    ),
)

FAULTS = ENGINE + LAYOUTS + DATA + CHECKPOINTS + LAUNCH
