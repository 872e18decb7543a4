"""Models and caches. What needs torch is imported by the fixtures: where it is not installed, the tests are skipped."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tiercache import Config, TierCache

if TYPE_CHECKING:
    from tests.transformers.models import Open
    from tiercache.integrations.transformers import ModelKv, PrefixCache


@pytest.fixture(params=["llama", "gemma"])
def kv(request: pytest.FixtureRequest) -> ModelKv:
    from tests.transformers.models import CHUNK_TOKENS, make_model
    from tiercache.integrations.transformers import ModelKv

    return ModelKv(make_model(request.param), chunk_tokens=CHUNK_TOKENS)


@pytest.fixture
async def prefixes(kv: ModelKv, open_cache: Open) -> AsyncIterator[PrefixCache]:
    from tiercache.integrations.transformers import PrefixCache

    async with open_cache(kv) as cache:
        yield PrefixCache(cache, kv)


@pytest.fixture
def open_cache(tmp_path: Path) -> Open:
    """With a disk tier that stays from one cache to the next."""
    from tests.transformers.models import CHUNK_TOKENS

    settings = {"max_local_cpu_size": 0.02, "local_disk": str(tmp_path / "kv"), "max_local_disk_size": 0.1}
    config = Config.load(overrides={"chunk_size": CHUNK_TOKENS, **settings}, environ={})

    @asynccontextmanager
    async def opened(kv: ModelKv) -> AsyncIterator[TierCache]:
        async with TierCache.open(config, kv.layout) as cache:
            yield cache

    return opened
