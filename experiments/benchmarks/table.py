"""The benchmarks: who takes part, what is compared with what, and the aim.

`ours` below is `mgpu_tf`. The rates of a ratio were taken one after the other
in the same round.
"""

from __future__ import annotations

import dataclasses

from experiments.benchmarks.jobs import JOBS, SETS
from experiments.benchmarks.runner import Contestant

_HERE = "experiments.benchmarks.contestants"
_LOOP = f"{_HERE}.tensorflow_loop"
_FIT = f"{_HERE}.keras_fit"
_TRAINER = f"{_HERE}.trainer"
_DDP = f"{_HERE}.torch_ddp"
_JAX = f"{_HERE}.keras_jax"
_READING = f"{_HERE}.reading"
_COORDINATOR = f"{_HERE}.coordinator_loop"
_TF_KERAS = f"{_HERE}.tf_keras_fit"
_ON_JAX = {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}


@dataclasses.dataclass(frozen=True)
class Ratio:
    """One number that is told.

    Attributes:
        contestant: Whose rate.
        baseline: Over whose.
        aim: What it should reach, None where it is for information.
    """

    contestant: str
    baseline: str
    aim: float | None = None


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """Contestants that train one job in alternation.

    Attributes:
        name: Of the benchmark and its variant.
        job: A key of `jobs.JOBS`.
        contestants: Who takes part.
        ratios: The values of the table.
        pinned: Whether process i stays on core i, with one thread.
        check_steps: Steps until losses are compared.
        burst_seconds: About how long a contestant's turn takes.
        multiple: Steps of a turn are a multiple of this number.
        unit: Of the rates that are told.
    """

    name: str
    job: str
    contestants: tuple[Contestant, ...]
    ratios: tuple[Ratio, ...]
    pinned: bool = False
    check_steps: int = 16
    burst_seconds: float = 3.0
    multiple: int = 1
    unit: str = "steps/s"


def _step_overhead(replicas: int) -> Benchmark:
    where: dict = {"strategy": "one_device"}
    if replicas > 1:
        where = {"strategy": "mirrored", "replicas": replicas}
    contestants = [
        Contestant("hand_written", _LOOP, {**where, "call": 400}),
        Contestant("mgpu_tf", _TRAINER, where),
        Contestant("keras_fit", _FIT, where),
    ]
    ratios = [
        Ratio("mgpu_tf", "hand_written", 0.95),
        Ratio("mgpu_tf", "keras_fit", 4.0),
    ]
    if replicas == 1:
        contestants.append(
            Contestant(
                "keras_fit_50",
                _FIT,
                {**where, "steps_per_execution": 50},
            )
        )
        ratios.append(Ratio("mgpu_tf", "keras_fit_50", 1.3))
    name = "one_device" if replicas == 1 else f"mirrored_x{replicas}"
    return Benchmark(
        f"step_overhead/{name}",
        "tiny",
        tuple(contestants),
        tuple(ratios),
        check_steps=100,
        burst_seconds=1.5,
        multiple=100,
    )


def _one_device(
    job: str, aim: float, call: int, tolerance: float = 2e-3
) -> Benchmark:
    """Long steps: what the kernels and the loop are worth.

    A process has one core and one thread, and rates are those of its
    processor time.

    Args:
        job: A key of `jobs.JOBS`.
        aim: Over Keras 3's `fit`.
        call: Steps of its longer execution, and least steps of an epoch.
        tolerance: By what part the losses of Keras 3 on TensorFlow may differ.
    """
    where = {"strategy": "one_device", "clock": "processor"}
    timed = {"clock": "processor"}
    stock = [("keras_fit", 1), (f"keras_fit_{call}", call)]
    peers = (
        Contestant("tf_keras_fit", _TF_KERAS, where, tolerance=0.02),
        Contestant("torch_eager", _DDP, timed, tolerance=0.02),
        Contestant(
            "torch_compile", _DDP, {**timed, "compile": True}, tolerance=0.02
        ),
        Contestant(
            "keras_jax",
            _JAX,
            timed,
            environment=_ON_JAX,
            tolerance=0.02,
        ),
    )
    contestants = (
        Contestant("mgpu_tf", _TRAINER, where, tolerance=tolerance),
        Contestant(
            "mgpu_tf_keras",
            _TRAINER,
            {**where, "kernels": "keras"},
            tolerance=tolerance,
        ),
        *(
            Contestant(
                name,
                _FIT,
                {**where, "steps_per_execution": steps},
                tolerance=tolerance,
            )
            for name, steps in stock
        ),
        *peers,
    )
    ratios = (
        *(Ratio("mgpu_tf", name, aim) for name, _ in stock),
        *(Ratio("mgpu_tf_keras", name, 1.0) for name, _ in stock),
        Ratio("mgpu_tf", "mgpu_tf_keras"),
        Ratio("mgpu_tf", "tf_keras_fit", 0.95),
        *(Ratio("mgpu_tf", peer.name) for peer in peers[1:]),
    )
    return Benchmark(
        f"one_device/{job}",
        job,
        contestants,
        ratios,
        pinned=True,
        check_steps=call,
        multiple=call,
        burst_seconds=1.0,
    )


