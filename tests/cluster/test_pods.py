"""Pods of manifests as processes: their environment, host names, command.

Each pod is a host of `tests.network` that has the name by which the other
pods know it. Its environment, its user and what it can write are those of the
manifest.
"""

import contextlib
import os
import subprocess
import sys
import tempfile

import pytest

from mgpu_tf.launch.kubernetes import KubernetesJob, objects
from tests import clusters
from tests.launch import losses
from tests.launch.pods import pods_of
from tests.network import Network
from tests.tiers import tiered

pytestmark = pytest.mark.full

# The default of --user_id.
USER = 1000
# What an image has: Python and the package. PATH is that of the image.
IMAGE = {
    "PATH": "/usr/bin:/bin",
    "PYTHONPATH": clusters.PATH,
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
# Where pods mount their claim; unlike /checkpoints, each machine has it.
CLAIM = "/srv"
# As a container is made: its volumes, a root file system that nobody writes,
# a user without privileges. Python and the package may be in the home of root,
# which that user does not reach, or below /tmp: they are laid open.
CONTAINER = f"""
claim=$1 python=$2 project=$3 user=$4; shift 4
mount --bind "$claim" {CLAIM}
mount --bind "$python" /media
mount --bind "$project" /mnt
for folder in "$python" "$project"; do
  case $folder in ~root/*)
    mountpoint -q ~root || mount -t tmpfs -o mode=755 tmpfs ~root
  esac
done
mount -t tmpfs tmpfs /dev/shm
mount -o remount,bind,ro /
mount -t tmpfs tmpfs /tmp
lay_open() {{
  [ -e "$2/$3" ] && return
  mkdir -p "$2"
  mount --bind "$1" "$2"
}}
lay_open /media "$python" bin
lay_open /mnt "$project" mgpu_tf
cd {CLAIM}
if touch /owned 2>/dev/null; then exit 99; fi
exec setpriv --reuid="$user" --regid="$user" --clear-groups --no-new-privs \
  --bounding-set=-all "$@"
"""


@pytest.fixture
def claim():
    """A folder that the user of the pods can write."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        os.chown(folder, USER, USER)
        yield folder


def run_pods(folder, claim, **fields):
    """Runs the pods of a job to their end; returns what they print."""
    command = (clusters.PYTHON, losses.SCRIPT, CLAIM)
    job = KubernetesJob(command, name="mnist", image="lab/train:1", **fields)
    pods = pods_of(objects(job))
    outputs = []
    with Network([pod.host for pod in pods]) as network:
        started = []
        with contextlib.ExitStack() as stack:
            for index, pod in enumerate(pods):
                output = stack.enter_context(
                    open(folder / f"pod-{index}.log", "w+")
                )
                outputs.append(output)
                process = network.popen(
                    pod.host,
                    [
                        *("unshare", "--mount", "sh", "-euc", CONTAINER, "sh"),
                        *(claim, sys.base_prefix, str(clusters.ROOT)),
                        str(pod.spec["securityContext"]["runAsUser"]),
                        *pod.container["command"],
                    ],
                    env=pod.environment | IMAGE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
                stack.callback(process.wait)
                stack.callback(process.kill)
                started.append(process)
            codes = [p.wait(clusters.LIMIT_SECONDS) for p in started]
            for index, output in enumerate(outputs):
                output.seek(0)
                outputs[index] = output.read()
    assert codes == [0] * len(pods), "\n".join(o[-3000:] for o in outputs)
    losses.compare(claim, outputs)
    assert os.stat(f"{claim}/losses.json").st_uid == USER
    return outputs


@pytest.mark.parametrize(
    "kind", tiered(["jobset", "job", "trainjob"], [], ["jobset", "job"])
)
def test_workers(kind, claim, tmp_path):
    """Two, and three where the script of all platforms has three."""
    count = 3 if kind == "jobset" else 2
    outputs = run_pods(tmp_path, claim, workers=count, kind=kind)
    assert len(outputs) == count
    for index, output in enumerate(outputs):
        line = f"{count} workers; this is worker {index} at mnist-"
        assert line in output


def test_roles(claim, tmp_path):
    outputs = run_pods(tmp_path, claim, workers=2, ps=1)
    assert "this is ps 0 at mnist-ps-0-0.mnist:2222" in outputs[0]
