"""The two halves of the connector over a real cache, and vLLM's side of the conversation, with plain stand-ins."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tiercache.bridge import CacheThread
from tiercache.core.keys import keys_from_hashes
from tiercache.integrations.vllm.scheduler import SchedulerSide

TOKENS = 16
"""Tokens of a block."""
NAMES = [bytes([number]) * 32 for number in range(64)]


def spec_of(heads: int, head_size: int) -> Any:
    """Return a stand-in for vLLM's description of blocks in bfloat16."""
    return SimpleNamespace(
        block_size=TOKENS,
        num_kv_heads=heads,
        num_heads=heads,
        head_size=head_size,
        head_size_v=head_size,
        state_content_size_bytes=2 * head_size * 2,
    )


def save_adapter(directory: Path, weights: bytes = b"weights") -> Path:
    """Make `directory` hold a LoRA adapter, and return it."""
    directory.mkdir(exist_ok=True)
    (directory / "adapter_model.safetensors").write_bytes(weights)
    (directory / "adapter_config.json").write_text('{"r": 8}')
    return directory


class Hanging:
    """A mount that hangs until `go_on` is set."""

    def __init__(self) -> None:
        self.hangs, self.go_on = threading.Event(), threading.Event()

    def place(self, path: str) -> Path:
        self.hangs.set()
        self.go_on.wait(30)
        return Path(path)


class Cached:
    """A worker's cache, and ways to ask it."""

    thread: CacheThread

    def ask(self, question: Coroutine[Any, Any, Any]) -> Any:
        """Return the result of a coroutine that the cache's thread runs."""
        return self.thread.submit(question).result(40)

    def on_loop(self, function: Callable[[], Any]) -> Any:
        """Call `function` on the cache's loop, after all that was asked of it before, and return its result."""

        async def call() -> Any:
            return function()

        return self.ask(call())

    def until(self, happened: Callable[[], Any]) -> Any:
        """Call `happened` until its result is true, and return that. The cache's loop goes on meanwhile."""
        for _ in range(1000):
            if found := happened():
                return found
            settled = threading.Event()
            self.thread.loop.call_soon_threadsafe(
                lambda settled=settled: self.thread.loop.call_later(0.005, settled.set)
            )
            settled.wait(10)
        raise AssertionError("it never happened")

    def stops_its_loop(self) -> threading.Event:
        """Stop the cache's thread until the event returned is set."""
        stopped, go_on = threading.Event(), threading.Event()
        self.thread.loop.call_soon_threadsafe(lambda: (stopped.set(), go_on.wait(10)))
        stopped.wait(10)
        return go_on

    def keys(self, *names: bytes) -> list[Any]:
        return keys_from_hashes(self.thread.cache.namespace, names)

    def has(self, name: bytes) -> bool:
        """Return True if the cache has the chunk after all that is under way there has ended."""
        return bool(self.ask(self.thread.cache.lookup_keys(self.keys(name))).chunks == 1)

    def puts(self, *names: bytes) -> None:
        """Store whole chunks."""
        for key in self.keys(*names):
            assert self.ask(self.thread.cache.put(key, b"x" * self.thread.cache.layout.chunk_bytes))

    def forgets(self, *names: bytes) -> None:
        self.ask(self.thread.cache.forget(self.keys(*names)))

    def only_on_disk(self, *names: bytes) -> None:
        """Drop chunks from the hot cache once they are on disk; without `names` all of them."""
        cache = self.thread.cache
        assert self.ask(cache.flush(10)).complete
        if not names:
            self.on_loop(cache.clear_hot)
        for key in self.keys(*names):
            assert self.on_loop(lambda key=key: cache.cpu.forget(key))


class Scheduled(Cached):
    """A scheduler's half beside it, and what vLLM's scheduler does with that."""

    side: SchedulerSide

    def arrives(self, tokens: int, name: str = "r", **more: Any) -> Any:
        """Return a new request whose blocks have the first of `NAMES`."""
        request = SimpleNamespace(
            request_id=name,
            num_tokens=tokens,
            num_prompt_tokens=tokens,
            block_hashes=NAMES[: tokens // TOKENS],
            cache_salt=None,
            num_computed_tokens=0,
            num_in_flight_tokens=0,
            priority=0,
            skip_reading_prefix_cache=False,
        )
        vars(request).update(more)
        self.side.on_new_request(request)
        return request

    def finds(self, request: Any, computed: int = 0) -> tuple[int, bool]:
        """Ask until there is an answer, as vLLM does in step after step. Return the tokens to load, and True for later."""
        until_s = time.monotonic() + 5
        while (answer := self.side.matched_tokens(request, computed))[0] is None:
            assert time.monotonic() < until_s
        tokens, later = answer
        assert tokens is not None
        return tokens, later

    def admits(self, request: Any, *tables: list[int], computed: int = 0) -> tuple[int, bool]:
        tokens, later = self.finds(request, computed)
        self.side.after_allocation(request, tables, tokens)
        request.num_computed_tokens = computed + tokens
        return tokens, later


def output_of(
    scheduled: Sequence[tuple[Any, int]],
    tables: Callable[[str], tuple[list[int], ...]],
    preempted: Sequence[str] = (),
    new_blocks: tuple[list[int], ...] | None = None,
) -> Any:
    """Return vLLM's plan of a step: requests that were admitted, and so many tokens of each."""
    return SimpleNamespace(
        preempted_req_ids=set(preempted),
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[request.request_id for request, _ in scheduled],
            num_computed_tokens=[request.num_computed_tokens for request, _ in scheduled],
            new_block_ids=[new_blocks for _ in scheduled],
            resumed_req_ids=set(),
        ),
        kv_cache_block_copies=None,
        num_scheduled_tokens={request.request_id: tokens for request, tokens in scheduled},
        kv_connector_block_state=SimpleNamespace(get_block_ids=tables, boundary_state_offloads={}),
    )