_CLUSTER = {"strategy": "multi_worker_mirrored"}


def _workers(
    name: str,
    job: str,
    count: int,
    ratios: tuple[Ratio, ...],
    more: tuple[Contestant, ...] = (),
) -> Benchmark:
    contestants = (
        Contestant(
            "limit",
            _LOOP,
            {"call": 10},
            copies=count,
            same_job=False,
        ),
        Contestant("mgpu_tf", _TRAINER, _CLUSTER, workers=count),
        Contestant(
            "stock_loop",
            _LOOP,
            {**_CLUSTER, "call": 10},
            workers=count,
        ),
        Contestant("ddp", _DDP, {"bucket_mb": 4}, workers=count),
        *more,
    )
    return Benchmark(
        f"{name}/{count}_workers", job, contestants, ratios, pinned=True
    )


_KERAS_JAX = Contestant(
    "keras_jax",
    _JAX,
    workers=2,
    environment=_ON_JAX,
)


def _compute_bound() -> Benchmark:
    return _workers(
        "compute_bound",
        "cnn",
        2,
        (
            Ratio("mgpu_tf", "ddp", 1.0),
            Ratio("mgpu_tf", "stock_loop", 1.2),
            Ratio("mgpu_tf", "limit", 0.85),
            Ratio("mgpu_tf", "keras_jax"),
            Ratio("stock_loop", "limit"),
            Ratio("ddp", "limit"),
        ),
        (_KERAS_JAX,),
    )


def _communication_bound(count: int) -> Benchmark:
    half = Contestant(
        "mgpu_tf_bf16",
        _TRAINER,
        {**_CLUSTER, "gradient_dtype": "bfloat16"},
        workers=count,
        tolerance=0.02,
    )
    return _workers(
        "communication_bound",
        "mlp",
        count,
        (
            Ratio("mgpu_tf", "stock_loop", 1.5),
            Ratio("mgpu_tf", "ddp", 1.0),
            Ratio("mgpu_tf_bf16", "stock_loop", 2.5),
            Ratio("mgpu_tf", "limit"),
            Ratio("stock_loop", "limit"),
            Ratio("ddp", "limit"),
            *((Ratio("mgpu_tf", "keras_jax"),) if count == 2 else ()),
        ),
        (half, *((_KERAS_JAX,) if count == 2 else ())),
    )


_ZERO_1 = {"shard": "optimizer"}


def _meshes(job: str) -> Benchmark:
    """What a mesh of two devices costs beside two data-parallel ones.

    The devices are parts of one CPU. They share its cores, so a pipeline
    gains nothing from work at the same time.
    """
    meshes: dict[str, tuple[str, dict]] = {
        "mirrored": ("mirrored", {}),
        "fsdp_zero3": ("fsdp", {}),
        "fsdp_zero1": ("fsdp", _ZERO_1),
        "tensor": ("model_parallel", {"tensor_parallel": 2}),
        "pipeline": ("model_parallel", {"pipeline_parallel": 2}),
    }
    contestants = tuple(
        Contestant(
            f"mgpu_tf_{name}",
            _TRAINER,
            {"strategy": strategy, "replicas": 2, "mesh": mesh},
        )
        for name, (strategy, mesh) in meshes.items()
    )
    first, *others = (contestant.name for contestant in contestants)
    return Benchmark(
        f"model_parallel/{job}_2_devices",
        job,
        contestants,
        tuple(Ratio(name, first) for name in others),
    )


