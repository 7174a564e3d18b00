"""Training in step: one sum over all replicas, then the same update on each.

engine           what the trainer talks to
overridden_step  a `train_step` that the author of a model wrote
probe            whether such a step gives a mean over its rows
"""
