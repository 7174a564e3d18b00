"""A language model on 2 workers that have parts of each sequence."""

import keras
import numpy as np

import mgpu_tf
from mgpu_tf.strategies.registry import topology_of
from tests.engine import test_sequence_parallel as cases


def trained(given, folder):
    """Weights after an epoch, where workers compute parts of each layer."""
    del folder
    strategy = mgpu_tf.create_model_parallel_strategy(
        tensor=given.num_replicas_in_sync,
        num_virtual_devices=topology_of(given).local.count,
        sequence_parallel=True,
        smallest_split=4,
    )

    def build():
        keras.utils.set_random_seed(1)
        return cases.language(cases.PostNorm(), cases.Attention())

    trainer = mgpu_tf.Trainer(build, strategy)
    trainer.fit(*cases.data_of(""), batch_size=17, shuffle=False, verbose=0)
    return [np.asarray(w).tolist() for w in trainer.model.get_weights()]


JOBS = {"trained": trained}
