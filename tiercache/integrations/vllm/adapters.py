"""What the LoRA adapters of requests hold. vLLM names blocks by an adapter's name and path, and means its content.

That stays what it is while an engine lives, or so vLLM takes it; but a cache outlives engines. So the content becomes part
of the names, where it is certain that the engine has loaded what lies there now: the files were changed last before the
engine began. Others get names that no other engine finds, and this one while the files stay as they are. They are looked
at in a thread, at each request, since they may change at any time.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from tiercache.integrations.vllm.kept_digests import Stamp, stamp_of
from tiercache.integrations.vllm.model_identity import adapter_files, identity_of_adapter

_GRAIN_NS = 2_000_000_000
"""By so much clocks of file systems may be wrong."""
_PATIENCE_S = 1.0
"""For what is under way: whoever comes after it is not kept waiting for a mount that hangs."""

Stamps = tuple[tuple[str, Stamp], ...]


class Adapters:
    """`key_of` never waits. Thread-safe."""

    def __init__(self, place_of: Callable[[str], Path | None], since_ns: int | None = None) -> None:
        """`place_of` finds the directory of an adapter's path. `since_ns`: the engine loads adapters from then on."""
        self._place_of = place_of
        self._since_ns = time.time_ns() if since_ns is None else since_ns
        self._secret = os.urandom(16)
        self._known: dict[str, tuple[Stamps, bytes]] = {}
        self._waiting: deque[tuple[str, Future[bytes]]] = deque()
        self._lock = threading.Lock()
        self._busy_since_s: float | None = None

    def key_of(self, path: str) -> Future[bytes]:
        """What blocks of the adapter at `path` are named with besides vLLM's hash. Has no exception."""
        future: Future[bytes] = Future()
        with self._lock:
            if self._busy_since_s is not None and time.monotonic() - self._busy_since_s > _PATIENCE_S:
                future.set_result(nobodys_key())
                return future
            self._waiting.append((path, future))
            if self._busy_since_s is not None:
                return future
            self._busy_since_s = time.monotonic()
        try:
            threading.Thread(target=self._answer, name="tiercache-adapters", daemon=True).start()
        except RuntimeError:  # no more threads
            self._answer(read=False)
        return future

    def _answer(self, *, read: bool = True) -> None:
        """Until nobody waits."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._busy_since_s = None
                    return
                path, future = self._waiting.popleft()
                self._busy_since_s = time.monotonic()
            try:
                key = self._find(path) if read else nobodys_key()
            except Exception:  # what cannot be read is not known
                key = nobodys_key()
            if future.set_running_or_notify_cancel():
                future.set_result(key)

    def _find(self, path: str) -> bytes:
        place = self._place_of(path)
        if place is None:
            return nobodys_key()
        stamps = _stamps(place)
        if any(max(stamp[1:3]) > self._since_ns - _GRAIN_NS for _, stamp in stamps):
            return hashlib.blake2b(repr((path, stamps)).encode(), digest_size=24, key=self._secret).digest()
        known = self._known.get(path)
        if known is None or known[0] != stamps:
            known = stamps, b"adapter " + bytes.fromhex(identity_of_adapter(place))
            if _stamps(place) != stamps:
                return nobodys_key()
            self._known[path] = known
        return known[1]


def nobodys_key() -> bytes:
    """For an adapter of which nothing is known: nothing is found by it, ever."""
    return os.urandom(24)


def _stamps(place: Path) -> Stamps:
    return tuple((name, stamp_of(path.stat())) for name, path in sorted(adapter_files(place).items()))
