"""What a test may leave set for the whole process."""

import logging


def clear():
    """Puts it back.

    A run with checkpoints makes operations repeat bit for bit, and TensorFlow
    then draws nothing without a seed. A seed that Keras was given is that of
    later trainers. The `train` command leaves lines of other tasks out.
    """
    logging.getLogger("mgpu_tf").filters.clear()
    from keras.src.backend.common import global_state
    from keras.src.utils import rng_utils
    from tensorflow.python.framework import config

    config.disable_op_determinism()
    global_state.set_global_attribute(rng_utils.GLOBAL_RANDOM_SEED, None)
