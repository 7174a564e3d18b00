"""The names that options, flags and commands take, and other tools' for them.

    RunConfig(optimizer="lamb")        # one of OPTIMIZERS
    StepOptions(gradient_dtype="bfloat16")
    ELSEWHERE["max_epochs"].place      # "Trainer.fit(epochs=10)"

No TensorFlow here, so that a wrong name is refused at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

# A number of GPUs, or GPUs by index or name ("GPU:1").
Devices = int | Sequence[int | str] | None
Shares = str | Sequence[int] | None
Recompute = str | Sequence[str] | Callable[..., Any] | None
KeepIf = str | Callable[..., Any] | None

STRATEGIES = (
    "auto",
    "plan",
    "one_device",
    "mirrored",
    "multi_worker_mirrored",
    "parameter_server",
    "central_storage",
    "tpu",
    "fsdp",
    "model_parallel",
)
SHARDS = ("weights", "gradients", "optimizer")
PIPELINE_SCHEDULES = ("1f1b", "gpipe")
GRADIENT_DTYPES = ("bfloat16", "float16")
PRECISIONS = ("float32", "mixed_bfloat16", "mixed_float16")
EMBEDDING_GRADIENTS = ("keras", "summed")
# Which GPUs a process sees, as CUDA has it.
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
COMMUNICATIONS = ("auto", "nccl", "ring", "hierarchical_copy")
LATE_GRADIENTS = ("hold", "scale")
RECOMPUTE = ("layers", "stages")
KERNELS = ("fused", "keras")
LEARNING_RATE_RULES = ("linear", "sqrt", "none")
LEARNING_RATE_DECAYS = ("constant", "cosine")
ON_NAN = ("ignore", "stop", "restore")
BATCH_NORMALIZATION = ("keras", "synchronized")
RANDOM = ("equal", "per_replica")
SAVE_EVERY = ("auto",)
MODES = ("min", "max")
ISOLATE = ("auto", "on", "off")
REPORTS = ("html",)
TRACKERS = ("tensorboard", "mlflow", "wandb", "prometheus")
RESUME = ("auto", "always", "never")
SNAPSHOT_IN = ("file", "memory")
MODELS = ("mlp", "cnn", "resnet", "transformer")
# The data sets of this package: a row for each, with its builder. One with a
# size, such as images/32, has a classmethod `options_of`.
DATASETS = {
    "digits": "mgpu_tf.datasets.digits:Digits",
    "tabular": "mgpu_tf.datasets.tabular:Tabular",
    "images": "mgpu_tf.datasets.images:Images",
}
# Models of `keras.applications`, by Keras's names.
APPLICATIONS = (
    "ConvNeXtBase",
    "ConvNeXtLarge",
    "ConvNeXtSmall",
    "ConvNeXtTiny",
    "ConvNeXtXLarge",
    "DenseNet121",
    "DenseNet169",
    "DenseNet201",
    "EfficientNetB0",
    "EfficientNetB1",
    "EfficientNetB2",
    "EfficientNetB3",
    "EfficientNetB4",
    "EfficientNetB5",
    "EfficientNetB6",
    "EfficientNetB7",
    "EfficientNetV2B0",
    "EfficientNetV2B1",
    "EfficientNetV2B2",
    "EfficientNetV2B3",
    "EfficientNetV2L",
    "EfficientNetV2M",
    "EfficientNetV2S",
    "InceptionResNetV2",
    "InceptionV3",
    "MobileNet",
    "MobileNetV2",
    "MobileNetV3Large",
    "MobileNetV3Small",
    "NASNetLarge",
    "NASNetMobile",
    "ResNet101",
    "ResNet101V2",
    "ResNet152",
    "ResNet152V2",
    "ResNet50",
    "ResNet50V2",
    "VGG16",
    "VGG19",
    "Xception",
)
OPTIMIZERS = ("sgd", "momentum", "adam", "adamw", "lamb", "lars", "lion")


class Meant(NamedTuple):
    """What was meant by a name that is not valid where it is given.

    Attributes:
        names: The same here, as arguments, flags or values.
        place: Where it is written in Python; "" where it is a value.
    """

    names: tuple[str, ...]
    place: str = ""


_CLIPPING = Meant((), "the optimizer in build_model (global_clipnorm=1.0)")
_ACCUMULATION = Meant(
    (), "the optimizer in build_model (gradient_accumulation_steps=4)"
)
_BATCH = Meant(
    ("global_batch_size",), "Trainer.fit(batch_size=64), of all replicas"
)
_CALLBACKS = Meant((), "Trainer.fit(callbacks=[...])")
_CHECKPOINTS = Meant(
    ("checkpoint_dir",), "Trainer.fit(checkpoint_dir='run/checkpoints')"
)
_DEVICES = Meant(("devices",), "create_strategy(devices=2)")
_EPOCHS = Meant(("epochs",), "Trainer.fit(epochs=10)")
_LEARNING_RATE = Meant(
    ("learning_rate",), "the optimizer in build_model (learning_rate=0.1)"
)
_LOSS = Meant((), "model.compile in build_model")
_MACHINES = Meant(("hosts",), "mgpu-tf launch --hosts=host0,host1 --ssh")
_OPTIMIZER = Meant(("optimizer",), "model.compile in build_model")
_PLACE_OF_TASK = Meant((), "TF_CONFIG, which mgpu-tf launch sets")
_PRECISION = Meant(("precision",), "Trainer(precision='mixed_bfloat16')")
_PROCESSES = Meant(("num_workers",), "mgpu-tf launch --num_workers=2")
_RESTARTS = Meant(("max_restarts",), "mgpu-tf launch --max_restarts=3")
_ROUNDED = Meant(("gradient_dtype",), "Trainer(gradient_dtype='bfloat16')")
_SHARDED = Meant(("shard",), "create_strategy('fsdp')")
_STEPS = Meant(("steps_per_epoch",), "Trainer.fit(steps_per_epoch=100)")
_STRATEGY = Meant(("strategy",), "create_strategy('mirrored')")
_TRACKER = Meant(("log_with",), "Trainer.fit(log_with='wandb')")
_VALIDATION = Meant((), "Trainer.fit(validation_data=(x, y))")

# Of Keras, Lightning, Accelerate, Horovod, torchrun and DeepSpeed, and options
# of this package that are given in the wrong place.
ELSEWHERE: dict[str, Meant] = {
    # Devices and strategies.
    "accelerator": _STRATEGY,
    "data_parallel": Meant(("data",)),
    "device": _DEVICES,
    "devices": _DEVICES,
    "distribute": _STRATEGY,
    "distribute_strategy": _STRATEGY,
    "distribution": _STRATEGY,
    "distribution_strategy": _STRATEGY,
    "fsdp": Meant(("fsdp_parallel",)),
    "fsdp_parallel": Meant(("fsdp",)),
    "gpus": _DEVICES,
    "n_gpu": _DEVICES,
    "num_devices": _DEVICES,
    "num_gpus": _DEVICES,
    "num_replicas": _DEVICES,
    "pipeline": Meant(("pipeline_parallel",)),
    "pipeline_parallel": Meant(("pipeline",)),
    "strategy": _STRATEGY,
    "tensor": Meant(("tensor_parallel",)),
    "tensor_parallel": Meant(("tensor",)),
    "zero_optimization": _SHARDED,
    "zero_stage": _SHARDED,
    # Processes and machines.
    "H": _MACHINES,
    "host": _MACHINES,
    "hostfile": _MACHINES,
    "hosts": _MACHINES,
    "local_rank": _PLACE_OF_TASK,
    "machine_rank": _PLACE_OF_TASK,
    "master_addr": _PLACE_OF_TASK,
    "master_port": _PLACE_OF_TASK,
    "max_restarts": _RESTARTS,
    "n": _PROCESSES,
    "nnodes": _PROCESSES,
    "node_rank": _PLACE_OF_TASK,
    "np": _PROCESSES,
    "nproc": _PROCESSES,
    "nproc_per_node": _PROCESSES,
    "num_machines": _PROCESSES,
    "num_nodes": _PROCESSES,
    "num_processes": _PROCESSES,
    "num_workers": _PROCESSES,
    "rank": _PLACE_OF_TASK,
    "rdzv_backend": _PLACE_OF_TASK,
    "rdzv_endpoint": _PLACE_OF_TASK,
    "workers": _PROCESSES,
    "world_size": _PROCESSES,
    # The training.
    "batch_size": _BATCH,
    "callbacks": _CALLBACKS,
    "checkpoint_dir": _CHECKPOINTS,
    "ckpt_path": _CHECKPOINTS,
    "data": Meant(("dataset", "data_parallel"), "Trainer.fit(x, y)"),
    "default_root_dir": _CHECKPOINTS,
    "deterministic": Meant(("deterministic",), "mgpu_tf.enable_determinism()"),
    "epochs": _EPOCHS,
    "global_batch_size": _BATCH,
    "logger": _TRACKER,
    "max_epochs": _EPOCHS,
    "limit_train_batches": _STEPS,
    "limit_val_batches": Meant((), "Trainer.fit(validation_steps=10)"),
    "max_steps": _STEPS,
    "num_epochs": _EPOCHS,
    "num_train_epochs": _EPOCHS,
    "overfit_batches": Meant((), "Trainer.fit(dataset.take(1))"),
    "per_device_train_batch_size": _BATCH,
    "report_to": _TRACKER,
    "resume_from_checkpoint": _CHECKPOINTS,
    "steps_per_epoch": _STEPS,
    "train_batch_size": _BATCH,
    "train_micro_batch_size_per_gpu": _BATCH,
    "validation_data": _VALIDATION,
    "validation_split": _VALIDATION,
    # The model and its optimizer.
    "accumulate_grad_batches": _ACCUMULATION,
    "clipnorm": _CLIPPING,
    "global_clipnorm": _CLIPPING,
    "gradient_accumulation_steps": _ACCUMULATION,
    "gradient_clip_val": _CLIPPING,
    "gradient_clipping": _CLIPPING,
    "learning_rate": _LEARNING_RATE,
    "loss": _LOSS,
    "lr": _LEARNING_RATE,
    "max_grad_norm": _CLIPPING,
    "metrics": _LOSS,
    "optimizer": _OPTIMIZER,
    "weight_decay": Meant(
        ("weight_decay",), "the optimizer in build_model (weight_decay=0.01)"
    ),
    # How a step is computed.
    "amp": _PRECISION,
    "bf16": Meant(("mixed_bfloat16", "precision"), _PRECISION.place),
    "compression": _ROUNDED,
    "fp16": Meant(
        ("mixed_float16", "precision"), "Trainer(precision='mixed_float16')"
    ),
    "mixed_precision": _PRECISION,
    "sync_batchnorm": Meant(
        ("batch_normalization",),
        "Trainer(batch_normalization='synchronized')",
    ),
    # Values.
    "16-mixed": Meant(("mixed_float16",)),
    "bf16-mixed": Meant(("mixed_bfloat16",)),
    "ddp": Meant(("mirrored",)),
    "fp32": Meant(("float32",)),
}
