import collections
import itertools
import json
import math

import keras
import pytest

from mgpu_tf import cli, create_strategy, planner
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.models import create_model
from mgpu_tf.names import OPTIMIZERS, SHARDS
from mgpu_tf.optimizers import create_optimizer
from mgpu_tf.reports.scaling import ScalingPoint, ScalingTable
from tests import clusters


def table(kind="processes"):
    points = [
        ScalingPoint(1, 64, [100.0], 0.5),
        ScalingPoint(4, 256, [320.0], 0.5),
    ]
    return ScalingTable("mlp", kind, "weak", points)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_is_what_variables_hold(name):
    model = create_model("mlp", (8, 8, 1), 10)
    optimizer = create_optimizer(name)
    optimizer.build(model.trainable_variables)
    memory = planner.StateMemory(model.count_params(), name)
    slots = [v for v in optimizer.variables if v.shape.rank]
    assert memory.weights == bytes_of(model.trainable_variables)
    assert memory.slots == bytes_of(slots)
    assert memory.gradients == memory.weights


def bytes_of(variables):
    return sum(
        v.numpy().nbytes for v in map(keras.ops.convert_to_tensor, variables)
    )


def test_every_optimizer_has_its_slots():
    assert set(planner.SLOTS) == set(OPTIMIZERS)


def test_what_is_left_and_what_is_missing():
    memory = planner.StateMemory(1 << 28, "adam")
    assert memory.total == 4 << 30
    assert memory.text(16 << 30).splitlines()[-1].split() == (
        ["left", "for", "activations", "12.000", "GiB"]
    )
    *_, missing, fits = memory.text(3 << 30).splitlines()
    assert missing.split() == ["does", "not", "fit", "by", "1.000", "GiB"]
    assert (
        fits == "fits with --strategy=fsdp over 2 devices, without activations"
    )


def test_state_that_is_split():
    gib = 1 << 30
    weights = planner.StateMemory(1 << 28, "adam", fsdp=4)
    assert weights.weights == weights.gradients == gib // 4
    assert weights.slots == 2 * gib // 4
    optimizer = planner.StateMemory(1 << 28, "adam", 4, "optimizer")
    assert optimizer.weights == gib + gib // 4
    assert optimizer.slots == weights.slots
    assert weights.fitting(gib) == 4
    assert weights.fitting(1) is None
    with pytest.raises(ConfigurationError, match="shard"):
        planner.StateMemory(8, shard="all")
    with pytest.raises(ConfigurationError, match="fsdp"):
        planner.StateMemory(8, fsdp=0)


def test_stages_of_a_pipeline():
    gib = 1 << 30
    stage = planner.StateMemory(1 << 28, "adam", pipeline=4)
    assert stage.weights == stage.gradients == gib // 4
    assert stage.slots == 2 * gib // 4
    assert stage.fitting(gib) == 4
    # A part is stored; the whole stage is gathered, and has gradients.
    split = planner.StateMemory(1 << 28, "adam", fsdp=2, pipeline=4)
    assert split.slots == stage.slots // 2
    assert split.weights == stage.weights + stage.weights // 2
    assert split.gradients == stage.gradients
    # Of a stage that is computed in parts, a device has and computes one.
    parts = planner.StateMemory(1 << 28, "adam", tensor=2, pipeline=4)
    assert parts.weights == parts.gradients == gib // 8
    assert parts.total == stage.total // 2


