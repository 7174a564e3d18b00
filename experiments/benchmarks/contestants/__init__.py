"""One module for each framework; only the processes import them."""
