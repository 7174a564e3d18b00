"""Checkpoints: the whole state of a run, and where they are kept.

    from mgpu_tf.checkpoints import reading, store

    for entry in store.entries("run/checkpoints"):    # needs no TensorFlow
        print(entry.describe())
    store.prune("run/checkpoints", keep=2)
    newest = store.newest("run/checkpoints")
    stored = reading.Stored(newest.path)

`store` is the folder: what is there, what is whole. `parts` writes, `manifest`
is the format, `reading` separates what is damaged from what cannot be read,
`registry` is what has become of each, and `keeping` says which stay. All of
them go through `storage`: a folder of a `disk`, or `objects`. `saver` decides
when to save and writes in the background. `run_state` holds the position,
counts and generators, `callback_state` what callbacks know, `recovery` what
restarts have cost.
"""
