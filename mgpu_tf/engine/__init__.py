"""The engine: what one execution of training, evaluation, prediction does."""
