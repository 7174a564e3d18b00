"""Write a Keras 3 model once; train it anywhere, get the same numbers.

    strategy = mgpu_tf.create_strategy("auto")
    trainer = mgpu_tf.Trainer(build_model, strategy)
    history = trainer.fit(x, y, batch_size=64, epochs=5)

Names are loaded when they are first used, so that `import mgpu_tf` imports
neither TensorFlow nor Keras.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mgpu_tf._version import __version__

if TYPE_CHECKING:
    from mgpu_tf import datasets, flags, layers, models, optimizers
    from mgpu_tf.cluster.config import ClusterConfig
    from mgpu_tf.config import RunConfig
    from mgpu_tf.datasets.random_access import RandomAccess
    from mgpu_tf.engine.author.contributions import (
        batch_mean,
        gather_batch,
        mean_over_batch,
        sum_over_batch,
    )
    from mgpu_tf.errors import (
        CheckpointError,
        ClusterError,
        ConfigurationError,
        DivergedError,
        OutOfMemoryError,
        Preempted,
        WorkerError,
    )
    from mgpu_tf.job import run
    from mgpu_tf.launch.notebook import launch_from_notebook
    from mgpu_tf.models.normalization import synchronize_batch_normalization
    from mgpu_tf.options import SaveOptions, StepOptions, StrategyOptions
    from mgpu_tf.reports.report import Report
    from mgpu_tf.reports.trackers import (
        MLflowTracker,
        PrometheusTracker,
        TensorBoardTracker,
        WandbTracker,
    )
    from mgpu_tf.runtime.determinism import enable_determinism
    from mgpu_tf.runtime.quiet_import import import_tensorflow
    from mgpu_tf.strategies.parameter_server import (
        create_parameter_server_strategy,
    )
    from mgpu_tf.strategies.registry import create_strategy, is_chief
    from mgpu_tf.strategies.split.model_parallel import (
        create_model_parallel_strategy,
    )
    from mgpu_tf.strategies.synchronous import (
        create_central_storage_strategy,
        create_mirrored_strategy,
        create_multi_worker_mirrored_strategy,
        create_one_device_strategy,
        create_tpu_strategy,
    )
    from mgpu_tf.studies.parity import ParityReport, check_parity
    from mgpu_tf.training.loops.custom_loop import Loop
    from mgpu_tf.training.trainer import Trainer

_MODULES = ("datasets", "flags", "layers", "models", "optimizers")

_HOMES = {
    "CheckpointError": "mgpu_tf.errors",
    "ClusterConfig": "mgpu_tf.cluster.config",
    "ClusterError": "mgpu_tf.errors",
    "ConfigurationError": "mgpu_tf.errors",
    "DivergedError": "mgpu_tf.errors",
    "MLflowTracker": "mgpu_tf.reports.trackers",
    "PrometheusTracker": "mgpu_tf.reports.trackers",
    "TensorBoardTracker": "mgpu_tf.reports.trackers",
    "WandbTracker": "mgpu_tf.reports.trackers",
    "Loop": "mgpu_tf.training.loops.custom_loop",
    "OutOfMemoryError": "mgpu_tf.errors",
    "ParityReport": "mgpu_tf.studies.parity",
    "Report": "mgpu_tf.reports.report",
    "RunConfig": "mgpu_tf.config",
    "Preempted": "mgpu_tf.errors",
    "RandomAccess": "mgpu_tf.datasets.random_access",
    "SaveOptions": "mgpu_tf.options",
    "StepOptions": "mgpu_tf.options",
    "StrategyOptions": "mgpu_tf.options",
    "Trainer": "mgpu_tf.training.trainer",
    "WorkerError": "mgpu_tf.errors",
    "batch_mean": "mgpu_tf.engine.author.contributions",
    "check_parity": "mgpu_tf.studies.parity",
    "create_central_storage_strategy": "mgpu_tf.strategies.synchronous",
    "create_mirrored_strategy": "mgpu_tf.strategies.synchronous",
    "create_model_parallel_strategy": "mgpu_tf.strategies.split.model_parallel",
    "create_multi_worker_mirrored_strategy": "mgpu_tf.strategies.synchronous",
    "create_one_device_strategy": "mgpu_tf.strategies.synchronous",
    "create_parameter_server_strategy": "mgpu_tf.strategies.parameter_server",
    "create_strategy": "mgpu_tf.strategies.registry",
    "create_tpu_strategy": "mgpu_tf.strategies.synchronous",
    "enable_determinism": "mgpu_tf.runtime.determinism",
    "import_tensorflow": "mgpu_tf.runtime.quiet_import",
    "gather_batch": "mgpu_tf.engine.author.contributions",
    "is_chief": "mgpu_tf.strategies.registry",
    "launch_from_notebook": "mgpu_tf.launch.notebook",
    "mean_over_batch": "mgpu_tf.engine.author.contributions",
    "run": "mgpu_tf.job",
    "sum_over_batch": "mgpu_tf.engine.author.contributions",
    "synchronize_batch_normalization": "mgpu_tf.models.normalization",
}

__all__ = [
    "CheckpointError",
    "ClusterConfig",
    "ClusterError",
    "ConfigurationError",
    "DivergedError",
    "Loop",
    "MLflowTracker",
    "OutOfMemoryError",
    "ParityReport",
    "Preempted",
    "PrometheusTracker",
    "RandomAccess",
    "Report",
    "RunConfig",
    "SaveOptions",
    "StepOptions",
    "StrategyOptions",
    "TensorBoardTracker",
    "Trainer",
    "WandbTracker",
    "WorkerError",
    "__version__",
    "batch_mean",
    "check_parity",
    "create_central_storage_strategy",
    "create_mirrored_strategy",
    "create_model_parallel_strategy",
    "create_multi_worker_mirrored_strategy",
    "create_one_device_strategy",
    "create_parameter_server_strategy",
    "create_strategy",
    "create_tpu_strategy",
    "datasets",
    "enable_determinism",
    "flags",
    "gather_batch",
    "import_tensorflow",
    "is_chief",
    "launch_from_notebook",
    "layers",
    "mean_over_batch",
    "models",
    "optimizers",
    "run",
    "sum_over_batch",
    "synchronize_batch_normalization",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"mgpu_tf.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'mgpu_tf' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
