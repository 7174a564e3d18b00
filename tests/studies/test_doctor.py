"""Each planted fault is found and named, and a healthy machine has none."""

import json
import os
import resource
import socket
import subprocess
import sys

import pytest

from mgpu_tf import cli
from mgpu_tf.cluster import ports
from mgpu_tf.studies.doctor import (
    gpus,
    machine,
    network,
    tensorflow_sees,
)
from mgpu_tf.studies.doctor.findings import ERROR, OK, WARNING
from tests import clusters


@pytest.fixture
def listening():
    """A port of this machine that somebody listens on."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def cluster(*workers, index=0):
    return {
        "TF_CONFIG": json.dumps(
            {
                "cluster": {"worker": list(workers)},
                "task": {"type": "worker", "index": index},
            }
        )
    }


def of(check, *workers, index=0, **options):
    config, _ = network.cluster(cluster(*workers, index=index))
    return list(check(config, **options))


def assert_found(findings, status, *words):
    """That the worst finding has the words, in one line, and a remedy."""
    [finding] = [f for f in findings if f.status != OK]
    assert finding.status == status
    for word in words:
        assert word in finding.found + finding.remedy
    assert finding.remedy
    assert "\n" not in finding.found + finding.remedy
    assert finding.line().startswith(f"{status} ")


def healthy(findings):
    found = list(findings)
    assert found
    assert {finding.status for finding in found} == {OK}, found


def test_versions_out_of_range(monkeypatch):
    def refuse():
        raise machine.ConfigurationError("needs keras>=3. Run: pip install x")

    healthy(machine.versions())
    monkeypatch.setattr(machine.ranges, "check", refuse)
    assert_found(machine.versions(), ERROR, "tensorflow 2.", "pip install x")


def test_another_backend_in_the_environment(tmp_path):
    home = str(tmp_path)
    healthy(machine.settings({}, home))
    healthy(machine.settings({"KERAS_BACKEND": "tensorflow"}, home))
    found = machine.settings({"KERAS_BACKEND": "jax"}, home)
    assert_found(found, ERROR, "KERAS_BACKEND", "'jax'")


def test_another_backend_in_the_file(tmp_path):
    (tmp_path / "keras.json").write_text('{"backend": "torch"}')
    found = machine.settings({"KERAS_HOME": str(tmp_path)})
    assert_found(found, ERROR, "keras.json", "'torch'")
    found = machine.settings({"KERAS_BACKEND": "tensorflow"}, str(tmp_path))
    healthy(found)
    (tmp_path / "keras.json").write_text("{")
    assert_found(machine.settings({}, str(tmp_path)), ERROR, "JSON")


def test_keras_2(tmp_path):
    found = machine.settings({"TF_USE_LEGACY_KERAS": "1"}, str(tmp_path))
    assert_found(found, ERROR, "Unset TF_USE_LEGACY_KERAS")


def test_a_file_that_hides_a_module(tmp_path):
    healthy(machine.shadowed_modules(str(tmp_path)))
    (tmp_path / "queue.py").write_text("")
    found = machine.shadowed_modules(str(tmp_path))
    assert_found(found, ERROR, "queue")


def test_a_container_with_fewer_processors(tmp_path):
    limits = tmp_path / "cpu.max"
    limits.write_text("max 100000")
    healthy(machine.processors(str(limits)))
    limits.write_text("50000 100000")
    found = machine.processors(str(limits))
    assert_found(found, WARNING, "0.5 of", "TF_NUM_INTRAOP_THREADS")


def test_few_open_files():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        assert_found(machine.open_files(), WARNING, "256", "ulimit -n")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    healthy(machine.open_files(least=1))


def test_little_shared_memory(tmp_path):
    healthy(machine.shared_memory(str(tmp_path), least=1))
    found = machine.shared_memory(str(tmp_path), least=1 << 60)
    assert_found(found, WARNING, "--shm-size")
    found = machine.shared_memory(str(tmp_path / "none"))
    assert_found(found, WARNING, "does not exist")


def test_a_folder_that_cannot_be_written(tmp_path):
    healthy(machine.folder("output_dir", str(tmp_path / "new")))
    (tmp_path / "file").write_text("")
    found = machine.folder("output_dir", str(tmp_path / "file"))
    assert_found(found, ERROR, "--output_dir")


@pytest.mark.parametrize("path", ["no://bucket/run", "~/run", "$HOME/run"])
def test_a_folder_that_is_no_path(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = machine.folder("checkpoint_dir", path, 0)
    assert_found(found, ERROR, "checkpoint_dir must be", path)
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_nearly_full(tmp_path):
    found = machine.folder("checkpoint_dir", str(tmp_path), 1 << 60)
    assert_found(found, WARNING, "GiB free")


def test_a_clock_that_differs(tmp_path, monkeypatch):
    now = machine.time.time()
    monkeypatch.setattr(machine.time, "time", lambda: now + 600)
    found = machine.folder("checkpoint_dir", str(tmp_path), 1)
    assert_found(found, WARNING, "differs by", "chrony")


def test_input_files(tmp_path):
    pattern = str(tmp_path / "*.tfrecord")
    assert_found(machine.input_files(pattern, 2), ERROR, "No file")
    (tmp_path / "a.tfrecord").write_text("1")
    assert_found(machine.input_files(pattern, 2), WARNING, "1 files for 2")
    healthy(machine.input_files(pattern, 1))
    (tmp_path / "b.tfrecord").write_text("")
    assert_found(machine.input_files(pattern, 2), ERROR, "1 of 2 files")


def test_a_tf_config_that_cannot_be_read():
    config, findings = network.cluster({"TF_CONFIG": "{"})
    assert config is None
    assert_found(findings, ERROR, "TF_CONFIG must be JSON")
    healthy(network.cluster({})[1])


def test_the_cluster_in_words():
    environ = cluster("127.0.0.1:1", "127.0.0.1:2", index=1)
    [finding] = network.cluster(environ)[1]
    assert finding.found == "2 workers; this is worker 1 at 127.0.0.1:2"


def test_loopback_among_other_machines():
    _, findings = network.cluster(cluster("localhost:1", "10.0.0.2:1"))
    assert_found(findings, ERROR, "worker", "localhost:1")


def test_a_host_without_an_address():
    found = of(network.resolved, "127.0.0.1:1", "no-such-host.invalid:1")
    assert_found(found, ERROR, "worker 1 at no-such-host.invalid:1")
    healthy(of(network.resolved, "127.0.0.1:1", "localhost:2"))


def test_a_port_in_use(listening):
    found = of(network.own_address, f"127.0.0.1:{listening}", environ={})
    assert_found(found, ERROR, f"Port {listening}", "in use")
    healthy(of(network.own_address, f"127.0.0.1:{free_port()}", environ={}))


def test_a_port_that_is_held_for_this_task():
    with ports.reserved(1) as (number,):
        here = f"127.0.0.1:{number}"
        healthy(of(network.own_address, here, environ=ports.ENVIRONMENT))
        found = of(network.own_address, here, environ={})
        assert_found(found, ERROR, "in use")


def test_an_index_of_another_machine():
    # 192.0.2.0/24 is kept for documents: no machine has such an address.
    found = of(network.own_address, "192.0.2.1:2222", "127.0.0.1:1", environ={})
    assert_found(found, ERROR, "not an address of this machine", "index")


def test_a_machine_that_does_not_answer(monkeypatch):
    def never(target, timeout):
        raise TimeoutError("timed out")

    here = f"127.0.0.1:{free_port()}"
    monkeypatch.setattr(network.socket, "create_connection", never)
    found = of(network.others, here, "192.0.2.1:2222", connect_seconds=0.1)
    assert_found(found, ERROR, "worker 1 at 192.0.2.1:2222", "firewall")


def test_machines_that_answer(listening):
    here = f"127.0.0.1:{free_port()}"
    workers = [here, f"127.0.0.1:{listening}"]
    [finding] = of(network.others, *workers, connect_seconds=5)
    assert finding.found == "1 other tasks answer"
    workers[1] = f"127.0.0.1:{free_port()}"
    [finding] = of(network.others, *workers, connect_seconds=5)
    assert finding.status == OK
    assert "have not started: worker 1" in finding.found


def test_a_proxy_between_the_tasks():
    workers = ["n0.local:1", "n1.local:1"]
    healthy(of(network.proxies, *workers, environ={}))
    proxy = {"http_proxy": "http://proxy:3128"}
    found = of(network.proxies, *workers, environ=proxy)
    assert_found(found, ERROR, "no_proxy=n0.local,n1.local")
    spared = proxy | {"no_proxy": "n0.local,n1.local"}
    healthy(of(network.proxies, *workers, environ=spared))
    healthy(
        of(network.proxies, *workers, environ=proxy | {"no_proxy": "*.local"})
    )


def test_an_interface_that_does_not_exist():
    assert not list(network.interfaces({}))
    found = network.interfaces({"NCCL_SOCKET_IFNAME": "ib77"})
    assert_found(found, ERROR, "ib77")
    healthy(network.interfaces({"NCCL_SOCKET_IFNAME": "lo"}))


SEEN = {
    "gpus": [],
    "kernels": ["sm_60", "sm_70", "sm_80", "sm_89", "compute_90"],
    "built_with_cuda": True,
    "cuda": "12",
    "cudnn": "9",
    "visible": None,
    "wheels": None,
}
REDUCED = {
    "replicas": 2,
    "exact": True,
    "seconds": 0.1,
    "gib_per_second": 1.0,
    "clock_seconds": 0.0,
}


H100 = gpus.Gpu("H100", (9, 0))
TWO = gpus.Driver((H100, H100), (560, 35, 3))


def sees(*found):
    return SEEN | {"gpus": [(gpu.name, gpu.capability) for gpu in found]}


def test_gpus_that_tensorflow_does_not_see():
    found = tensorflow_sees.judge(SEEN, TWO)
    assert_found(found, ERROR, "sees none", "'tensorflow[and-cuda]")
    found = tensorflow_sees.judge(SEEN | {"visible": ""}, TWO)
    assert_found(found, WARNING, "CUDA_VISIBLE_DEVICES")
    found = tensorflow_sees.judge(sees(H100), TWO)
    assert_found(found, WARNING, "2 GPUs, TensorFlow 1")
    healthy(tensorflow_sees.judge(sees(H100, H100), TWO))
    healthy(tensorflow_sees.judge(SEEN, None))


def test_libraries_that_tensorflow_does_not_find(tmp_path, monkeypatch):
    for name in ("cudnn", "nccl"):
        (tmp_path / "nvidia" / name / "lib").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tensorflow_sees._folder_of_wheels()
    assert folder == str(tmp_path / "nvidia")

    found = next(tensorflow_sees.judge(SEEN | {"wheels": folder}, TWO))
    assert_found([found], ERROR, "sees none")
    export = found.remedy.removeprefix("Run: ")
    assert export.startswith("export LD_LIBRARY_PATH=")
    for before in ("", "/other/lib"):
        path = subprocess.run(
            ["sh", "-c", f"{export}; printenv LD_LIBRARY_PATH"],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"LD_LIBRARY_PATH": before},
        ).stdout.strip()
        wanted = [f"{folder}/cudnn/lib", f"{folder}/nccl/lib", before]
        assert path == ":".join(filter(None, wanted))

    without = SEEN | {"wheels": folder, "built_with_cuda": False}
    found = tensorflow_sees.judge(without, TWO)
    assert_found(found, ERROR, "sees none", "'tensorflow[and-cuda]")


def kernels_for(*capability, built=SEEN["kernels"], driver=TWO.version):
    driver = gpus.Driver((), driver)
    return list(
        gpus.kernels(built, [gpus.Gpu("G", capability)], "12.5.1", driver)
    )


@pytest.mark.parametrize("capability", [(6, 1), (7, 5), (8, 0), (8, 6), (8, 9)])
def test_kernels_that_run_as_they_are(capability):
    healthy(kernels_for(*capability))


def test_kernels_that_the_driver_compiles():
    [finding] = kernels_for(9, 0)
    assert finding.status == OK
    assert "driver compiles the kernels for G (compute" in finding.found
    found = kernels_for(12, 0)
    assert_found(found, WARNING, "half an hour", "CUDA_CACHE_PATH")
    found = kernels_for(9, 0, driver=(535, 1))
    assert_found(found, ERROR, "driver 535.1 is older", "Install driver 555")


def test_a_gpu_without_kernels():
    found = kernels_for(5, 2)
    assert_found(found, ERROR, "no kernels for G (compute capability 5.2)")
    found = kernels_for(9, 0, built=["sm_80", "sm_89"])
    assert_found(found, ERROR, "no kernels for G")
    assert kernels_for(9, 0, built=[]) == []
    healthy(kernels_for(12, 0, built=["sm_120a"]))


def test_a_driver_that_is_too_old():
    old = gpus.Driver((H100,), (470, 82, 1))
    found = gpus.driver_fits("12.5.1", old)
    assert_found(found, ERROR, "Driver 470.82.1 is too old for CUDA 12.5.1")
    healthy(gpus.driver_fits("12.5.1", TWO))
    assert list(gpus.driver_fits("none", TWO)) == []


MATRIX = """
\tGPU0\tGPU1\tGPU2\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV18\tSYS\t0-15\t0
GPU1\tNV18\t X \tSYS\t0-15\t0
GPU2\tSYS\tSYS\t X \t16-31\t1

