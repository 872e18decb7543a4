"""The second version of SGLang's interface: several pools a request, with its own file back end as the oracle."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.sglang.pages import page_hashes, random_pages, read_pages, tokens_of, write_pages
from tests.sglang.process import in_sglang
from tests.sglang.stack import engine, file_storage, hybrid_engine, mha_pools, mla_pools


@in_sglang
def test_a_hybrid_controller_restores_kv_and_state(tmp_path: Path) -> None:
    """KV of a prefix and the recurrent state at its end, by SGLang's hybrid controller, after a restart."""
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

    tokens = tokens_of(1, pages=4)
    hashes = page_hashes(tokens)
    last = {"keys": hashes[-1:], "hit_policy": PoolHitPolicy.TRAILING_PAGES}
    with hybrid_engine(tmp_path) as (controller, kv, states):
        indices, state = kv.alloc(len(tokens)), states.alloc(1)
        pages, kept = random_pages(kv, 4), random_pages(states, 1, seed=1)
        write_pages(kv, indices, pages)
        write_pages(states, state, kept)
        saved = PoolTransfer(PoolName.MAMBA, host_indices=state, **last)
        controller.write_storage(indices, tokens, hashes, extra_pools=[saved])
        operation = controller.ack_backup_queue.get(timeout=20)
        assert operation.completed_tokens == len(tokens)
        assert operation.pool_storage_result.extra_pool_hit_pages == {PoolName.MAMBA: 1}
    with hybrid_engine(tmp_path) as (controller, kv, states):
        wanted = PoolTransfer(PoolName.MAMBA, **last)
        longer = [*hashes, *page_hashes(tokens_of(2, pages=1))]
        found = controller.storage_backend.batch_exists_v2(longer, [wanted])
        assert found.kv_hit_pages == 4
        assert found.restorable_prefix_pages == [4], "states lie at the end of what was stored, and nowhere else"
        indices, wanted.host_indices = kv.alloc(len(tokens)), states.alloc(1)
        assert controller.storage_backend.batch_get_v1(hashes, indices) == [True] * 4
        assert controller.storage_backend.batch_get_v2([wanted]) == {PoolName.MAMBA: [True]}
        assert torch.equal(read_pages(kv, indices), pages)
        assert torch.equal(read_pages(states, wanted.host_indices), kept)


@pytest.mark.parametrize("policy", ["all_pages", "trailing_pages"])
@in_sglang
def test_it_says_the_same_as_sglangs_file_back_end(tmp_path: Path, policy: str) -> None:
    """Whatever pages there are of two pools, and however long the window."""
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

    chance = random.Random(policy)
    with hybrid_engine(tmp_path / "ours") as (controller, kv, states):
        ours, theirs = controller.storage_backend, file_storage(tmp_path / "theirs", kv, states)
        for trial in range(12):
            hashes = page_hashes(tokens_of(100 + trial, pages=8))
            with_kv = hashes[: chance.randint(0, 8)]
            with_state = [key for key in hashes if chance.random() < 0.6]
            window = chance.randint(1, 3)
            for storage in (ours, theirs):
                for name, pool, keys in ((PoolName.KV, kv, with_kv), (PoolName.MAMBA, states, with_state)):
                    indices = pool.alloc(len(keys) * pool.page_size)
                    if keys:
                        stored = storage.batch_set_v2([PoolTransfer(name, host_indices=indices, keys=keys)])
                        assert stored == {name: [True] * len(keys)}
                    pool.free(indices)
            asked = PoolTransfer(PoolName.MAMBA, keys=hashes[:window], hit_policy=PoolHitPolicy(policy))
            assert ours.batch_exists_v2(hashes, [asked]) == theirs.batch_exists_v2(hashes, [asked])
            assert ours.batch_exists(hashes) == len(with_kv)


@in_sglang
def test_states_of_ranks_are_kept_apart_though_their_kv_is_one(tmp_path: Path) -> None:
    """MLA beside recurrent layers: latents are the same on all ranks, states are not."""
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

    hashes = page_hashes(tokens_of(3, pages=1))
    for rank, is_stored in ((0, False), (1, False), (0, True), (1, True)):
        with hybrid_engine(tmp_path, mla_pools(), tp_rank=rank, tp_size=2) as (controller, _, states):
            state = PoolTransfer(PoolName.MAMBA, host_indices=states.alloc(1), keys=hashes)
            kept = random_pages(states, 1, seed=rank)
            assert controller.storage_backend.batch_get_v2([state]) == {PoolName.MAMBA: [is_stored]}
            if is_stored:
                assert torch.equal(read_pages(states, state.host_indices), kept)
            else:
                write_pages(states, state.host_indices, kept)
                assert controller.storage_backend.batch_set_v2([state]) == {PoolName.MAMBA: [True]}


@in_sglang
def test_a_pool_that_comes_late_is_stored_if_its_pages_fit(tmp_path: Path) -> None:
    """A draft model's pool is registered when the cache is open already."""
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

    hashes = page_hashes(tokens_of(4, pages=1))
    for heads, fits in ((1, True), (8, False)):
        with engine(tmp_path) as one:
            _, draft = mha_pools(heads=heads)
            one.storage.register_mem_host_pool_v2(draft, PoolName.DRAFT)
            page = PoolTransfer(PoolName.DRAFT, host_indices=draft.alloc(16), keys=hashes)
            assert one.storage.batch_set_v2([page]) == {PoolName.DRAFT: [fits]}
            assert one.storage.batch_get_v2([page]) == {PoolName.DRAFT: [fits]}
