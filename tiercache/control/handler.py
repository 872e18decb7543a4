"""Execute control messages."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

from tiercache.control.families import figures_of
from tiercache.control.messages import (
    Advise,
    Attach,
    Began,
    Cancel,
    Command,
    ControlError,
    Detach,
    Ended,
    Forget,
    Lookup,
    Over,
    Pin,
    Prefetch,
    Progress,
    Reconfigure,
    Reload,
    Statistics,
    Unpin,
)
from tiercache.control.naming import Naming
from tiercache.control.served import ServedCache
from tiercache.core.advice import sentences
from tiercache.core.keys import ChunkKey
from tiercache.scheduler.prefetcher import PrefetchHandle

_MOST_HANDLES = 4096
_KEYS_AT_ONCE = 1024


class Handler:
    """Bound to the cache's loop. Cancelling `answer` does not cancel the operation that it began."""

    def __init__(self, cache: ServedCache, naming: Naming) -> None:
        self._cache = cache
        self._naming = naming
        self._handles: dict[str, PrefetchHandle] = {}
        self._turns = asyncio.Lock()

    async def turn(self) -> None:
        """Wait for a round of the loop, shared by all connections one after another.

        The code between this and the next `await` should take no longer than a few milliseconds.
        """
        async with self._turns:
            await asyncio.sleep(0)

    async def answer(self, command: Command) -> dict[str, Any]:
        """Return the answer as plain data. Raises ControlError for a refused command, and the errors of the cache."""
        cache, ahead = self._cache, self._cache.ahead
        match command:
            case Prefetch():
                return await self._prefetch(command)
            case Progress() | Cancel():
                handle = self._handle(command.handle)
                if isinstance(command, Cancel):
                    handle.cancel()
                else:
                    await _wait(handle, command.until_s)
                return _progress(command.handle, handle)
            case Pin():
                return await self._pin(command)
            case Unpin() | Forget():
                keys = await self._naming.all_keys(cache, command)
                async for part in self._parts(keys):
                    ahead.unpin(part)
                if isinstance(command, Forget):
                    await cache.forget(keys)
                return {}
            case Lookup():
                keys = await self._naming.keys(cache, command)
                hit = await cache.lookup_keys(keys, counts=False)
                return {"asked": len(keys), "found": hit.chunks, "by_tier": dict(hit.by_tier)}
            case Began() | Ended():
                keys = await self._naming.keys(cache, command)
                (ahead.began if isinstance(command, Began) else ahead.ended)(command.session, keys)
                return {"chunks": len(keys)}
            case Over():
                ahead.over(command.session)
                return {}
            case Statistics():
                return figures_of(cache)
            case Advise():
                advice = cache.statistics().advice
                return {"advice": asdict(advice), "sentences": sentences(advice)}
            case Reconfigure():
                return {"changed": await cache.reconfigure(command.changes)}
            case Reload():
                return {"changed": await cache.reload()}
            case Detach():
                await cache.detach(command.tier, timeout_s=command.until_s)
                return {}
            case Attach():
                await cache.attach(command.tier)
                return {}

    async def _pin(self, command: Pin) -> dict[str, Any]:
        cache = self._cache
        keys = await self._naming.keys(cache, command)
        if cache.lookup_hot(keys) < len(keys):
            await _wait(cache.prefetch(keys, ttl=command.ttl_s), command.until_s)
        pinned = 0
        async for part in self._parts(keys):
            pinned += cache.ahead.pin(part, command.ttl_s)
        return {"asked": len(keys), "pinned": pinned}

    async def _parts(self, keys: list[ChunkKey]) -> AsyncIterator[list[ChunkKey]]:
        """Yield parts that each fit into one round of the loop."""
        for start in range(0, len(keys), _KEYS_AT_ONCE):
            if start:
                await self.turn()
            yield keys[start : start + _KEYS_AT_ONCE]

    async def _prefetch(self, command: Prefetch) -> dict[str, Any]:
        name = command.handle or secrets.token_hex(12)
        keys = await self._naming.keys(self._cache, command)
        known = self._handles.get(name)
        if known is not None and not known.done:
            raise ControlError("refused", f"there is a prefetch {name!r} already, which has not ended")
        if len(self._handles) >= _MOST_HANDLES:
            # Drop ended handles when their place is needed; until then their outcome can be queried.
            ended = next((other for other, handle in self._handles.items() if handle.done), None)
            if ended is None:
                raise ControlError("busy", f"{_MOST_HANDLES} prefetches are in flight; cancel some, or wait")
            del self._handles[ended]
        handle = self._cache.prefetch(keys, deadline=command.deadline_s, ttl=command.ttl_s, priority=command.priority)
        self._handles.pop(name, None)  # the newest is the last
        self._handles[name] = handle
        return _progress(name, handle)

    def _handle(self, name: str) -> PrefetchHandle:
        handle = self._handles.get(name)
        if handle is None:
            raise ControlError("unknown", f"there is no prefetch {name!r}; it may have ended long ago")
        return handle


async def _wait(handle: PrefetchHandle, until_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(until_s):
            await handle


def _progress(name: str, handle: PrefetchHandle) -> dict[str, Any]:
    progress = handle.progress
    return {"handle": name, **asdict(progress), "done": progress.done}
