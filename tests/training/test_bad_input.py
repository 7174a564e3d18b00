"""What a user can get wrong: one line each, status 2, no traceback."""

import json
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import mgpu_tf
from mgpu_tf import cli, datasets

ADDRESSES = ["127.0.0.1:1", "127.0.0.1:2"]


def tf_config(cluster=None, task="worker", index=0, **other):
    cluster = {"worker": ADDRESSES} if cluster is None else cluster
    return json.dumps(
        {"cluster": cluster, "task": {"type": task, "index": index}} | other
    )


# What TF_CONFIG says, and what the line must hold.
CLUSTERS = {
    "not_json": ("{", "must be JSON"),
    "a_list": ("[1]", "JSON object"),
    "no_cluster": ('{"task": {"type": "worker", "index": 0}}', "cluster"),
    "cluster_is_a_list": (tf_config(["a:1"]), "cluster"),
    "cluster_without_tasks": (tf_config({}), "Received"),
    "unknown_job": (tf_config({"workers": ADDRESSES}), "'workers'"),
    "addresses_are_numbers": (tf_config({"worker": [1, 2]}), "[1, 2]"),
    "address_without_port": (tf_config({"worker": ["a"]}), "'a'"),
    "port_out_of_range": (tf_config({"worker": ["a:70000"]}), "70000"),
    "port_is_text": (tf_config({"worker": ["a:http"]}), "http"),
    "same_address_twice": (tf_config({"worker": ["a:1", "a:1"]}), "a:1"),
    "two_chiefs": (tf_config({"chief": ["a:1", "b:1"]}, "chief"), "chief"),
    "no_task": (json.dumps({"cluster": {"worker": ADDRESSES}}), "task"),
    "unknown_task": (tf_config(task="boss"), "boss"),
    "index_out_of_range": (tf_config(index=2), "2"),
    "index_negative": (tf_config(index=-1), "-1"),
    "index_is_text": (tf_config(index="first"), "'first'"),
    "index_is_true": (tf_config(index=True), "True"),
}

