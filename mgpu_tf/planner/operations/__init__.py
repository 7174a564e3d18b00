"""The operations of a training step: sizes, costs, what is alive when."""
