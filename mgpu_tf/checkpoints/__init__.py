"""Checkpoints: the whole state of a run, and where they are kept.

from mgpu_tf.checkpoints import store
from mgpu_tf.options import SaveOptions

SaveOptions("run", every_steps=100, keep=3)
for entry in store.entries("run"):        # needs no TensorFlow
    print(entry.describe())

options          when and where to save
store            the folder: names, bytes, what is whole
saver            when a save is due; writes in the background
run_state        position, counts, generators, callbacks
recovery         what restarts have cost
"""
