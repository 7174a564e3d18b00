"""Faults inside of a task: what a system answers on a bad day.

    write("run", read=2)       # each file of a checkpoint fails to open twice
    write("run", unreadable=1) # ... and each time
    write("run", readonly=1)   # nothing can be made or renamed
    write("run", clock=-3600)  # the clock of the wall is an hour late
    clear("run")

Tasks that have called `install("run")` obey at once. The functions of Python's
`os` and `time` are replaced in the task, so the package's own code sees what
it would see of a kernel.
"""

import contextlib
import errno
import json
import os
import time

_FILE = "faults.json"


def write(folder, **faults):
    path = os.path.join(folder, _FILE)
    with open(path + ".new", "w", encoding="utf-8") as file:
        json.dump(faults, file)
    os.replace(path + ".new", path)


def clear(folder):
    with contextlib.suppress(FileNotFoundError):
        os.remove(os.path.join(folder, _FILE))


def install(folder, checkpoints):
    """Lets this process obey.

    Args:
        folder: Where the faults are written.
        checkpoints: The folder whose files are concerned.
    """
    wanted = os.path.join(folder, _FILE)
    opened, renamed, replaced = os.open, os.rename, os.replace
    made, now = os.mkdir, time.time
    failures = {}
    checkpoints = os.path.join(checkpoints, "")

    def faults():
        try:
            descriptor = opened(wanted, os.O_RDONLY)
        except FileNotFoundError:
            return {}
        with open(descriptor, encoding="utf-8") as file:
            return json.load(file)

    def fail(code, path):
        raise OSError(code, os.strerror(code), path)

    def check_write(path):
        if os.fspath(path).startswith(checkpoints) and faults().get("readonly"):
            fail(errno.EROFS, path)

    def injected_open(path, flags, *more, **options):
        text = os.fspath(path)
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if isinstance(text, str) and text.startswith(checkpoints):
            if writes:
                check_write(path)
            elif f"{os.sep}step-" in text:
                told = faults()
                tried = failures[text] = failures.get(text, 0) + 1
                if told.get("unreadable") or tried <= told.get("read", 0):
                    fail(errno.EIO, path)
        return opened(path, flags, *more, **options)

    def checked(function):
        def injected(path, *more, **options):
            check_write(path)
            return function(path, *more, **options)

        return injected

    os.open = injected_open
    os.rename, os.replace = checked(renamed), checked(replaced)
    os.mkdir = checked(made)
    time.time = lambda: now() + faults().get("clock", 0)
