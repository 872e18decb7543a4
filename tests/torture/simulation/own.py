"""A third party's tier behind the weather, made as `remote_storage_plugin.NAME.module_path` makes it."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tests.torture.simulation.weather import Weather
from tiercache.core.keys import ChunkKey
from tiercache.errors import TierUnavailable
from tiercache.testing.wrapped import WrappedTier
from tiercache.tiers.base import Tier
from tiercache.tiers.remote.base import RemoteSettings
from tiercache.tiers.remote.registry import make_remote


@dataclass(frozen=True)
class Given:
    """What a run takes: module:Class, and the weather before it."""

    place: str
    weather: Weather


GIVEN: list[Given] = []
"""Of the run that is under way, one or none."""


def make_own(settings: RemoteSettings) -> Tier:
    """The factory that the configuration of a simulated process names."""
    (given,) = GIVEN
    module, _, name = given.place.partition(":")
    return BehindWeather(make_remote(settings, module_path=module, class_name=name), settings, given.weather)


class BehindWeather(WrappedTier):
    """Any tier, with a way to it that is slow, hangs, refuses, and loses answers."""

    def __init__(self, tier: Tier, settings: RemoteSettings, weather: Weather) -> None:
        super().__init__(tier)
        self._timeout_s = settings.timeout_s
        self._weather = weather

    async def open(self) -> None:
        await self._arrive()
        await super().open()

    async def probe(self, keys: Sequence[ChunkKey]) -> int:
        await self._arrive()
        return await super().probe(keys)

    async def probe_each(self, keys: Sequence[ChunkKey]) -> list[bool]:
        await self._arrive()
        return await super().probe_each(keys)

    async def read(self, key: ChunkKey, into: np.ndarray) -> int | None:
        await self._arrive()
        return await super().read(key, into)

    async def write(self, key: ChunkKey, payload: np.ndarray, payload_bytes: int) -> bool:
        await self._arrive()
        stored = await super().write(key, payload, payload_bytes)
        self._may_lose_answer()
        return stored

    async def remove(self, key: ChunkKey) -> bool:
        await self._arrive()
        found = await super().remove(key)
        self._may_lose_answer()
        return found

    async def _arrive(self) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._weather.moment()
        except TimeoutError:
            raise TierUnavailable(f"no answer within {self._timeout_s:.1f} s") from None
        if self._weather.strikes("unavailable"):
            raise TierUnavailable("it says that it cannot be used")
        if self._weather.strikes("refused"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def _may_lose_answer(self) -> None:
        if self._weather.strikes("lost-answer"):
            raise TierUnavailable("it was done, and the answer was lost")
