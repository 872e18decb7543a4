"""The back end alone, with SGLang's pools and factory: opening, refusing, and letting go of SGLang's memory."""

from __future__ import annotations

import argparse
import contextlib
import shlex
from pathlib import Path

import pytest
import torch

from tests.readme.blocks import block_of
from tests.sglang.pages import page_hashes, random_pages, read_pages, tokens_of, write_pages
from tests.sglang.process import in_sglang
from tests.sglang.stack import engine, extra_config, mha_pools, mla_pools, storage_config
from tiercache.errors import ConfigError


@in_sglang
def test_a_page_is_not_written_to_after_the_call_has_returned(tmp_path: Path) -> None:
    """The cache's thread is held up until SGLang's call has given up: what it copies then goes nowhere."""
    from tiercache.integrations.sglang import storage as module

    tokens = tokens_of(3, pages=4)
    with engine(tmp_path, blocking_timeout_secs=1) as one:
        one.store(tokens, random_pages(one.host, 4))
        module._MARGIN_S = -0.8  # so that it does not take seconds
        indices = one.host.alloc(len(tokens))
        others = random_pages(one.host, 4, seed=9)
        write_pages(one.host, indices, others)
        with one.held_up():
            assert one.storage.batch_get_v1(page_hashes(tokens), indices) == [False] * 4
    assert torch.equal(read_pages(one.host, indices), others)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"local_diks": "/tmp"}, "local_disk"),
        ({"model": None}, "model_id"),
        ({"local_disk": "/proc/nowhere"}, "/proc/nowhere"),
        ({"interface_v1": 0}, "interface_v1: expected 1"),
    ],
)
@in_sglang
def test_what_cannot_work_fails_the_attach(tmp_path: Path, options: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said), engine(tmp_path, **options):
        pass


@in_sglang
def test_indices_that_are_no_whole_pages_are_a_miss(tmp_path: Path) -> None:
    hashes = page_hashes(tokens_of(4, pages=2))
    with engine(tmp_path) as one:
        indices = one.host.alloc(32)
        assert one.storage.batch_set_v1(hashes, indices[:-1]) == [False, False]
        assert one.storage.batch_set_v1([], indices[:0]) == []
        assert one.storage.batch_exists(hashes) == 0


@in_sglang
def test_each_process_of_a_server_has_a_control_socket_of_its_own(tmp_path: Path) -> None:
    """Also where the layout takes ranks for one, as with MLA."""
    with contextlib.ExitStack() as server:
        for rank in (0, 1):
            socket = str(tmp_path / "s")
            server.enter_context(engine(tmp_path / "kv", mla_pools(), tp_rank=rank, tp_size=2, control_socket=socket))
        assert sorted(path.name for path in tmp_path.glob("s*") if path.is_socket()) == ["s.0", "s.1"]


@in_sglang
def test_what_the_guide_shows_is_what_sglang_takes(tmp_path: Path) -> None:
    """From the server's command line, and the file that it names, to a back end of its factory."""
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
    from sglang.srt.mem_cache.storage import StorageBackendFactory
    from sglang.srt.server_args import ServerArgs

    (command,) = block_of("docs/sglang.md", "SGLang", "sh").commands()
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    given = parser.parse_args(shlex.split(command)[3:])
    assert (given.enable_hierarchical_cache, given.hicache_storage_backend) == (True, "dynamic")
    assert given.hicache_storage_backend_extra_config == "@tiercache.json"
    file = block_of("docs/sglang.md", "SGLang", "json").text
    (tmp_path / "tiercache.json").write_text(file.replace("/mnt/nvme", str(tmp_path)).replace("5.0", "0.02"))
    extra, *_ = HybridCacheController.parse_storage_backend_extra_config(f"@{tmp_path / 'tiercache.json'}")
    _, host = mha_pools()
    storage = StorageBackendFactory.create_backend("dynamic", storage_config(extra_config=extra), host)
    storage.register_mem_pool_host(host)
    storage.on_host_pools_registered()
    assert storage.batch_exists(["00"]) == 0
    storage.close()


@in_sglang
def test_before_all_pools_are_registered_everything_is_a_miss(tmp_path: Path) -> None:
    from tiercache.integrations.sglang import TierCacheStorage

    _, host = mha_pools()
    early = TierCacheStorage(storage_config(extra_config=extra_config(tmp_path)), {})
    for _ in range(2):  # without the pool of the KV, and with it
        assert [early.exists("00"), early.batch_exists(["00"])] == [False, 0]
        assert early.batch_exists_v2(["00"], []).kv_hit_pages == 0
        assert early.batch_get_v1(["00"], torch.arange(16)) == [False]
        assert early.batch_set_v1(["00"], torch.arange(16)) == [False]
        early.register_mem_pool_host(host)


@in_sglang
def test_a_key_that_comes_again_in_one_batch_is_stored(tmp_path: Path) -> None:
    one, other = page_hashes(tokens_of(4, pages=2))
    with engine(tmp_path) as v1:
        indices = v1.host.alloc(48)
        pages = random_pages(v1.host, 2)
        write_pages(v1.host, indices, pages[[0, 0, 1]])
        assert v1.storage.batch_set_v1([one, one, other], indices) == [True] * 3
        assert v1.storage.batch_get_v1([one, one, other], indices) == [True] * 3
        assert read_pages(v1.host, indices).equal(pages[[0, 0, 1]])
