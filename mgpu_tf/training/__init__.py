"""`Trainer` and `Loop`, the loops under them, and what they check and print.

    import mgpu_tf

    trainer = mgpu_tf.Trainer(build_model, mgpu_tf.create_strategy())
    trainer.fit(x, y, batch_size=64, epochs=5, checkpoint_dir="run")
    trainer.evaluate(x_test, y_test)
    trainer.goodput, trainer.recovery

`trainer` and `custom_loop` are what users call. `loop` runs epochs and steps
over an engine, `distributed_model` is a model in a strategy's scope with its
engine. `call_arguments` has the rules of what `fit` and the others take,
`agreement` what workers compare, `data_errors` the one line for data that does
not fit.
"""
