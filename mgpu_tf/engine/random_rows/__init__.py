"""Random numbers of a replica: its rows of what one device would draw.

    with rows_of_global_draws(low, local, total, data):       # on a replica
        keras.random.dropout(x, 0.5, seed=generator)   rows [low, low + local)
        keras.random.uniform((4, 4), seed=generator)   the same on all replicas

A draw has rows if a dimension of its shape follows from the number of rows of
`data`, which TensorFlow's own shape inference proves (`dimensions.py`). Its
numbers are those of the rows in a draw for the whole batch, bit for bit
(`draws.py`). The way in is the seed: inside of the scope, generators give one
of a type that TensorFlow's random functions dispatch on (`seeds.py`).
"""

from mgpu_tf.engine.random_rows.scope import (
    DrawnRows,
    RowScope,
    current_scope,
    draws_by_own_state,
    entered_again,
    rows_of_global_draws,
    warn_of_own_state,
    warned,
)
from mgpu_tf.engine.random_rows.seeds import seed_for_rows

__all__ = [
    "DrawnRows",
    "RowScope",
    "current_scope",
    "draws_by_own_state",
    "entered_again",
    "rows_of_global_draws",
    "seed_for_rows",
    "warn_of_own_state",
    "warned",
]
