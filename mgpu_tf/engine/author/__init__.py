"""What the author of a model writes: state, and values of the examples."""
