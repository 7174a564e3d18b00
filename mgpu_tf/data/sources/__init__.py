"""Where global batches come from: arrays, datasets, Python, rows by number."""
