"""Loops of epochs and steps."""
