"""The rules of a Dockerfile, as far as ours use them."""

import json
import re
import shlex

INSTRUCTIONS = ("ARG", "CMD", "COPY", "ENV", "FROM", "RUN", "USER", "WORKDIR")
_STAGE = re.compile(r"[a-z0-9][a-z0-9./_-]*(:[A-Za-z0-9_][A-Za-z0-9_.-]*)?")


def instructions(text):
    """Returns `(instruction, rest)` of each, with lines joined."""
    joined = re.sub(r"\\\n", " ", text)
    found = []
    for line in joined.splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            word, _, rest = line.strip().partition(" ")
            found.append((word, rest.strip()))
    return found


def problems(text):
    """Returns what Docker would refuse, or a cluster."""
    found = []
    if not text.endswith("\n") or text.rstrip().endswith("\\"):
        found.append("the last line does not end")
    steps = instructions(text)
    words = [word for word, _ in steps]
    found += [f"unknown: {w}" for w in words if w not in INSTRUCTIONS]
    found += [f"{w} without an argument" for w, rest in steps if not rest]
    if words[:1] != ["FROM"] or words.count("FROM") != 1:
        found.append("FROM must be the first, once")
    if words.count("CMD") > 1:
        found.append("only the last CMD counts")
    for word, rest in steps:
        found += _of(word, rest)
    users = [rest for word, rest in steps if word == "USER"]
    if not users or users[-1] in ("root", "0"):
        found.append("the container runs as root")
    return found


def _of(word, rest):
    if word == "FROM" and not _STAGE.fullmatch(rest):
        return [f"no image: {rest}"]
    if word == "COPY":
        *sources, target = rest.split() or [""]
        if not sources:
            return ["COPY needs a source and a target"]
        if len(sources) > 1 and not target.endswith("/"):
            return ["the target of several files must end with /"]
        if any(s.startswith(("/", "..")) for s in sources):
            return ["a source must be in the folder of the build"]
    if word == "ENV" and any(
        "=" not in pair or pair.startswith("=") for pair in shlex.split(rest)
    ):
        return ["ENV needs name=value"]
    if word == "CMD":
        try:
            command = json.loads(rest)
        except ValueError:
            return ["CMD must be a list, for signals reach no shell's child"]
        if not isinstance(command, list) or not all(
            isinstance(part, str) for part in command
        ):
            return ["CMD must be a list of texts"]
    if word == "RUN":
        try:
            shlex.split(rest)
        except ValueError as error:
            return [f"RUN: {error}"]
    return []
