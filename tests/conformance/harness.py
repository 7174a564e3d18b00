"""A row of the suite, how it is run, and what it leaves.

    @row("Structures of data")
    def two_inputs_in_a_list(run):
        run.fit(two_inputs, [x1, x2], y)

    reference = observe(ROWS["two_inputs_in_a_list"], None)     # Keras alone
    outcome = observe(ROWS["two_inputs_in_a_list"], strategy)   # the Trainer

A row gets a `Run` and uses it as it would use a model. The same function runs
on Keras's own model and on a `Trainer`.
"""

import contextlib
import dataclasses
import logging
import pickle
import re
import traceback
import warnings
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

import mgpu_tf
from tests import columns

BATCH_SIZE = 8
EPOCHS = 2


@dataclasses.dataclass(frozen=True)
class Excuse:
    """What may differ, since docs/guarantees.md says so.

    Attributes:
        what: A pattern of labels of a `Run`; "" for all.
        phrase: The words of docs/guarantees.md.
        everywhere: Whether on one device too.
    """

    what: str
    phrase: str
    everywhere: bool = False


@dataclasses.dataclass(frozen=True)
class Row:
    """A program.

    Attributes:
        name: Unique.
        group: The section of the table.
        program: Takes a `Run`.
        excuses: What may differ.
        floatx: "float32" where TensorFlow has no op for the other.
        tolerance: The largest difference that is equal.
    """

    name: str
    group: str
    program: Callable
    excuses: tuple = ()
    floatx: str = "float64"
    tolerance: float = 1e-9


ROWS: dict[str, Row] = {}


def add(group, name, program, **options):
    """Adds a row."""
    assert name not in ROWS, name
    ROWS[name] = Row(name, group, program, **options)


def row(group, **options):
    """Adds a function as a row by its name."""

    def decorate(program):
        add(group, program.__name__.replace("_", " "), program, **options)
        return program

    return decorate


class Stock:
    """Keras's own model on one device, with a trainer's attributes."""

    def __init__(self, build):
        keras.utils.set_random_seed(0)
        with tf.device(columns.ONE):
            self.model = build()

    def __getattr__(self, name):
        method = getattr(self.model, name)

        def call(*arguments, **named):
            with tf.device(columns.ONE):
                return method(*arguments, **named)

        return call


class Run:
    """What a row is run by; keeps what the row leaves, by labels.

    Attributes:
        strategy: None for Keras alone.
        options: For each `Trainer`, beside those of the row.
        seen: Arrays by labels: `history loss`, `weight 0 kernel`, `slot 3
            momentum`, `predict 0`.
    """

    def __init__(self, strategy, options=None):
        self.strategy = strategy
        self.options = options or {}
        self.seen = {}

    def trainer(self, build, **options):
        """Returns what trains: Keras's own model, or a `Trainer`."""
        if self.strategy is None:
            return Stock(build)
        return mgpu_tf.Trainer(
            build, self.strategy, **{**self.options, **options}
        )

    def scope(self):
        """Returns the scope that a strategy's variables are made in."""
        if self.strategy is None:
            return contextlib.nullcontext()
        return self.strategy.scope()

    def use(self, build, *data, **options):
        """Trains, evaluates and predicts on the same data, and looks."""
        return self.fit(build, *data, evaluate=True, **options)

    def fit(self, build, *data, trainer=None, evaluate=False, **options):
        """Trains, and looks."""
        trainer = trainer or self.trainer(build)
        arrays = not _in_batches(data[0] if data else options.get("x"))
        defaults = {"epochs": EPOCHS, "verbose": 0, "shuffle": False}
        if arrays and len(data) < 3:
            defaults["batch_size"] = BATCH_SIZE
        if len(data) > 3:
            del defaults["epochs"]
        options = defaults | options
        history = trainer.fit(*data, **options)
        self.see_history(history)
        if evaluate and arrays:
            size = {"batch_size": BATCH_SIZE, "verbose": 0}
            weight = options.get("sample_weight")
            self.see(
                "evaluate",
                trainer.evaluate(*data[:2], sample_weight=weight, **size),
            )
            if data:
                self.see("predict", trainer.predict(data[0], **size))
        self.look(trainer)
        return trainer

    def see_history(self, history):
        """Keeps the logs of a `fit`."""
        for name, values in history.history.items():
            self.see(f"history {name}", values)

    def see(self, label, structure):
        """Keeps all arrays of a structure."""
        flat = tf.nest.flatten(structure, expand_composites=True)
        for index, value in enumerate(flat):
            self.seen[f"{label} {index}"] = _as_array(value)

    def look(self, trainer, model=None):
        """Keeps weights, state and slots of the model as they are now."""
        model = model or trainer.model
        for index, variable in enumerate(model.variables):
            label = f"weight {index} {_plain(variable.path)}"
            self.seen[label] = _as_array(variable)
        for which, optimizer in enumerate(_optimizers(model)):
            for index, variable in enumerate(optimizer.variables):
                # In the middle of an accumulation a sum is each replica's own.
                if "gradient_accumulator" in variable.name:
                    continue
                # Keras names a slot of nothing by where it built it.
                name = _plain(variable.path).rpartition("/")[2]
                label = f"slot {which}.{index} {name}"
                self.seen[label] = _as_array(variable)


