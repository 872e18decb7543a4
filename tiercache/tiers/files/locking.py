"""File locks that are waited for with a deadline: whoever holds one may be stopped, or its host gone."""

from __future__ import annotations

import fcntl
import time
from pathlib import Path

from tiercache.errors import TierUnavailable

_FIRST_PAUSE_S = 0.0001
_LONGEST_PAUSE_S = 0.02


def lock_within(descriptor: int, wait_s: float, path: Path | str) -> None:
    """flock(2), exclusive. Raises TierUnavailable when somebody else has had the lock for `wait_s` seconds.

    It is asked for again and again, because a call that waits for a lock cannot be ended from outside.
    """
    until_s = time.monotonic() + wait_s
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= until_s:
                raise TierUnavailable(
                    f"{path}: another process has kept its lock for {wait_s:g} s; is one stopped, or a host gone?"
                ) from None
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
