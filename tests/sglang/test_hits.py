"""Which prefixes can be restored, and what the control socket takes for a name, without SGLang."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tiercache.control.messages import ControlError, Prefix
from tiercache.core.keys import ChunkKey
from tiercache.integrations.sglang.lookup import PageNaming, PoolPages, look_up
from tiercache.scheduler.reads import Hit
from tiercache.testing import JumpingClockLoop

NO_CACHE: Any = SimpleNamespace()
KEYS = [bytes([number]) * 24 for number in range(5)]


class Lookups:
    """The lookups of a cache that has these chunks, each of which takes three quarters of its time limit."""

    def __init__(self, *present: ChunkKey) -> None:
        self._present = present
        self.limits_s: list[float] = []

    async def lookup_keys(self, keys: Sequence[ChunkKey], deadline_s: float) -> Hit:
        present = await self.lookup_each(keys, deadline_s)
        chunks = [*present, False].index(False)
        return Hit(chunks, 0, {})

    async def lookup_each(self, keys: Sequence[ChunkKey], deadline_s: float) -> list[bool]:
        self.limits_s.append(deadline_s)
        await asyncio.sleep(0.75 * deadline_s)
        return [key in self._present for key in keys]


def looked_up(cache: Any, kv: list[ChunkKey], pools: list[PoolPages]) -> tuple[int, dict[str, int], list[int]]:
    with asyncio.Runner(loop_factory=JumpingClockLoop) as runner:
        return runner.run(look_up(cache, len(kv), kv, pools, limit_s=64.0))


def test_pools_have_to_agree_on_a_prefix() -> None:
    states, windows = [[bytes([pool, number]) * 12 for number in range(5)] for pool in (8, 9)]
    cache = Lookups(*KEYS[:4], states[1], states[3], *windows[:3])
    found = looked_up(cache, KEYS, [PoolPages("mamba", states, 1), PoolPages("swa", windows, 2)])
    assert found == (4, {"mamba": 4, "swa": 3}, [2])
    assert looked_up(cache, KEYS, [PoolPages("draft", [], 5)]) == (4, {}, []), (
        "a pool that is not stored leaves no prefix"
    )


def test_pools_are_looked_up_within_one_time_limit() -> None:
    """Not within one each: what is left for a pool is what others have not taken."""
    cache = Lookups(*KEYS)
    looked_up(cache, KEYS, [PoolPages(name, KEYS, 1) for name in ("mamba", "swa", "indexer")])
    assert cache.limits_s == [64.0, 16.0, 4.0, 1.0]


async def test_keys_name_pages_and_tokens_do_not_since_sglang_hashes_them_in_its_own_way() -> None:
    assert await PageNaming().keys(NO_CACHE, Prefix(keys=["ab" * 24])) == [b"\xab" * 24]
    with pytest.raises(ControlError, match="expected keys, found tokens"):
        await PageNaming().all_keys(NO_CACHE, Prefix(tokens=[1, 2, 3]))
