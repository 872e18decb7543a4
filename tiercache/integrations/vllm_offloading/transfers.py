"""Look up chunks, and move them between vLLM's CPU tier and the cache. Coroutines of the cache's loop.

vLLM may reuse a row as soon as a transfer has ended. So a transfer ends when no copy uses its rows, without limit;
everything else has a deadline.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from tiercache.cache import TierCache
from tiercache.core.keys import ChunkKey
from tiercache.integrations.lending import Lending

logger = logging.getLogger("tiercache.vllm")

_LEAST_S = 0.002
"""A remaining time below this counts as 0: timers of a loop may be a millisecond early."""
_POLL_S = 0.1


async def look_up(cache: TierCache, runs: Sequence[Sequence[ChunkKey]], waited_s: float) -> tuple[list[int], float]:
    """Return how many of the first chunks of each run are present, and the seconds that this took.

    All runs are looked up concurrently, within the part of `lookup_timeout_ms` that the request has not waited yet.
    """
    began_s = time.monotonic()
    left_s = cache.config.lookup_timeout_ms / 1000 - waited_s
    left_s = left_s if left_s >= _LEAST_S else 0.0
    there, hits = await asyncio.gather(
        cache.lookup_each([run[0] for run in runs if len(run) == 1], deadline_s=left_s),
        asyncio.gather(*(cache.lookup_keys(run, deadline_s=left_s) for run in runs if len(run) > 1)),
    )
    single, longer = iter(there), iter(hits)
    found = [int(next(single)) if len(run) == 1 else next(longer).chunks for run in runs]
    return found, time.monotonic() - began_s


@dataclass(frozen=True)
class Ended:
    """The end of a transfer."""

    done: Sequence[bool]
    """Per chunk: True if a load has filled its row, or if a stored chunk is in the cache."""
    seconds: float


async def store(cache: TierCache, keys: Sequence[ChunkKey], rows: Sequence[np.ndarray], *, is_prefix: bool) -> Ended:
    """Copy rows into the cache, which writes them to the tiers below later. Raises only CancelledError.

    `rows` are uint8 vectors, one per key, that no other code writes to. With `is_prefix` each chunk follows the one
    before it in the prompt.
    """
    began_s, lending = time.monotonic(), Lending()
    done = [False] * len(keys)

    def fill(position: int, slot: np.ndarray) -> None:
        np.copyto(slot, rows[position])
        done[position] = True

    try:
        items = [
            (key, row.nbytes, lending.reading(partial(fill, position)))
            for position, (key, row) in enumerate(zip(keys, rows, strict=True))
        ]
        # Waiting longer for a free slot is not worth holding vLLM's memory.
        if await cache.put_from(items, deadline_s=cache.config.queue_wait_s, prefix=is_prefix) == len(items):
            done = [True] * len(items)  # chunks that were already present were not copied
    except Exception as error:
        logger.warning("storing %d chunks failed: %r", len(keys), error)
    finally:
        await _ended(lending)
    return Ended(done, time.monotonic() - began_s)


async def load(cache: TierCache, keys: Sequence[ChunkKey], rows: Sequence[np.ndarray]) -> Ended:
    """Copy verified chunks into rows within `blocking_timeout_secs`, also those after a missing chunk.

    `rows` are as for `store`; no other code uses them until the transfer has ended. Raises only CancelledError.
    """
    began_s, lending = time.monotonic(), Lending()
    until_s = began_s + cache.config.blocking_timeout_secs
    done = [False] * len(keys)

    def take(position: int, chunk: np.ndarray) -> None:
        np.copyto(rows[position], chunk)
        done[position] = True

    left = list(range(len(keys)))
    try:
        while left and (left_s := until_s - time.monotonic()) > 0:
            sinks = [lending.writing(partial(take, position)) for position in left]
            found = await cache.get_to([keys[position] for position in left], sinks, deadline_s=left_s)
            # The first chunk not found is missing. Later chunks may be present, and may have been copied already.
            left = [position for position in left[found + 1 :] if not done[position]]
    except Exception as error:
        logger.warning("loading %d chunks failed: %r", len(keys), error)
    finally:
        await _ended(lending)
    return Ended(done, time.monotonic() - began_s)


async def _ended(lending: Lending) -> None:
    """Wait until no copy is in flight. The cache leaves a copy behind only if the machine hangs in it."""
    while not lending.take_back(0.0):  # noqa: ASYNC110 - copies end on threads, hardly ever after the call that began them
        await asyncio.sleep(_POLL_S)
