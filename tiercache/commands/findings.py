"""What an examination says: one line of the doctor's table."""

from __future__ import annotations

from dataclasses import dataclass

OK, NOTE, PROBLEM = "ok", "note", "problem"


@dataclass(frozen=True)
class Finding:
    topic: str
    status: str
    found: str
    advice: str = ""
