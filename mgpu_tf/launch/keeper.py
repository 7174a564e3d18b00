"""A process on another machine that keeps a task, and ends it in time.

    python3 -c CODE < requests

The first line of its input is what to start, from `request`. Each line after
it is the number of a signal for the task; 0 says that the launcher lives. When
the input ends, or says nothing for a minute, the task and all in its group are
killed. So nothing outlives a launcher that was killed, or a connection that
was cut. The keeper ends as the task does; 128 + signal for one that a signal
has ended.

The code needs Python 3.6 and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from mgpu_tf.errors import ConfigurationError

# How often a launcher says that it lives, and what the keeper waits for.
ALIVE_SECONDS = 10.0
SILENT_SECONDS = 60.0

ALIVE = b"0\n"

CODE = """
import json, os, select, signal, subprocess, sys, threading
asked = json.loads(sys.stdin.buffer.raw.readline().decode())
def refuse(error, what):
    sys.exit("mgpu-tf: %s on this machine: %s" % (error.strerror, what))
try:
    if asked["folder"]:
        os.chdir(asked["folder"])
except OSError as error:
    refuse(error, asked["folder"])
try:
    task = subprocess.Popen(
        asked["command"],
        env=dict(os.environ, **asked["environment"]),
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
except OSError as error:
    refuse(error, asked["command"][0])
def send(number):
    try:
        os.killpg(task.pid, number)
    except OSError:
        pass
def obey():
    rest = b""
    while select.select([0], [], [], asked["silent_seconds"])[0]:
        read = os.read(0, 4096)
        if not read:
            break
        *lines, rest = (rest + read).split(b"\\n")
        for line in lines:
            send(int(line))
    send(signal.SIGKILL)
threading.Thread(target=obey, daemon=True).start()
code = task.wait()
if code:
    send(signal.SIGKILL)
sys.stdout.flush()
os._exit(128 - code if code < 0 else code)
"""


def request(
    command: Sequence[str],
    environment: Mapping[str, str],
    folder: str | None,
) -> bytes:
    """Returns the first line for a keeper.

    Args:
        command: The program and its arguments.
        environment: What is added to the environment of the machine.
        folder: Where the program runs, None for where the keeper is.

    Raises:
        ConfigurationError: The command is no text in UTF-8.
    """
    asked = {
        "command": list(command),
        "environment": dict(environment),
        "folder": folder,
        "silent_seconds": SILENT_SECONDS,
    }
    try:
        return json.dumps(asked, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:
        raise ConfigurationError(
            f"A command must be text in UTF-8. Received: {list(command)!r}. "
            "Rename the file, or change the argument."
        ) from None


def signal_line(number: int) -> bytes:
    """Returns the line that sends a signal to the task."""
    return b"%d\n" % number
