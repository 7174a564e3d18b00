"""Jobs of a test cluster: steps and loops that their author wrote."""

import os

import keras

import mgpu_tf
from tests import test_author, test_custom_training, test_on_batch


def _in_float64(job):
    def run(strategy, folder):
        keras.config.set_floatx("float64")
        keras.config.set_dtype_policy("float64")
        return job(strategy, folder)

    return run


def gan(strategy, folder):
    del folder
    trainer = mgpu_tf.Trainer(test_author.build_gan, strategy)
    history = trainer.fit(
        *test_author.arrays((3, 5)), **test_author.FIT
    ).history
    weights = [weight.tolist() for weight in trainer.model.get_weights()]
    return {"history": history, "weights": weights}


def on_batch(strategy, folder):
    del folder
    trainer = mgpu_tf.Trainer(test_on_batch.build, strategy)
    x, y = test_author.arrays()
    scores = [trainer.train_on_batch(x[:n], y[:n]) for n in (8, 7)]
    predicted = trainer.predict_on_batch(x[:7]).tolist()
    return {"scores": scores, "predicted": predicted}


def loop(strategy, folder):
    """Goes on from a checkpoint in the middle."""
    saved = os.path.join(folder, "loop")
    own = mgpu_tf.Loop(test_custom_training.build, strategy)
    logs = []
    for number, batch in enumerate(test_custom_training.batches()):
        if number == 3:
            own.save(saved, number=number)
            own = mgpu_tf.Loop(test_custom_training.build, strategy, seed=5)
            assert own.restore(saved) == {"number": number}
        logs.append(own.run(test_custom_training.d_step, batch))
        logs.append(own.run(test_custom_training.g_step, batch))
    values = test_custom_training.values(own.objects)
    return {"logs": logs, "values": [value.tolist() for value in values]}


JOBS = {job.__name__: _in_float64(job) for job in (gan, on_batch, loop)}
