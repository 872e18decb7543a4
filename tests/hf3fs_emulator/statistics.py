"""What the daemon counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Statistics:
    operations: int
    """Carried out or failed by rings since the daemon's start."""
    transferred_bytes: int
    faults_struck: int
    buffers: int
    """Registered now, as are `rings`."""
    rings: int
    open_files: int
    """Inodes that rings may name."""
