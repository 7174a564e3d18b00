"""Which models a pipeline takes, and which layers each stage has.

The calls of a functional model are put in an order in which they can run, and
the order is cut. By default the cuts make the most expensive stage as cheap as
can be. The cost of a call is

    half its part of the parameters      weights, gradients, optimizer state
    half its part of the work            products of weights with the positions
                                         that they are applied to

Of cuts with the same most expensive stage, those are taken at which the fewest
values are sent.

A value may be used several stages later: it is sent there directly. So is a
weight that several calls share: it is stored, and counts as a parameter, where
the first of them is. State that calls share, such as moving statistics, is in
one stage: no cut goes between its first and its last call.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import keras

from mgpu_tf.engine import keras_internals
from mgpu_tf.engine.keras_internals import Call, Key
from mgpu_tf.errors import ConfigurationError


@dataclasses.dataclass(frozen=True)
class Stage:
    """The calls of one stage.

    Attributes:
        calls: The calls, in their order.
        inputs: The keys of what it takes from the model's inputs and from
            stages before.
        outputs: The keys of what stages after it take, and of the model's
            outputs.
        variables: What its layers keep, and is stored here.
        borrowed: Weights of its layers that are stored in a stage before.
    """

    calls: list[Call]
    inputs: list[Key]
    outputs: list[Key]
    variables: list[keras.Variable]
    borrowed: list[keras.Variable]

    @property
    def first_name(self) -> str:
        """Returns the name of the first layer that has one."""
        named = (call.names[0] for call in self.calls if call.names)
        return next(named, "")

    @property
    def parameters(self) -> int:
        """Returns the number of its parameters."""
        return sum(math.prod(v.shape) for v in self.variables)


@dataclasses.dataclass(frozen=True)
class Stages:
    """A model in stages.

    Attributes:
        every: The stages.
        inputs: The keys of the model's inputs.
        outputs: The keys of the model's outputs.
    """

    every: list[Stage]
    inputs: list[Key]
    outputs: list[Key]


def stages_of(
    model: keras.Model, count: int, begins: Sequence[str] | None = None
) -> Stages:
    """Cuts a model into stages.

    Args:
        model: A built model.
        count: How many stages there are.
        begins: The names of the layers at which the second and further
            stages begin. Default: the cuts of the least cost.

    Raises:
        ConfigurationError: The model has no graph of layers, or cannot be
            cut so.
    """
    graph = keras_internals.graph_of(model)
    if graph is None:
        raise _no_graph(model)
    calls, inputs, outputs = graph
    tied = _tied(calls, _weights_of(model))
    if begins is None:
        cuts = _cheapest(calls, count, tied)
    else:
        cuts = _named(calls, begins, tied)
    bounds = [0, *cuts, len(calls)]
    parts = [calls[a:b] for a, b in itertools.pairwise(bounds)]
    return Stages(_joined(parts, outputs), inputs, outputs)


def most_stages(model: keras.Model) -> int:
    """Returns how many stages a built model can be cut into at most.

    Raises:
        ConfigurationError: A pipeline does not take the model.
    """
    check_model(model)
    check_rows(model)
    graph = keras_internals.graph_of(model)
    if graph is None:
        raise _no_graph(model)
    calls, _, _ = graph
    return len(calls) - len(_tied(calls, _weights_of(model)))


def check_model(model: keras.Model) -> None:
    """Refuses a model that is not called layer by layer."""
    if keras_internals.overrides(model, "predict_step"):
        raise ConfigurationError(
            "A pipeline predicts in stages, with Keras's own predict_step. "
            f"Received: {type(model).__name__}, which has its own. Use 'fsdp' "
            "or 'mirrored'."
        )
    if not (
        keras_internals.has_graph(model)
        and keras_internals.is_unpatched(model, "call")
    ):
        raise _no_graph(model)


def check_rows(model: keras.Model) -> None:
    """Refuses a built model whose batches cannot be cut."""
    for layer in keras_internals.layers_of(model):
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            raise ConfigurationError(
                "A recurrent layer with stateful=True keeps a state for each "
                "row of a batch, which a pipeline cuts into micro-batches. "
                f"Received: the layer {layer.name!r}. Use 'one_device', or "
                "return_state=True and pass initial_state yourself."
            )
        if getattr(layer, "synchronized", False):
            raise ConfigurationError(
                "A pipeline normalizes each micro-batch by itself. Received: "
                f"the layer {layer.name!r} with synchronized=True. Use "
                "synchronized=False, LayerNormalization, or 'mirrored'."
            )
    if any(spec.shape[0] is not None for spec in model.inputs):
        raise ConfigurationError(
            "A pipeline cuts batches, so a model must take any number of "
            "rows. Received: inputs with a batch size of their own. Leave "
            "batch_size out of keras.Input."
        )


def _no_graph(model: keras.Model) -> ConfigurationError:
    return ConfigurationError(
        "A pipeline needs a functional or Sequential model, whose layers it "
        f"can cut into stages. Received: {type(model).__name__}. Build it "
        "with keras.Model(inputs, outputs), or use 'fsdp'."
    )


def _joined(parts: list[list[Call]], outputs: list[Key]) -> list[Stage]:
    """Finds what stages take from each other."""
    made = [{key for call in part for key in call.outputs} for part in parts]
    taken = [
        list(
            dict.fromkeys(
                key for call in part for key in call.inputs if key not in own
            )
        )
        for part, own in zip(parts, made, strict=True)
    ]
    # The last stage has all outputs, for the loss.
    for key in outputs:
        if key not in made[-1] and key not in taken[-1]:
            taken[-1].append(key)
    wanted = {key for keys in taken for key in keys} | set(outputs)
    stages, stored = [], set[int]()
    for part, keys in zip(parts, taken, strict=True):
        used = {id(v): v for call in part for v in call.variables}
        stages.append(
            Stage(
                part,
                keys,
                [key for call in part for key in call.outputs if key in wanted],
                [v for key, v in used.items() if key not in stored],
                [v for key, v in used.items() if key in stored],
            )
        )
        stored |= set(used)
    return stages


def _weights_of(model: keras.Model) -> set[int]:
    """Returns what is no state of layers: trained and frozen weights."""
    frozen = keras_internals.frozen_weights(model)
    return set(map(id, [*model.trainable_variables, *frozen]))


def _tied(calls: list[Call], weights: set[int]) -> dict[int, str]:
    """Returns the cuts that would part shared state, with its path.

    A cut is the index of the first call after it.

    Args:
        calls: The calls, in their order.
        weights: What may be sent to other stages.
    """
    first: dict[int, int] = {}
    found: dict[int, str] = {}
    for place, call in enumerate(calls):
        for variable in call.variables:
            begin = first.setdefault(id(variable), place)
            if id(variable) in weights:
                continue
            for cut in range(begin + 1, place + 1):
                found.setdefault(cut, variable.path)
    return found


def _named(
    calls: list[Call], begins: Sequence[str], tied: dict[int, str]
) -> list[int]:
    places: dict[str, int] = {}
    for place, call in enumerate(calls):
        for name in call.names:
            places.setdefault(name, place)
    cuts = []
    for name in begins:
        if name not in places:
            raise ConfigurationError(
                "pipeline_stages must be names of layers. Received: "
                f"{name!r}. The model has: {', '.join(places)}."
            )
        cuts.append(places[name])
    if cuts != sorted(set(cuts)) or 0 in cuts:
        raise ConfigurationError(
            "pipeline_stages must name layers in the order in which they "
            "run, without the first. Received: "
            f"{', '.join(begins)}. The order is: {', '.join(places)}."
        )
    for name, cut in zip(begins, cuts, strict=True):
        if cut in tied:
            raise ConfigurationError(
                "State that several calls share must be in one stage. "
                f"Received: a stage that begins at {name!r}, between two "
                f"uses of {tied[cut]}. Begin it elsewhere."
            )
    return cuts


def _cheapest(calls: list[Call], count: int, tied: dict[int, str]) -> list[int]:
    """Returns the cuts whose most expensive stage costs the least."""
    allowed = [c for c in range(1, len(calls)) if c not in tied]
    if len(allowed) < count - 1:
        raise _too_few(calls, count, tied)
    costs = costs_of(calls)
    total = [0.0, *itertools.accumulate(costs)]
    sent = _sent(calls)
    end = len(calls)
    # best[b] = (most expensive stage, values sent, cuts) of the calls to b.
    best: dict[int, tuple[float, int, list[int]]] = {
        b: (total[b], 0, []) for b in [*allowed, end]
    }
    for _ in range(count - 1):
        best = {
            b: min(
                (
                    # Sums of the same costs may differ in their last bits.
                    round(max(worst, total[b] - total[a]), 12),
                    values + sent[a],
                    [*cuts, a],
                )
                for a, (worst, values, cuts) in best.items()
                if a < b
            )
            for b in [*allowed, end]
            if any(a < b for a in best)
        }
    cuts = best[end][2]
    bounds = itertools.pairwise([0, *cuts, end])
    if tied and not all(
        any(call.variables for call in calls[a:b]) for a, b in bounds
    ):
        raise _too_few(calls, count, tied)
    return cuts


def _too_few(
    calls: list[Call], count: int, tied: dict[int, str]
) -> ConfigurationError:
    held = sorted(set(tied.values()))
    shared = f", and calls that share {held[0]}" if held else ""
    return ConfigurationError(
        "A pipeline needs a layer for each stage, and shared state "
        f"within one stage. Received: {len(calls)} layers{shared}, for "
        f"{count} stages. Use fewer stages, or 'fsdp'."
    )


def costs_of(calls: list[Call]) -> list[float]:
    """Returns the cost of each call; see the head of this module."""
    used = [sum(math.prod(v.shape) for v in c.variables) for c in calls]
    works = [_work(call, size) for call, size in zip(calls, used, strict=True)]
    sizes = [sum(math.prod(v.shape) for v in vs) for vs in _firsts(calls)]
    all_sizes, all_works = sum(sizes) or 1, sum(works) or 1
    return [
        0.5 * size / all_sizes + 0.5 * work / all_works
        for size, work in zip(sizes, works, strict=True)
    ]


def _firsts(calls: list[Call]) -> list[list[keras.Variable]]:
    """Returns of each call what no call before it has used."""
    known: set[int] = set()
    found = []
    for call in calls:
        found.append([v for v in call.variables if id(v) not in known])
        known |= set(map(id, call.variables))
    return found


def _work(call: Call, size: int) -> int:
    """Estimates the multiplications of a call for one example."""
    taken, made = call.specs
    elements = sum(_elements(spec) for spec in made)
    if size == 0 or isinstance(call.layer, keras.layers.Embedding):
        return elements
    specs = taken if isinstance(call.layer, keras.layers.RNN) else made
    return elements + size * max(map(_positions, specs), default=1)


def _elements(spec: keras.KerasTensor) -> int:
    return math.prod(n or 1 for n in spec.shape[1:])


def _positions(spec: keras.KerasTensor) -> int:
    """How often a weight is applied to make a tensor, or to take it."""
    return math.prod(n or 1 for n in spec.shape[1:-1])


def _sent(calls: list[Call]) -> list[int]:
    """Returns how many values of an example cross each cut."""
    born: dict[Key, tuple[int, int]] = {}
    last: dict[Key, int] = {}
    for place, call in enumerate(calls):
        for key, spec in zip(call.outputs, call.specs[1], strict=True):
            born[key] = (place, _elements(spec))
        for key in call.inputs:
            last[key] = place
    crossing = [0] * (len(calls) + 1)
    for key, (place, elements) in born.items():
        for cut in range(place + 1, last.get(key, place) + 1):
            crossing[cut] += elements
    return crossing
