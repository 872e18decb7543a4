"""Decide when programs announce their next requests."""

from __future__ import annotations

from collections import Counter, deque

from tiercache.replay.formats import Request


class Announcements:
    """Schedule of announcements. Pure; tell it each arrival and each end.

    A program announces a request `lead_s` before its arrival (or the lead in the request itself), but not before the
    answer to its previous request has ended.
    """

    def __init__(self, lead_s: float) -> None:
        self.lead_s = lead_s
        self._coming: dict[str, deque[Request]] = {}
        self._running: Counter[str] = Counter()

    def at_s(self, request: Request) -> float:
        """Return the time of the announcement if no answer is running. Call once per request, in the trace's order."""
        if request.session is not None:
            self._coming.setdefault(request.session, deque()).append(request)
        return self._at_s(request)

    def may(self, request: Request, now_s: float) -> bool:
        """Return True if the request may be announced now."""
        run = request.session
        if now_s >= request.time_s:
            return False
        return run is None or (run not in self._running and self._coming[run][0] is request)

    def arrived(self, request: Request) -> None:
        run = request.session
        if run is not None:
            coming = self._coming[run]
            coming.popleft()
            if not coming:
                del self._coming[run]
            self._running[run] += 1

    def ended(self, request: Request, now_s: float) -> Request | None:
        """Record the end of an answer. Return the next request of its session if it is to be announced at once."""
        run = request.session
        if run is None:
            return None
        self._running[run] -= 1
        if self._running[run]:
            return None
        del self._running[run]
        coming = self._coming.get(run)
        if not coming or self._at_s(coming[0]) > now_s or not self.may(coming[0], now_s):
            return None
        return coming[0]

    def _at_s(self, request: Request) -> float:
        return max(0.0, request.time_s - (self.lead_s if request.lead_s is None else request.lead_s))
