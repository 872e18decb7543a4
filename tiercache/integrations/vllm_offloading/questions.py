"""Look up chunks that memory does not know, on the cache's loop, without blocking vLLM's scheduler."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence

from tiercache.bridge import CacheThread
from tiercache.core.keys import ChunkKey
from tiercache.integrations.vllm_offloading.requests import Answer, Name, Question

logger = logging.getLogger("tiercache.vllm")

_LEAST_S = 0.002
"""A remaining time below this counts as 0: timers of a loop may be a millisecond early."""

_Asked = tuple[Question, list[list[ChunkKey]]]


class Questions:
    """Lookups in flight. `ask` and `answers` are called by the scheduler's thread and do not wait."""

    def __init__(self, thread: CacheThread) -> None:
        self._thread = thread
        self._answers: deque[Answer] = deque()
        self._asking: set[asyncio.Task[None]] = set()

    def ask(self, asked: Sequence[_Asked]) -> None:
        """Start the lookup of each question, with the keys of its names. If the cache is closed, all are missing."""
        if not asked:
            return
        try:
            self._thread.loop.call_soon_threadsafe(self._begin, asked)
        except RuntimeError:  # the cache is closed
            for question, _ in asked:
                missing = dict.fromkeys((name for run in question.runs for name in run), False)
                self._answers.append(Answer(question.request_id, missing, 0.0))

    def answers(self) -> list[Answer]:
        """Return the answers since the last call."""
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
        """Look up all keys concurrently, within the part of `lookup_timeout_ms` that the request has not waited yet."""
        cache, loop = self._thread.cache, self._thread.loop
        began_s = loop.time()
        left_s = cache.config.lookup_timeout_ms / 1000 - question.waited_s
        left_s = left_s if left_s >= _LEAST_S else 0.0
        found = {name: False for run in question.runs for name in run}
        asked = list(zip(question.runs, keys, strict=True))

        async def look_up(names: list[Name], run: list[ChunkKey]) -> None:
            hit = await cache.lookup_keys(run, deadline_s=left_s)
            found.update(dict.fromkeys(names[: hit.chunks], True))

        async def look_up_each(names: list[Name], each: list[ChunkKey]) -> None:
            found.update(zip(names, await cache.lookup_each(each, deadline_s=left_s), strict=True))

        single = [(names[0], run[0]) for names, run in asked if len(run) == 1]
        questions = [look_up(names, run) for names, run in asked if len(run) > 1]
        if single:
            questions.append(look_up_each([name for name, _ in single], [key for _, key in single]))
        try:
            await asyncio.gather(*questions)
        except Exception as error:
            logger.warning("a look-up failed: %r", error)
        finally:
            self._answers.append(Answer(question.request_id, found, loop.time() - began_s))
