"""What the cache is asked about chunks that memory does not know: on its loop, while vLLM's scheduler goes on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Sequence

from tiercache.bridge import CacheThread
from tiercache.core.keys import ChunkKey
from tiercache.integrations.vllm_offloading.requests import Name, Question

logger = logging.getLogger("tiercache.vllm")

_AT_ONCE = 16
"""Runs of one question that are looked for side by side: of windows there are many, of one chunk each."""
_Asked = tuple[Question, list[list[ChunkKey]]]


class Questions:
    """`ask` and `answers` are called by the scheduler's thread and do not wait."""

    def __init__(self, thread: CacheThread) -> None:
        self._thread = thread
        self._answers: deque[tuple[str, dict[Name, bool]]] = deque()
        self._asking: set[asyncio.Task[None]] = set()

    def ask(self, asked: Sequence[_Asked]) -> None:
        """Each question with the keys of its names. What nobody can be asked about any more gets no answer."""
        if asked:
            with contextlib.suppress(RuntimeError):  # the cache is closed
                self._thread.loop.call_soon_threadsafe(self._begin, asked)

    def answers(self) -> list[tuple[str, dict[Name, bool]]]:
        """By request, what has come since the last call."""
        found = []
        while self._answers:
            found.append(self._answers.popleft())
        return found

    def _begin(self, asked: Sequence[_Asked]) -> None:
        for question, keys in asked:
            task = self._thread.loop.create_task(self._answer(question, keys))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)

    async def _answer(self, question: Question, keys: list[list[ChunkKey]]) -> None:
        found = {name: False for run in question.runs for name in run}
        side_by_side = asyncio.Semaphore(_AT_ONCE)

        async def look_up(names: list[Name], run: list[ChunkKey]) -> None:
            async with side_by_side:
                hit = await self._thread.cache.lookup_keys(run)
            found.update(dict.fromkeys(names[: hit.chunks], True))

        try:
            await asyncio.gather(*map(look_up, question.runs, keys))
        except Exception as error:
            logger.warning("a look-up failed: %r", error)
        finally:
            self._answers.append((question.request_id, found))
