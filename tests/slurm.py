"""A real Slurm for tests: a controller and nodes with names of their own.

    with Slurm() as slurm:
        slurm.run("srun", "--nodes=3", "hostname")      # n08, n09, n10

Each node is a host of `tests.network`. It needs root, iproute2 and Slurm;
`make slurm` installs both.
"""

import contextlib
import os
import pathlib
import secrets
import shutil
import stat
import subprocess
import tempfile
import time

from tests import clusters
from tests.network import Network, check_programs

NODES = ("n08", "n09", "n10")
CONTROLLER = "ctl"
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun")

# So many tasks a node can have; they are more than there are cores.
CPUS = 8
# Files that Slurm takes for GPUs.
GPUS = 4
# A partition whose jobs preempt those of the default one.
URGENT = "urgent"

_CONF = """ClusterName=test
SlurmctldHost={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1
ReturnToService=2
MailProg=/bin/true
KillWait=30
SlurmdParameters=config_overrides
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=test Nodes={names} Default=YES PriorityTier=1 GraceTime=60
PartitionName={urgent} Nodes={names} PriorityTier=2
"""


class Slurm:
    """A controller and nodes, started and ended with the block.

    Attributes:
        folder: What they write.
    """

    def __init__(self):
        check_programs(PROGRAMS, "Slurm")
        self._network = Network([CONTROLLER, *NODES])
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="slurm-"))
        self._daemons = []

    def __enter__(self):
        try:
            self._network.__enter__()
            self._configure()
            self._start_daemons()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        with contextlib.suppress(subprocess.SubprocessError):
            self.run("scancel", "--user=root", check=False, timeout=60)
        deadline = time.monotonic() + 60
        while self._daemons and self._busy() and time.monotonic() < deadline:
            time.sleep(0.5)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(30)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._network.__exit__()
        shutil.rmtree(self.folder, ignore_errors=True)

    def popen(self, *command, host=CONTROLLER, env=None, **options):
        """Starts a command on a host."""
        return self._network.popen(
            host,
            command,
            env=clusters.environment(
                SLURM_CONF=str(self.folder / "slurm.conf"),
                PATH=f"{pathlib.Path(clusters.PYTHON).parent}:"
                + os.environ["PATH"],
                TF_CPP_MIN_LOG_LEVEL="3",
                **(env or {}),
            ),
            **options,
        )

    def run(self, *command, check=True, timeout=clusters.LIMIT_SECONDS, **more):
        """Runs a command on the controller's host to its end.

        Returns:
            Its standard output and error.
        """
        process = self.popen(
            *command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **more,
        )
        try:
            output, _ = process.communicate(timeout=timeout)
        finally:
            process.kill()
        if check and process.returncode:
            raise AssertionError(f"exit code {process.returncode}\n{output}")
        return output

    def state(self, job):
        """Returns the state of a job and how often it was restarted."""
        text = self.run("scontrol", "--oneliner", "show", "job", job)
        fields = dict(w.split("=", 1) for w in text.split() if "=" in w)
        return fields["JobState"], int(fields["Restarts"])

    def wait(self, job, *, seconds=clusters.LIMIT_SECONDS):
        """Waits until a job has ended for good; returns state, restarts."""
        deadline = time.monotonic() + seconds
        while True:
            state, restarts = self.state(job)
            if state in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"):
                return state, restarts
            assert time.monotonic() < deadline, (job, state)
            time.sleep(1)

    def _busy(self):
        return bool(
            self.run("squeue", "--noheader", check=False, timeout=60).strip()
        )

    def _configure(self):
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        self.folder.chmod(0o755)
        nodes = "\n".join(
            f"NodeName={name} NodeAddr={name} CPUs={CPUS} RealMemory=4000 "
            f"Gres=gpu:{GPUS} State=UNKNOWN"
            for name in NODES
        )
        (self.folder / "slurm.conf").write_text(
            _CONF.format(
                controller=CONTROLLER,
                folder=self.folder,
                nodes=nodes,
                names=",".join(NODES),
                urgent=URGENT,
            )
        )
        gpus = f"{self.folder}/gpu[0-{GPUS - 1}]"
        for index in range(GPUS):
            path = f"{self.folder}/gpu{index}"
            os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        (self.folder / "gres.conf").write_text(f"Name=gpu File={gpus}\n")
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)

    def _start_daemons(self):
        folder, conf = self.folder, str(self.folder / "slurm.conf")
        self._daemon(
            CONTROLLER,
            *("munged", "--foreground", "--force"),
            f"--socket={folder}/munge.socket",
            f"--key-file={folder}/munge.key",
            f"--pid-file={folder}/munged.pid",
            f"--log-file={folder}/munged.log",
            f"--seed-file={folder}/munge.seed",
        )
        _await(lambda: (folder / "munge.socket").exists(), "munged")
        self._daemon(CONTROLLER, "slurmctld", "-D", "-f", conf)
        for name in NODES:
            self._daemon(name, "slurmd", "-D", "-f", conf, "-N", name)
        _await(self._idle, "the nodes", lambda: self._logs())

    def _idle(self):
        text = self.run(
            *("sinfo", "--noheader", "--Node", "--partition=test"),
            "--format=%T",
            check=False,
            timeout=60,
        )
        return text.split() == ["idle"] * len(NODES)

    def _daemon(self, host, *command):
        name = f"{command[0]}-{host}.out"
        with open(self.folder / name, "wb") as output:
            self._daemons.append(
                self.popen(*command, host=host, stdout=output, stderr=output)
            )

    def _logs(self):
        return "\n".join(
            f"{path.name}: {path.read_text()[-1500:]}"
            for path in self.folder.glob("*.out")
        )


def _await(condition, what, logs=lambda: ""):
    deadline = time.monotonic() + 120
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not start\n{logs()}")
        time.sleep(0.2)