def test_the_bubble_is_told(capsys):
    model = ["plan", "--num_parameters=1G", "--pipeline_parallel=4"]
    assert cli.main([*model, "--micro_batches=9"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == (
        "each stage is without work for 25.0% of a step of 9 micro-batches"
    )
    assert cli.main(model) == 0
    assert "15.8% of a step of 16" in capsys.readouterr().out
    assert cli.main([*model[:2], "--micro_batches=9"]) != 0
    assert "effect with pipeline_parallel" in capsys.readouterr().err


@pytest.mark.parametrize("other", ["num_parameters=1G", "scaling=table.json"])
def test_a_model_stands_alone(other, capsys):
    assert cli.main(["plan", "--model=cnn", f"--{other}"]) != 0
    said = capsys.readouterr().err.strip()
    assert "not both. Received: --model beside --" in said
    assert "\n" not in said


def test_layers_in_parts():
    memory = planner.StateMemory(1 << 28, "adam", tensor=4)
    assert memory.total == 1 << 30
    both = planner.StateMemory(1 << 28, "adam", fsdp=2, tensor=2)
    assert both.total == memory.total


def accepts(make):
    """Returns whether no rule is broken."""
    try:
        make()
    except ConfigurationError:
        return False
    return True


def test_it_plans_what_strategies_accept(capsys):
    """All options of a mesh that the two have in common, up to 4 devices."""
    answers = collections.Counter()
    axes = itertools.product((1, 2, 3, 4), repeat=3)
    for (fsdp, tensor, pipeline), shard, micro in itertools.product(
        [lengths for lengths in axes if math.prod(lengths) <= 4],
        [*SHARDS, "all"],
        [None, 0, 4],
    ):
        options = {
            "fsdp_parallel": fsdp,
            "tensor_parallel": tensor,
            "pipeline_parallel": pipeline,
            "shard": shard,
        }
        if micro is not None:
            options["micro_batches"] = micro
        flags = [f"--{name}={value}" for name, value in options.items()]
        planned = cli.main(["plan", "--num_parameters=1G", *flags]) == 0
        devices = fsdp * tensor * pipeline
        made = accepts(
            lambda options=options, devices=devices: create_strategy(
                "model_parallel", num_virtual_devices=devices, **options
            )
        )
        assert planned == made, (options, capsys.readouterr())
        answers[planned] += 1
    assert min(answers[True], answers[False]) > 10


def test_hours():
    hours = planner.hours(table(), examples=36_000, epochs=10)
    assert hours == [1.0, pytest.approx(1 / 3.2)]


def test_parts_of_one_cpu_tell_nothing_of_time():
    with pytest.raises(ConfigurationError, match="do not share cores"):
        planner.hours(table("virtual"), 1, 1)


def test_command_tells_both(tmp_path, capsys):
    path = str(tmp_path / "scaling.json")
    table().write(path)
    arguments = ["--num_parameters=268.435456M", "--device_memory_gib=16"]
    arguments += [f"--scaling={path}", "--examples=36K", "--epochs=10"]
    assert cli.main(["plan", *arguments, "--price=2.5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[4].split() == ["left", "for", "activations", "12.000", "GiB"]
    assert lines[6] == "mlp, weak scaling: 10 epochs of 36,000 examples"
    assert " ".join(lines[8].split()) == "1 64 100 100% 1.00 1.00 2.50"
    assert " ".join(lines[9].split()) == "4 256 320 80% 0.31 1.25 3.12"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "Received: none of them"),
        ("--num_parameters=many", "num_parameters='MANY'"),
        ("--num_parameters=0", "num_parameters='0'"),
        ("--num_parameters=nan", "num_parameters='NAN'"),
        ("--num_parameters=3Q", "num_parameters='3Q'"),
        ("--num_parameters=1M --optimizer=adm", "Did you mean 'adam'"),
        ("--num_parameters=1M --device_memory_gib=0", "gib=0.0"),
        ("--num_parameters=1M --device_memory_gib=nan", "gib=nan"),
        ("--num_parameters=1M --device_memory_gib=inf", "gib=inf"),
        (
            "--num_parameters=1M --price=1",
            "price has an effect with scaling or model only",
        ),
        (
            "--scaling=x --optimizer=sgd",
            "optimizer has an effect with num_parameters or model only",
        ),
        ("--scaling=nowhere.json", "without --examples"),
        ("--scaling=nowhere.json --examples=9", "FileNotFoundError"),
        ("--scaling=setup.cfg --examples=9", "JSONDecodeError"),
        (
            "--scaling=experiments/benchmarks/growth.png --examples=9",
            "UnicodeDecodeError",
        ),
        ("--scaling=nowhere.json --examples=9 --price=-1", "price=-1.0"),
        ("--scaling=nowhere.json --examples=9 --price=nan", "price=nan"),
        ("--scaling=nowhere.json --examples=9 --epochs=0", "epochs=0"),
        (f"--scaling=x --examples=9 --epochs=1{'0' * 400}", "epochs=10000"),
        ("--num_parameters=1M --epochs=x", "epochs='x'"),
    ],
)
def test_a_mistake_is_one_line(flags, message, capsys, monkeypatch):
    monkeypatch.chdir(clusters.ROOT)
    assert cli.main(["plan", *flags.split()]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def points(**other):
    point = {"devices": 1, "global_batch_size": 8, "loss": 0.0}
    return [{**point, "examples_per_second": [9.0], **other}]


@pytest.mark.parametrize(
    "wrong",
    [
        {"points": []},
        {"points": 5},
        {"points": points(devices=0)},
        {"points": points(devices="1")},
        {"points": points(examples_per_second=[])},
        {"points": points(examples_per_second=[0.0])},
        {"points": points(examples_per_second=[-1.0])},
        {"points": points(examples_per_second=[math.nan])},
        {"points": points(examples_per_second=["1"])},
        {"points": points(examples_per_second=7.0)},
        {"points": points(), "kind": "moons"},
        {"points": points(), "kind": []},
    ],
)
def test_a_table_that_no_benchmark_wrote(wrong, tmp_path, capsys):
    path = tmp_path / "scaling.json"
    value = {"model": "mlp", "kind": "processes", "scaling": "weak", **wrong}
    path.write_text(json.dumps(value))
    assert cli.main(["plan", f"--scaling={path}", "--examples=9"]) == 2
    error = capsys.readouterr().err
    assert "scaling must be a file" in error
    assert error.count("\n") == 1


def test_units_in_any_case(capsys):
    for text in ("1m", "1M", "1000k", " 0.001g "):
        assert cli.main(["plan", f"--num_parameters={text}"]) == 0
        assert "0.004 GiB" in capsys.readouterr().out


def test_a_model_by_name(capsys, tmp_path):
    """A table, the reason, JSON and the page, of a model of this package."""
    flags = ["plan", "--model=mlp", "--input_shape=8x8x1", "--num_classes=10"]
    flags += ["--global_batch_size=256", "--devices=4", "--device=t4"]
    page = tmp_path / "new" / "plan.html"
    assert cli.main([*flags, f"--html={page}", "--price=0.5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == ("mlp, 26,122 parameters, global batch 256, on 4 x t4")
    assert lines[1].split()[0] == "layout" and lines[1].endswith("price/M")
    assert any(line.startswith("one device: it takes") for line in lines)
    assert page.read_text().count("<svg") == 2
    assert cli.main([*flags, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["parameters"] == 26_122
    assert plan["candidates"][0]["fits"] is True
    assert cli.main([*flags, "--device_memory_gib=0.0001"]) == 1
    assert "No layout of 4 devices fits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--model=resnet51", "Did you mean"),
        ("--model=mlp --device=a101", "Unknown device"),
        ("--model=mlp --interconnect=fast", "interconnect must be"),
        ("--model=mlp --precision=float8", "Unknown precision"),
        ("--model=mlp --input_shape=8x", "input_shape must be"),
        ("--model=mlp --global_batch_size=0", "global_batch_size"),
        ("--model=mlp --devices=0", "devices must be"),
        ("--model=mlp --nodes=0", "nodes must be"),
        ("--model=mlp --price=-1", "price=-1.0"),
        ("--model=mlp --device_memory_gib=-1", "gib=-1.0"),
        ("--model=mlp --calibration=nowhere.json", "FileNotFoundError"),
        ("--model=nowhere.at:all", "No module named"),
        ("--num_parameters=1M --json", "json has an effect with model"),
        ("--num_parameters=1M --devices=4", "devices has an effect with model"),
    ],
)
def test_a_mistake_about_a_model_is_one_line(
    flags, message, capsys, monkeypatch
):
    monkeypatch.chdir(clusters.ROOT)
    assert cli.main(["plan", *flags.split()]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
