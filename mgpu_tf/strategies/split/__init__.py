"""Strategies whose devices store parts of a model."""
