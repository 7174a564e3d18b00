"""What replicas send each other: rows, weights, gradients, and their sums."""
