"""The names that options, flags and commands take, each list once.

    RunConfig(optimizer="lamb")        # one of OPTIMIZERS
    StepOptions(gradient_dtype="bfloat16")

No TensorFlow here, so that a wrong name is told at once.
"""

from __future__ import annotations

from collections.abc import Sequence

# A number of GPUs, or GPUs by index or name ("GPU:1").
Devices = int | Sequence[int | str] | None
Shares = str | Sequence[int] | None

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
