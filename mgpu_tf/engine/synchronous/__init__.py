"""Training in step: one sum over all replicas, then the same update on each.

    engine = create_engine(model, strategy)           # a SynchronousEngine
    engine.prepare(source)
    feed = engine.feed(source, chain=True, training=True)
    done = engine.train(feed.iterator(epoch=0), steps=10, source=source)
    done.logs, done.examples

`overridden_step` runs a `train_step` that the author of a model wrote; `probe`
checks, by a `rehearsal` of it, whether it gives a mean over its rows.
"""
