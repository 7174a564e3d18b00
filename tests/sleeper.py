"""A contestant of known speed, for the tests of the benchmarks' runner."""

import time


def create(place):
    return Sleeper(place.options)


class Sleeper:
    """Options: `step_seconds`, `loss`, `error`."""

    def __init__(self, options):
        self._options = options

    def check(self, steps):
        if "error" in self._options:
            raise ValueError(self._options["error"])
        return self._options.get("loss", 1.0) * steps

    def burst(self, steps):
        started = time.perf_counter()
        time.sleep(self._options["step_seconds"] * steps)
        return steps, time.perf_counter() - started
