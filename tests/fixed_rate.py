"""A contestant of a given speed, for the tests of the runner."""

import json
import os
import signal


def create(place):
    if _cluster().get("task", {}).get("type") in ("worker", "ps"):
        while True:  # As a server does, until it is ended.
            signal.pause()
    return FixedRate(place.options)


class FixedRate:
    """Options: `step_seconds`, `loss`, `error`.

    The loss of a coordinator is the number of tasks that it knows.
    """

    def __init__(self, options):
        self._options = options

    def check(self, steps):
        if "error" in self._options:
            raise ValueError(self._options["error"])
        if _cluster():
            return float(sum(map(len, _cluster()["cluster"].values())))
        return self._options.get("loss", 1.0) * steps

    def burst(self, steps, **options):
        return steps, (self._options | options)["step_seconds"] * steps


def _cluster():
    return json.loads(os.environ.get("TF_CONFIG", "{}"))
