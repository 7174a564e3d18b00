"""Replicas that train in step, and what they send each other."""
