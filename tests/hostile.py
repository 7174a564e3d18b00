"""Values that no argument is meant to have, and how a call may end with them.

An argument of any kind gets each of them. A call returns, or it raises an
error of this package with one line, or one of Keras itself.
"""

import traceback

import keras
import numpy as np

from mgpu_tf.errors import ConfigurationError, DivergedError

ADDRESSED = "gs://bucket/a"
VALUES = {
    "None": None,
    "True": True,
    "zero": 0,
    "minus one": -1,
    "huge": 2**70,
    "half": 0.5,
    "nan": float("nan"),
    "infinite": float("-inf"),
    "complex": 1j,
    "empty": "",
    "a word": "a",
    "words": "a, b",
    "zero byte": "a\0b",
    "lone surrogate": "\ud800",
    "home": "~/a",
    "long": "a" * 300,
    "address": ADDRESSED,
    "target": "no_such:function",
    "bytes": b"a",
    "list": [],
    "list of None": [None],
    "list of lists": [[1], [2, 3]],
    "tuple": (1, -2),
    "dict": {},
    "dict of text": {"a": 1},
    "set": {1},
    "range": range(3),
    "function": lambda *_: None,
    "failing": lambda: 1 / 0,
    "class": int,
    "object": object(),
    "array": np.array([1, 2]),
    "array of nothing": np.zeros([0]),
    "scalar": np.float32("nan"),
    "integer": np.int64(-5),
    "objects": np.array([None, "a"], object),
}


def ends_well(error):
    """Whether an error is one that a user may see."""
    if isinstance(error, ConfigurationError | DivergedError):
        lines = str(error).splitlines()
        return len(lines) == 1 and len(lines[0]) < 3000
    if isinstance(error, ZeroDivisionError):
        return True  # Of a function that was given.
    home = keras.__file__.rpartition("/")[0]
    frames = traceback.extract_tb(error.__traceback__)
    within = any(frame.filename.startswith(home) for frame in frames)
    return isinstance(error, ValueError | TypeError | RuntimeError) and within


def tried(call, **arguments):
    """Returns an error that a user must not see, None where all is well."""
    try:
        call(**arguments)
    except Exception as error:
        return None if ends_well(error) else error
    return None
