"""What the control socket of a cache in SGLang takes for a name, without SGLang."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tiercache.control.messages import ControlError, Prefix
from tiercache.integrations.sglang.lookup import PageNaming

NO_CACHE: Any = SimpleNamespace()


async def test_keys_name_pages() -> None:
    assert await PageNaming().keys(NO_CACHE, Prefix(keys=["ab" * 24])) == [b"\xab" * 24]


async def test_tokens_are_refused_since_sglang_hashes_them_in_its_own_way() -> None:
    with pytest.raises(ControlError, match="expected keys, found tokens"):
        await PageNaming().all_keys(NO_CACHE, Prefix(tokens=[1, 2, 3]))