Legend:
  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect
"""


def test_what_the_driver_tells():
    listed = "NVIDIA A, 560.35.03, 9.0\n" * 3
    driver = gpus.read_driver(listed, MATRIX)
    assert driver.version == (560, 35, 3)
    assert driver.gpus == (gpus.Gpu("NVIDIA A", (9, 0)),) * 3
    assert driver.links == ("NV18", "SYS", "SYS")
    assert_found(gpus.links(driver), WARNING, "1 x NV18, 2 x SYS")
    whole = gpus.read_driver(listed, MATRIX.replace("SYS", "NV18"))
    healthy(gpus.links(whole))
    bridged = gpus.read_driver(listed, MATRIX.replace("NV18", "SYS"))
    healthy(gpus.links(bridged))
    for broken in ("", "\0", "GPU0", "GPU0 X", "GPU0 GPU1\nGPU1 ? X"):
        assert gpus.read_driver(broken, broken).links == ()


def test_what_nccl_says():
    lines = "a:1:2 [0] NCCL INFO NCCL version 2.25.1+cuda12.8\n"
    way = "a:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via {}\n"
    [finding] = gpus.nccl(lines + 2 * way.format("P2P/CUMEM"))
    assert finding.found == "NCCL 2.25.1+cuda12.8, channels: 2 by P2P"
    found = gpus.nccl(lines + way.format("SHM/direct/direct"))
    assert_found(found, WARNING, "do not reach each other directly")
    found = gpus.nccl("a:1:2 [0] init.cc:1 NCCL WARN Cuda failure 'x'\n")
    assert_found(found, ERROR, "Cuda failure")
    assert list(gpus.nccl("nothing")) == []


def test_a_sum_that_is_wrong():
    healthy(tensorflow_sees.judge(SEEN | {"all_reduce": REDUCED}, None))
    wrong = SEEN | {"all_reduce": REDUCED | {"exact": False}}
    assert_found(tensorflow_sees.judge(wrong, None), ERROR, "is wrong")
    late = SEEN | {"all_reduce": REDUCED | {"clock_seconds": 90.0}}
    assert_found(tensorflow_sees.judge(late, None), WARNING, "90 s")


def test_a_tensorflow_that_fails_or_hangs(tmp_path):
    package = tmp_path / "tensorflow"
    package.mkdir()
    environ = clusters.environment()
    environ["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{environ['PYTHONPATH']}"
    (package / "__init__.py").write_text("raise ImportError('no libcudart')")
    found = tensorflow_sees.examine(environ, 600, False)
    assert_found(found, ERROR, "no libcudart", "environment")
    (package / "__init__.py").write_text("import time; time.sleep(3600)")
    found = tensorflow_sees.examine(environ, 3, False)
    assert_found(found, ERROR, "did not start within 3 s")


@pytest.mark.full
def test_command(tmp_path):
    """On this machine, without a fault."""
    done = clusters.mgpu_tf("doctor", f"--checkpoint_dir={tmp_path}", "--json")
    findings = json.loads(done.stdout)
    assert [f for f in findings if f["status"] == ERROR] == [], done.stdout
    assert done.returncode == 0


def test_a_fault_is_in_the_status(monkeypatch, capsys):
    """The test above has TensorFlow's process, which takes seconds."""
    monkeypatch.setattr(tensorflow_sees, "examine", lambda *_: iter(()))
    monkeypatch.setenv("TF_CONFIG", "{")
    assert cli.main(["doctor"]) == 1
    told = capsys.readouterr()
    assert "TF_CONFIG must be JSON" in told.out
    assert told.out.endswith("1 errors, 0 warnings\n")
    assert "Traceback" not in told.out + told.err


@pytest.mark.full
def test_a_sum_over_two_workers():
    program = [sys.executable, "-m", "mgpu_tf", "doctor", "--all_reduce"]
    done = clusters.mgpu_tf(
        "launch", "--num_workers=2", "--startup_seconds=0", "--", *program
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for worker in range(2):
        assert f"[worker {worker}] ok       all-reduce" in done.stdout
    assert "over 2 replicas" in done.stdout
