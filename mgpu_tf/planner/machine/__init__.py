"""The machines that are here: what they can do, and what fits on them."""
