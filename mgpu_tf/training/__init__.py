"""`Trainer`, the loops under it, and what they check and tell.

trainer = mgpu_tf.Trainer(build_model, mgpu_tf.create_strategy())
trainer.fit(x, y, batch_size=64, epochs=5, checkpoint_dir="run")

trainer             what users call
loop                epochs and steps over an engine
custom_loop         `Loop`: steps that the user writes
distributed_model   a model in a strategy's scope, and its engine
call_arguments      the rules of what `fit` and the others take
"""
