"""Jobs of a test cluster: steps and loops that their author wrote."""

import os

import keras

import mgpu_tf
from tests.engine import test_overridden_step
from tests.training import test_custom_loop, test_on_batch


def _in_float64(job):
    def run(strategy, folder):
        keras.config.set_floatx("float64")
        keras.config.set_dtype_policy("float64")
        return job(strategy, folder)

    return run


def gan(strategy, folder):
    del folder
    trainer = mgpu_tf.Trainer(test_overridden_step.build_gan, strategy)
    history = trainer.fit(
        *test_overridden_step.arrays((3, 5)), **test_overridden_step.FIT
    ).history
    weights = [weight.tolist() for weight in trainer.model.get_weights()]
    return {"history": history, "weights": weights}


def on_batch(strategy, folder):
    del folder
    trainer = mgpu_tf.Trainer(test_on_batch.build, strategy)
    x, y = test_overridden_step.arrays()
    scores = [trainer.train_on_batch(x[:n], y[:n]) for n in (8, 7)]
    predicted = trainer.predict_on_batch(x[:7]).tolist()
    return {"scores": scores, "predicted": predicted}


def loop(strategy, folder):
    """Goes on from a checkpoint in the middle."""
    saved = os.path.join(folder, "loop")
    own = mgpu_tf.Loop(test_custom_loop.build, strategy)
    logs = []
    for number, batch in enumerate(test_custom_loop.batches()):
        if number == 3:
            own.save(saved, number=number)
            own = mgpu_tf.Loop(test_custom_loop.build, strategy, seed=5)
            assert own.restore(saved) == {"number": number}
        logs.append(own.run(test_custom_loop.d_step, batch))
        logs.append(own.run(test_custom_loop.g_step, batch))
    values = test_custom_loop.values(own.objects)
    return {"logs": logs, "values": [value.tolist() for value in values]}


JOBS = {job.__name__: _in_float64(job) for job in (gan, on_batch, loop)}
