"""The commands of docs/kubernetes.md."""

import stat
import subprocess
import sys

import yaml

from tests import clusters, pages
from tests.launch import dockerfiles
from tests.launch.manifests import problems

KUBECTL = """#!/bin/sh
[ "$1 $2" = "apply -f" ] && cp "$3" applied.yaml
"""


def test_commands(tmp_path):
    """Each runs as it stands; kubectl is one that keeps what it gets."""
    blocks = pages.blocks("kubernetes.md", "sh")
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    main = f'#!/bin/sh\nexec {sys.executable} -m mgpu_tf "$@"\n'
    for name, text in (("kubectl", KUBECTL), ("mgpu-tf", main)):
        (bin_folder / name).write_text(text)
        (bin_folder / name).chmod(stat.S_IRWXU)
    subprocess.run(
        ["bash", "-euc", "\n".join(blocks)],
        cwd=tmp_path,
        env=clusters.environment(PATH=f"{bin_folder}:/usr/bin:/bin"),
        timeout=clusters.LIMIT_SECONDS,
        check=True,
    )
    applied = (tmp_path / "applied.yaml").read_text()
    assert applied == (tmp_path / "mnist.yaml").read_text()
    assert dockerfiles.problems((tmp_path / "Dockerfile").read_text()) == []
    files = sorted(tmp_path.glob("*.yaml"))
    assert len(files) == 5
    for file in files:
        assert problems(list(yaml.safe_load_all(file.read_text()))) == []
