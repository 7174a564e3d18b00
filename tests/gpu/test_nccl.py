"""Several processes that exchange tensors by NCCL, on one GPU.

NCCL takes a GPU once on each machine, so each process says that it is on a
machine of its own, and NCCL goes between them by sockets.
"""

import collections
import json
import os
import pathlib
import re
import shutil

import pytest

from tests import clusters
from tests.parity import cases, judge, run, worker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        shutil.which("nvidia-smi") is None, reason="there is no GPU"
    ),
]
MESHES = {
    "2_workers": "",
    "3_workers": "",
    "2_workers_fsdp_2": "1,2,weights",
    "3_workers_fsdp_3": "1,3,gradients",
    "2_workers_zero1": "1,2,optimizer",
    "2_workers_tensor_2": "1,1,weights,2",
    "2_workers_pipeline_2": "1,1,weights,1,2",
}
ROWS = (
    *("adam_global_clipnorm", "accumulation_3_uneven", "last_batch_of_1"),
    *("loss_scale_overflow", "batch_norm_synchronized", "embedding_adam"),
    *("mixed_bfloat16", "own_train_step", "dropout", "mask", "auc"),
)


def counted(folder):
    """Returns how often NCCL began each operation, over all processes."""
    found = collections.Counter()
    for path in folder.glob("nccl.*"):
        text = path.read_text(errors="replace")
        found.update(re.findall(r"NCCL INFO (\w+): opCount", text))
    return found


def trained(layout, communication, rows, folder, monkeypatch):
    """Runs rows; returns the weights' hashes, and what NCCL did."""
    for name, value in {
        "MGPU_TF_TESTS_ON": "gpu",
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,COLL",
        "NCCL_DEBUG_FILE": f"{folder}/nccl.%p",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        # Each has "its own" GPU: else `auto` does not take NCCL.
        "CUDA_VISIBLE_DEVICES": "0",
    }.items():
        monkeypatch.setenv(name, value)
    workers = int(layout[0])
    hashes = clusters.run_parity_cases(
        workers,
        1,
        rows,
        folder,
        mesh=MESHES[layout],
        communication=communication,
    )
    return hashes, counted(pathlib.Path(folder))


@pytest.mark.parametrize("communication", ["auto", "nccl", "ring"])
@pytest.mark.parametrize("layout", MESHES)
def test_numbers_of_one_device(layout, communication, tmp_path, monkeypatch):
    rows = [
        name
        for name in (ROWS if communication == "nccl" else ROWS[:2])
        if not MESHES[layout] or name in run.SPLIT_ROWS
    ]
    hashes, operations = trained(
        layout, communication, rows, tmp_path, monkeypatch
    )
    if path := os.environ.get("MGPU_TF_GPU_FIGURES"):
        figures = [layout, communication, len(rows), dict(operations)]
        with open(path, "a") as file:
            file.write(json.dumps(figures) + "\n")
    wrong = {}
    for name in rows:
        result = cases.Result.load(worker.result_file(tmp_path, name))
        holds, difference = judge.verdict(name, result, hashes[name])
        if not holds:
            wrong[name] = difference
    assert not wrong
    if communication == "ring":
        assert not operations
    else:
        assert sum(operations.values())
    if "fsdp" in layout and communication != "ring":
        assert operations["ReduceScatter"]
        assert operations["AllGather"]
