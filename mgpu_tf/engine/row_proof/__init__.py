"""Proofs, from a graph, that the rows of a batch do not meet.

    proof = RowProof(graph, rows=[x, y])
    proof.of(tf.square(x - y))                     Rows(axis=0)
    proof.of(tf.reduce_mean(tf.square(x - y)))     MEAN
    proof.of(x / tf.reduce_sum(x))                 UNPROVEN

The operations of a graph are walked once, in the order in which they were
made. Each operation on the list below has a rule, and
`tests/engine/test_row_proof.py` runs each of them on cut and on permuted rows
against what its rule says.
Everything else, and every argument that a rule does not know, is unproven.
Calls, branches and loops of TensorFlow are walked with what goes into them.

    FIXED       depends on no row, and not on the number of rows
    Rows(a)     axis a is that of the rows; each row is made of its own alone
    Sizes       numbers of rows, and lengths of other axes, as of `tf.shape`
    Spread      rows in parts, each apart, within a dilated convolution alone
    SUM         a sum over the rows: sums of cuts add up to it
    MEAN        a mean over the rows: its cuts weigh as many as they have rows
    LARGEST     the largest of the rows, element by element; and SMALLEST
    Held(k)     what a variable held, plus something of kind k, or the larger
                of it and a LARGEST
    OTHERS      made of the rows of another replica
    UNPROVEN    anything else
"""

from mgpu_tf.engine.row_proof.kinds import (
    FIXED,
    LARGEST,
    MEAN,
    NOTHING,
    OTHERS,
    SMALLEST,
    SUM,
    UNPROVEN,
    Held,
    Kind,
    Rows,
    Sizes,
)
from mgpu_tf.engine.row_proof.operations import Operations
from mgpu_tf.engine.row_proof.proof import (
    RowProof,
    active,
    axis_of_rows,
    given_gradients,
    leave_others,
    note,
    note_drawn,
    note_same,
    noting,
    proving,
    recorded,
)
from mgpu_tf.engine.row_proof.rules import (
    ELEMENTWISE,
    as_fixed,
    proven_operations,
)
from mgpu_tf.engine.row_proof.sums import SumProof
from mgpu_tf.engine.row_proof.writes import acts, functions_of, taken, written

__all__ = [
    "ELEMENTWISE",
    "FIXED",
    "LARGEST",
    "MEAN",
    "NOTHING",
    "OTHERS",
    "SMALLEST",
    "SUM",
    "UNPROVEN",
    "Held",
    "Kind",
    "Operations",
    "RowProof",
    "Rows",
    "Sizes",
    "SumProof",
    "active",
    "acts",
    "as_fixed",
    "axis_of_rows",
    "functions_of",
    "given_gradients",
    "leave_others",
    "note",
    "note_drawn",
    "note_same",
    "noting",
    "proven_operations",
    "proving",
    "recorded",
    "taken",
    "written",
]
