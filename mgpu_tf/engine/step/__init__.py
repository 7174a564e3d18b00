"""A step as engines trace it: calls, losses, gradients, update."""
