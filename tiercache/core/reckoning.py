"""Correct the capacity counter of a shared directory."""

from __future__ import annotations

_DOUBT_SHARE = 32


def reckoned_bytes(
    counted_bytes: int | None,
    *,
    found_bytes: int,
    outstanding_bytes: int,
    owed_bytes: int,
    charged_bytes: int,
    credited_bytes: int,
) -> int:
    """Return the value of a directory's capacity counter after a scan during which other processes went on using it.

    `found_bytes` were seen by the scan. `outstanding_bytes` had been charged before it began and were perhaps not there yet;
    `charged_bytes` and `credited_bytes` were added to and taken off the counter since. `owed_bytes` are deleted, or may be,
    and will yet be taken off.

    Everything that exists, or may come into being without another charge, was seen, or had been charged before the scan and
    was not there yet, or was charged since. So the sum of those and `owed_bytes` is an upper bound. What was seen, less what
    is credited or owed, is a lower bound. A counter between the bounds may be right and stays; any other, and a missing one
    (`counted_bytes` None), becomes the upper bound.
    """
    most_bytes = found_bytes + outstanding_bytes + charged_bytes + owed_bytes
    least_bytes = found_bytes - credited_bytes - owed_bytes
    if counted_bytes is not None and least_bytes <= counted_bytes <= most_bytes:
        return counted_bytes
    return most_bytes


def is_doubtful(counted_bytes: int, known_bytes: int, explained_bytes: int, cap_bytes: int) -> bool:
    """Return True if a full directory has to be scanned again, since its counter is too far above what is known to be there.

    `known_bytes` are those of the chunks in the index; `explained_bytes` those of other files that the last scan found.
    """
    return counted_bytes - known_bytes - explained_bytes > cap_bytes // _DOUBT_SHARE
