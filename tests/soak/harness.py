"""Running a job under the supervisor, and killing parts of it."""

import contextlib
import dataclasses
import json
import os
import re
import resource
import signal
import subprocess
import time

from mgpu_tf.checkpoints import manifest
from mgpu_tf.checkpoints.manifest import MANIFEST
from tests import clusters
from tests.soak import injected
from tests.ssh import SshHosts

# The job, `tests.soak.job`.
EPOCHS = 5
STEPS_PER_EPOCH = 32
SAVE_EVERY_STEPS = 5
TOTAL_STEPS = EPOCHS * STEPS_PER_EPOCH

# The tasks of each strategy; the first is the chief.
TASKS = {
    "mirrored": ("worker-0",),
    "3_machines": ("worker-0", "worker-1", "worker-2"),
    "2_workers": ("worker-0", "worker-1"),
    "2_workers_local": ("worker-0", "worker-1"),
    "3_workers": ("worker-0", "worker-1", "worker-2"),
    "2_workers_fsdp": ("worker-0", "worker-1"),
    "2_workers_tensor": ("worker-0", "worker-1"),
    "fsdp": ("worker-0",),
    "data_2_tensor_2": ("worker-0",),
    "data_2_pipeline_2": ("worker-0",),
    "parameter_server": ("chief-0", "worker-0", "worker-1", "ps-0"),
}
# Network namespaces with an address and an sshd each stand for machines.
MACHINES = {"3_machines": ("host0", "host1", "host2")}

# What is done, and when: a task is killed between two steps; while the chief
# writes a checkpoint; two tasks at once; the supervisor is killed; or all are
# told to end by SIGTERM; a task is stopped, for good or for PAUSE_SECONDS; the
# newest checkpoint is damaged, or the chief cannot write files for a while,
# and then the chief is killed. A machine loses its link, in training or while
# the tasks start, until the supervisor has noticed and all of them have ended.
# Where a task is killed, and the job resumes: the files of checkpoints fail to
# open twice; all the time, for a while; the newest is of a later release until
# somebody upgrades. Nothing can be made in the folder for a while; the clock of
# the wall jumps by an hour; all tasks are stopped for PAUSE_SECONDS.
KINDS = {
    "step": 4,
    "save": 3,
    "two": 2,
    "supervisor": 1,
    "preempt": 1,
    "stop": 1,
    "pause": 1,
    "damage": 2,
    "full": 2,
    "read": 2,
    "unreadable": 1,
    "newer": 1,
    "readonly": 1,
    "clock": 1,
    "pause_all": 1,
}
# Those that strike what the chief does.
OF_CHIEF = (
    *("damage", "full", "read", "unreadable", "newer", "readonly", "clock"),
)
KINDS_OF_MACHINES = {"link": 1, "start": 1}
# What the run says as it ends.
_ENDS = {"unreadable": "may be whole", "newer": "Upgrade mgpu_tf"}
STALL_SECONDS = 60
PAUSE_SECONDS = 30

# What the chief may write of a file on a full disk; its progress still fits.
FULL_BYTES = 4096