@dataclasses.dataclass
class Outcome:
    """What a row left in one column.

    Attributes:
        kind: "ran", "refused" or "crashed".
        seen: By labels, as in `Run`.
        message: Of the refusal or of the crash.
        warnings: What the package's logger warned of.
    """

    kind: str
    seen: dict
    message: str = ""
    warnings: tuple = ()

    def save(self, path):
        with open(path, "wb") as file:
            pickle.dump(self, file)

    @staticmethod
    def load(path):
        with open(path, "rb") as file:
            return pickle.load(file)


def observe(row, strategy, options=None):
    """Runs a row.

    Args:
        row: A row.
        strategy: Where; None for Keras alone.
        options: For each `Trainer`, beside those of the row.

    Returns:
        The outcome; whatever the row raises is in it.
    """
    keras.utils.clear_session()
    keras.config.set_floatx(row.floatx)
    keras.config.set_dtype_policy(row.floatx)
    run = Run(strategy, options)
    try:
        with _heard() as said, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            row.program(run)
        return Outcome("ran", run.seen, "", tuple(said))
    except mgpu_tf.ConfigurationError as error:
        return Outcome("refused", run.seen, str(error), tuple(said))
    except Exception as error:
        lines = "".join(traceback.format_exception(error)).splitlines()
        where = [line for line in lines if "mgpu_tf/" in line][-1:]
        text = " ".join(str(error).split())
        message = " ".join([f"{type(error).__name__}: {text[:400]}", *where])
        return Outcome("crashed", run.seen, message, tuple(said))
    finally:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")


def differences(outcome, reference):
    """How far what was seen is from the reference.

    Returns:
        For each label the largest difference: of numbers relative where they
        are larger than one; infinite where one lacks it or shapes differ.
    """
    found = {}
    for label in {**reference.seen, **outcome.seen}:
        ours, theirs = outcome.seen.get(label), reference.seen.get(label)
        if ours is None or theirs is None or ours.shape != theirs.shape:
            found[label] = np.inf
        elif ours.dtype.kind in "OSU":
            found[label] = 0.0 if np.array_equal(ours, theirs) else np.inf
        elif ours.size == 0:
            found[label] = 0.0
        else:
            found[label] = _largest(ours, theirs)
    return found


def _largest(ours, theirs):
    ours, theirs = (np.asarray(a, np.float64) for a in (ours, theirs))
    same = (ours == theirs) | (np.isnan(ours) & np.isnan(theirs))
    with np.errstate(invalid="ignore"):
        gap = np.abs(ours - theirs) / np.maximum(np.abs(theirs), 1.0)
    gap = np.where(same, 0.0, gap)
    return float(np.where(np.isnan(gap), np.inf, gap).max())


@contextlib.contextmanager
def _heard():
    """Collects what the package's logger warns of."""
    said = []

    class Ear(logging.Handler):
        def emit(self, record):
            said.append(record.getMessage())

    ear = Ear(logging.WARNING)
    logger = logging.getLogger("mgpu_tf")
    logger.addHandler(ear)
    try:
        yield said
    finally:
        logger.removeHandler(ear)


def _as_array(value):
    if isinstance(value, str):
        return np.array(value)
    return np.array(keras.ops.convert_to_numpy(value))


def _in_batches(x):
    """Whether data comes in batches already."""
    return (
        isinstance(x, tf.data.Dataset | keras.utils.PyDataset)
        or hasattr(x, "__next__")
        or callable(x)
    )


def _optimizers(model):
    """The optimizers of a model that have applied something."""
    found = [model.optimizer, *vars(model).values()]
    unique = {}
    while found:
        value = found.pop(0)
        if isinstance(value, keras.optimizers.Optimizer):
            unique[id(value)] = value
            found += vars(value).values()
    return [
        optimizer
        for optimizer in unique.values()
        if optimizer.built and _as_array(optimizer.iterations) > 0
    ]


def _plain(path):
    """A variable's path without the numbers that Keras counts up."""
    return re.sub(r"_\d+\b", "", path)
