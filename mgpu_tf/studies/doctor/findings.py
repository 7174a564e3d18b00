"""What a check found: how bad it is, in words, and what to do."""

from __future__ import annotations

import dataclasses

OK = "ok"
WARNING = "warning"
ERROR = "error"


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of a check.

    Attributes:
        check: The name of the check, such as "versions".
        status: "ok", "warning" (training may be slow or fail later) or "error"
            (training cannot start, or will fail).
        found: What was found, in one line.
        remedy: What to do; empty where the status is "ok".
    """

    check: str
    status: str
    found: str
    remedy: str = ""

    def line(self) -> str:
        """Returns the finding as text: a line, and a second for the remedy."""
        text = f"{self.status:8} {self.check:16} {self.found}"
        if self.remedy:
            text += f"\n{'':8} {'':16} -> {self.remedy}"
        return text


def ok(check: str, found: str) -> Finding:
    """Returns a finding that needs no action."""
    return Finding(check, OK, found)


def warning(check: str, found: str, remedy: str) -> Finding:
    """Returns a finding that makes training slow, or fail later."""
    return Finding(check, WARNING, found, remedy)


def error(check: str, found: str, remedy: str) -> Finding:
    """Returns a finding with which training cannot start, or fails."""
    return Finding(check, ERROR, found, remedy)
