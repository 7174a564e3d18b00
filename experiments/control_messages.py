"""What hundreds of workers tell each other outside of their steps.

    python experiments/control_messages.py [--tasks=16,64,256]

Each task is a thread with its own connection to a real coordination service of
TensorFlow, and runs the package's own code: the agreement before a training,
and the choice of shares after an epoch. Every request that it sends is counted
with its bytes. Hardware: any; expected on 2 CPU cores: half a minute. No
training runs, and no TensorFlow in the tasks: 256 of them would not fit. Not
counted: the one message that a task sends of a place that it waits in for
longer than a second or two.
"""

import argparse
import contextlib
import json
import multiprocessing
import socket
import threading
import time

import grpc

from mgpu_tf.strategies import messages, peers

_METHOD = "/tensorflow.CoordinationService/"
_LIMIT_SECONDS = 300


def serve(port, ready, done):
    """A coordination service, in a process of its own."""
    import tensorflow as tf
    from tensorflow.python.eager import context

    context.context().configure_coordination_service(
        service_type="standalone", service_leader="/job:worker/replica:0/task:0"
    )
    cluster = tf.train.ClusterSpec({"worker": [f"127.0.0.1:{port}"]})
    context.context().enable_collective_ops(
        tf.train.ServerDef(
            cluster=cluster.as_cluster_def(),
            job_name="worker",
            task_index=0,
            protocol="grpc",
            # It has the coordination service.
            default_session_config=context.context().config,
        )
    )
    context.context().ensure_initialized()
    ready.set()
    done.wait()


def field(number, content):
    """A field of a message: text, or a message."""
    data = content.encode() if isinstance(content, str) else content
    size, length = len(data), b""
    while size > 127:
        length += bytes([size & 127 | 128])
        size >>= 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + data


def text_of(message, *path):
    """The text at a path of fields of a message."""
    for number in path:
        at = 0
        while at < len(message):
            key, at = message[at], at + 1
            size = shift = 0
            while True:
                byte, at = message[at], at + 1
                size |= (byte & 127) << shift
                shift += 7
                if byte < 128:
                    break
            if key >> 3 == number:
                break
            at += size
        message = message[at : at + size]
    return message.decode()


class Unwatched:
    """In the place of `messages.Watch`: nobody is told of long waits."""

    def inside(self, key, text):
        return contextlib.nullcontext()


class Task(threading.local):
    """What a thread sends, and what it has counted."""

    def __init__(self):
        self.calls, self.requests, self.bytes = [], 0, 0
        self.channel, self.watch = None, Unwatched()

    def connect(self, port, number):
        options = [("grpc.use_local_subchannel_pool", 1)]
        self.channel = grpc.insecure_channel(f"127.0.0.1:{port}", options)
        self.call = peers.Call(number, "fit")
        self.calls = [self.call]

    def send(self, name, message, seconds):
        answer = self.channel.unary_unary(_METHOD + name)(
            message, timeout=seconds
        )
        self.requests += 1
        self.bytes += len(message) + len(answer)
        return answer

    def put(self, key, text):
        entry = field(1, key) + field(2, text)
        self.send("InsertKeyValue", field(1, entry), _LIMIT_SECONDS)
        return True

    def take(self, key, milliseconds):
        if milliseconds < 1000:
            return None  # Looks for failures; there are none here.
        try:
            answer = self.send("GetKeyValue", field(1, key), _LIMIT_SECONDS)
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
            return None
        return text_of(answer, 1, 2)


FACTS = {
    "data's content or order": "a" * 64,
    "data's length": "60000 examples in batches of 4096",
    "data's shapes and types": "((None, 224, 224, 3), float32)",
    "epochs": "90",
}


def work(task, index, tasks, port, barrier, found):
    """A task: agrees before a training, and on shares after an epoch."""
    task.connect(port, tasks)
    mine = object.__new__(peers.Peers)
    mine._worker, mine._workers = index, tasks
    rows = {}
    for name, act in (
        ("agreement", lambda: mine._meet(task.call, FACTS)),
        ("shares", lambda: mine.of_all(1000.0 + index)),
    ):
        barrier.wait(_LIMIT_SECONDS)
        task.requests = task.bytes = 0
        started = time.perf_counter()
        value = act()
        seconds = time.perf_counter() - started
        rows[name] = (task.requests, task.bytes, seconds, value)
    task.channel.close()
    found[index] = rows


def measure(tasks, port):
    """Runs tasks to their end; returns for each what it has counted."""
    task, found = Task(), {}
    barrier = threading.Barrier(tasks)
    messages.put, messages.take, peers._HERE = task.put, task.take, task
    threads = [
        threading.Thread(
            target=work, args=(task, index, tasks, port, barrier, found)
        )
        for index in range(tasks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(found) < tasks:
        raise SystemExit(f"{tasks - len(found)} tasks have failed.")
    return [found[index] for index in range(tasks)]


def rows_of(found):
    """Requests and bytes of the first task, of any other, and in all."""
    rows = {}
    for name in found[0]:
        counts = [each[name] for each in found]
        others = counts[1:]
        rows[name] = {
            "first_requests": counts[0][0],
            "other_requests": max(c[0] for c in others),
            "first_bytes": counts[0][1],
            "other_bytes": max(c[1] for c in others),
            "service_requests": sum(c[0] for c in counts),
            "service_bytes": sum(c[1] for c in counts),
            "seconds": max(c[2] for c in counts),
            "agree": all(
                c[3] == counts[0][3] or not counts[0][3] for c in counts
            ),
        }
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", default="16,64,256")
    arguments = parser.parse_args()
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    ready, done = context.Event(), context.Event()
    server = context.Process(target=serve, args=(port, ready, done))
    server.start()
    try:
        if not ready.wait(_LIMIT_SECONDS):
            raise SystemExit("The coordination service did not start.")
        for tasks in map(int, arguments.tasks.split(",")):
            for name, row in rows_of(measure(tasks, port)).items():
                print(json.dumps({"tasks": tasks, "what": name} | row))
    finally:
        done.set()
        server.join(30)
        server.kill()


if __name__ == "__main__":
    main()
