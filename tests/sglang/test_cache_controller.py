"""SGLang's cache controller with its host pools, above our back end: what it backs up it prefetches again, bit by bit."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.chunks import chunks_of
from tests.sglang.pages import page_hashes, random_pages, tokens_of
from tests.sglang.process import in_sglang
from tests.sglang.stack import engine, mha_pools, mla_pools

LAYOUTS = ["page_first", "page_first_direct", "layer_first"]


@pytest.mark.parametrize(("attention", "layout"), [("mha", "page_head"), *itertools.product(["mha", "mla"], LAYOUTS)])
@in_sglang
def test_what_was_backed_up_is_prefetched_after_a_restart(tmp_path: Path, attention: str, layout: str) -> None:
    pools = mha_pools if attention == "mha" else mla_pools
    tokens = tokens_of(1, pages=5)
    with engine(tmp_path, pools(layout)) as first:
        pages = random_pages(first.host, 5)
        assert first.store(tokens, pages) == len(tokens)
        assert torch.equal(first.load(tokens), pages)
    with engine(tmp_path, pools(layout)) as second:
        assert torch.equal(second.load(tokens), pages)
        assert torch.equal(second.load([*tokens[:48], 9, *tokens[49:]]), pages[:3])


@in_sglang
def test_a_flipped_bit_is_a_miss(tmp_path: Path) -> None:
    tokens = tokens_of(4, pages=3)
    with engine(tmp_path) as first:
        pages = random_pages(first.host, 3)
        first.store(tokens, pages)
    files = [path for path in chunks_of(tmp_path).glob("??/*") if path.is_file()]
    assert len(files) == 3
    for path in files:
        content = bytearray(path.read_bytes())
        content[5000] ^= 1
        path.write_bytes(content)
    with engine(tmp_path) as second:
        assert second.storage.batch_exists(page_hashes(tokens)) == 3, "only a read finds that out"
        assert len(second.load(tokens)) == 0
        second.store(tokens, pages)
        assert torch.equal(second.load(tokens), pages)


@in_sglang
def test_pages_of_another_kind_are_not_found(tmp_path: Path) -> None:
    """Another model, KV type, order of bytes, or number of heads: no hit, whatever the hashes say."""
    tokens = tokens_of(5, pages=2)
    with engine(tmp_path) as one:
        pages = random_pages(one.host, 2)
        one.store(tokens, pages)
    others: list[tuple[Any, dict[str, Any]]] = [
        (mha_pools(), {"model": "another-model"}),
        (mha_pools(), {"model_id": "another content"}),
        (mha_pools(), {"tenant_salt": "another tenant"}),
        (mha_pools(dtype=torch.float16), {}),
        (mha_pools("page_first_direct"), {}),
        (mha_pools(heads=4), {}),
        (mha_pools(), {"tp_rank": 1, "tp_size": 2}),
        (mha_pools(), {"pp_rank": 1, "pp_size": 2}),
    ]
    for pools, options in others:
        with engine(tmp_path, pools, **options) as other:
            assert len(other.load(tokens)) == 0, options
    with engine(tmp_path) as one:
        assert torch.equal(one.load(tokens), pages)


@in_sglang
def test_of_mla_only_the_first_rank_writes_and_all_read(tmp_path: Path) -> None:
    tokens = tokens_of(7, pages=2)
    with engine(tmp_path, mla_pools(), tp_rank=1, tp_size=2) as second:
        pages = random_pages(second.host, 2)
        second.store(tokens, pages)
        indices = second.host.alloc(len(tokens))
        assert second.storage.batch_set_v1(page_hashes(tokens), indices) == [True, True], "asked for it all the same"
        assert second.storage.batch_exists(page_hashes(tokens)) == 0
    with engine(tmp_path, mla_pools(), tp_rank=0, tp_size=2) as first:
        first.store(tokens, pages)
    with engine(tmp_path, mla_pools(), tp_rank=1, tp_size=2) as second:
        assert torch.equal(second.load(tokens), pages)


@in_sglang
def test_sglangs_metrics_get_pages_and_speeds(tmp_path: Path) -> None:
    tokens = tokens_of(8, pages=4)
    with engine(tmp_path, metrics=True) as one:
        one.store(tokens, random_pages(one.host, 4))
        one.load(tokens)
        metrics = one.storage.get_stats()
        assert metrics.backup_pgs == metrics.prefetch_pgs == [4]
        assert metrics.backup_bandwidth[0] > 0 and metrics.prefetch_bandwidth[0] > 0
        assert one.storage.get_stats().prefetch_pgs == []
    with engine(tmp_path) as quiet:
        assert quiet.storage.get_stats() is None


@in_sglang
def test_sglangs_own_failure_injection_costs_hits_only(tmp_path: Path) -> None:
    tokens = tokens_of(9, pages=2)
    with engine(tmp_path) as one:
        one.store(tokens, random_pages(one.host, 2))
    os.environ["SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE"] = "1.0"
    with engine(tmp_path) as failing:
        assert type(failing.storage).__name__ == "HiCacheStorageFailureInjector"
        assert len(failing.load(tokens)) == 0
