"""Real coordinators, workers and parameter servers; a start for many cases.

One worker does things in one order, so what it trains equals one device.
Three workers do not, and what must hold all the same is counted.
"""

import json
import os

import pytest

from tests import clusters
from tests.asynchronous import slots, worker
from tests.tiers import tiered

EQUAL = [
    "adam_cosine",
    "clipped_momentum",
    "lars",
    "accumulation",
    "ema_overwrite",
    "loss_scale_overflow",
    "batch_norm",
    "regularizer",
    "class_weight",
    "mixed_bfloat16",
    "steps_per_epoch",
    "dataset",
    "dataset_fn",
    "random_access",
    "random_access_of_a_table",
    "rows_sent",
]
TEXT = list(slots.TEXT)
# Each cluster costs a minute and a half of a processor, so the default tests
# have none of them.
pytestmark = pytest.mark.full
# What the full tier has of them: each way of the data and of an update once.
FULL = {
    "equal": [
        "clipped_momentum",
        "accumulation",
        "ema_overwrite",
        "loss_scale_overflow",
        "batch_norm",
        "class_weight",
        "dataset_fn",
        "random_access",
        "rows_sent",
    ],
    "text": TEXT[:2],
    "slots": [
        "momentum",
        "rmsprop_all",
        "lion",
        "adam",
        "ema",
        "accumulating",
        "scaled",
        "constraint",
        "rows_momentum",
    ],
}
SEVERAL = [
    "scores_of_1797",
    "each_example_once",
    "masks",
    "stopped_early",
    "raised_at_batch",
    "methods_of_the_model",
    "scores_of_one_batch",
    "few_batches",
    "mistakes",
    "sharded_embedding",
    "staleness:2:hold",
    "staleness:2:scale",
    "digits_of_two_seeds",
    "half_made",
    "staleness",
    "statistics",
]
OF_EQUAL = "test_one_worker_equals_one_device"
OF_TEXT = "test_one_worker_trains_embeddings_as_keras_does"
OF_SLOTS = "test_no_update_of_a_slot_is_lost"


