"""What Mooncake's return codes mean to the cache (`ErrorCode` in its types.h)."""

from __future__ import annotations

from tiercache.errors import TierFull, TierUnavailable

_NAMES = {
    -1: "internal error",
    -10: "its local buffer is too small",
    -101: "no segment",
    -103: "the master does not know this client",
    -200: "no room in any segment",
    -600: "invalid parameters",
    -601: "illegal client",
    -703: "the value is not complete",
    -704: "no such value",
    -705: "the value is already there",
    -706: "somebody reads the value",
    -707: "the read took longer than the master's lease",
    -708: "the value is being copied",
    -710: "no such replica",
    -712: "the replica is gone",
    -714: "the replica is busy",
    -800: "the transfer failed",
    -801: "checksum mismatch",
    -900: "the master cannot be reached",
    -901: "the master does not answer",
}
ALREADY_THERE = -705
_MISSES = frozenset({-703, -704, -710, -712})
"""A value that is still being written (-703) is not there yet."""
_FULL = -200
_MASTER_LOST = frozenset({-900, -901})


class MasterLost(TierUnavailable):
    """The master is gone or does not answer: nothing that was known of the store is worth anything."""


def is_miss(code: int) -> bool:
    return code in _MISSES


def failure(name: str, what: str, code: int) -> TierFull | TierUnavailable:
    """The error for a code that is neither success nor a miss."""
    meaning = f"{name}: {what}: Mooncake says {code} ({_NAMES.get(code, 'see ErrorCode in its types.h')})"
    if code == _FULL:
        return TierFull(meaning)
    return MasterLost(meaning) if code in _MASTER_LOST else TierUnavailable(meaning)
