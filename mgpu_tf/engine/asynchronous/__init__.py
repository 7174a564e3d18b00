"""Training with parameter servers: workers that do not wait for each other.

    engine = create_engine(model, strategy)           # an AsynchronousEngine
    feed = engine.feed(source, chain=True, training=True)
    run = feed.iterator(epoch=0, limit=100)
    engine.train(run, steps=10, source=source)
    engine.finish(run)

`work` is what is handed out, as row numbers or names of shares; `dispatch`
hands it out, `piece` is what a worker does with it, and `update` applies
gradients on the servers, in the `sections` that one worker is in at a time.
"""
