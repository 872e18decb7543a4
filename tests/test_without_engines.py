"""Where an engine, or the library of a tier, is not installed: one sentence says what is needed and what to install."""

from __future__ import annotations

import importlib
import sys

import pytest

from tiercache.errors import ConfigError
from tiercache.tiers.remote.base import RemoteSettings
from tiercache.tiers.remote.registry import make_remote

ENGINES = [
    ("vllm", "vllm", "TierCacheConnector", "needs vLLM 0.30 or 0.31 or 0.32", "pip install 'vllm==0.32.*'"),
    ("vllm_offloading", "vllm", "TierCacheTier", "needs vLLM 0.32", "pip install 'vllm==0.32.*'"),
    ("sglang", "sglang", "TierCacheStorage", "needs SGLang 0.5.23", "pip install sglang==0.5.23"),
    ("transformers", "transformers", "Generator", "needs torch and transformers 5.19", "'tiercache[transformers]'"),
]


def forget(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """What was imported of it is there again after the test."""
    for module in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, module)


@pytest.mark.parametrize(("name", "engine", "what", "needs", "install"), ENGINES)
def test_an_integration_says_which_engine_it_needs(
    monkeypatch: pytest.MonkeyPatch, name: str, engine: str, what: str, needs: str, install: str
) -> None:
    forget(monkeypatch, f"tiercache.integrations.{name}")
    forget(monkeypatch, engine)
    monkeypatch.setitem(sys.modules, engine, None)
    with pytest.raises(ImportError) as caught:
        getattr(importlib.import_module(f"tiercache.integrations.{name}"), what)
    said = str(caught.value)
    assert needs in said and install in said and engine in said and "\n" not in said


def test_an_engine_of_another_version_is_named_with_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch, "tiercache.integrations.vllm_offloading")
    forget(monkeypatch, "vllm")
    monkeypatch.setitem(sys.modules, "vllm", sys)
    with pytest.raises(ImportError, match=r"TierCacheTier needs vLLM 0\.32.*vllm\.v1"):
        _ = importlib.import_module("tiercache.integrations.vllm_offloading").TierCacheTier


@pytest.mark.parametrize(("type_name", "library"), [("redis", "redis"), ("s3", "obstore")])
async def test_a_tier_says_which_extra_it_needs(monkeypatch: pytest.MonkeyPatch, type_name: str, library: str) -> None:
    forget(monkeypatch, library)
    forget(monkeypatch, f"tiercache.tiers.remote.{type_name}")
    monkeypatch.setitem(sys.modules, library, None)
    settings = RemoteSettings(type_name, type_name, b"", 4096, options={"url": f"{type_name}://somewhere"})
    with pytest.raises(ConfigError, match=rf"cannot be imported \(.*{library}.*pip install 'tiercache\[{type_name}\]'"):
        await make_remote(settings).open()
