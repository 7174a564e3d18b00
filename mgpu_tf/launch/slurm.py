"""The text of a batch script of Slurm, as a pure function.

    job = SlurmJob(("python", "train.py"), nodes=4, gpus_per_node=8)
    print(batch_script(job))             # for sbatch

The script starts one task on each node, and with parameter servers the tasks
beside them. Slurm signals the script some time before the job ends. The script
tells its tasks to end; they save a checkpoint. It then puts the job back into
the queue, and the job resumes. It does so too where the tasks of a job that is
preempted have ended before Slurm takes the nodes. Otherwise, and where a node
fails, Slurm queues the job itself. With `min_nodes` the job starts with as many
nodes as there are then.
"""

from __future__ import annotations

import dataclasses
import re
import shlex

from mgpu_tf.cluster.roles import Roles
from mgpu_tf.errors import ConfigurationError, check_integer
from mgpu_tf.fields import check_types
from mgpu_tf.launch.job import check_command

# What sbatch reads in a comment has no quoting that is safe for all text.
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:+@,=-]*")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# Minutes, m:s, h:m:s, d-h, d-h:m or d-h:m:s.
_TIME = re.compile(
    r"(?:(?P<days>[0-9]{1,5})-)?(?P<first>[0-9]{1,7})"
    r"(?::(?P<second>[0-9]{1,2}))?(?::(?P<third>[0-9]{1,2}))?"
)
# As many nodes and tasks as a cluster of Slurm can have.
_MOST = 65533
_OPTION = re.compile(r"[a-z][a-z-]*(=[A-Za-z0-9._:+@,/%*&|()\[\]=-]+)?")

# These are the script's own; a second one would contradict it.
_OWN = (
    "gpus-per-node",
    "job-name",
    "nodes",
    "ntasks",
    "ntasks-per-node",
    "open-mode",
    "requeue",
    "signal",
)


@dataclasses.dataclass(frozen=True)
class SlurmJob:
    """A command as a job of Slurm.

    Attributes:
        command: The program and its arguments.
        nodes: The number of nodes. Each has one worker.
        min_nodes: Start, and start again, with this many nodes or more, up to
            `nodes`. None: with `nodes`. Not with parameter servers.
        grow_minutes: How often a job on fewer nodes than `nodes` looks for
            idle ones of its partition. If there are any, it saves and is
            queued again, to have more. 0: never.
        gpus_per_node: The GPUs of each node, which its worker uses.
        num_ps: The number of parameter servers. With any there is a
            coordinator as well. Both run beside the workers.
        evaluator: Whether one more task evaluates the checkpoints.
        name: The name of the job.
        log_dir: The folder for a log file of each task.
        signal_seconds: How long before its end the job gets the signal to save.
        max_restarts: How often the job is queued again when a task fails.
            Restarts after a signal or a preemption count too.
        container_image: The image that tasks run in, by pyxis; None for none.
        time: The time limit, as sbatch takes it; None for the partition's.
        partition: The partition; None for the cluster's default.
        account: The account that pays; None for the user's default.
        options: More options of sbatch, such as "qos=high".

    Raises:
        ConfigurationError: A value is out of range, or would not be safe in
            the script.
    """

    command: tuple[str, ...]
    nodes: int
    min_nodes: int | None = None
    grow_minutes: int = 0
    gpus_per_node: int = 0
    num_ps: int = 0
    evaluator: bool = False
    name: str = "mgpu-tf"
    log_dir: str = "logs"
    signal_seconds: int = 120
    max_restarts: int = 0
    container_image: str | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_types(self)
        for field, least, most in (
            ("nodes", 1, _MOST),
            ("gpus_per_node", 0, _MOST),
            ("num_ps", 0, _MOST),
            ("max_restarts", 0, _MOST),
            ("signal_seconds", 1, 65535),
            ("grow_minutes", 0, _MOST),
        ):
            check_integer(field, getattr(self, field), least, most)
        if self.min_nodes is not None:
            check_integer("min_nodes", self.min_nodes, 1, self.nodes)
        for field in ("min_nodes", "grow_minutes"):
            if getattr(self, field) and self.num_ps:
                raise ConfigurationError(
                    f"{field} goes with synchronous jobs. Received: "
                    f"{field}={getattr(self, field)}, num_ps={self.num_ps}. "
                    f"Leave {field} out."
                )
        if self.grow_minutes and self.min_nodes is None:
            raise ConfigurationError(
                "grow_minutes goes with min_nodes. Received: "
                f"grow_minutes={self.grow_minutes} without min_nodes. Give "
                "min_nodes."
            )
        for field, rule, example in (
            ("name", _NAME, "mnist-1"),
            ("partition", _WORD, "gpu"),
            ("account", _WORD, "team"),
        ):
            value = getattr(self, field)
            if value is not None and not rule.fullmatch(value):
                raise ConfigurationError(
                    f"{field} must be such as {example}. Received: "
                    f"{field}={value!r}."
                )
        if self.time is not None:
            _check_time(self.time, self.signal_seconds)
        for option in self.options:
            _check_option(option)
        _check_line("log_dir", self.log_dir)
        _check_line("container_image", self.container_image)
        check_command(self.command)

    @property
    def roles(self) -> Roles:
        """How many tasks there are of each type."""
        return Roles(self.nodes, self.num_ps, self.evaluator)


