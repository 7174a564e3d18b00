"""Experiments that compare what the planner predicts with what is measured."""