# What follows `mgpu-tf`, and what the line must hold.
COMMANDS = {
    "unknown_command": ("trian", "Did you mean 'train'"),
    "unknown_flag": ("train --epoch=3", "epochs"),
    "flag_without_value": ("train --epochs", "Missing value"),
    "not_a_number": ("train --epochs=three", "three"),
    "numbers_of_gpus": (
        "train --devices=0,2",
        "set CUDA_VISIBLE_DEVICES=0,2",
    ),
    "not_a_flag": ("train fast", "'fast'"),
    "no_epochs": ("train --epochs=0", "epochs=0"),
    "no_batch": ("train --global_batch_size=0", "global_batch_size=0"),
    "no_steps": ("train --steps_per_epoch=0", "steps_per_epoch=0"),
    "negative_seed": ("train --seed=-1", "seed=-1"),
    "learning_rate_below_0": ("train --learning_rate=-1", "-1.0"),
    "learning_rate_nan": ("train --learning_rate=nan", "nan"),
    "unknown_strategy": ("train --strategy=miror", "mirrored"),
    "unknown_communication": ("train --communication=rings", "ring"),
    "unknown_optimizer": ("train --optimizer=adm", "adam"),
    "unknown_model": ("train --model=resnt", "Did you mean 'resnet'"),
    "unknown_application": (
        "train --model=MobileNetV9",
        "Did you mean 'MobileNetV",
    ),
    "depth_of_none": ("train --model=resnet/21", "6 n + 2"),
    "unknown_dataset": ("train --dataset=digit", "Did you mean 'digits'"),
    "no_side": ("train --dataset=images/7", "images/224"),
    "dataset_without_module": ("train --dataset=no_such:f", "no_such"),
    "dataset_without_function": (
        "train --dataset=tests.clusters:digit",
        "'digit'",
    ),
    "dataset_of_nothing": (
        "train --dataset=tests.training.test_bad_input:nothing",
        "(x_train, y_train)",
    ),
    "model_without_module": ("train --model=no_such:f", "no_such"),
    "model_of_nothing": (
        "train --model=tests.training.test_bad_input:nothing",
        "NoneType",
    ),
    "model_file_of_another_kind": ("train --initial_model=m.h5", ".keras"),
    "model_file_missing": ("train --initial_model=/no/m.keras", "/no/m.keras"),
    "weights_missing": ("train --initial_model=/no/m.weights.h5", "/no/"),
    "more_gpus_than_there_are": ("train --devices=4", "devices=4"),
    "gpus_and_virtual_devices": (
        "train --devices=1 --num_virtual_devices=2",
        "so none to split",
    ),
    "virtual_devices_on_one": (
        "train --strategy=one_device --num_virtual_devices=2",
        "'one_device'",
    ),
    "nccl_without_gpus": (
        "train --strategy=mirrored --communication=nccl",
        "without GPUs",
    ),
    "ring_on_one_machine": (
        "train --strategy=mirrored --communication=ring",
        "'ring'",
    ),
    "no_tpu": ("train --strategy=tpu", "needs a TPU"),
    "workers_of_mirrored": (
        "train --strategy=mirrored --num_workers=2",
        "num_workers=2",
    ),
    "batch_smaller_than_replicas": (
        "train --num_virtual_devices=4 --global_batch_size=3",
        "global_batch_size=3",
    ),
    "images_too_small": ("train --model=VGG16", "(8, 8, 1)"),
    "cnn_of_a_table": ("train --model=cnn --dataset=tabular", "(20,)"),
    "loss_is_nan": ("train --optimizer=sgd --learning_rate=1e30", "finite"),
    "output_is_a_file": ("train --output_dir=/dev/null", "/dev/null"),
    "data_is_a_file": ("train --data_dir=/dev/null/a", "/dev/null"),
    "data_in_a_bucket": (
        "train --data_dir=s3://bucket/data",
        "File system scheme 's3' not implemented",
    ),
    "model_in_a_bucket": (
        "train --initial_model=s3://bucket/model.keras",
        "Mount s3://",
    ),
    "output_in_a_bucket": (
        "train --output_dir=gs://bucket/run",
        "Mount that storage",
    ),
    "checkpoints_in_a_bucket": (
        "train --checkpoint_dir=nothing://bucket/run",
        "storage that fsspec knows",
    ),
    "logs_in_a_bucket": (
        "launch --num_workers=1 --log_dir=gs://bucket/logs -- true",
        "Mount that storage",
    ),
    "table_in_a_bucket": (
        "benchmark --output_dir=gs://bucket/table",
        "Mount that storage",
    ),
    "trace_in_a_bucket": (
        "trace --html=gs://bucket/trace.html",
        "Mount that storage",
    ),
    "isolated_elsewhere": (
        "launch --hosts=a,b --print --isolate=on -- true",
        "isolate='on', print=True",
    ),
    "isolated_perhaps": (
        "launch --num_workers=2 --isolate=maybe -- true",
        "maybe",
    ),
    "stages_of_no_model": (
        "train --strategy=model_parallel --num_virtual_devices=4 "
        "--pipeline_parallel=2 --pipeline_stages=a,b,c",
        "3 names",
    ),
    "mesh_of_others": (
        "train --strategy=model_parallel --num_virtual_devices=4 "
        "--tensor_parallel=3",
        "for 4 devices",
    ),
    "stall_below_0": ("train --stall_timeout_seconds=-1", "-1"),
    "stall_without_end": ("train --stall_timeout_seconds=inf", "inf"),
    "parity_of_nothing": (
        "parity --dataset=digits --model=tests.training.test_bad_input:nothing",
        "NoneType",
    ),
    "launch_of_nothing": ("launch --num_workers=2", "command"),
    "launch_of_no_workers": ("launch --num_workers=0 -- true", "0"),
}


def nothing():
    return None


