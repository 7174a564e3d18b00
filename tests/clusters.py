"""Starting real clusters of processes on this machine for tests."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import typing

# Guards against a hang; on a starved machine a start takes minutes.
LIMIT_SECONDS = 900

PYTHON = sys.executable
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# What a child imports from: this package, and `tests/lean` when it starts.
PATH = os.pathsep.join((ROOT, os.path.join(ROOT, "tests", "lean")))


def environment(**extra):
    """The environment for a child: no cluster of its own, this package."""
    inherited = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
    path = os.pathsep.join(p for p in (PATH, os.environ.get("PYTHONPATH")) if p)
    return inherited | {"PYTHONPATH": path} | extra


def mgpu_tf(*arguments, **kwargs):
    """Runs `python -m mgpu_tf` to its end."""
    return run(["-m", "mgpu_tf", *arguments], **kwargs)


def run(arguments, **kwargs):
    """Runs Python with arguments to its end."""
    return subprocess.run(
        [PYTHON, *arguments],
        env=environment(**kwargs.pop("env", {})),
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
        **kwargs,
    )


def report_in(folder):
    """The report that a run left in its folder."""
    with open(os.path.join(folder, "report.json")) as file:
        return json.load(file)


def report_of_one_device(train, folder):
    """Trains on one device in this process, to compare with; its report.

    Args:
        train: Words of the command `mgpu-tf train`.
        folder: Of its output.
    """
    from mgpu_tf import job
    from mgpu_tf.config import RunConfig

    given = dict(word[2:].split("=", 1) for word in train[1:])
    kinds = typing.get_type_hints(RunConfig)
    for name, value in given.items():
        kind, *_ = typing.get_args(kinds[name]) or (kinds[name],)
        given[name] = kind(value)
    job.run(RunConfig(strategy="one_device", output_dir=str(folder), **given))
    return report_in(folder)


def finish(process, seconds=LIMIT_SECONDS):
    """Waits for the end of a process; returns its status and output."""
    try:
        output, _ = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return process.returncode, output


def run_parity_cases(
    num_workers,
    num_virtual_devices,
    names,
    folder,
    floatx="",
    mesh="",
    communication="auto",
):
    """Runs cases on a cluster; their results are then in the folder.

    With a mesh, "data,fsdp,shard[,tensor[,pipeline]]", weights are split.

    Returns:
        For each case the set of weight hashes that the workers ended with.
    """
    done = mgpu_tf(
        "launch",
        f"--num_workers={num_workers}",
        "--startup_seconds=0",
        "--",
        PYTHON,
        "-m",
        "tests.parity.worker",
        f"--folder={folder}",
        f"--cases={','.join(names)}",
        f"--floatx={floatx}",
        f"--num_virtual_devices={num_virtual_devices}",
        f"--mesh={mesh}",
        f"--communication={communication}",
    )
    hashes = {name: [] for name in names}
    pattern = r"^\[worker \d+\] RESULT (\S+) (\S+)"
    for name, digest in re.findall(pattern, done.stdout, re.MULTILINE):
        hashes[name].append(digest)
    short = [n for n, found in hashes.items() if len(found) != num_workers]
    if done.returncode or short:
        raise AssertionError(
            f"exit code {done.returncode}, not finished: {short}\n"
            + (done.stdout + done.stderr)[-6000:]
        )
    assert "auto-shard" not in (done.stdout + done.stderr).lower()
    return {name: set(found) for name, found in hashes.items()}


class Workers:
    """Worker processes that run jobs as tests ask for them.

    Args:
        num_workers: How many.
        num_virtual_devices: Replicas of each.

    Attributes:
        spent_seconds: Processor time of all its jobs so far.
    """

    def __init__(self, num_workers, num_virtual_devices):
        self.num_workers = num_workers
        self.spent_seconds = 0.0
        self._requests = tempfile.TemporaryDirectory()
        self._asked = 0
        self._log = os.path.join(self._requests.name, "log")
        command = [
            PYTHON,
            "-m",
            "mgpu_tf",
            "launch",
            f"--num_workers={num_workers}",
            "--startup_seconds=0",
            "--",
            PYTHON,
            "-m",
            "tests.jobs.worker",
            f"--requests={self._requests.name}",
            f"--asked_by={os.getpid()}",
            f"--num_virtual_devices={num_virtual_devices}",
        ]
        with open(self._log, "w") as log:
            self._process = subprocess.Popen(
                command,
                env=environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _ask(self, request):
        from tests.jobs import worker

        path = worker.request_file(self._requests.name, self._asked)
        with open(path + ".new", "w") as file:
            json.dump(request, file)
        os.replace(path + ".new", path)

    def run(self, module, jobs, folder):
        """Runs jobs of a module.

        Raises:
            AssertionError: A worker failed, or a job took longer than
                `LIMIT_SECONDS`. The cluster has ended then.
        """
        from tests.jobs import worker

        self._ask({"module": module, "jobs": jobs, "folder": folder})
        indices = range(self.num_workers)
        done = [
            worker.done_file(self._requests.name, self._asked, index)
            for index in indices
        ]
        left = {
            worker.result_file(folder, job, index)
            for job in jobs
            for index in indices
        }
        self._asked += 1
        limit = time.monotonic() + LIMIT_SECONDS
        while not all(map(os.path.exists, done)):
            still = {path for path in left if not os.path.exists(path)}
            if still != left:
                left, limit = still, time.monotonic() + LIMIT_SECONDS
            if self._process.poll() is not None or time.monotonic() > limit:
                with open(self._log) as log:
                    said = log.read()[-6000:]
                self.end()
                missing = sorted(map(os.path.basename, left))
                raise AssertionError(f"{said}\nWithout {missing}.")
            time.sleep(0.05)
        with open(self._log) as log:
            assert "auto-shard" not in log.read().lower()
        for path in done:
            with open(path) as file:
                self.spent_seconds += float(file.read())

    def end(self):
        """Ends the processes."""
        self._ask(None)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait(LIMIT_SECONDS)
        self._requests.cleanup()


_shared = {}


def spent_by_shared():
    """Processor seconds of the clusters that wait for more jobs."""
    return sum(workers.spent_seconds for workers in _shared.values())


def end_shared():
    """Ends the clusters that `run_jobs` left running for other tests."""
    while _shared:
        _shared.popitem()[1].end()


def run_jobs(
    module, num_workers, folder, names=None, num_virtual_devices=1, shared=True
):
    """Runs the jobs of a module on a cluster.

    Args:
        module: One of `tests.jobs`.
        num_workers: Its processes.
        folder: Where jobs leave what they observed, and their files.
        names: Which jobs; all by default.
        num_virtual_devices: Replicas of each process.
        shared: Whether a cluster of two workers may have run other jobs,
            and may run more. Not for jobs that end a cluster.

    Returns:
        For each job what each worker observed.
    """
    from tests.jobs import worker

    names = list(names or module.JOBS)
    layout = (num_workers, num_virtual_devices)
    shared = shared and num_workers == 2
    workers = _shared.pop(layout, None) if shared else None
    workers = workers or Workers(*layout)
    workers.run(module.__name__, names, folder)
    if shared:
        _shared[layout] = workers
    else:
        workers.end()
    observed = {}
    for name in names:
        observed[name] = []
        for index in range(num_workers):
            with open(worker.result_file(folder, name, index)) as file:
                observed[name].append(json.load(file))
    return observed
