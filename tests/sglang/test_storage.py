"""The back end alone, with SGLang's pools and factory: opening, clearing, refusing, and letting go of SGLang's memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sglang.process import in_sglang


@in_sglang
def test_clear_removes_this_models_pages_and_no_others(tmp_path: Path) -> None:
    """Also what an earlier run stored, on disk; another model's pages in the same directory stay."""
    import torch

    from tests.sglang.stack import engine, page_hashes, random_pages, tokens_of

    before, now = tokens_of(1, pages=3), tokens_of(2, pages=2)
    with engine(tmp_path, model="another") as other:
        pages = random_pages(other.host, 3)
        other.store(before, pages)
    with engine(tmp_path) as earlier:
        earlier.store(before, random_pages(earlier.host, 3, seed=1))
    with engine(tmp_path) as one:
        one.store(now, random_pages(one.host, 2))
        assert one.storage.batch_exists(page_hashes(before)) == 3
        assert one.storage.clear() is True
        assert [one.storage.batch_exists(page_hashes(tokens)) for tokens in (before, now)] == [0, 0]
        one.store(now, random_pages(one.host, 2))
        assert len(one.load(now)) == 2, "and goes on"
    with engine(tmp_path, model="another") as other:
        assert torch.equal(other.load(before), pages)


@in_sglang
def test_clear_says_what_it_cannot_clear(tmp_path: Path) -> None:
    """A server cannot say which chunks it holds. Nothing listens there: its tier is as good as any for that."""
    from tests.sglang.stack import engine
    from tiercache.errors import TierUnavailable

    remote = {"remote_storage_plugins": ["redis"], "remote_storage_plugin.redis.url": "redis://127.0.0.1:1"}
    with engine(tmp_path, **remote) as one, pytest.raises(TierUnavailable, match="redis"):
        one.storage.clear()


@in_sglang
def test_a_page_is_not_written_to_after_the_call_has_returned(tmp_path: Path) -> None:
    """The cache's thread is held up until SGLang's call has given up: what it copies then goes nowhere."""
    import threading

    import torch

    from tests.sglang.stack import engine, page_hashes, random_pages, read_pages, tokens_of, write_pages
    from tiercache.integrations.sglang import storage as module

    tokens = tokens_of(3, pages=4)
    with engine(tmp_path, blocking_timeout_secs=1) as one:
        one.store(tokens, random_pages(one.host, 4))
        module._MARGIN_S = -0.8  # so that it does not take seconds
        indices = one.host.alloc(len(tokens))
        others = random_pages(one.host, 4, seed=9)
        write_pages(one.host, indices, others)
        loop, held, go_on = one.storage._thread.loop, threading.Event(), threading.Event()
        loop.call_soon_threadsafe(lambda: (held.set(), go_on.wait()))
        assert held.wait(10)
        assert one.storage.batch_get_v1(page_hashes(tokens), indices) == [False] * 4
        go_on.set()
        one.storage._wait(one.storage._thread.cache.flush(), 10)
        assert torch.equal(read_pages(one.host, indices), others)


@in_sglang
def test_settings_that_only_vllms_connector_reads_are_named_once(tmp_path: Path) -> None:
    import logging

    from tests.sglang.stack import engine

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tiercache.sglang").addHandler(handler)
    with engine(tmp_path, priority_limit=3, save_decode_cache=True):
        pass
    unread = "accepted but not honoured: priority_limit, save_decode_cache (up to SGLang)"
    assert [line for line in lines if "not honoured" in line] == [unread]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"local_diks": "/tmp"}, "local_disk"),
        ({"model": None}, "model_id"),
        ({"local_disk": "/proc/nowhere"}, "/proc/nowhere"),
    ],
)
@in_sglang
def test_what_cannot_work_fails_the_attach(tmp_path: Path, options: dict[str, str], said: str) -> None:
    from tests.sglang.stack import engine
    from tiercache.errors import ConfigError

    with pytest.raises(ConfigError, match=said), engine(tmp_path, **options):
        pass