def _split_over_workers() -> Benchmark:
    """Two processes that split a model's state, and PyTorch's that do."""
    fsdp = {"strategy": "fsdp"}
    contestants = (
        Contestant("mgpu_tf_mirrored", _TRAINER, _CLUSTER, workers=2),
        Contestant("mgpu_tf_fsdp_zero3", _TRAINER, fsdp, workers=2),
        Contestant(
            "mgpu_tf_fsdp_zero1", _TRAINER, {**fsdp, "mesh": _ZERO_1}, workers=2
        ),
        Contestant("ddp", _DDP, {"bucket_mb": 4}, workers=2),
        Contestant("torch_fsdp2", _DDP, {"sharding": "fsdp2"}, workers=2),
        Contestant(
            "torch_zero1",
            _DDP,
            {"bucket_mb": 4, "sharding": "zero1"},
            workers=2,
        ),
    )
    return Benchmark(
        "model_parallel/mlp_2_workers",
        "mlp",
        contestants,
        (
            Ratio("mgpu_tf_fsdp_zero3", "mgpu_tf_mirrored"),
            Ratio("mgpu_tf_fsdp_zero1", "mgpu_tf_mirrored"),
            Ratio("mgpu_tf_fsdp_zero3", "torch_fsdp2", 1.0),
            Ratio("mgpu_tf_fsdp_zero1", "torch_zero1", 1.0),
            Ratio("torch_fsdp2", "ddp"),
            Ratio("torch_zero1", "ddp"),
        ),
        pinned=True,
    )


def _input(job: str, *, training: bool) -> Benchmark:
    """The package's pipeline against tf.data written by hand."""
    contestants = (
        Contestant("tf_data", _READING, {"pipeline": "by_hand"}),
        Contestant("mgpu_tf", _READING, {"pipeline": "mgpu_tf"}),
    )
    ratios = [Ratio("mgpu_tf", "tf_data")]
    if job == "images":
        by_number = Contestant("by_number", _READING, {"pipeline": "by_number"})
        contestants = (*contestants, by_number)
        ratios.append(Ratio("by_number", "tf_data"))
    if training:
        # They shuffle each in its own way, so losses agree roughly.
        contestants = (
            Contestant("tf_data_loop", _LOOP, {"call": 100}),
            Contestant("mgpu_tf", _TRAINER, tolerance=0.1),
            Contestant("tf_data_keras_fit", _FIT, tolerance=0.1),
        )
        ratios = [
            Ratio("mgpu_tf", contestant.name)
            for contestant in (contestants[0], contestants[2])
        ]
    return Benchmark(
        f"input/{job}_{'training' if training else 'reading'}",
        job,
        contestants,
        tuple(ratios),
        check_steps=JOBS[job].pass_steps,
        multiple=JOBS[job].pass_steps,
        unit="examples/s",
    )


# Of a piece of work of `mgpu_tf`.
_STEPS_TO_A_CLOSURE = 50


def _asynchronous(workers: int) -> Benchmark:
    # Workers in another order every time train to another loss.
    place: dict = {
        "workers": workers,
        "num_ps": 1,
        "tolerance": 2e-3 if workers == 1 else 0.1,
    }
    call = {"call": _STEPS_TO_A_CLOSURE}
    first = "tf_keras_fit_1"
    fits = [
        Contestant(first, _TF_KERAS, **place),
        *(
            Contestant(
                f"tf_keras_fit_{steps}",
                _TF_KERAS,
                {"steps_per_execution": steps},
                inside=first,
            )
            for steps in (10, 50, 100)
        ),
    ]
    contestants = (
        Contestant("coordinator_loop", _COORDINATOR, call, **place),
        Contestant(
            "mgpu_tf", _TRAINER, {"strategy": "parameter_server"}, **place
        ),
        *fits,
    )
    aimed = workers == 3
    return Benchmark(
        f"asynchronous/{workers}_workers",
        "tiny",
        contestants,
        (
            Ratio("mgpu_tf", "coordinator_loop", 0.9 if aimed else None),
            *(Ratio("mgpu_tf", c.name, 2.0 if aimed else None) for c in fits),
        ),
        check_steps=300,
        burst_seconds=3.0,
        multiple=100 * workers,
    )


BENCHMARKS = (
    _step_overhead(1),
    _step_overhead(2),
    _step_overhead(4),
    _one_device("cnn", 1.25, 10),
    _one_device("resnet20", 1.25, 10),
    # In 10 steps it parts from itself: with the rows of a batch in another
    # order, the loss of Keras's own `fit` differs by 0.9%.
    _one_device("mobilenetv2", 1.3, 10, tolerance=0.02),
    _one_device("mlp_adam", 1.25, 20),
    _one_device("transformer", 1.1, 20),
    _one_device("lstm", 1.0, 20),
    _compute_bound(),
    _communication_bound(2),
    _communication_bound(3),
    _meshes("mlp"),
    _meshes("transformer"),
    _split_over_workers(),
    _asynchronous(1),
    _asynchronous(2),
    _asynchronous(3),
    *(
        _input(job, training=training)
        for job in SETS
        for training in (False, True)
    ),
)
