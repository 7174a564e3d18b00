"""What the workers of a cluster send each other outside their steps.

    peers = Peers(strategy)
    with peers.together("Trainer"):            # one fails, all end with it
        with peers.same_variables():           # the model, while it is built
            model = build_model()
        peers.compare({"epochs": "3"})         # what must be the same
        peers.any(stop)                        # a decision of one for all

Facts and failures go through the cluster's coordination service, decisions
are a collective. With one process nothing is sent.

A failure belongs to the call that it happens in. Workers meet before the
first collective of a call, and each reports to the first one whether it goes
on; so where one refuses its arguments all do, and the next call works. Later in
a call the workers that fail wait for the others to fail too, as they do where
all meet the same mistake. If they do not, they wait in a collective that
cannot end, and TensorFlow can only end all collectives of the cluster, for
good: then one line says so, in this call and in every later one.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import itertools
import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from mgpu_tf.cluster import heartbeat
from mgpu_tf.errors import ConfigurationError, WorkerError
from mgpu_tf.strategies import messages
from mgpu_tf.strategies.calls import (
    Call,
    comes_from,
    crossed,
    described,
    ended,
    error_of,
    is_abort,
    mistake_behind,
    unheard,
)
from mgpu_tf.strategies.registry import topology_of
from mgpu_tf.strategies.replicas.own_gradient import sum_over_replicas

# How long one look for a message waits before failures are looked for.
_LOOK_MILLISECONDS = 2000
# How long who fails waits for the others to do so before it ends the cluster.
_PATIENCE_SECONDS = 10.0
_LOST = "mgpu_tf/lost"
# Put by the first worker whose program has come to its end.
_LEFT = "mgpu_tf/left"


class _Here:
    """What a process knows of its calls, whatever strategy they are with.

    Attributes:
        numbers: Of its calls, which all workers make alike.
        calls: Those that it is in, the outermost first.
        watch: Reports what it waits in, while it is in a call.
        lost: The call that the cluster has ended in, and why.
        parted: Whether the others know, or were waited for.
        leaves: Whether the others get a message that this program ends.
    """

    def __init__(self) -> None:
        self.numbers = itertools.count()
        self.calls: list[Call] = []
        self.watch: messages.Watch | None = None
        self.lost: tuple[int, str] | None = None
        self.parted = False
        self.leaves = False


_HERE = _Here()


class Peers:
    """The other workers of a synchronous strategy.

    Args:
        strategy: The strategy; every process of it makes this object.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        local = topology_of(strategy).local
        self._strategy = strategy
        self._worker = local.process
        self._workers = local.num_processes
        # A callback may call again, in the same thread.
        self._one_thread = threading.RLock()
        self._sum = tf.function(self._sum_over_replicas, autograph=False)
        self._merge = tf.function(self._sum_over_workers, autograph=False)
        if not self.alone and not _HERE.leaves:
            _HERE.leaves = True
            atexit.register(_leave, self._worker, self._workers)

    @property
    def alone(self) -> bool:
        """Returns whether there is no other process."""
        return self._workers == 1

    @property
    def worker(self) -> int:
        """Returns the number of this process, from 0."""
        return self._worker

    @property
    def num_workers(self) -> int:
        """Returns how many processes there are."""
        return self._workers

    def token(self) -> str:
        """Returns a new word that all workers share, and nobody else."""
        return str(self.of_all(uuid.uuid4().hex[:12])[0])

    # Calls.

    @contextlib.contextmanager
    def together(self, name: str) -> Iterator[None]:
        """Ends all workers with the first exception that one of them has.

        Args:
            name: What is called.

        Raises:
            ConfigurationError: Another worker had one.
            WorkerError: Another worker failed in another way, now or in an
                earlier call that no worker could go on from.
        """
        if not self._one_thread.acquire(blocking=False):
            raise ConfigurationError(
                "A trainer takes one call at a time. "
                f"Received: {name} while another thread is in a call of the "
                "same trainer. Wait for it, or make another trainer."
            )
        try:
            with heartbeat.call(name):
                if self.alone:
                    yield
                    return
                with self._in_call(name):
                    yield
        finally:
            self._one_thread.release()

    @contextlib.contextmanager
    def _in_call(self, name: str) -> Iterator[None]:
        if _HERE.lost is not None:
            raise WorkerError(ended(_HERE.lost[1]))
        call = Call(next(_HERE.numbers), name)
        outermost = not _HERE.calls
        if outermost:
            _HERE.watch = messages.Watch()
        _HERE.calls.append(call)
        try:
            yield
        except Exception as error:
            # Nobody may answer: a task that is cut off is ended from outside.
            with heartbeat.at(heartbeat.AGREE):
                self._fail(call, error)
        finally:
            _HERE.calls.pop()
            if outermost and _HERE.watch is not None:
                _HERE.watch.end()
                _HERE.watch = None

    @contextlib.contextmanager
    def inside(
        self, kind: str = "call", text: str | None = None
    ) -> Iterator[None]:
        """Marks what all workers have to take part in.

        Args:
            kind: What must be the same on all workers.
            text: What it is here; that the call goes on by default.
        """
        if self.alone or not _HERE.calls or _HERE.watch is None:
            yield
            return
        call = _HERE.calls[-1]
        call.sections += 1
        with self._waiting(call.key("waits", call.sections), kind, text):
            yield

    # Facts.

    def compare(self, facts: Mapping[str, str] | None = None) -> None:
        """Checks that all workers make the same call with the same facts.

        However many the facts are, a worker sends one short message and gets
        one; all of them are sent where they differ.

        Args:
            facts: By name, what must be the same everywhere.

        Raises:
            ConfigurationError: A worker differs, or has refused the call.
        """
        if self.alone:
            return
        call = _HERE.calls[-1]
        facts = {"call": call.name, **(facts or {})}
        place = call.rounds
        with heartbeat.at(heartbeat.AGREE):
            verdict = self._meet(call, facts)
        if "failure" in verdict:
            call.agreed = True
            raise error_of(*verdict["failure"])
        if "differs" not in verdict:
            return
        if verdict["differs"] == self._worker:
            first = messages.unpacked(verdict["facts"])
            message = self._difference(first, facts)
            messages.put(call.key(place, "difference"), message)
        else:
            message = self._wait(call.key(place, "difference"))
        call.agreed = True
        raise ConfigurationError(message)

    @contextlib.contextmanager
    def same_variables(self) -> Iterator[None]:
        """Checks that all workers make the same variables in this block.

        Each is sent from the first worker to the others, which TensorFlow
        refuses where shapes differ; a worker that makes more of them waits.
        What differs is found from the lists that are compared at the end.
        """
        if self.alone:
            yield
            return
        made: list[str] = []

        def creator(make: Callable[..., Any], **options: Any) -> Any:
            initial = options["initial_value"]

            def noted() -> Any:
                value = initial() if callable(initial) else initial
                shape = list(np.shape(value))
                made.append(f"{options.get('name')} of shape {shape}")
                return value

            kind = _variable(len(made))
            text = f"another one, {options.get('name')},"
            with self.inside(kind, text):
                return make(**options | {"initial_value": noted})

        try:
            with tf.variable_creator_scope(creator):
                yield
        except Exception as error:
            if is_abort(error):
                _HERE.calls[-1].apart = True
                # Some workers may not have seen that shapes differ.
                messages.end_collectives(str(error))
                self._compare_made(made)
            raise
        self._compare_made(made)

    @contextlib.contextmanager
    def reading(self, what: str) -> Iterator[None]:
        """Lets all workers read together what they hold parts of.

        Args:
            what: What is read, the same on all workers.

        Raises:
            ConfigurationError: Another worker does something else.
        """
        if not _HERE.calls:
            with self.together("reading a split weight"), self.reading(what):
                yield
            return
        self.compare({"reading of": what})
        with self.inside():
            yield

    def of_first(self, value: int) -> int:
        """Returns the value that worker 0 has given."""
        if self.alone:
            return value
        call = _HERE.calls[-1]
        key = call.key(call.rounds, "value")
        call.rounds += 1
        if self._worker == 0:
            messages.put(key, str(value))
            return value
        return int(self._wait(key))

    def of_all(self, value: Any) -> list[Any]:
        """Returns the values that the workers have given, in their order.

        The first worker collects them, and sends all of them to the others.

        Args:
            value: What JSON can hold.
        """
        if self.alone:
            return [value]
        call = _HERE.calls[-1]
        place = f"{call.rounds} value"
        call.rounds += 1
        whole = call.key(place, "all")
        if self._worker:
            messages.put(call.key(place, self._worker), messages.packed(value))
            return list(messages.unpacked(self._wait(whole)))
        others = [
            messages.unpacked(self._wait(call.key(place, worker)))
            for worker in range(1, self._workers)
        ]
        messages.put(whole, messages.packed([value, *others]))
        return [value, *others]

    def bytes_of_all(self, data: bytes) -> list[bytes]:
        """Returns the bytes that the workers have given, in their order.

        They go through a collective: for what is too large for `of_all`. All
        of them are in memory at once.

        Args:
            data: Of any length, another on each worker.
        """
        if self.alone:
            return [data]
        sizes = np.zeros(_words(self._workers), np.int64)
        sizes[self._worker] = len(data)
        with self.inside(), heartbeat.at(heartbeat.COLLECTIVE):
            sizes = self._merge(tf.constant(sizes)).numpy()[: self._workers]
            words = -(-sizes // 8)
            ends = np.cumsum(words)
            merged = np.zeros(_words(int(ends[-1])), np.int64)
            begins = 8 * (ends - words)
            mine = merged.view(np.uint8)[begins[self._worker] :][: len(data)]
            mine[:] = np.frombuffer(data, np.uint8)
            found = self._merge(tf.constant(merged)).numpy().view(np.uint8)
        return [
            found[begin : begin + size].tobytes()
            for begin, size in zip(begins, sizes, strict=True)
        ]

    def any(self, flag: bool) -> bool:
        """Returns whether a flag is set on any worker."""
        if self.alone:
            return flag
        with self.inside(), heartbeat.at(heartbeat.COLLECTIVE):
            return float(self._sum(tf.constant(float(flag)))) > 0

    def _compare_made(self, made: list[str]) -> None:
        self.compare({_variable(i): text for i, text in enumerate(made)})

    def _meet(self, call: Call, facts: Mapping[str, str]) -> dict[str, Any]:
        """Returns what the first worker says of the facts of all."""
        place = call.rounds
        call.rounds += 1
        mine = {"digest": _digest(facts)}
        if self._worker:
            messages.put(call.key(place, self._worker), json.dumps(mine))
            return dict(json.loads(self._wait(call.key(place, "verdict"))))
        verdict: dict[str, Any] = {}
        for worker in range(1, self._workers):
            theirs = json.loads(self._wait(call.key(place, worker)))
            if "failure" in theirs:
                verdict = theirs
                break
            if theirs != mine and not verdict:
                verdict["differs"] = worker
                verdict["facts"] = messages.packed(dict(facts))
        messages.put(call.key(place, "verdict"), json.dumps(verdict))
        return verdict

    @contextlib.contextmanager
    def _waiting(self, key: str, kind: str, text: str | None) -> Iterator[None]:
        """Lets the others know under a key what this worker waits in."""
        assert _HERE.watch is not None
        text = text or f"the next step of {_HERE.calls[-1].name}"
        waiting = json.dumps((self._worker, kind, text))
        with _HERE.watch.inside(key, waiting):
            yield

    def _wait(self, key: str) -> str:
        """Returns a message that another worker will send.

        Raises:
            ConfigurationError: It has failed in this call, or waits for this
                worker in another place.
        """
        call = _HERE.calls[-1]
        with self._waiting(call.key("meets", call.rounds), "call", None):
            return self._taken(key)

    def _taken(self, key: str) -> str:
        """Returns a message once it is there; see `_wait`."""
        text = None
        while text is None:
            text = messages.take(key, _LOOK_MILLISECONDS)
            if text is not None:
                break
            left = messages.take(_LEFT, 50)
            try:
                text = self._looked_around(key)
                # It announced a failure, and sent its messages, before it left.
                if text is None and left is not None:
                    text = messages.take(key, 50)
            except tf.errors.UnavailableError:
                # The first worker may take the messages with it.
                if left is None:
                    raise
            if text is None and left is not None:
                self._deserted(int(left))
        return text

    def _looked_around(self, key: str) -> str | None:
        """Looks whether the others have failed, or are in another place.

        Returns:
            The message, if it has come meanwhile.
        """
        for call in _HERE.calls:
            failure = self._failure_of_others(call, 50)
            if failure is not None:
                raise failure
            # What this worker would come to next, while another is in it.
            for place in (
                call.key("waits", call.sections + 1),
                call.key("meets", call.rounds + 1),
            ):
                waits = messages.take(place, 50)
                if waits is not None:
                    # It sent its messages before it went on.
                    text = messages.take(key, 50)
                    if text is not None:
                        return text
                    self._part(call, *json.loads(waits))
        return None

    def _deserted(self, worker: int) -> NoReturn:
        """Refuses a call that a worker that has ended cannot make."""
        call = _HERE.calls[-1]
        call.agreed = True
        raise ConfigurationError(
            f"Every worker must make the same calls. Received: {call.name} on "
            f"worker {self._worker}, the end of the program on worker "
            f"{worker}. Call {call.name} on every worker, not on the chief "
            "alone."
        )

    def _part(
        self, waiting: Call, worker: int, kind: str, text: str
    ) -> NoReturn:
        """Refuses what this worker does while another waits elsewhere."""
        call = _HERE.calls[-1]
        for each in _HERE.calls:
            each.apart = True
        mine = "none" if call is waiting else f"{call.name} of its own"
        remedy = _SAME_START
        if call is not waiting:
            remedy = f"Call {call.name} on every worker, in callbacks too."
        raise ConfigurationError(
            _same(kind, {self._worker: mine, worker: text}, remedy)
        )

    def _difference(self, first: dict[str, str], mine: dict[str, str]) -> str:
        """Returns what is said about the first fact that differs."""
        name = next(
            name
            for name in (*mine, *first)
            if first.get(name) != mine.get(name)
        )
        received = {0: first.get(name, "none")}
        received[self._worker] = mine.get(name, "none")
        return _same(name, received, _REMEDIES.get(name, _SAME_START))

    # Failures.

    def _fail(self, call: Call, error: Exception) -> NoReturn:
        """Raises what this worker or another one has failed with."""
        mistake = mistake_behind(error)
        mistake = mistake or crossed(self._worker, call.name, error)
        failed = error if mistake is None else mistake
        if mistake is None and comes_from(error, tf.errors.OpError):
            # A worker that ends the others reports why before it does so.
            is_ended = comes_from(error, tf.errors.AbortedError)
            failure = self._failure_of_others(call, 10_000 if is_ended else 100)
            failed = failure or unheard(error) or failed
        if not call.agreed:
            self._announce(call, failed, aborted=is_abort(error))
        elif call.apart:
            self._lose(call, described(self._worker, failed))
        self._part_together()
        if failed is error:
            raise error
        raise failed from None

    def _part_together(self) -> None:
        """Lets no worker end before the others know why the cluster has.

        The first worker holds their messages; it waits until all have
        heard it, once, and not for long, since some may be dead.
        """
        if _HERE.lost is None or _HERE.parted:
            return
        _HERE.parted = True
        end = time.monotonic() + _PATIENCE_SECONDS
        with contextlib.suppress(tf.errors.OpError):
            if self._worker:
                messages.put(f"{_LOST}/heard/{self._worker}", "")
                return
            for worker in range(1, self._workers):
                left = max(end - time.monotonic(), 0.0)
                messages.take(f"{_LOST}/heard/{worker}", 1 + int(1000 * left))

    def _failure_of_others(
        self, call: Call, milliseconds: int
    ) -> Exception | None:
        """Returns what another worker has failed with."""
        with contextlib.suppress(tf.errors.OpError):
            lost = messages.take(_LOST, milliseconds)
            if lost is not None:
                number, kind, message = json.loads(lost)
                _HERE.lost = (number, message)
                if number < _HERE.calls[0].number:
                    return WorkerError(ended(message))
                return error_of(kind, message)
            failure = messages.take(call.key("failure"), 100)
            if failure is not None:
                return error_of(*json.loads(failure))
        return None

    def _announce(self, call: Call, error: Exception, *, aborted: bool) -> None:
        """Reports a failure to the others, and ends those that wait."""
        if _HERE.lost is not None:
            return
        failure = described(self._worker, error)
        with contextlib.suppress(tf.errors.OpError):
            if call.rounds == 0:
                # Nobody can be in a collective: all look here first.
                place = "verdict" if self._worker == 0 else self._worker
                text = json.dumps({"failure": failure})
                messages.put(call.key(0, place), text)
                return
            messages.put(call.key("failure"), json.dumps(failure))
            messages.put(call.key("failed", self._worker), "")
            if not (aborted or call.apart) and self._all_failed(call):
                return
        self._lose(call, failure)

    def _all_failed(self, call: Call) -> bool:
        """Returns whether the other workers fail in the same call."""
        end = time.monotonic() + _PATIENCE_SECONDS

        def taken(key: str) -> str | None:
            left = max(end - time.monotonic(), 0.0)
            return messages.take(key, 1 + int(1000 * left))

        if self._worker:
            return taken(call.key("settled")) == "all"
        failed = all(
            taken(call.key("failed", worker)) is not None
            for worker in range(1, self._workers)
        )
        messages.put(call.key("settled"), "all" if failed else "some")
        return failed

    def _lose(self, call: Call, failure: tuple[str, str]) -> None:
        """Ends the collectives of the cluster, and says why to all."""
        number = _HERE.calls[0].number
        _HERE.lost = (number, failure[1])
        with contextlib.suppress(tf.errors.OpError):
            messages.put(_LOST, json.dumps((number, *failure)))
        messages.end_collectives(failure[1])

    def _sum_over_replicas(self, value: tf.Tensor) -> tf.Tensor:
        def on_replica(value: tf.Tensor) -> tf.Tensor:
            return sum_over_replicas(tf.identity(value))

        sums = self._strategy.run(on_replica, args=(value,))
        return self._strategy.experimental_local_results(sums)[0]

    def _sum_over_workers(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the sum of a tensor of integers that each worker has."""
        count = topology_of(self._strategy).local.count

        def on_replica(value: tf.Tensor) -> tf.Tensor:
            replica = tf.distribute.get_replica_context()
            place = replica.replica_id_in_sync_group % count
            mine = tf.where(tf.equal(place, 0), value, tf.zeros_like(value))
            return sum_over_replicas(mine)

        sums = self._strategy.run(on_replica, args=(value,))
        return self._strategy.experimental_local_results(sums)[0]


def _words(least: int) -> int:
    """Returns one of few lengths, since each of them is traced."""
    length = 1 << 7
    while length < least:
        length <<= 4
    return length


def _leave(worker: int, workers: int) -> None:
    """Reports to the others that this program has come to its end.

    The first worker holds the messages; it stays until one that waits for it
    has looked for this one, or has ended too.
    """
    end = time.monotonic() + _LOOK_MILLISECONDS / 1000 + 1
    with contextlib.suppress(tf.errors.OpError, RuntimeError):
        messages.put(_LEFT, str(worker))
        messages.put(f"{_LEFT}/{worker}", "")
        for other in range(1, workers if worker == 0 else 0):
            left = max(end - time.monotonic(), 0.0)
            messages.take(f"{_LEFT}/{other}", 1 + int(1000 * left))


_SAME_START = "Start all workers with the same script, flags and data."
# What helps where a fact of this name differs.
RATES = "learning rate at the end of an epoch"
_REMEDIES = {
    "path": "Pass one path on all workers: the chief alone writes the file.",
    RATES: "Let callbacks set the same on all workers, such as by the logs.",
}


def _same(kind: str, received: dict[int, str], remedy: str) -> str:
    """Returns the message about what differs."""
    texts = [f"{text} on worker {k}" for k, text in sorted(received.items())]
    return (
        f"All workers must have the same {kind}. Received: "
        f"{', '.join(texts)}. {remedy}"
    )


def _variable(number: int) -> str:
    return f"model (its variable number {number})"


def _digest(facts: Mapping[str, str]) -> str:
    text = json.dumps(list(facts.items()))
    return hashlib.sha256(text.encode()).hexdigest()
