"""The time that a step takes."""