_RESULT = re.compile(
    r"^RESULT (?P<sha>\w{64}) (?P<step>\d+) (?P<restarts>\d+)"
    r" (?P<lost_steps>\d+) (?P<lost_seconds>[\d.]+)$",
    re.MULTILINE,
)


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault: of what kind, in which task, after which step."""

    kind: str
    worker: int
    step: int

    def killed(self, tasks):
        """Returns which of the tasks are killed."""
        if self.kind in OF_CHIEF:
            return [0]
        if self.kind == "two":
            return [self.worker, (self.worker + 1) % tasks]
        return [self.worker]


@dataclasses.dataclass(frozen=True)
class Struck:
    """What a fault did.

    Attributes:
        at_step: The last step that was noted before it.
        torn: Whether it left a checkpoint half-written.
        seconds: From the fault to the first step that was new.
    """

    at_step: int
    torn: bool
    seconds: float


@dataclasses.dataclass(frozen=True)
class Result:
    """How a job ended."""

    sha: str
    step: int
    restarts: int
    lost_steps: int
    lost_seconds: float
    cold_start_seconds: float
    struck: list[Struck]


class Job:
    """One job in a folder of its own.

    Args:
        strategy: A name in `TASKS`.
        folder: An empty folder.
        flags: More flags of `mgpu-tf launch`.
    """

    def __init__(self, strategy, folder, flags=()):
        self._flags = list(flags)
        self._strategy = strategy
        self._tasks = TASKS[strategy]
        self._folder = folder
        self._checkpoints = os.path.join(folder, "checkpoints")
        self._logs = os.path.join(folder, "logs")
        self._output = os.path.join(folder, "output.txt")
        self._supervisor = None
        self._hosts = None

    def run(self, faults=()):
        """Runs the job to its end, through all faults."""
        if self._strategy not in MACHINES:
            return self._run(faults)
        with SshHosts(MACHINES[self._strategy]) as self._hosts:
            return self._run(faults)

    def _run(self, faults):
        started = time.time()
        self._start()
        try:
            self._until(lambda: self._progress()[0] > 0)
            cold_start_seconds = time.time() - started
            struck = []
            for fault in faults:
                self._until(
                    lambda fault=fault: (
                        self._is_done() or self._progress()[0] >= fault.step
                    )
                )
                if self._is_done():
                    break  # A stopped task may end the job when it goes on.
                struck.append(self._strike(fault))
            code = self._supervisor.wait(clusters.LIMIT_SECONDS)
            assert code == 0, self._told()
        finally:
            self._supervisor.kill()
            self._supervisor.wait()
        trained = self._tasks[: 1 if self._servers else None]
        results = [self._result(task) for task in trained]
        assert len({found["sha"] for found in results}) == 1, results
        chief = results[0]
        return Result(
            sha=chief["sha"],
            step=int(chief["step"]),
            restarts=int(chief["restarts"]),
            lost_steps=int(chief["lost_steps"]),
            lost_seconds=float(chief["lost_seconds"]),
            cold_start_seconds=cold_start_seconds,
            struck=struck,
        )

    @property
    def _servers(self):
        return sum(task.startswith("ps-") for task in self._tasks)

    def _start(self):
        command = [
            *(clusters.PYTHON, "-m", "mgpu_tf", "launch"),
            *self._places(),
            "--startup_seconds=0",
            "--max_restarts=99",
            f"--stall_timeout_seconds={STALL_SECONDS}",
            "--backoff_seconds=0",
            "--grace_seconds=300",
            f"--log_dir={self._logs}",
            *self._flags,
            "--",
            *(clusters.PYTHON, "-m", "tests.soak.job"),
            *(self._checkpoints, self._strategy),
        ]
        with open(self._output, "ab") as output:
            options = {
                "cwd": clusters.ROOT,
                "env": clusters.environment(),
                "stdout": output,
                "stderr": subprocess.STDOUT,
            }
            if self._hosts is None:
                self._supervisor = subprocess.Popen(command, **options)
            else:
                self._supervisor = self._hosts.popen(*command, **options)

    def _places(self):
        if self._hosts is not None:
            return (
                f"--hosts={','.join(self._hosts.names)}",
                *("--ssh", f"--ssh_command={self._hosts.ssh_command}"),
            )
        workers = sum(task.startswith("worker-") for task in self._tasks)
        return f"--num_workers={workers}", f"--num_ps={self._servers}"

    def _strike(self, fault):
        began = self._progress()[1]
        if fault.kind == "save":
            self._until(self._writing, pause=0.0)
        pids = [self._pid(task) for task in self._tasks]
        if fault.kind in ("damage", "newer"):
            # No newer one comes while this one is changed.
            os.kill(pids[0], signal.SIGSTOP)
        if fault.kind == "damage":
            self._damage()
        if fault.kind == "full":
            self._fill(pids[0])
        if fault.kind in ("readonly", "clock"):
            self._two_saves(fault)
        if fault.kind in ("read", "unreadable"):
            injected.write(self._folder, **{fault.kind: 2})
        mend = self._newer() if fault.kind == "newer" else None
        lines = {line: self._said(line) for line in _ENDS.values()}
        struck = time.time()
        if fault.kind in KINDS_OF_MACHINES:
            self._cut(fault, pids[fault.worker])
        elif fault.kind == "supervisor":
            self._supervisor.kill()
        elif fault.kind == "preempt":
            self._supervisor.terminate()
        elif fault.kind in ("stop", "pause"):
            os.kill(pids[fault.worker], signal.SIGSTOP)
        elif fault.kind == "pause_all":
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
        else:
            for index in fault.killed(len(pids)):
                os.kill(pids[index], signal.SIGKILL)
        at_step, _ = self._progress()
        if fault.kind in ("supervisor", "preempt"):
            code = self._supervisor.wait(clusters.LIMIT_SECONDS)
            assert code == (75 if fault.kind == "preempt" else -9), self._told()
            self._until(lambda: not any(map(_runs, pids)), watch=False)
            at_step, _ = self._progress()
            torn = self._writing()
            self._start()
        elif fault.kind in ("pause", "pause_all"):
            time.sleep(PAUSE_SECONDS)
            at_step, torn = self._progress()[0], self._writing()
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        else:
            self._until(lambda: not _runs(pids[fault.worker]))
            torn = self._writing()
        if fault.kind in _ENDS:
            line = _ENDS[fault.kind]
            self._until(lambda: self._said(line) > lines[line])
            injected.clear(self._folder)
        if mend is not None:
            mend()

        def goes_on():
            if self._is_done():
                return True  # It struck after the last step.
            step, now_began = self._progress()
            alone = "pause" in fault.kind or self._servers
            return (alone or now_began > began) and step > at_step

        self._until(goes_on)
        injected.clear(self._folder)
        return Struck(at_step, torn, time.time() - struck)

    def _is_done(self):
        return self._supervisor.poll() == 0

    def _cut(self, fault, pid):
        """Takes a machine from the network until the supervisor has lost it."""
        task = self._tasks[fault.worker]
        host = self._hosts.names[fault.worker]
        if fault.kind == "start":
            os.kill(pid, signal.SIGKILL)
            self._until(lambda: self._pid(task) != pid)
            pid = self._pid(task)
        self._hosts.network.cut(host)
        try:
            self._until(lambda: not _runs(pid))
        finally:
            self._hosts.network.mend(host)

    def _damage(self):
        """Changes a byte of the newest checkpoint."""
        with open(self._newest("arrays-0.bin"), "r+b") as file:
            file.seek(100)
            byte = file.read(1)[0]
            file.seek(100)
            file.write(bytes([byte ^ 1]))

    def _fill(self, pid):
        """Keeps the chief from writing checkpoints, as a full disk does."""
        _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (FULL_BYTES, most))
        step = self._progress()[0] + 2 * SAVE_EVERY_STEPS
        self._until(lambda: self._progress()[0] >= min(step, TOTAL_STEPS - 3))

    def _newest(self, name):
        names = sorted(os.listdir(self._checkpoints))
        steps = [name for name in names if name.startswith("step-")]
        return os.path.join(self._checkpoints, steps[-1], name)

    def _newer(self):
        """Makes the newest checkpoint one of a later release, for a while."""
        path = self._newest(MANIFEST)
        with open(path, encoding="utf-8") as file:
            text = file.read()
        body = json.loads(text)
        del body["manifest_sha256"]
        body["format"] += 1
        body["manifest_sha256"] = manifest.digest(body)
        _rewrite(path, json.dumps(body))
        return lambda: _rewrite(path, text)

    def _two_saves(self, fault):
        """Lets a fault last for two saves of the chief."""
        faults = {"readonly": 1, "clock": 3600 * (1 - 2 * (fault.step % 2))}
        injected.write(self._folder, **{fault.kind: faults[fault.kind]})
        step = self._progress()[0] + 2 * SAVE_EVERY_STEPS
        self._until(lambda: self._progress()[0] >= min(step, TOTAL_STEPS - 3))
        if fault.kind == "readonly":
            injected.clear(self._folder)

    def _said(self, text):
        return sum(self._log(task).count(text) for task in self._tasks)

    def _until(self, condition, pause=0.01, watch=True):
        deadline = time.monotonic() + clusters.LIMIT_SECONDS
        while not condition():
            assert time.monotonic() < deadline, self._told()
            ended = watch and self._supervisor.poll() is not None
            assert not ended or condition(), self._told()
            time.sleep(pause)

    def _progress(self):
        """The last step that the chief has noted, and when it had begun."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            path = os.path.join(self._checkpoints, "progress")
            with open(path, encoding="ascii") as file:
                step, _, began, _ = file.read().split()
            return int(step), float(began)
        return 0, 0.0

    def _writing(self):
        with contextlib.suppress(FileNotFoundError):
            names = os.listdir(self._checkpoints)
            return any(name.startswith(".unfinished") for name in names)
        return False

    def _log(self, task):
        path = os.path.join(self._logs, f"{task}.log")
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()

    def _pid(self, task):
        return int(re.findall(r"^--- process (\d+)", self._log(task), re.M)[-1])

    def _result(self, task):
        return list(_RESULT.finditer(self._log(task)))[-1]

    def _told(self):
        with open(self._output, encoding="utf-8", errors="replace") as file:
            return file.read()[-6000:]


def _rewrite(path, text):
    with open(path + ".new", "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(path + ".new", path)


def _runs(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def faults_of(generator, strategy, count):
    """Draws faults, one in each part of a run.

    Args:
        generator: A `random.Random`.
        strategy: A name in `TASKS`.
        count: How many.

    Returns:
        The faults, by step.
    """
    tasks = len(TASKS[strategy])
    drawn_from = KINDS_OF_MACHINES if strategy in MACHINES else KINDS
    kinds = [kind for kind in drawn_from if kind != "two" or tasks > 1]
    weights = [drawn_from[kind] for kind in kinds]
    part = (TOTAL_STEPS - 4 * SAVE_EVERY_STEPS) / count

    def drawn(index):
        (kind,) = generator.choices(kinds, weights)
        of_chief = kind in OF_CHIEF
        return Fault(
            kind,
            worker=0 if of_chief else generator.randrange(tasks),
            # After the second save, so that damage leaves one.
            step=2 * SAVE_EVERY_STEPS
            + int(part * (index + generator.uniform(0.2, 0.9))),
        )

    return [drawn(index) for index in range(count)]