def build(compiled=True):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    if compiled:
        model.compile(
            "sgd",
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    return model


X, Y = np.ones((8, 4), "float32"), np.zeros(8, "int32")


def dataset(size=8, batch=4):
    return tf.data.Dataset.from_tensor_slices((X[:size], Y[:size])).batch(batch)


def batches():
    yield X, Y


def with_metrics(
    trainer, loss="sparse_categorical_crossentropy", metric="accuracy"
):
    with trainer.strategy.scope():
        trainer.model.compile("sgd", loss, metrics=[metric])
    return trainer


def build_two(loss="mse", **options):
    inputs = keras.Input((4,), name="x")
    outputs = {name: keras.layers.Dense(1)(inputs) for name in "ab"}
    model = keras.Model({"x": inputs}, outputs)
    model.compile("sgd", loss, **options)
    return model


def fit_two(x, y, **options):
    return lambda s: in_fit(x, y)(
        mgpu_tf.Trainer(lambda: build_two(**options), s)
    )


def batches_of(*sizes):
    """Batches of these sizes, as a filter of the rows of each may leave."""
    rows = tf.data.Dataset.from_tensor_slices((X, Y)).repeat()
    made = rows.batch(1).take(0)
    for size in sizes:
        batch = next(iter(rows.batch(max(size, 1))))
        some = tuple(leaf[:size] for leaf in batch)
        made = made.concatenate(tf.data.Dataset.from_tensors(some))
    return made


def in_fit(*data, **options):
    return lambda t: t.fit(*data, **{"verbose": 0} | options)


# What is done with a trainer, and what the line must hold.
CALLS = {
    "no_data": (lambda t: in_fit(None)(t), "None"),
    "text": (lambda t: in_fit("data")(t), "np.asarray"),
    "iterable_of_batches": (
        lambda t: in_fit(Batches())(t),
        "a generator or a keras.utils.PyDataset",
    ),
    "rows_of_objects": (
        lambda t: in_fit(X.astype(object), Y)(t),
        'x.astype("float32")',
    ),
    "no_examples": (lambda t: in_fit(X[:0], Y[:0])(t), "1 or more"),
    "lengths_differ": (lambda t: in_fit(X, Y[:7])(t), "(7,)"),
    "sparse": (lambda t: in_fit(tf.sparse.from_dense(X), Y)(t), "SparseTensor"),
    "unbatched": (
        lambda t: in_fit(dataset().unbatch())(t),
        "batch(global_batch_size)",
    ),
    "empty_dataset": (
        lambda t: in_fit(dataset().take(0))(t),
        "without elements",
    ),
    "filtered_away": (
        lambda t: in_fit(dataset().filter(lambda *_: False))(t),
        "no batch",
    ),
    "infinite": (lambda t: in_fit(dataset().repeat())(t), "steps_per_epoch=N"),
    "infinite_validation": (
        lambda t: in_fit(X, Y, validation_data=dataset().repeat())(t),
        "without an end",
    ),
    "targets_beside_a_dataset": (
        lambda t: in_fit(dataset(), Y)(t),
        "Leave out y",
    ),
    "batch_size_beside_a_dataset": (
        lambda t: in_fit(dataset(), batch_size=4)(t),
        "batch",
    ),
    "generator_function": (lambda t: in_fit(batches)(t), "Pass batches()"),
    "generator_for_two_epochs": (
        lambda t: in_fit(batches(), epochs=2)(t),
        "read once",
    ),
    "generator_without_elements": (
        lambda t: in_fit(iter(()))(t),
        "without elements",
    ),
    "function_of_nothing": (
        lambda t: in_fit(lambda context: None)(t),
        "NoneType",
    ),
    "targets_missing": (lambda t: in_fit(X)(t), "needs targets"),
    "targets_missing_for_metrics": (
        lambda t: in_fit(X)(with_metrics(t)),
        "needs targets",
    ),
    "labels_for_one_hot": (
        lambda t: in_fit(X, Y)(with_metrics(t, "categorical_crossentropy")),
        "go with sparse_categorical_crossentropy",
    ),
    "one_hot_for_labels": (
        lambda t: in_fit(X, np.eye(3)[Y])(t),
        "go with categorical_crossentropy",
    ),
    "label_out_of_range": (lambda t: in_fit(X, Y + 3)(t), "the label 3"),
    "inputs_of_another_shape": (
        lambda t: in_fit(X[:, :3], Y)(t),
        "shape (None, 3)",
    ),
    "targets_of_another_shape": (
        lambda t: in_fit(X, X[:, :2])(t),
        "fit the model",
    ),
    "targets_wider_than_outputs": (
        lambda t: in_fit(X, X)(with_metrics(t, "mse")),
        "the shapes [?,4], [?,3]. Give y the shape of the outputs",
    ),
    "validation_targets_wider_than_outputs": (
        lambda t: in_fit(X, X[:, :3], validation_data=(X, X))(
            with_metrics(t, "mse")
        ),
        "y of shape (None, 4)",
    ),
    "targets_wider_than_outputs_of_a_batch": (
        lambda t: with_metrics(t, "mse").train_on_batch(X, X),
        "Give y the shape of the outputs",
    ),
    "unknown_metric": (
        lambda t: in_fit(X, Y)(with_metrics(t, metric="foo")),
        "a metric of Keras by its name, or an object or a function. Received: "
        "'foo'",
    ),
    "unknown_loss": (
        lambda t: in_fit(X, Y)(with_metrics(t, "foo")),
        "a loss of Keras by its name",
    ),
    "batch_size_0": (lambda t: in_fit(X, Y, batch_size=0)(t), "batch_size=0"),
    "batch_size_text": (lambda t: in_fit(X, Y, batch_size="4")(t), "'4'"),
    "epochs_0": (lambda t: in_fit(X, Y, epochs=0)(t), "epochs=0"),
    "epochs_float": (lambda t: in_fit(X, Y, epochs=1.5)(t), "epochs=1.5"),
    "initial_epoch": (
        lambda t: in_fit(X, Y, initial_epoch=-1)(t),
        "initial_epoch=-1",
    ),
    "steps_0": (
        lambda t: in_fit(X, Y, steps_per_epoch=0)(t),
        "steps_per_epoch=0",
    ),
    "validation_freq": (
        lambda t: in_fit(X, Y, validation_freq=0)(t),
        "validation_freq=0",
    ),
    "verbose": (lambda t: in_fit(X, Y, verbose=3)(t), "verbose=3"),
    "split_above_1": (lambda t: in_fit(X, Y, validation_split=1.5)(t), "1.5"),
    "split_of_all": (
        lambda t: in_fit(X, Y, validation_split=0.95)(t),
        "both sides",
    ),
    "split_of_a_dataset": (
        lambda t: in_fit(dataset(), validation_split=0.5)(t),
        "validation_data",
    ),
    "split_and_data": (
        lambda t: in_fit(X, Y, validation_split=0.5, validation_data=(X, Y))(t),
        "not both",
    ),
    "callback_class": (
        lambda t: in_fit(X, Y, callbacks=[keras.callbacks.TerminateOnNaN])(t),
        "TerminateOnNaN(...)",
    ),
    "class_weight_beside_weights": (
        lambda t: in_fit(X, Y, sample_weight=Y, class_weight={0: 2.0})(t),
        "class_weight",
    ),
    "class_weight_as_a_list": (
        lambda t: in_fit(X, Y, class_weight=[1.0, 2.0])(t),
        "Received: list",
    ),
    "class_weight_of_text": (
        lambda t: in_fit(X, Y, class_weight={0: "much"})(t),
        "'much' of class 0",
    ),
    "text_inputs": (lambda t: in_fit(X.astype("U"), Y)(t), "text in x"),
    "a_batch_without_a_row": (
        lambda t: in_fit(batches_of(4, 0, 5))(t),
        "one row or more",
    ),
    "a_first_batch_without_a_row": (
        lambda t: t.predict(batches_of(0, 4), verbose=0),
        "one row or more",
    ),
    "batches_of_another_shape": (
        lambda t: in_fit(iter([(X, Y), (X[:, :3], Y)]))(t),
        "TensorFlow says of a batch",
    ),
    "targets_by_names_that_are_not": (
        lambda t: in_fit(X, {"a": Y})(t),
        "targets 'a'",
    ),
    "checkpoints_in_a_bucket": (
        lambda t: in_fit(X, Y, checkpoint_dir="nothing://bucket/run")(t),
        "storage that fsspec knows",
    ),
    "checkpoints_in_a_number": (
        lambda t: in_fit(X, Y, checkpoint_dir=5)(t),
        "checkpoint_dir=5",
    ),
    "saved_to_a_bucket": (
        lambda t: t.save("s3://bucket/model.keras"),
        "Mount that storage",
    ),
    "saved_where_nothing_can_be": (
        lambda t: t.save("/proc/no/model.keras"),
        "Make the folder",
    ),
    "evaluate_infinite": (lambda t: t.evaluate(dataset().repeat()), "steps=N"),
    "predict_of_a_function": (
        lambda t: t.predict(lambda context: dataset()),
        "dataset_fn",
    ),
    "validation_of_inputs_alone": (
        lambda t: in_fit(X, Y, validation_data=(X,))(t),
        "a tuple of 1",
    ),
    "validation_of_an_array": (
        lambda t: in_fit(X, Y, validation_data=X)(t),
        "Received: one ndarray",
    ),
    "validation_of_four": (
        lambda t: in_fit(X, Y, validation_data=[X, Y, Y, Y])(t),
        "a list of 4",
    ),
    "evaluate_no_steps": (lambda t: t.evaluate(X, Y, steps=0), "steps=0"),
    "predict_no_steps": (lambda t: t.predict(X, steps=-1), "steps=-1"),
    "saved_without_an_ending": (
        lambda t: t.save("/tmp/model"),
        "filepath extension",
    ),
    "saved_to_nothing": (lambda t: t.save(None), "path=None"),
    "saved_to_a_number": (lambda t: t.save_weights(5), "path=5"),
    "numbered_by_no_batch": (
        lambda t: in_fit(mgpu_tf.RandomAccess(Numbered()), batch_size=0)(t),
        "batch_size=0",
    ),
    "numbered_by_text": (
        lambda t: in_fit(mgpu_tf.RandomAccess(Numbered()), batch_size="2")(t),
        "batch_size='2'",
    ),
    "numbered_without_examples": (
        lambda t: in_fit(mgpu_tf.RandomAccess(Numbered(0)))(t),
        "0",
    ),
    "predict_another_shape": (
        lambda t: t.predict(X[:, :2], verbose=0),
        "fit the model",
    ),
}


class Batches:
    """An iterable, as loaders of PyTorch are."""

    def __iter__(self):
        return iter([(X, Y)])


class Numbered:
    """Examples by their number."""

    def __init__(self, examples=8):
        self.examples = examples

    def __len__(self):
        return self.examples

    def __getitem__(self, number):
        return X[number], Y[number]


def mesh(**options):
    """Makes a strategy of a mesh of four devices."""
    return lambda s: mgpu_tf.create_model_parallel_strategy(
        num_virtual_devices=4, **options
    )


def named(name, **options):
    return lambda s: mgpu_tf.create_strategy(
        name, num_virtual_devices=2, **options
    )


def saving(**options):
    return lambda s: mgpu_tf.SaveOptions("folder", **options)


def training(**options):
    return lambda s: mgpu_tf.Trainer(build, s, **options)


def split_by(layout):
    strategy = mgpu_tf.create_model_parallel_strategy(
        data=2, tensor=2, layout=layout, num_virtual_devices=4
    )
    mgpu_tf.Trainer(build, strategy).fit(X, Y, verbose=0)


# What is done without one.
OTHERS = {
    "mesh_of_none": (mesh(fsdp=0), "fsdp_parallel=0"),
    "mesh_below_0": (mesh(data=-1), "data_parallel=-1"),
    "mesh_of_a_half": (mesh(data=2.0, fsdp=2), "data=2.0"),
    "mesh_of_true": (mesh(data=True), "data=True"),
    "mesh_of_text": (mesh(data="2", fsdp=2), "data='2'"),
    "mesh_too_large": (mesh(data=3, fsdp=2), "= 6 for 4 devices"),
    "mesh_immense": (mesh(data=10**9, fsdp=10**9), "= 10000"),
    "layout_of_stages": (
        mesh(pipeline=4, layout={".*kernel": (None, "model")}),
        "goes with tensor",
    ),
    "unknown_shard": (mesh(fsdp=4, shard="weight"), "Did you mean 'weights'"),
    "no_shard": (mesh(fsdp=4, shard=None), "None"),
    "split_below_0": (mesh(fsdp=4, smallest_split=-1), "smallest_split=-1"),
    "split_of_text": (mesh(fsdp=4, smallest_split="big"), "'big'"),
    "layout_of_a_number": (mesh(tensor=4, layout=5), "layout=5"),
    "unknown_layout": (mesh(tensor=4, layout="atuo"), "'atuo'"),
    "layout_of_a_list": (mesh(tensor=4, layout=["a"]), "['a']"),
    "layout_of_no_pattern": (
        mesh(tensor=4, layout={"(": (None, "model")}),
        "unterminated subpattern",
    ),
    "layout_by_numbers": (mesh(tensor=4, layout={1: ("model",)}), "1 ("),
    "layout_of_no_axis": (
        mesh(tensor=4, layout={".*kernel": (None, "modl")}),
        "'modl'",
    ),
    "layout_of_a_name": (
        mesh(tensor=4, layout={".*kernel": "modl"}),
        "('modl',)",
    ),
    "no_target_for_an_output": (
        fit_two({"x": X}, {"a": Y, "c": Y}, metrics={"a": "mae"}),
        "targets 'a', 'c', none for the output 'b'. Name a target for each",
    ),
    "no_target_for_an_output_without_metrics": (
        fit_two({"x": X}, {"a": Y}),
        "a dict with the same keys. Received: targets 'a'. Name",
    ),
    "no_target_for_one_of_two_losses": (
        fit_two({"x": X}, {"a": Y}, loss={"a": "mse", "b": "mse"}),
        "for outputs {'a': '*', 'b': '*'}. Pass a target for each output",
    ),
    "a_target_of_another_name": (
        fit_two({"x": X}, {"a": Y, "c": Y}),
        "a dict with the same keys. Received: targets 'a', 'c'",
    ),
    "no_weight_for_one_of_two_targets": (
        lambda s: in_fit(
            tf.data.Dataset.from_tensor_slices(
                ({"x": X}, {"a": Y, "b": Y}, {"a": X[:, 0]})
            ).batch(4)
        )(mgpu_tf.Trainer(build_two, s)),
        "sample_weight of 'a', none for the output 'b'. Give ones",
    ),
    "a_target_too_many": (
        fit_two({"x": X}, {"a": Y, "b": Y, "c": Y}),
        "for outputs {'a': '*', 'b': '*'}. Pass a target for each output",
    ),
    "an_input_of_another_name": (
        fit_two({"z": X}, {"a": Y, "b": Y}),
        "Expected the following keys: ['x']",
    ),
    "layout_of_nothing": (
        lambda s: split_by({"dense/kernel": (None, "model")}),
        "'dense/kernel', where the paths are such as sequential",
    ),
    "layout_of_three_dimensions": (
        lambda s: split_by({".*kernel": (None, None, "model")}),
        "shape (4, 3)",
    ),
    "stages_as_text": (mesh(pipeline=2, data=2, stages="b"), "stages='b'"),
    "stages_as_a_number": (mesh(pipeline=2, data=2, stages=5), "stages=5"),
    "stages_too_few": (mesh(pipeline=4, stages=["a"]), "1 names"),
    "stages_too_many": (mesh(pipeline=8), "= 8 for 4 devices"),
    "micro_batches_of_none": (
        mesh(pipeline=2, data=2, micro_batches=0),
        "micro_batches=0",
    ),
    "micro_batches_of_text": (
        mesh(pipeline=2, data=2, micro_batches="3"),
        "micro_batches='3'",
    ),
    "micro_batches_alone": (mesh(micro_batches=3), "pipeline_parallel=1"),
    "unknown_schedule": (
        mesh(pipeline=2, data=2, schedule="1f1"),
        "Did you mean '1f1b'",
    ),
    "no_schedule": (mesh(pipeline=2, data=2, schedule=None), "None"),
    "unknown_communication": (
        mesh(fsdp=4, communication="fast"),
        "'fast'",
    ),
    "balance_of_text": (named("mirrored", balance="fast"), "'fast'"),
    "balance_of_none": (named("mirrored", balance=[0, 0]), "[0, 0]"),
    "balance_below_0": (named("mirrored", balance=[2, -1]), "[2, -1]"),
    "balance_of_others": (named("mirrored", balance=[1, 1, 1]), "for 2"),
    "balance_of_parts": (named("mirrored", balance=[0.5, 0.5]), "0.5"),
    "balance_of_a_dict": (named("mirrored", balance={"a": 1}), "{'a': 1}"),
    "balance_of_one": (
        lambda s: mgpu_tf.create_strategy("one_device", balance="2,1"),
        "'one_device'",
    ),
    "option_of_no_strategy": (named("mirrored", virtual=2), "Did you mean"),
    "no_strategy": (named(None), "None"),
    "save_every_text": (saving(save_every_steps="5"), "'5'"),
    "save_every_nan": (saving(save_every_seconds=float("nan")), "nan"),
    "keep_a_half": (saving(keep_checkpoints=1.5), "1.5"),
    "keep_none": (saving(keep_checkpoints=0), "keep_checkpoints=0"),
    "unknown_resume": (saving(resume="yes"), "'yes'"),
    "private_as_text": (saving(private="yes"), "private='yes'"),
    "unknown_option_of_steps": (training(gradient_dtyp="f"), "gradient_dtype"),
    "unknown_gradient_dtype": (training(gradient_dtype="float8"), "'float8'"),
    "check_of_no_steps": (training(check_replicas_every=0), "=0"),
    "unknown_on_nan": (training(on_nan="explode"), "'explode'"),
    "numbered_by_nothing": (
        lambda s: mgpu_tf.RandomAccess(None),
        "None",
    ),
    "read_by_no_thread": (
        lambda s: mgpu_tf.RandomAccess(Numbered(), threads=0),
        "threads=0",
    ),
    "notebook_of_nothing": (
        lambda s: mgpu_tf.launch_from_notebook(5),
        "Received: 5",
    ),
    "notebook_without_script": (
        lambda s: mgpu_tf.launch_from_notebook("no.py"),
        "no such file",
    ),
    "notebook_of_no_workers": (
        lambda s: mgpu_tf.launch_from_notebook(__file__, num_workers=0),
        "0",
    ),
    "unknown_option_of_notebook": (
        lambda s: mgpu_tf.launch_from_notebook(__file__, num_worker=2),
        "Did you mean 'num_workers'",
    ),
    "no_build_model": (lambda s: mgpu_tf.Trainer(None, s), "NoneType"),
    "a_model": (
        lambda s: mgpu_tf.Trainer(build(), s),
        "with strategy.scope():",
    ),
    "builds_nothing": (lambda s: mgpu_tf.Trainer(nothing, s), "NoneType"),
    "not_compiled": (
        lambda s: mgpu_tf.Trainer(lambda: build(compiled=False), s),
        "not compiled",
    ),
    "made_outside": (
        lambda s: (lambda model: mgpu_tf.Trainer(lambda: model, s))(build()),
        "outside",
    ),
    "jit_compile": (
        lambda s: mgpu_tf.Trainer(build, s, jit_compile=True),
        "jit_compile=True",
    ),
    "steps_per_execution": (
        lambda s: mgpu_tf.Trainer(build, s, steps_per_execution=0),
        "steps_per_execution=0",
    ),
    "type_of_an_option": (lambda s: mgpu_tf.RunConfig(epochs="5"), "'5'"),
    "strategy_name": (
        lambda s: mgpu_tf.create_strategy("mirorred"),
        "Did you mean 'mirrored'",
    ),
    "no_such_gpu": (
        lambda s: mgpu_tf.create_one_device_strategy("GPU:7"),
        "GPU:7",
    ),
    "no_device": (lambda s: mgpu_tf.create_mirrored_strategy([]), "[]"),
    "no_records": (
        lambda s: datasets.records("/no/*.tfrecord", print, batch_size=2),
        "matches none",
    ),
    "records_of_no_batch": (
        lambda s: datasets.records("/no/*", print, batch_size=0),
        "batch_size=0",
    ),
}


def check_line(line, part):
    assert "\n" not in line
    assert part in line
    assert line.rstrip("'").endswith((".", ")", "]")), line


@pytest.mark.parametrize("case", CLUSTERS)
def test_cluster(case, monkeypatch, capsys):
    text, part = CLUSTERS[case]
    monkeypatch.setenv("TF_CONFIG", text)
    check_command("train", part, capsys)


@pytest.mark.parametrize("case", COMMANDS)
def test_command(case, monkeypatch, capsys, data_dir):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setenv("TFDS_DATA_DIR", data_dir)
    text, part = COMMANDS[case]
    check_command(text, part, capsys)


def check_command(text, part, capsys):
    arguments = text.split()
    capsys.readouterr()
    assert cli.main(arguments) == cli.USAGE_ERROR
    told = [
        line
        for line in capsys.readouterr().err.splitlines()
        if re.match(r"mgpu-tf: (?!strategy )", line)
    ]
    assert len(told) == 1, told
    assert part in told[0], told[0]


@pytest.mark.parametrize("case", CALLS)
def test_call(case, strategies):
    act, part = CALLS[case]
    trainer = mgpu_tf.Trainer(build, strategies["mirrored_x2"])
    with pytest.raises(mgpu_tf.ConfigurationError) as raised:
        act(trainer)
    check_line(str(raised.value), part)


@pytest.mark.parametrize("case", OTHERS)
def test_other(case, strategies):
    act, part = OTHERS[case]
    with pytest.raises(mgpu_tf.ConfigurationError) as raised:
        act(strategies["mirrored_x2"])
    check_line(str(raised.value), part)


def test_enough_cases():
    assert sum(map(len, (CLUSTERS, COMMANDS, CALLS, OTHERS))) >= 100
