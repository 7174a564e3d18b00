"""Checkpoints: the whole state of a run, and where they are kept.

    from mgpu_tf.checkpoints import store

    for entry in store.entries("run/checkpoints"):    # needs no TensorFlow
        print(entry.describe())
    store.prune("run/checkpoints", keep=2)
    newest = store.newest("run/checkpoints")
    state, arrays = store.read(newest.path)

`store` is the folder: names, bytes, what is whole. `saver` decides when to
save and writes in the background. `run_state` holds the position, counts and
generators, `callback_state` what callbacks know, `recovery` what restarts
have cost.
"""
