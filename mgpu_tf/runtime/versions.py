"""Which TensorFlow and Keras this package runs with.

The range stands in `install_requires` of setup.cfg, and is read from what the
installer wrote down. Neither TensorFlow nor Keras is imported for it.
"""

from __future__ import annotations

from importlib import metadata

from mgpu_tf.errors import ConfigurationError

RANGED = ("tensorflow", "keras")


def check() -> None:
    """Refuses a TensorFlow or Keras that is not in the range.

    What is not installed under its own name is not looked at, nor is anything
    where this package itself is not installed.

    Raises:
        ConfigurationError: A version is out of range.
    """
    from packaging.requirements import Requirement

    try:
        lines = metadata.requires("mgpu_tf") or []
    except metadata.PackageNotFoundError:
        return
    needed: list[str] = []
    received: list[str] = []
    fits = True
    for requirement in map(Requirement, lines):
        if requirement.name not in RANGED or requirement.marker:
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            continue
        bounds = sorted(map(str, requirement.specifier), reverse=True)
        needed.append(f"{requirement.name}{','.join(bounds)}")
        received.append(f"{requirement.name} {version}")
        # A release candidate within the bounds is in range as well.
        fits &= requirement.specifier.contains(version, prereleases=True)
    if fits:
        return
    quoted = " ".join(f"'{one}'" for one in needed)
    raise ConfigurationError(
        f"mgpu_tf runs with {' and '.join(needed)}. Received: "
        f"{', '.join(received)}. Run: pip install {quoted}"
    )
