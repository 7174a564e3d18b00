"""Jobs whose number of workers follows the machines."""

import contextlib
import dataclasses
import pathlib
import shlex
import signal
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from mgpu_tf.checkpoints import registry
from mgpu_tf.errors import ConfigurationError
from mgpu_tf.launch import elastic, local, ssh
from mgpu_tf.launch.job import LaunchJob
from mgpu_tf.launch.machines import ThisMachine
from mgpu_tf.launch.policy import RestartPolicy
from tests import clusters, pages
from tests.launch.test_local import command
from tests.ssh import SshHosts

BODY = """
attempt = int(os.environ["MGPU_TF_RESTARTS"])
workers = len(config["cluster"]["worker"])
note(f"{attempt}.{index}", workers)


def there(count):
    note("there", count)


def saves(*_):
    note(f"saved{attempt}.{index}")
    sys.exit(75)


def dies():
    wait_for(*(f"{attempt}.{k}" for k in range(workers)))
    os.kill(os.getpid(), signal.SIGKILL)


"""


class Coming(ThisMachine):
    """Machines that come and go, as a file says."""

    def __init__(self, job, folder):
        super().__init__(job)
        self._file = pathlib.Path(folder, "there")

    def room(self, most):
        # The file is empty for a moment while it is written.
        while not (text := self._file.read_text()):
            time.sleep(0.01)
        return min(most, int(text))


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setattr(local, "SETTLED_SECONDS", 0.2)
    monkeypatch.setattr(local, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(elastic, "LOOK_SECONDS", 0.1)


def run(body, folder, *, num_workers=4, there=4, policy=None, **options):
    (folder / "there").write_text(str(there))
    usual = {"min_workers": 2, "max_workers": 4, "backoff_seconds": 0.0}
    job = LaunchJob(
        tuple(command(BODY + body, folder)),
        num_workers,
        policy=RestartPolicy(**usual | (policy or {})),
        **options,
    )
    return local.supervise(job, Coming(job, folder))


def sizes(folder):
    """The number of workers of each attempt."""
    found = {}
    for path in folder.glob("*.*"):
        if path.stem.isdecimal():
            found.setdefault(int(path.stem), set()).add(int(path.read_text()))
    assert all(len(each) == 1 for each in found.values())
    return [found[attempt].pop() for attempt in sorted(found)]


def test_machines_go_and_come_back(tmp_path, capfd):
    """4 workers, then 2, then 4; no restart is allowed for other reasons."""
    body = """
signal.signal(signal.SIGTERM, saves)
if attempt == 0:
    if index == 3:
        there(2)
        dies()
    time.sleep(3600)
if attempt == 1:
    wait_for("1.0", "1.1")
    there(4)
    time.sleep(3600)
"""
    assert run(body, tmp_path) == 0
    assert sizes(tmp_path) == [4, 2, 4]
    assert {path.name for path in tmp_path.glob("saved1.*")} == {
        "saved1.0",
        "saved1.1",
    }
    lines = capfd.readouterr().err.splitlines()
    assert lines == [
        "mgpu-tf launch: worker 3 failed with SIGKILL; ended worker 0, "
        "worker 1, worker 2.",
        "mgpu-tf launch: going on with 2 workers.",
        "mgpu-tf launch: restart 1 in 0.0 seconds.",
        "mgpu-tf launch: there are machines for 4 workers; the tasks save.",
    ]


def test_a_failure_on_machines_that_are_there_is_one_of_the_job(tmp_path):
    body = "\ndies() if index == 1 else time.sleep(3600)\n"
    policy = {"min_workers": 4, "max_restarts": 1}
    assert run(body, tmp_path, policy=policy) == 128 + signal.SIGKILL
    assert sizes(tmp_path) == [4, 4]


def test_a_job_that_does_not_save_grows_once(tmp_path, capfd):
    body = """
if attempt == 0:
    there(3)
    time.sleep(3600)
wait_for(f"{attempt}.0")
there(4)
time.sleep(1.5)
"""
    assert run(body, tmp_path, num_workers=2, there=2) == 0
    assert sizes(tmp_path) == [2, 3]
    assert "have not saved; the job does not grow" in capfd.readouterr().err


def test_too_few_machines_are_waited_for(tmp_path, capfd):
    code = run("", tmp_path, there=1, startup_seconds=0.3)
    assert (code, sizes(tmp_path)) == (1, [])
    said = capfd.readouterr().err
    assert "there are machines for 1 workers; waiting for 2" in said
    assert "gave up: too few machines are there" in said

    def come():
        time.sleep(0.5)
        (tmp_path / "there").write_text("3")

    threading.Thread(target=come).start()
    assert run("", tmp_path, there=1) == 0
    assert sizes(tmp_path) == [3]


def test_a_machine_counts_when_it_was_seen_twice():
    looks = iter([4, 2, 4, 4, 4])
    room = elastic.Room(lambda: next(looks))
    seen = []
    for moment in range(200):
        seen.append(room.more_than(2, float(moment)))
        time.sleep(0.005)
        if seen[-1]:
            break
    assert seen[-1] == 4
    assert next(looks) == 4  # After the fourth look, before the fifth.


def test_machines_are_asked_by_ssh(tmp_path, monkeypatch):
    """One answers, one refuses, one is silent; each has two places."""
    monkeypatch.setattr(ssh, "_ASK_SECONDS", 8.0)
    program = tmp_path / "ssh"
    program.write_text(
        "#!/bin/sh\n"
        "for host; do [ $host = -- ] && shift && break; shift; done\n"
        "[ $1 = silent ] && exec sleep 600\n[ $1 = there -o $1 = also ]\n"
    )
    program.chmod(0o755)
    hosts = ["silent", "there", "gone", "also"]
    job = LaunchJob(("true",), 8, policy=RestartPolicy(max_workers=8))
    machines = ssh.SshMachines(job, hosts, 2222, str(program))
    with machines.addresses(job.roles, lambda: True) as every:
        assert len(every) == 8
    began = time.monotonic()
    assert machines.room(8) == 4
    assert time.monotonic() - began < 60
    roles = dataclasses.replace(job.roles, num_workers=3)
    with machines.addresses(roles, lambda: True) as addresses:
        assert addresses == ["there:2222", "also:2222", "there:2223"]


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"max_workers": 1}, "max_workers must be num_workers or more"),
        ({"min_workers": 3}, "min_workers must be num_workers or less"),
        ({"max_workers": 2, "unit": "task"}, "goes with synchronous jobs"),
    ],
)
def test_numbers_that_do_not_fit(policy, message):
    with pytest.raises(ConfigurationError, match=message):
        LaunchJob(("true",), 2, policy=RestartPolicy(**policy))


