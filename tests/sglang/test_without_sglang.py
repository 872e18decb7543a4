"""Where SGLang is not installed: the storage says so, and the rest of the package is there."""

from __future__ import annotations

import importlib
import sys

import pytest


@pytest.fixture
def no_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)
    monkeypatch.delitem(sys.modules, "tiercache.integrations.sglang.storage", raising=False)


@pytest.mark.usefixtures("no_sglang")
def test_the_storage_says_what_it_needs() -> None:
    with pytest.raises(ImportError, match=r"TierCacheStorage needs SGLang.*pip install sglang"):
        from tiercache.integrations.sglang import TierCacheStorage  # noqa: F401


@pytest.mark.usefixtures("no_sglang")
def test_another_sglang_is_named_with_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang", sys)
    with pytest.raises(ImportError, match=r"cannot be imported.*sglang\.srt"):
        _ = importlib.import_module("tiercache.integrations.sglang").TierCacheStorage


@pytest.mark.usefixtures("no_sglang")
def test_pages_and_hits_do_without() -> None:
    importlib.import_module("tiercache.integrations.sglang.lookup")
