"""What is found after SGLang has cleared its storage: nothing from before by itself, nothing from after by others."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.chunks import chunks_of
from tests.sglang.pages import page_hashes, random_pages, tokens_of
from tests.sglang.process import in_sglang
from tests.sglang.stack import engine, in_another_process, mla_pools
from tiercache.errors import TierUnavailable


@in_sglang
def test_clear_removes_this_models_pages_and_no_others(tmp_path: Path) -> None:
    """Also what an earlier run stored, on disk; another model's pages in the same directory stay."""
    before, now = tokens_of(1, pages=3), tokens_of(2, pages=2)
    with engine(tmp_path, model="another") as other:
        pages = random_pages(other.host, 3)
        other.store(before, pages)
    with engine(tmp_path) as earlier:
        earlier.store(before, random_pages(earlier.host, 3, seed=1))
    with engine(tmp_path, model="another") as other, engine(tmp_path) as one:
        one.store(now, random_pages(one.host, 2))
        assert one.storage.batch_exists(page_hashes(before)) == 3
        assert one.storage.clear() is True
        assert [one.storage.batch_exists(page_hashes(tokens)) for tokens in (before, now)] == [0, 0]
        one.store(now, random_pages(one.host, 2))
        assert len(one.load(now)) == 2, "and goes on"
        assert torch.equal(other.load(before), pages)


@in_sglang
def test_what_is_stored_after_a_clear_is_found_by_this_process_only(tmp_path: Path) -> None:
    """Weights may have been replaced in memory: their KV must not be taken for that of the files. The process keeps it when
    the storage is attached anew; a process that begins finds nothing."""
    tokens = tokens_of(1, pages=2)

    def clear_and_store() -> None:
        with engine(tmp_path) as one:
            one.storage.clear()
            pages = random_pages(one.host, 2)
            one.store(tokens, pages)
        with engine(tmp_path) as attached_anew:
            assert torch.equal(attached_anew.load(tokens), pages)

    in_another_process(clear_and_store)
    assert list(chunks_of(tmp_path).glob("??/*"))
    with engine(tmp_path) as one:
        assert one.storage.batch_exists(page_hashes(tokens)) == 0
        one.store(tokens, random_pages(one.host, 2, seed=1))
        one.storage.clear()
        assert not list(chunks_of(tmp_path).glob("??/*")), "clear removes what other processes stored after theirs"


@in_sglang
def test_ranks_with_the_same_pages_share_nothing_after_a_clear(tmp_path: Path) -> None:
    """MLA: one rank writes and all read, and nobody can tell them a name that no other engine has."""
    tokens = tokens_of(1, pages=2)
    of_two = partial(engine, tmp_path, tp_size=2)
    with of_two(mla_pools(), tp_rank=0) as writer, of_two(mla_pools(), tp_rank=1) as reader:
        writer.storage.clear()
        reader.storage.clear()
        assert writer.store(tokens, random_pages(writer.host, 2)) == len(tokens), "as ranks do that leave it to another"
        assert [rank.storage.batch_exists(page_hashes(tokens)) for rank in (writer, reader)] == [0, 0]
    assert not list(chunks_of(tmp_path).glob("??/*")), "what nobody can find is not written"


@in_sglang
def test_clear_waits_for_pages_that_are_being_stored(tmp_path: Path) -> None:
    """They have the names from before, and would be stored behind the removal."""
    before, now = tokens_of(1, pages=2), tokens_of(2, pages=2)
    storing, go_on = threading.Event(), threading.Event()
    with engine(tmp_path) as one:
        one.store(before, random_pages(one.host, 2))
        places = one.host.get_page_buffer_meta

        def held(indices: torch.Tensor) -> Any:
            storing.set()
            assert go_on.wait(10)
            return places(indices)

        one.host.get_page_buffer_meta = held
        with ThreadPoolExecutor() as threads:
            stored = threads.submit(one.storage.batch_set_v1, page_hashes(now), one.host.alloc(32))
            assert storing.wait(10)
            cleared = threads.submit(one.storage.clear)
            while one.storage.batch_exists(page_hashes(before)):
                pass  # until the clear has begun
            go_on.set()
            assert stored.result() == [True, True] and cleared.result() is True
    assert not list(chunks_of(tmp_path).glob("??/*"))


@in_sglang
def test_clear_says_what_it_cannot_clear(tmp_path: Path) -> None:
    """A server cannot say which chunks it holds. Nothing listens there: its tier is as good as any for that."""
    tokens = tokens_of(1, pages=2)
    remote = {"remote_storage_plugins": ["redis"], "remote_storage_plugin.redis.url": "redis://127.0.0.1:1"}
    with engine(tmp_path, **remote) as one:
        one.store(tokens, random_pages(one.host, 2))
        with pytest.raises(TierUnavailable, match="redis"):
            one.storage.clear()
        assert one.storage.batch_exists(page_hashes(tokens)) == 0