def start(num_workers, num_ps, cases, folder):
    """Runs cases in a cluster; returns what was printed."""
    done = clusters.mgpu_tf(
        "launch",
        f"--num_workers={num_workers}",
        f"--num_ps={num_ps}",
        "--startup_seconds=0",
        "--",
        clusters.PYTHON,
        "-m",
        "tests.asynchronous.worker",
        f"--folder={folder}",
        f"--cases={','.join(cases)}",
        env={"TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def one_worker(tmp_path_factory, of_this_run):
    folder = tmp_path_factory.mktemp("one_worker")
    # What saves makes operations repeat from there on, so it comes last.
    cases = [
        *(f"equal_{n}" for n in of_this_run(EQUAL, "name", OF_EQUAL)),
        *(f"text_{n}" for n in of_this_run(TEXT, "name", OF_TEXT)),
    ]
    cases += ["named_results", "raised_at_batch", "callbacks_at_batches"]
    cases += ["methods_of_the_model"]
    cases += ["task_of_keras_hub", "saved_in_accumulation", "keeps_the_best"]
    start(1, 1, cases, folder)
    return folder


@pytest.fixture(scope="module")
def three_workers(tmp_path_factory, of_this_run):
    folder = tmp_path_factory.mktemp("three_workers")
    optimizers = of_this_run(slots.OPTIMIZERS, "name", OF_SLOTS)
    cases = SEVERAL + [f"slots_{name}" for name in optimizers]
    folder.joinpath("output").write_text(start(3, 2, cases, folder))
    return folder


def result(folder, case):
    path = worker.result_file(folder, case)
    assert os.path.exists(path), f"{case} did not run"
    with open(path) as file:
        return json.load(file)


@pytest.mark.parametrize("name", tiered(EQUAL, [], FULL["equal"]))
def test_one_worker_equals_one_device(name, one_worker):
    differences = result(one_worker, f"equal_{name}")
    assert differences.pop("counts") == 0
    assert max(differences.values()) < 1e-5, differences


@pytest.mark.parametrize("name", tiered(TEXT, [], FULL["text"]))
def test_one_worker_trains_embeddings_as_keras_does(name, one_worker):
    found = result(one_worker, f"text_{name}")
    assert found["moved"] > 0.01
    assert found["difference"] < 1e-12


def test_callbacks_at_batches_do_what_they_do_in_keras(one_worker):
    found = result(one_worker, "callbacks_at_batches")
    assert len(found) == 6
    for name, differences in found.items():
        assert max(differences.values()) < 1e-5, (name, differences)


def test_methods_of_the_model_are_those_of_the_trainer(
    one_worker, three_workers
):
    for folder in (one_worker, three_workers):
        found = result(folder, "methods_of_the_model")
        assert found["scores"]["loss"] > 0
        assert found["outputs"] == [90, 3]
        of_batch, without_trainer = found["refused"]
        assert "Received: train_on_batch()" in of_batch
        assert "Keep the Trainer" in without_trainer


def test_a_metric_that_returns_a_dict(one_worker):
    found = result(one_worker, "named_results")
    assert max(found.values()) < 1e-5, found


def test_a_task_of_keras_hub_equals_one_device(one_worker):
    found = result(one_worker, "task_of_keras_hub")
    assert found["difference"] < 1e-5
    assert "Received: a task whose preprocessor looks" in found["refused"]


def test_a_save_waits_for_the_end_of_an_update(one_worker):
    found = result(one_worker, "saved_in_accumulation")
    assert found["saved"] == [[6, 9, 12], [4, 8, 12]]
    assert found["difference"] < 1e-5


def test_the_best_and_some_for_good_are_kept(one_worker):
    found = result(one_worker, "keeps_the_best")
    losses = found["losses"]
    best = 6 * (losses.index(min(losses)) + 1)
    assert found["step"] == best
    assert found["loss"] == pytest.approx(min(losses), rel=1e-5)
    assert found["saved"] == sorted({6, 12, 16, 20, 24, best})


def test_only_the_coordinator_runs_the_script(three_workers):
    output = (three_workers / "output").read_text()
    assert output.count("COORDINATOR") == 1
    assert "[chief 0] COORDINATOR" in output


def test_counts_are_exact_and_digits_are_learned(three_workers):
    runs = result(three_workers, "digits_of_two_seeds")
    assert len(runs) == 2
    for run in runs:
        assert run["global_step"] == run["iterations"] == 900
        assert run["examples_seen"] == 900 * 32
        assert run["records"] == [300 * 32] * 3
        assert run["accuracy"] >= 0.94


def test_compiling_and_evaluating_are_told(three_workers):
    found = result(three_workers, "each_example_once")
    assert found["compile"] > 0
    assert found["evaluate"] > 0


def test_scores_and_outputs_of_all_examples(three_workers):
    found = result(three_workers, "scores_of_1797")
    assert found["rows"] == 1797
    assert found["difference"] < 1e-6


def test_each_example_once_in_an_epoch(three_workers):
    found = result(three_workers, "each_example_once")
    assert found["losses"] == pytest.approx([found["expected"]] * 4, rel=1e-6)
    assert found["examples"] == [101] * 4
    assert found["iterations"] == 4 * 26
    # A generator goes on where the epoch before has stopped.
    assert found["of generator"] == pytest.approx([24.5, 74.5], rel=1e-6)


def test_every_step_has_a_mask_of_its_own(three_workers):
    kept = result(three_workers, "masks")["kept"]
    assert len(kept) == 24
    assert len(set(kept)) > 12
    assert all(3400 < number < 4600 for number in kept)


def test_a_callback_stops_within_an_epoch(three_workers):
    found = result(three_workers, "stopped_early")
    assert found["epochs"] == 1
    assert 11 <= found["global_step"] < 90
    for name in ("iterations", "examples_seen", "record"):
        assert found[name] == found["global_step"]


def test_training_goes_on_after_a_callback_has_raised(
    one_worker, three_workers
):
    for folder in (one_worker, three_workers):
        found = result(folder, "raised_at_batch")
        assert found["raised"] == ["mine"] * 3
        assert found["steps"] == found["iterations"] == 2 * 45
        assert found["examples"] == [90, 90]
    # With one worker nothing is under way when a callback raises.
    assert result(one_worker, "raised_at_batch")["before"] == [12, 12]


def test_fewer_batches_than_workers(three_workers):
    found = result(three_workers, "few_batches")
    for name in ("one", "unknown", "evaluated"):
        assert max(found[name].values()) < 1e-5, (name, found[name])
    assert found["steps of two"] == 2 * 3
    for name in ("none", "none, again and again", "function"):
        assert "ConfigurationError: The data must have one" in found[name]
    assert found["afterwards"] == 2 * 4


def test_an_evaluation_of_fewer_batches_than_workers(three_workers):
    found = result(three_workers, "scores_of_one_batch")
    assert max(found.values()) < 1e-5, found


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own train_step", "ConfigurationError: A train_step of your own"),
        ("accumulation", "must divide the steps of an epoch"),
        ("both", "does not go with gradient_accumulation_steps"),
        ("written weight", "may not write its own trainable weights"),
        ("unknown length", "needs steps_per_epoch"),
        ("label out of range", "ConfigurationError: Labels must be in [0, "),
        ("restore", "ConfigurationError: Parameter servers apply the grad"),
        ("max_loss", "max_loss=3.0. Use on_nan='stop' without max_loss"),
    ],
)
def test_mistakes_are_told(name, message, three_workers):
    assert message in result(three_workers, "mistakes")[name]


