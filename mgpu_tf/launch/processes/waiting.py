"""A process that has imported TensorFlow, and waits to be a task.

    python waiting.py script.py --epochs=5
    python waiting.py -m package.module --epochs=5

It imports what every task imports. Then it reads one line from its input: the
environment variables of a task, as JSON. With these it runs the script, as
Python does that is started with it. It ends when its input does.

It is run by its path, so that no module of the current folder stands for one
of Python's.
"""

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # The folder of this file, which no task has.

import importlib
import json
import os
import runpy


def main() -> None:
    """Imports, waits, and runs what the arguments name."""
    words = sys.argv[1:]
    is_module = words[0] == "-m"
    if not sys.flags.safe_path:
        script = os.path.realpath(words[0])
        sys.path.insert(
            0, os.getcwd() if is_module else os.path.dirname(script)
        )
    _import_all()
    line = sys.stdin.buffer.readline()
    if not line:
        return
    os.environ.update(json.loads(line))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    if is_module:
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


def _import_all() -> None:
    """Imports what a training imports; no device is touched."""
    from mgpu_tf.runtime.quiet_import import import_tensorflow

    import_tensorflow()
    # As the script will do that runs in this process: by name, since the
    # rooms of this package do not import those below them.
    package = importlib.import_module("mgpu_tf")
    _ = package.Trainer  # Is imported when it is asked for.


if __name__ == "__main__":
    main()