@in_sglang
def test_indices_that_are_no_whole_pages_are_a_miss(tmp_path: Path) -> None:
    from tests.sglang.stack import engine, page_hashes, tokens_of

    hashes = page_hashes(tokens_of(4, pages=2))
    with engine(tmp_path) as one:
        indices = one.host.alloc(32)
        assert one.storage.batch_set_v1(hashes, indices[:-1]) == [False, False]
        assert one.storage.batch_set_v1([], indices[:0]) == []
        assert one.storage.batch_exists(hashes) == 0


@in_sglang
def test_each_process_of_a_server_has_a_control_socket_of_its_own(tmp_path: Path) -> None:
    """Also where the layout takes ranks for one, as with MLA."""
    import contextlib

    from tests.sglang.stack import engine, mla_pools

    with contextlib.ExitStack() as server:
        for rank in (0, 1):
            socket = str(tmp_path / "s")
            server.enter_context(engine(tmp_path / "kv", mla_pools(), tp_rank=rank, tp_size=2, control_socket=socket))
        assert sorted(path.name for path in tmp_path.glob("s*") if path.is_socket()) == ["s.0", "s.1"]


@in_sglang
def test_the_model_is_known_by_its_weights(tmp_path: Path) -> None:
    """Where SGLang's arguments say where they are: the same under another name, others under the same."""
    from types import SimpleNamespace

    from tests.sglang.stack import storage_config
    from tiercache.integrations.sglang.identity import model_of

    def server(name: str, weights: bytes) -> SimpleNamespace:
        place = tmp_path / name
        place.mkdir()
        (place / "model.safetensors").write_bytes(weights)
        (place / "config.json").write_text("{}")
        return SimpleNamespace(
            model_path=str(place), revision=None, load_format="auto", download_dir=None, trust_remote_code=False
        )

    one, same, other = server("one", b"w"), server("same", b"w"), server("other", b"v")
    named = [model_of(storage_config(), args, "0") for args in (one, same, other)]
    assert named[0] == named[1] != named[2]
    assert model_of(storage_config(model_name="m"), None, "0") == "name m"


@in_sglang
def test_what_the_server_was_told_keeps_pages_apart(tmp_path: Path) -> None:
    """What of SGLang's arguments changes KV; that it has these arguments is part of it."""
    from types import SimpleNamespace

    import torch
    from sglang.srt.runtime_context import get_context
    from sglang.srt.server_args import ServerArgs

    from tests.sglang.stack import engine, random_pages, tokens_of
    from tiercache.integrations.sglang.identity import _CHANGES_KV

    assert set(_CHANGES_KV) <= set(ServerArgs.__struct_fields__)
    (tmp_path / "model.safetensors").write_bytes(b"w")
    told = dict.fromkeys(ServerArgs.__struct_fields__) | {"model_path": str(tmp_path), "load_format": "auto"}
    tokens = tokens_of(5, pages=2)

    def found(**more: str) -> torch.Tensor:
        get_context()._server_args = SimpleNamespace(**told | more)
        with engine(tmp_path / "kv") as one:
            return one.load(tokens)

    get_context()._server_args = SimpleNamespace(**told)
    with engine(tmp_path / "kv") as one:
        pages = random_pages(one.host, 2)
        one.store(tokens, pages)
    assert len(found(kv_cache_dtype="fp8_e5m2")) == 0
    assert len(found(speculative_draft_model_path="a draft")) == 0
    assert torch.equal(found(served_model_name="a name"), pages)


@in_sglang
def test_what_the_readme_shows_is_what_sglang_takes(tmp_path: Path) -> None:
    """From the file that its command line names to a back end of its factory."""
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
    from sglang.srt.mem_cache.storage import StorageBackendFactory

    from tests.readme.blocks import blocks
    from tests.sglang.stack import mha_pools, storage_config

    (shown,) = [block for block in blocks() if block.section == "Serving with SGLang" and block.language == "json"]
    (tmp_path / "tiercache.json").write_text(shown.text.replace("/mnt/nvme", str(tmp_path)).replace("5.0", "0.02"))
    extra, *_ = HybridCacheController.parse_storage_backend_extra_config(f"@{tmp_path / 'tiercache.json'}")
    _, host = mha_pools()
    storage = StorageBackendFactory.create_backend("dynamic", storage_config(extra_config=extra), host)
    storage.register_mem_pool_host(host)
    storage.on_host_pools_registered()
    assert storage.batch_exists(["00"]) == 0
    storage.close()