def batch_script(job: SlurmJob) -> str:
    """Returns the script for sbatch.

    Args:
        job: The job.
    """
    return _SCRIPT.format(
        directives="\n".join(f"#SBATCH --{line}" for line in _directives(job)),
        log_dir=shlex.quote(job.log_dir),
        exports="".join(
            f"export {name}={value}\n"
            for name, value in job.roles.environment().items()
        ),
        srun=" \\\n  ".join(_srun(job)),
        command=shlex.join(job.command),
        more=_MORE.format(
            nodes=job.nodes,
            seconds=60 * job.grow_minutes,
            log_dir=shlex.quote(job.log_dir),
        )
        if job.grow_minutes
        else "",
        again=_AGAIN.format(job.max_restarts) if job.max_restarts else "",
    )


def _directives(job: SlurmJob) -> list[str]:
    tasks = job.roles.num_tasks
    lines = [f"job-name={job.name}"]
    if job.min_nodes is None:
        lines += [
            f"nodes={job.nodes}",
            f"ntasks={tasks}",
            f"ntasks-per-node={-(-tasks // job.nodes)}",
        ]
    else:
        # With tasks to a node, sbatch asks for the fewest nodes alone.
        lines.append(f"nodes={job.min_nodes}-{job.nodes}")
    if job.gpus_per_node:
        lines.append(f"gpus-per-node={job.gpus_per_node}")
    for field in ("time", "partition", "account"):
        value = getattr(job, field)
        if value is not None:
            lines.append(f"{field}={value}")
    lines += [
        "requeue",
        "open-mode=append",
        f"signal=B:USR1@{job.signal_seconds}",
        *job.options,
    ]
    return lines


def _srun(job: SlurmJob) -> list[str]:
    """Returns srun and its options, each quoted for the shell."""
    # To srun, % begins a pattern, in the names of folders too.
    pattern = job.log_dir.replace("%", "%%").rstrip("/") + "/%x-%j-%t.log"
    options = [
        "srun",
        "--kill-on-bad-exit=1",
        "--open-mode=append",
        shlex.quote(f"--output={pattern}"),
    ]
    if job.min_nodes is not None:
        options += ['--ntasks="$SLURM_JOB_NUM_NODES"', "--ntasks-per-node=1"]
    if job.num_ps:
        # Each node gets one of the workers.
        options.append("--distribution=cyclic")
    if job.container_image is not None:
        options += [
            shlex.quote(f"--container-image={job.container_image}"),
            '--container-mounts="$PWD:$PWD"',
            '--container-workdir="$PWD"',
        ]
    return options


