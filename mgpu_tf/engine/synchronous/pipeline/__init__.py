"""Pipelines: a model's layers in stages, each on a device of its own.

split       which layers a stage has
schedule    in which order a stage computes its micro-batches
step        forward, backward and gradients of a replica
update      new weights, each on the device of its stage
engine      the above in place of the synchronous engine's own
"""