def test_a_mistake_does_no_harm_to_what_follows(three_workers):
    assert result(three_workers, "mistakes")["afterwards"] == 6


def test_a_new_trace_is_one_of_a_new_compile(three_workers):
    found = result(three_workers, "mistakes")
    assert "Call model.compile" in found["traced anew"]
    assert found["compiled"] == 12


def test_staleness_is_held(three_workers):
    held = result(three_workers, "staleness:2:hold")
    assert max(held["staleness_max"]) <= 2


def test_staleness_is_measured(three_workers):
    check_staleness(result(three_workers, "staleness:2:scale"))


def test_staleness_is_measured_without_a_limit(three_workers):
    check_staleness(result(three_workers, "staleness"))


def check_staleness(found):
    for epoch in range(2):
        mean, p50, p95, most = (
            found[f"staleness_{name}"][epoch]
            for name in ("mean", "p50", "p95", "max")
        )
        assert 0 <= p50 <= p95 <= most
        assert 0 <= mean <= most


def test_staleness_in_tensorboard(three_workers):
    found = result(three_workers, "staleness:2:scale")
    assert [epoch for epoch, *_ in found["histograms"]] == [0, 1]
    for epoch, low, high, count in found["histograms"]:
        assert low <= found["staleness_mean"][epoch] <= high
        assert high <= max(found["staleness_max"][epoch], 1) + 1
        assert count >= 1


def test_three_workers_at_once_are_late_at_times(three_workers):
    found = result(three_workers, "staleness:2:scale")
    assert max(found["staleness_max"]) >= 1


def test_rows_of_an_embedding_on_all_parameter_servers(three_workers):
    found = result(three_workers, "sharded_embedding")
    assert sorted(found["devices"]) == ["/job:ps/task:0", "/job:ps/task:1"]
    assert found["lookup"] == 0
    assert found["learned"] < 1e-6
    assert found["moved"] > 0.1
    assert found["shards"] == [1, 3]
    assert found["loaded"] == 0
    assert found["untouched"] == 0


@pytest.mark.parametrize(
    "name", tiered(list(slots.OPTIMIZERS), [], FULL["slots"])
)
def test_no_update_of_a_slot_is_lost(name, three_workers):
    """Three workers end with the slots of one device, and Keras's own."""
    found = result(three_workers, f"slots_{name}")
    # Where a step depends on its number, that number is another's at times.
    bound = 1e-12 if found["exact"] else 1e-3
    assert max(found["weights"].values()) < bound, found["weights"]
    # One slot is a sum of such steps.
    bound = bound if name == "schedule_free" else 1e-12
    assert max(found["slots"].values()) < bound, found["slots"]


def test_no_worker_sees_half_of_an_update(three_workers):
    """Every update makes weights negative before it constrains them."""
    found = result(three_workers, "half_made")
    assert found["negative"] == [0.0] * 3
    assert found["least"] == 0.0
    assert found["count"] == found["steps"]


def test_no_batch_of_a_moving_statistic_is_lost(three_workers):
    found = result(three_workers, "statistics")
    assert len(found) == 4
    assert max(found.values()) < 1e-12, found
