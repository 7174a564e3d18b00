"""A contestant of a given speed, for the tests of the runner."""


def create(place):
    return FixedRate(place.options)


class FixedRate:
    """Options: `step_seconds`, `loss`, `error`."""

    def __init__(self, options):
        self._options = options

    def check(self, steps):
        if "error" in self._options:
            raise ValueError(self._options["error"])
        return self._options.get("loss", 1.0) * steps

    def burst(self, steps):
        return steps, self._options["step_seconds"] * steps
