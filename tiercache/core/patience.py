"""How long one put may wait for room in write queues."""

from __future__ import annotations


class Patience:
    """Of one put, for all of its chunks and all tiers together. Times are of one clock, in seconds."""

    def __init__(self, deadline_s: float) -> None:
        """`deadline_s` is the put's own, which no wait outlasts."""
        self.deadline_s = deadline_s
        self.waited_s = 0.0

    def until_s(self, now_s: float, wait_s: float) -> float:
        """The end of a wait that begins now, where a put may wait `wait_s` altogether. Where it is not after `now_s` the put
        has waited enough."""
        return min(self.deadline_s, now_s + wait_s - self.waited_s)

    def waited(self, began_s: float, now_s: float) -> None:
        """Waits that pass side by side count once."""
        self.waited_s += now_s - began_s