# What is trained, by the script and by Keras alone.
MODEL = """
import keras
import numpy as np


def build_model():
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(32, activation="tanh"),
            keras.layers.Dense(4),
        ]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


generator = np.random.default_rng(0)
x, y = generator.normal(size=(480, 8)), generator.normal(size=(480, 4))
FIT = {"batch_size": 24, "epochs": 25, "shuffle": False, "verbose": 0}
"""
SCRIPT = f"""
import os, sys, time
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import mgpu_tf
{MODEL}
folder = sys.argv[1]
keras.config.set_floatx("float64")
keras.config.set_dtype_policy("float64")
mgpu_tf.enable_determinism()
strategy = mgpu_tf.create_multi_worker_mirrored_strategy()


class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if os.path.exists(os.path.join(folder, "slow")):
            time.sleep(0.5)


trainer = mgpu_tf.Trainer(build_model, strategy, steps_per_execution=1, seed=1)
trainer.fit(
    x, y, **FIT, callbacks=[Slow()],
    checkpoint=mgpu_tf.SaveOptions(
        os.path.join(folder, "checkpoints"), save_every_steps=5
    ),
)
if mgpu_tf.is_chief(strategy):
    weights = trainer.model.get_weights()
    np.savez(os.path.join(folder, "weights.npz"), *weights)
    print("STEPS", trainer.global_step, "WORKERS",
          strategy.num_replicas_in_sync, flush=True)
"""
HOSTS = ("host0", "host1", "host2", "host3")


@pytest.mark.full
def test_two_of_four_machines_are_lost_and_come_back(tmp_path, float64):
    """The weights are those of Keras on one device, that nothing disturbs."""
    with SshHosts(HOSTS) as hosts:
        (block,) = (
            text
            for text in pages.blocks("checkpoints.md", "sh")
            if "--max_workers" in text
        )
        words = shlex.split(block.replace("\\\n", ""))
        elastic_words = words[1 : words.index("--")]
        assert f"--hosts={','.join(HOSTS)}" in elastic_words

        folder = tmp_path
        (folder / "slow").touch()
        launcher = hosts.popen(
            *(clusters.PYTHON, "-m", "mgpu_tf", *elastic_words),
            f"--ssh_command={hosts.ssh_command}",
            "--grace_seconds=120",
            *("--", clusters.PYTHON, "-c", SCRIPT, str(folder)),
        )
        said = Said(launcher)
        try:
            said.until(lambda: step_of(folder) >= 10)
            for host in HOSTS[2:]:
                hosts.network.cut(host)
            said.until(lambda: "going on with 2 workers" in said.text)
            lost_at = step_of(folder)
            said.until(lambda: step_of(folder) > lost_at)
            for host in HOSTS[2:]:
                hosts.network.mend(host)
            said.until(lambda: "machines for 4 workers" in said.text)
            (folder / "slow").unlink()
            assert launcher.wait(clusters.LIMIT_SECONDS) == 0, said.text
            said.until(lambda: "STEPS 500 WORKERS 4" in said.text)
        finally:
            launcher.kill()
            launcher.wait()
            said.end()
    named = {}
    exec(MODEL, named)
    keras.utils.set_random_seed(1)
    with tf.device("CPU:0"):
        model = named["build_model"]()
        model.fit(named["x"], named["y"], **named["FIT"])
    with np.load(folder / "weights.npz") as found:
        for name, value in zip(found.files, model.get_weights(), strict=True):
            np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-9)
    resumed = [
        event.step
        for event in registry.read(str(folder / "checkpoints"))
        if event.what == registry.RESUMED
    ]
    # From 4 to 2 what came after the checkpoint is done again.
    assert len(resumed) == 2 and resumed[0] <= lost_at


def step_of(folder):
    with contextlib.suppress(FileNotFoundError, ValueError, IndexError):
        path = folder / "checkpoints" / "progress"
        return int(path.read_text().split()[0])
    return 0


class Said:
    """What a process has said so far."""

    def __init__(self, process):
        self._process, self._lines = process, []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self._process.stdout:
            self._lines.append(line)

    def end(self):
        self._reader.join(60)
        self._process.stdout.close()

    @property
    def text(self):
        return "".join(self._lines)

    def until(self, condition):
        deadline = time.monotonic() + clusters.LIMIT_SECONDS
        while not condition():
            assert time.monotonic() < deadline, self.text
            time.sleep(0.1)
