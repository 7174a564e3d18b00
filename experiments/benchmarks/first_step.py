"""One process of a start that is measured: makes a step, says when.

Started by a launcher, which says through `TF_CONFIG` or `RANK` which process
this is, with one JSON argument: `module`, `options` and `job` of a contestant,
and the `folder` that gets `{"loss", "monotonic"}`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time

from experiments.benchmarks.starts import task
from experiments.benchmarks.worker import Place


def main() -> None:
    what = json.loads(sys.argv[1])
    index, workers = task()
    place = Place(
        module=what["module"],
        job=what["job"],
        index=index,
        workers=workers,
        options=what["options"],
        check_steps=1,
        answers=-1,
        core=None,
        threads=None,
    )
    loss = importlib.import_module(place.module).create(place).check(1)
    told = {"loss": loss, "monotonic": time.monotonic()}
    path = os.path.join(what["folder"], f"{index}.json")
    with open(path, "w", encoding="utf-8") as file:
        json.dump(told, file)


if __name__ == "__main__":
    main()
