"""What commands say: a line of the doctor's table, or why there is nothing to say."""

from __future__ import annotations

import sys
from dataclasses import dataclass

OK, NOTE, PROBLEM = "ok", "note", "problem"


@dataclass(frozen=True)
class Finding:
    topic: str
    status: str
    found: str
    advice: str = ""


def complain(problem: str) -> int:
    """The exit status of a command that could not do what it was asked."""
    print(f"error: {problem}", file=sys.stderr)
    return 2