def _check_time(text: str, signal_seconds: int) -> None:
    """Refuses a time limit that sbatch does not take, or that is too short.

    Raises:
        ConfigurationError: It is none, or leaves no time to save.
    """
    match = _TIME.fullmatch(text)
    days, first, second, third = match.groups() if match else (None,) * 4
    if days is not None:
        parts = (days, first, second or 0, third or 0)
    elif third is not None:
        parts = (0, first or 0, second or 0, third)
    else:
        parts = (0, 0, first or 0, second or 0)
    numbers = [int(part or 0) for part in parts]
    # What stands first may be of any size, and what follows it is a rest.
    leading = next((i for i, part in enumerate(parts) if part != 0), 0)
    limits = (1 << 31, 24, 60, 60)
    rests = range(leading + 1, 4)
    if match is None or any(numbers[i] >= limits[i] for i in rests):
        raise ConfigurationError(
            "time must be such as 12:30:00, 2-12:00:00 or 90 (minutes). "
            f"Received: time={text!r}."
        )
    seconds = sum(
        number * unit
        for number, unit in zip(numbers, (86400, 3600, 60, 1), strict=True)
    )
    if seconds <= signal_seconds:
        raise ConfigurationError(
            "time must be longer than signal_seconds, which are left to save. "
            f"Received: time={text!r}, which is {seconds} s, "
            f"signal_seconds={signal_seconds}. Ask for more time."
        )


def _check_option(option: str) -> None:
    if not _OPTION.fullmatch(option):
        raise ConfigurationError(
            "sbatch_option must be an option of sbatch without dashes, such "
            f"as qos=high. Received: {option!r}."
        )
    if option.partition("=")[0] in _OWN:
        raise ConfigurationError(
            "sbatch_option must be one that the script does not set. "
            f"Received: {option!r}. Use the flag of mgpu-tf slurm."
        )


def _check_line(field: str, value: str | None) -> None:
    if value is None:
        return
    if not value or re.search(r"[\0-\x1f\x7f\\]", value):
        raise ConfigurationError(
            f"{field} must be a name without backslashes and control "
            f"characters. Received: {field}={value!r}."
        )


_AGAIN = """if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {} ]; then
  requeue=1
fi
"""
# A job that was queued again and has no more nodes does not ask again: others
# have taken those that were idle.
_MORE = """asked={log_dir}/".asked-$SLURM_JOB_ID"
[ "$(cat "$asked" 2> /dev/null)" = "$SLURM_JOB_NUM_NODES" ] || rm -f -- "$asked"
more() {{
  while [ "$SLURM_JOB_NUM_NODES" -lt {nodes} ] && sleep {seconds}; do
    idle=$(sinfo -hN --states=idle -p "$SLURM_JOB_PARTITION" -o %N)
    if [ -n "$idle" ] && [ ! -e "$asked" ]; then
      echo "$SLURM_JOB_NUM_NODES" > "$asked"
      kill -USR1 $$
    fi
  done
}}
more > /dev/null 2>&1 &
trap "kill $!" EXIT
"""
_SCRIPT = """#!/bin/bash
{directives}

# Signal the tasks to save and end, then requeue the job: it resumes.
requeue=
trap 'requeue=1; scancel --signal=TERM "$SLURM_JOB_ID"' USR1

mkdir -p -- {log_dir}
{exports}{srun} \\
  {command} &
step=$!
{more}# The signal ends a wait, not the step.
while kill -0 "$step" 2>/dev/null; do
  wait "$step"
done
wait "$step"
status=$?
if scontrol show job "$SLURM_JOB_ID" | grep -q " PreemptTime=[0-9]"; then
  requeue=1
fi
{again}if [ -n "$requeue" ] && [ "$status" -ne 0 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""
