"""Starts processes with a `TF_CONFIG` each and nothing else.

    python -m experiments.benchmarks.bare_launch 2 -m some.module

What a launcher is measured against: no supervision, no limit, no output of
its own.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys


def main() -> int:
    count, arguments = int(sys.argv[1]), sys.argv[2:]
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in held]
    for one in held:
        one.close()
    children = []
    for index in range(count):
        task = {"type": "worker", "index": index}
        config = {"cluster": {"worker": addresses}, "task": task}
        environment = os.environ | {"TF_CONFIG": json.dumps(config)}
        command = [sys.executable, *arguments]
        children.append(subprocess.Popen(command, env=environment))
    return max(child.wait() for child in children)


if __name__ == "__main__":
    sys.exit(main())
