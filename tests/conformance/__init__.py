"""Programs that Keras's `fit` runs, each held to Keras's numbers.

    python -m tests.conformance.run          (or: make conformance)

A row is a program as a user of Keras writes it. It is run once by Keras alone,
on one device, and once by the `Trainer` in each column; all that it leaves is
compared. See `harness` for what a row is and for the verdicts.
"""
