"""What the code of model parallelism refuses, and what its page lists."""

import ast
import pathlib

import pytest

import mgpu_tf

PACKAGE = pathlib.Path(mgpu_tf.__file__).parent
PAGE = PACKAGE.parent / "docs" / "model_parallel.md"
MODULES = [
    "engine/synchronous/outside_update.py",
    "engine/synchronous/sharded.py",
    "engine/synchronous/whole_update.py",
    "engine/synchronous/whole_weights.py",
    "strategies/split/sharded_variable.py",
    "engine/step/tensor_parallel/parts.py",
    "engine/step/tensor_parallel/plan.py",
    "engine/step/tensor_parallel/structure.py",
    "engine/synchronous/pipeline/engine.py",
    "engine/synchronous/pipeline/blocks.py",
    "engine/synchronous/pipeline/head.py",
    "engine/synchronous/pipeline/run.py",
    "engine/synchronous/pipeline/step.py",
    "engine/synchronous/pipeline/split.py",
]


RAISED = ("ConfigurationError", "ReadRefused")


def rules():
    """The rule of each error that the modules raise."""
    for module in MODULES:
        tree = ast.parse((PACKAGE / module).read_text())
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and getattr(node.func, "id", "") in RAISED
                and node.args
            ):
                yield "".join(texts(node.args[0])).split(" Received:")[0]


def texts(node):
    for each in getattr(node, "values", [node]):
        yield each.value if isinstance(each, ast.Constant) else "{}"


# The rule -> how the page has it, under "What is refused".
LISTED = {
    "A stage of a pipeline reads no metric, which is updated behind the last "
    "one.": "a metric that a layer reads",
    "An optimizer that needs whole weights takes no rows of a table that "
    "layers compute with in parts.": "Muon",
    "An optimizer keeps what belongs to weights that are split in lists, with "
    "one item for each weight.": "keeps slots elsewhere",
    "An update_step of yours gets the weight that it updates, and holds no "
    "weight that is split.": "or that holds weights",
    "Outside of a step an optimizer applies no gradients to weights that "
    "several processes hold parts of.": "`optimizer.apply` outside of a step,",
    "Within tf.function, tf.cond and loops of TensorFlow a step reads no "
    "weights that several processes hold parts of.": (
        "inside of a `tf.function`"
    ),
    "LazyAdam updates the rows that a batch has looked up, and a device with a "
    "part of a vocabulary does not tell them apart.": "`LazyAdam`",
    "noise_scale compares the gradients of replicas, each of its own rows, "
    "and a layer whose weights a layout splits over 'batch' is computed of the "
    "rows of all.": "`noise_scale`",
    "TensorFlow's own checkpoints and SavedModel do not know sharded "
    "variables.": "`tf.train.Checkpoint`",
    "A sharded variable cannot be copied by copy.deepcopy.": "`copy.deepcopy`",
    "Rows of a sharded variable are written by its optimizer only.": (
        "Writes to rows"
    ),
    "Rows are looked up in a matrix where weights are split.": "Row lookups",
    "Weights that are split over several processes are gathered in graphs.": (
        "`run_eagerly=True`"
    ),
    "A weight that is stored in parts is written by all devices together, "
    "and so not within a branch, a loop or a tf.function of a step.": (
        "written inside of a `tf.cond`"
    ),
    "Where layers are computed in parts, a part of the gradient flows back "
    "between them.": "`tf.custom_gradient`",
    "Rows are looked up in a weight that the layout splits over 'batch'.": (
        "a table that a layer of your own looks up"
    ),
    "A trace runs one operation after another, and gathers of weights wait "
    "for each other.": "`trainer.trace`",
    "On a pipeline a softmax is over the last axis.": "over another axis",
    "A pipeline needs a functional or Sequential model, whose layers it can "
    "cut into stages.": "Subclassed models",
    "A pipeline predicts in stages, with Keras's own predict_step.": (
        "an overridden `predict_step`"
    ),
    "A pipeline needs a layer for each stage, and shared state within one "
    "stage.": "Fewer layers than stages",
    "State that several calls share must be in one stage.": (
        "two calls that share state"
    ),
    "Where stages share a table, all look up rows of each example, or all the "
    "same for every example.": "a table that is looked up by the data",
    "On a pipeline a compute_loss of your own sees no losses of layers.": (
        "`compute_loss` beside `add_loss`"
    ),
    "A pipeline normalizes each micro-batch by itself.": "`synchronized=True`",
    "A recurrent layer with stateful=True keeps a state for each row of a "
    "batch, which a pipeline cuts into micro-batches.": "stateful recurrent",
    "A pipeline cuts batches, so a model must take any number of rows.": (
        "a batch size of their own"
    ),
    "A layer of a pipeline cannot assign its own weights.": (
        "assign their own weights"
    ),
    "A stage of a pipeline reads the weights and the state of its own "
    "layers.": ("of a layer in another stage"),
    "On a pipeline, what a layer has made reaches a loss, a metric or another "
    "stage by outputs, and not by an attribute.": "keeps in an attribute",
    "A trace goes with strategies whose replicas have one device.": (
        "`trainer.trace`"
    ),
    "Stages in several processes go with Keras's own train_step, test_step "
    "and compute_metrics.": "Your own `train_step`",
    "A pipeline proves in a graph that micro-batches can be computed one "
    "after another.": "`run_eagerly=True`, `trainer.trace`, `step_parts`",
    "{} goes with stages in one process.": (
        "`noise_scale`, and `check_replicas_every`"
    ),
    "Stages in several processes update weights where they are, element by "
    "element.": "Muon, Adafactor",
    "Stages in several processes draw from the seeds of their layers.": (
        "Draws without a seed"
    ),
    "A loss or a metric that needs all rows goes with one replica where "
    "stages are in several processes.": "on several replicas, and where",
    "With stages in several processes, a loss that needs all rows has a "
    "gradient for each output of the model.": "has no gradient",
    "A compute_loss of your own has the regularizers of all weights, and each "
    "process of a pipeline its own weights.": "Regularizers beside",
    "Each process of a pipeline reads the weights and the state of its own "
    "stages.": "of a layer in another stage",
    "A pipeline computes stages again, not layers.": '`recompute="layers"`',
    "A pipeline cuts its rows into micro-batches already.": "`step_parts`",
}
# Mistakes in an argument, which its help explains.
ARGUMENTS = {
    "pipeline_stages must be names of layers.",
    "pipeline_stages must name layers in the order in which they run, without "
    "the first.",
}


def test_every_refusal_is_known():
    assert set(rules()) == set(LISTED) | ARGUMENTS


@pytest.mark.parametrize("rule", LISTED)
def test_it_is_on_the_page(rule):
    section = PAGE.read_text().split("## What is refused")[1].split("\n## ")[0]
    assert LISTED[rule] in " ".join(section.split())
