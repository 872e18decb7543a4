"""What the daemon counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Statistics:
    operations: int
    """Carried out or failed by rings since the daemon's start."""
    faults_struck: int
