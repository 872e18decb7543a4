"""Report findings and errors of commands."""

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
    """Print an error, and return the exit status of a command that failed."""
    print(f"error: {problem}", file=sys.stderr)
    return 2
