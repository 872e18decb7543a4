"""Count transfers for SGLang's metrics: pages and speed."""

from __future__ import annotations

from collections import deque
from typing import Any

_KEPT = 1024
"""Largest number of transfers kept since the last `take`; the oldest are dropped."""


class TransferFigures:
    """Filled by SGLang's storage threads, emptied by its scheduler. `wanted` is `--enable-metrics`."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted
        self._loaded: deque[tuple[int, float]] = deque(maxlen=_KEPT)
        self._stored: deque[tuple[int, float]] = deque(maxlen=_KEPT)

    def loaded(self, pages: int, payload_bytes: int, seconds: float) -> None:
        self._note(self._loaded, pages, payload_bytes, seconds)

    def stored(self, pages: int, payload_bytes: int, seconds: float) -> None:
        self._note(self._stored, pages, payload_bytes, seconds)

    def take(self) -> Any:
        """Return a StorageMetrics of the transfers since the last call, or None without metrics. Speeds are in GiB/s,
        as in SGLang's other back ends."""
        if not self._wanted:
            return None
        from sglang.srt.observability.metrics_collector import StorageMetrics

        loaded, stored = ([one.popleft() for _ in range(len(one))] for one in (self._loaded, self._stored))
        return StorageMetrics(
            prefetch_pgs=[pages for pages, _ in loaded],
            backup_pgs=[pages for pages, _ in stored],
            prefetch_bandwidth=[speed for _, speed in loaded],
            backup_bandwidth=[speed for _, speed in stored],
        )

    def _note(self, transfers: deque[tuple[int, float]], pages: int, payload_bytes: int, seconds: float) -> None:
        if self._wanted and pages:
            transfers.append((pages, payload_bytes / max(seconds, 1e-9) / 2**30))
