"""Open a tier for the time of a block."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

from tiercache.tiers.base import Tier

AnyTier = TypeVar("AnyTier", bound=Tier)


@asynccontextmanager
async def open_tier(tier: AnyTier) -> AsyncIterator[AnyTier]:
    await tier.open()
    try:
        yield tier
    finally:
        await tier.close()
