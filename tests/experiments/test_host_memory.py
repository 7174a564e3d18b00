"""The script that measures what the memory of a long run grows by."""

import json

import pytest

from tests import clusters


@pytest.mark.full
def test_ten_lines():
    done = clusters.run(["experiments/host_memory.py", "--fits=20"])
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["fits"] for line in lines] == list(range(2, 22, 2))
    assert [line["steps"] for line in lines] == list(range(80, 840, 80))
    assert all(line["mib"] > 0 for line in lines)
