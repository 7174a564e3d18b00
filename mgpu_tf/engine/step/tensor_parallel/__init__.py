"""Layers that are computed in parts, one on each device of the tensor axis.

    linear.py      what the dimensions of a kernel do
    alike.py       which operations treat parts alike
    structure.py   which activations may stay split between layers
    sequence.py    which may be parts of a sequence
    lengths.py     after which ones code asks for a length
    plan.py        which layers are computed in parts, and how
    forms.py       how a layer computes with parts of its weights
    parts.py       all of it in place, while a step is traced

A layer with column-split weights computes some of its outputs, one with
row-split weights a part of all of them, which is then summed:

    x -> column -> h, a part on each device -> row -> sum -> y

Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models
Using Model Parallelism", 2019. Krizhevsky, "One weird trick for parallelizing
convolutional neural networks", 2014.
"""
