"""Contents of chunks in a real replay: random bytes derived from the key, so that each read can be checked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from hashlib import blake2b

import numpy as np

from tiercache.core.keys import KEY_BYTES, ChunkKey
from tiercache.payloads import Sink, Source
from tiercache.replay.formats import Request

_TAPE_BYTES = 8 << 20
_STEP_BYTES = 64


class Contents:
    """Contents by key: the key, and then random bytes from one shared array, at an offset derived from the key."""

    def __init__(self, chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self._tape = np.random.default_rng(0).integers(0, 256, _TAPE_BYTES + chunk_bytes, dtype=np.uint8)
        self.wrong: list[ChunkKey] = []
        """Keys for which wrong contents were delivered."""

    def source(self, key: ChunkKey) -> Source:
        """Return a source that fills a slot with the chunk. Runs on a worker thread."""

        def fill(slot: np.ndarray) -> None:
            np.copyto(slot, self._piece(key))
            slot[: len(key)] = np.frombuffer(key, np.uint8)

        return fill

    def sink(self, key: ChunkKey) -> Sink:
        """Return a sink that copies a delivered chunk like an engine, and checks all of it. Runs on a worker thread."""

        def take(chunk: np.ndarray) -> None:
            taken = chunk.copy()
            named, rest = taken[: len(key)], taken[len(key) :]
            if not (
                np.array_equal(named, np.frombuffer(key, np.uint8)) and np.array_equal(rest, self._piece(key)[len(key) :])
            ):
                self.wrong.append(key)

        return take

    def _piece(self, key: ChunkKey) -> np.ndarray:
        start = int.from_bytes(key[:8], "big") % (_TAPE_BYTES // _STEP_BYTES) * _STEP_BYTES
        return self._tape[start : start + self.chunk_bytes]


class Renamed:
    """Requests with keys hashed to the length of chunk keys, `speed_up` times as fast. Can be iterated repeatedly."""

    def __init__(self, requests: Iterable[Request], speed_up: float = 1.0) -> None:
        self._requests = requests
        self._speed_up = speed_up

    def __iter__(self) -> Iterator[Request]:
        speed_up = self._speed_up
        for request in self._requests:
            yield replace(
                request,
                keys=[blake2b(key, digest_size=KEY_BYTES).digest() for key in request.keys],
                time_s=request.time_s / speed_up,
            )
