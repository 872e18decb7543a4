"""When the count of a shared directory is right, and what it is to be when it is not."""

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
    """What a directory's count should say after all of it was looked at while others went on using it.

    `found_bytes` were seen at one moment or another of the look. `outstanding_bytes` had been charged before it began and
    were perhaps not there yet; `charged_bytes` and `credited_bytes` were added to and taken off the count since.
    `owed_bytes` are deleted, or may be, and will yet be taken off.

    Whatever exists or may yet be made without another charge was seen, or had been charged before the look began and was not
    there yet, or was charged since. So the sum of those, with what will yet be taken off, is never too little. And what was
    seen and is not credited by now, nor about to be, is never too much. A count between the two may be right, and stays; any
    other, and one that never was a count (`counted_bytes` None), becomes the upper bound: rather too much than too little.
    """
    most_bytes = found_bytes + outstanding_bytes + charged_bytes + owed_bytes
    least_bytes = found_bytes - credited_bytes - owed_bytes
    if counted_bytes is not None and least_bytes <= counted_bytes <= most_bytes:
        return counted_bytes
    return most_bytes


def is_doubtful(counted_bytes: int, known_bytes: int, explained_bytes: int, cap_bytes: int) -> bool:
    """Whether a full directory is to be counted again: more is counted than there is known to be.

    `known_bytes` are of the chunks in the index; `explained_bytes` of what else was found when it was last counted.
    """
    return counted_bytes - known_bytes - explained_bytes > cap_bytes // _DOUBT_SHARE
