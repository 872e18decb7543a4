"""One ring as the daemon serves it: which operations to claim, and in what order results may be published."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field

from tests.hf3fs_emulator.ring_memory import RingMemory
from tests.hf3fs_emulator.wire import RingTraits

_CLAIMS_AT_ONCE = 32


@dataclass
class Batch:
    """Operations that were claimed together. All results are published together, when the last is there."""

    ring: ServedRing
    start: int
    submissions: list[tuple[int, int]]
    """(index, userdata)"""
    results: list[int | None] = field(init=False)
    """None: lost, never reported."""

    def __post_init__(self) -> None:
        self.results = [None] * len(self.submissions)
        self._missing = len(self.submissions)
        self._lock = threading.Lock()

    def done(self, position: int, result: int | None) -> bool:
        """Note a result; whether it was the last."""
        with self._lock:
            self.results[position] = result
            self._missing -= 1
            return self._missing == 0


class ServedRing:
    def __init__(self, memory: RingMemory, traits: RingTraits) -> None:
        self.memory = memory
        self.traits = traits
        self._lock = threading.Lock()
        self._claimed_to = 0
        self._claims: deque[int] = deque()
        """Where each batch under way ends, in order of claim: submissions are consumed in this order only."""
        self._finished: set[int] = set()
        self._under_way = 0
        memory.completed.initialise()

    def claim(self, limit: int = _CLAIMS_AT_ONCE) -> list[Batch]:
        """The batches that `io_depth` lets run now."""
        batches: list[Batch] = []
        memory, depth = self.memory, self.traits.io_depth
        with self._lock:
            waiting = memory.submitted_after(self._claimed_to)
            # Results that nobody has waited for take the room of new ones.
            room = memory.slots - 1 - self._under_way - memory.completions()
            while waiting and len(batches) < limit:
                size = depth if depth > 0 else min(waiting, room)
                if depth < 0:
                    size = min(size, -depth)
                if size <= 0 or size > waiting or size > room:
                    break
                start = self._claimed_to
                batches.append(Batch(self, start, [memory.submission(start + number) for number in range(size)]))
                self._claimed_to = (start + size) % memory.slots
                self._claims.append(self._claimed_to)
                self._under_way += size
                waiting -= size
                room -= size
        return batches

    def finish(self, batch: Batch) -> None:
        """Publish the results of `batch` and wake the waiters."""
        end = (batch.start + len(batch.submissions)) % self.memory.slots
        with self._lock:
            self._finished.add(end)
            while self._claims and self._claims[0] in self._finished:
                consumed = self._claims.popleft()
                self._finished.discard(consumed)
                self.memory.consume(consumed)
            for (index, userdata), result in zip(batch.submissions, batch.results, strict=True):
                if result is not None:
                    self.memory.complete(index, result, userdata)
            self._under_way -= len(batch.submissions)
        self.memory.completed.post()
