"""A real engine says by ZMQ, as vLLM does for its own blocks, what the tiers of this host have and have no more."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

from tests.vllm.engines import BLOCK_TOKENS, CHUNK_TOKENS, drive, tiercache_settings, tiny_engine
from tests.vllm.models import tiny_gemma, tiny_model
from tests.vllm.test_parallel import GENERATE, PROMPT_TOKENS, ranks_of, settings_of
from tiercache.core.keys import keys_from_hashes

HI = ["generate", ["Hi"], 2]
"""Less than a block: a step, with which events go out."""
HI_IN_TOKENS = ["generate", [{"prompt_token_ids": [2, 3]}], 2, True]
NO_TAILS = {"save_unfull_chunk": False}


class Subscriber:
    """Listens from the start; engines connect to `endpoint`."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.subscribe("")
        self._socket.rcvtimeo = 200
        self.endpoint = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self.batches: list[tuple[float, list[Any]]] = []
        """When they were published, by time.time(), and the events."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    @property
    def config(self) -> dict[str, Any]:
        """An engine's `kv_events_config`."""
        return {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": self.endpoint}

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self._socket.close(0)
        self._context.term()

    def until(self, time_s: float = float("inf")) -> list[Any]:
        """What was published before that time."""
        return [event for published_s, events in self.batches if published_s < time_s for event in events]

    def _listen(self) -> None:
        decoder = msgspec.msgpack.Decoder(KVEventBatch)
        while not self._ended.is_set():
            try:
                _, _, payload = self._socket.recv_multipart()
            except zmq.Again:
                continue
            batch = decoder.decode(payload)
            self.batches.append((batch.ts, batch.events))


def there(events: list[Any]) -> dict[str, dict[Any, BlockStored]]:
    """By medium: blocks that are there, and the event that said so last. A block is stored before it is removed."""
    found: dict[str, dict[Any, BlockStored]] = {}
    for event in events:
        if isinstance(event, AllBlocksCleared):
            found.clear()
        elif isinstance(event, BlockStored):
            found.setdefault(str(event.medium), {}).update(dict.fromkeys(event.block_hashes, event))
        elif isinstance(event, BlockRemoved):
            for block in event.block_hashes:
                del found[str(event.medium)][block]
    return found


@pytest.fixture
def subscriber(opened: Callable[..., Any]) -> Any:
    return opened(Subscriber)


def blocks_of(events: list[Any], medium: str) -> dict[Any, tuple[Any, ...]]:
    """Of all that was ever stored in a medium, by hash: group, what sees it, the block before it, and its tokens. Of blocks
    that a window leaves behind nothing."""
    found: dict[Any, tuple[Any, ...]] = {}
    for event in events:
        if getattr(event, "token_ids", None) is None or event.medium != medium or event.kv_cache_spec_sliding_window:
            continue
        before, size = event.parent_block_hash, event.block_size
        assert len(event.token_ids) == size * len(event.block_hashes)
        for number, block in enumerate(event.block_hashes):
            kind = event.group_idx, event.kv_cache_spec_kind
            found[block] = *kind, before, size, *event.token_ids[number * size : (number + 1) * size]
            before = block
    return found


def chunk_files(namespace: str, chunks: list[tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
    """Of chunks, each its blocks' hashes: by the name of its file."""
    keys = keys_from_hashes(bytes.fromhex(namespace), [chunk[-1] for chunk in chunks])
    return {key.hex(): chunk for key, chunk in zip(keys, chunks, strict=True)}


def test_what_tiers_have_is_published(model: str, prompts: list[str], tmp_path: Path, subscriber: Subscriber) -> None:
    """And what others removed is taken back."""
    engine = {"model": model, "tiercache": tiercache_settings(tmp_path, **NO_TAILS)}
    engine["kv_events_config"] = subscriber.config
    steps = [["generate", prompts], ["flush"], HI, ["now"], ["known_files", str(tmp_path)], ["namespace"]]
    steps += [["clear_hot"], HI, ["now"], ["remove_elsewhere", str(tmp_path)], HI, ["now"]]
    steps += [["reset_prefix_cache", True], HI]
    whole = {"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0"}  # not cut to 64 bits: files are named by them
    (answers, _, _, stored_s, stored, namespace, *found), _ = drive(engine, steps, whole)
    cleared, _, cleared_s, left, _, removed_s, _, _ = found
    chunks = sum(answer["prompt_tokens"] // CHUNK_TOKENS for answer in answers)
    assert chunks >= 8

    events = subscriber.until(stored_s)
    gpu, cpu, storage = (blocks_of(events, medium) for medium in ("GPU", "CPU", "STORAGE"))
    assert len(cpu) == chunks * CHUNK_TOKENS // BLOCK_TOKENS
    assert cpu == storage
    assert {block: gpu[block] for block in cpu} == cpu, "our blocks are the engine's, with the same hashes and parents"
    ours = [event for event in events if getattr(event, "token_ids", None) and event.medium != "GPU"]
    assert {(event.group_idx, event.lora_name, event.locality) for event in ours} == {(0, None, "LOCAL")}
    assert all(event.extra_keys == [None] * len(event.block_hashes) for event in ours)
    files = chunk_files(namespace, [tuple(event.block_hashes) for event in ours if event.medium == "STORAGE"])
    assert set(files) == set(stored) and len(files) == chunks

    assert cleared == chunks
    now = there(subscriber.until(cleared_s))
    assert not now["CPU"] and now["STORAGE"].keys() == storage.keys()

    assert len(left) == chunks // 2
    now = there(subscriber.until(removed_s))
    assert now["STORAGE"].keys() == {block for name in left for block in files[name]}

    now = there([event for event in subscriber.until() if type(event).__name__ != "AllBlocksCleared"])
    assert not now["STORAGE"] and not now["CPU"], "after a reset nothing that was stored is found"


def test_loads_after_a_restart_publish(model: str, prompts: list[str], tmp_path: Path, subscriber: Subscriber) -> None:
    engine = {"model": model, "tiercache": tiercache_settings(tmp_path, **NO_TAILS)}
    (answers, _), _ = drive(engine, [["generate", prompts], ["flush"]])
    engine["kv_events_config"] = subscriber.config
    (_, _, found_s, _, _), _ = drive(engine, [["scanned"], HI, ["now"], ["generate", prompts[:1]], HI])
    assert not [event for event in subscriber.until(found_s) if getattr(event, "medium", None) != "GPU"]
    now = there(subscriber.until())
    usable = (answers[0]["prompt_tokens"] - 1) // CHUNK_TOKENS * CHUNK_TOKENS // BLOCK_TOKENS
    assert len(now["STORAGE"]) == len(now["CPU"]) == usable


@pytest.mark.usefixtures("imported")
def test_groups_of_layers_that_see_every_token_are_published(tmp_path: Path, subscriber: Subscriber) -> None:
    settings = tiercache_settings(tmp_path / "kv", max_local_cpu_size=0.03)
    engine = tiny_engine(tiny_gemma(tmp_path / "model", "sliding", "full"), tiercache=settings)
    engine["kv_events_config"] = subscriber.config
    prompt = {"prompt_token_ids": list(range(2, 2 + 3 * CHUNK_TOKENS + 5))}
    drive(engine, [["generate", [prompt], 2, True], ["flush"], HI_IN_TOKENS])
    events = subscriber.until()
    gpu, cpu, storage = (blocks_of(events, medium) for medium in ("GPU", "CPU", "STORAGE"))
    assert len(cpu) == 3 * CHUNK_TOKENS // BLOCK_TOKENS and cpu == storage
    assert {block: gpu[block] for block in cpu} == cpu


@pytest.mark.usefixtures("imported")
def test_what_ranks_have_is_published_once_and_taken_back_if_lost(tmp_path: Path, subscriber: Subscriber) -> None:
    engine = ranks_of(tiny_model(tmp_path / "model", "llama"), settings_of(tmp_path, **NO_TAILS))
    steps = [GENERATE, ["on_workers", "flush"], HI_IN_TOKENS, ["now"], ["on_workers", "lose_tail", 0], HI_IN_TOKENS]
    (_, _, _, stored_s, kept, _), _ = drive(engine | {"kv_events_config": subscriber.config}, steps)
    chunks = PROMPT_TOKENS // CHUNK_TOKENS
    assert kept == [chunks - 1, chunks]
    now = there(subscriber.until(stored_s))
    assert len(now["CPU"]) == len(now["STORAGE"]) == chunks * CHUNK_TOKENS // BLOCK_TOKENS
    now = there(subscriber.until())
    assert len(now["CPU"]) == len(now["STORAGE"]) == (chunks - 1) * CHUNK_TOKENS // BLOCK_TOKENS
