"""What replicas get from each other in groups, and what their gradients are.

Every replica r has its own values. The loss of all is the sum over replicas of
what they make of the results, so the expected gradients follow by hand.
"""

import numpy as np
import tensorflow as tf

from mgpu_tf.strategies.replicas.collectives import Groups

ROWS, COLUMNS = 6, 7


def value_of(replica):
    """The value of a replica, `[ROWS, COLUMNS]`."""
    return np.random.default_rng(replica).normal(size=(ROWS, COLUMNS))


def weight_of(replica, shape):
    """What a replica multiplies a result by, for its loss."""
    return np.random.default_rng(100 + replica).normal(size=shape)


def part(value, axis, rank, size):
    length = value.shape[axis]
    low, high = length * rank // size, length * (rank + 1) // size
    return np.take(value, range(low, high), axis)


def dealt_to(values, rank, cut):
    """What a member gets, of members that have parts of the other axis."""
    size = len(values)
    pieces = [
        part(part(value, 1 - cut, r, size), cut, rank, size)
        for r, value in enumerate(values)
    ]
    return np.concatenate(pieces, 1 - cut)


def expected(group, member, kind, axis):
    """The result of a member and its gradient, computed by hand."""
    size, rank = len(group), group.index(member)
    values = [value_of(each) for each in group]
    if kind == "all_reduce":
        weights = [weight_of(each, (ROWS, COLUMNS)) for each in group]
        return sum(values), sum(weights)
    if kind == "all_gather":
        parts = [part(value, axis, r, size) for r, value in enumerate(values)]
        weights = [weight_of(each, (ROWS, COLUMNS)) for each in group]
        return np.concatenate(parts, axis), part(sum(weights), axis, rank, size)
    if kind == "all_to_all":
        dealt = [dealt_to(values, r, axis) for r in range(size)]
        weights = [
            weight_of(each, dealt[r].shape) for r, each in enumerate(group)
        ]
        back = np.concatenate(weights, axis)
        return dealt[rank], part(back, 1 - axis, rank, size)
    weights = [
        weight_of(each, part(values[0], axis, r, size).shape)
        for r, each in enumerate(group)
    ]
    return part(sum(values), axis, rank, size), np.concatenate(weights, axis)


KINDS = [
    ("all_reduce", 0),
    ("all_gather", 0),
    ("all_gather", 1),
    ("reduce_scatter", 0),
    ("reduce_scatter", -1),
    ("all_to_all", 0),
    ("all_to_all", 1),
]


def largest_differences(strategy, members, communication="auto"):
    """Compares all operations, repeated in a loop, on this process's replicas.

    Returns:
        For each operation, axis and kind of shape the largest difference of
        results and gradients from what is computed by hand.
    """
    groups = Groups(strategy, members, communication=communication)
    cases = [(*kind, True) for kind in KINDS]
    cases += [(*kind, False) for kind in KINDS if kind[1] == 0]

    @tf.function
    def steps():
        def on_replica():
            return [_on_replica(groups, *case) for case in cases]

        results = strategy.run(on_replica)
        for _ in tf.range(2):
            strategy.run(on_replica)
        return tf.nest.map_structure(
            strategy.experimental_local_results, results
        )

    found = {}
    for (kind, axis, known), seen in zip(cases, steps(), strict=True):
        differences = []
        for place, pair in enumerate(zip(*seen, strict=True)):
            me = groups.first + place
            group = sorted(next(g for g in members if me in g))
            right = expected(group, me, kind, axis)
            for value, should_be in zip(pair, right, strict=True):
                assert value.shape == should_be.shape, (kind, axis)
                differences.append(np.abs(value - should_be).max())
        found[f"{kind} {axis} {known}"] = float(max(differences))
    return found


def _on_replica(groups, kind, axis, known):
    """Returns a result and its gradient."""
    context = tf.distribute.get_replica_context()
    me = int(tf.get_static_value(context.replica_id_in_sync_group))
    own, length = value_of(me), value_of(me).shape[axis]
    if kind == "all_gather":
        own = part(own, axis, groups.rank(), groups.size)
    if kind == "all_to_all":
        own = part(own, 1 - axis, groups.rank(), groups.size)
        length = value_of(me).shape[1 - axis]
    given = tf.constant(own)
    if not known:
        given = tf.compat.v1.placeholder_with_default(given, [None, None])
        length = tf.constant(length)
    shape = (ROWS, COLUMNS)
    with tf.GradientTape() as tape:
        tape.watch(given)
        if kind == "all_reduce":
            result = groups.all_reduce(given)
        elif kind == "all_gather":
            result = groups.all_gather(given, axis, length)
        elif kind == "all_to_all":
            result = groups.all_to_all(given, axis, 1 - axis, length)
            values = [value_of(me)] * groups.size
            shape = dealt_to(values, groups.rank(), axis).shape
        else:
            result = groups.reduce_scatter(given, axis)
            shape = part(value_of(0), axis, groups.rank(), groups.size).shape
        loss = tf.reduce_sum(result * weight_of(me, shape))
    return result, tape.gradient(loss, given)


def one_after_another(strategy, folder):
    """Rows of a 2 x 2 of replicas, columns of it, and all of them."""
    del folder
    return {
        str(members): largest_differences(strategy, members)
        for members in ([[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 1, 2, 3]])
    }


def without_elements(strategy, folder):
    """Tensors that have no element, of known and of unknown shape.

    Returns:
        For each operation and kind of shape the shape of the result and that
        of its gradient.
    """
    del folder
    groups = Groups(strategy, [[0, 1, 2, 3]])

    def on_replica(kind, empty, known):
        shape = [0, COLUMNS] if empty == "rows" else [groups.size, 0]
        if kind in ("all_reduce", "reduce_scatter") and empty == "columns":
            shape = [ROWS, 0]
        given = tf.zeros(shape)
        if not known:
            given = tf.compat.v1.placeholder_with_default(given, [None, None])
        with tf.GradientTape() as tape:
            tape.watch(given)
            if kind == "all_to_all":
                length = shape[1] * groups.size
                result = groups.all_to_all(given, 0, 1, length)
            elif kind == "gather_rows":
                rows = tf.constant([shape[0]] * groups.size)
                with tape.stop_recording():  # It has no gradient.
                    result = groups.gather_rows(given, rows)
                result = result + tf.reduce_sum(given)
            else:
                result = getattr(groups, kind)(given)
            loss = tf.reduce_sum(result)
        return tf.shape(result), tf.shape(tape.gradient(loss, given))

    cases = [
        (kind, empty, known)
        for kind in (
            *("all_reduce", "all_gather", "reduce_scatter", "all_to_all"),
            "gather_rows",
        )
        for empty in ("rows", "columns")
        for known in (True, False)
    ]

    @tf.function
    def step():
        return strategy.run(lambda: [on_replica(*case) for case in cases])

    return {
        " ".join(map(str, case)): [
            shape.numpy().tolist()
            for each in pair
            for shape in strategy.experimental_local_results(each)
        ]
        for case, pair in zip(cases, step(), strict=True)
    }


def a_member_is_missing(strategy, folder):
    """Replicas of one process wait for those of another."""
    del folder
    groups = Groups(strategy, [[0, 1, 2, 3]], timeout_seconds=2)

    @tf.function
    def step():
        return strategy.run(lambda: groups.all_reduce(tf.constant(1.0)))

    if groups.first:
        return "not called"
    try:
        step()
    except tf.errors.OpError as error:
        return type(error).__name__
    return "no error"


JOBS = {
    job.__name__: job
    for job in (one_after_another, without_elements, a_member_is_missing)
}
