"""How the scheduler's half asks what the workers' caches have, without ever waiting.

What a step asks goes in one piece: to the worker's loop where that is in this process, otherwise through a Unix socket to
each worker. The answer for several workers is what all of them have.

The scheduler's thread shares Python's lock with those that ask and answer: 64 look-ups that were begun one by one, each of
which woke them, once cost it 5 ms.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tiercache.control.framing import frame, receive
from tiercache.control.sockets import check_private, connect
from tiercache.errors import TierCacheError
from tiercache.integrations.vllm.lookup import LARGEST_MESSAGE_BYTES, Answer, LookUp, Question, local, socket_path
from tiercache.integrations.vllm.planning import BlockGeometry, Match, agreed

logger = logging.getLogger("tiercache.vllm")

_NAMES_A_MESSAGE = 1 << 14
"""Half a megabyte: a longer one would hold the worker's loop while it is unpacked."""


class LookupClient:
    """`begin`, `send` and `close` are called by one thread, the scheduler's, which polls what `begin` returned."""

    def __init__(self, engine: str, ranks: int, geometry: BlockGeometry, timeout_s: float) -> None:
        self._engine = engine
        self._ranks = ranks
        self._geometry = geometry
        self._timeout_s = timeout_s
        self._unsent: list[LookUp] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._connections: dict[int, _Connection] = {}

    def begin(self, names: Sequence[bytes], claim: str = "") -> LookUp:
        """Asked with the next `send`. It is answered in any case, by a failed Match where a worker does not answer in time.
        What is found may be held for the request, until `LookupServer.release`."""
        one = LookUp(list(names), claim)
        self._unsent.append(one)
        return one

    def send(self) -> None:
        """Ask all that was begun. Never waits."""
        if not self._unsent:
            return
        asked, self._unsent = [one for one in self._unsent if one.is_open], []
        try:
            if self._ranks == 1 and (worker := local.get((self._engine, 0))) is not None:
                worker.ask(asked)
                return
            self._running().call_soon_threadsafe(self._ask, asked)
        except RuntimeError as error:  # no thread is to be had, or the loop is closed
            _miss(asked, error)

    def close(self) -> None:
        if self._loop is not None and self._thread is not None:
            asyncio.run_coroutine_threadsafe(self._hang_up(), self._loop)
            self._thread.join(5.0)
            self._loop.close()
            self._loop = self._thread = None

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            loop = asyncio.new_event_loop()
            thread = threading.Thread(target=loop.run_forever, name="tiercache-lookup", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                loop.close()  # not kept: whatever is given to a loop that nobody runs would never end
                raise
            self._loop, self._thread = loop, thread
        return self._loop

    # On the loop

    async def _hang_up(self) -> None:
        await asyncio.gather(*(connection.close() for connection in self._connections.values()))
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.stop)  # in that round the transports are closed

    def _ask(self, asked: list[LookUp]) -> None:
        asyncio.get_running_loop().call_later(self._timeout_s, self._give_up, asked)
        for rank in range(self._ranks):
            self._ask_rank(rank, asked)

    def _ask_rank(self, rank: int, asked: list[LookUp]) -> None:
        connection = self._connections.get(rank)
        if connection is None or connection.broken:
            connection = self._connections[rank] = _Connection(self, rank, socket_path(self._engine, rank))
        connection.ask(asked)

    def _give_up(self, asked: list[LookUp]) -> None:
        if _miss(asked, TimeoutError()):
            for connection in self._connections.values():
                connection.forget_ended()

    def answered(self, rank: int, one: LookUp, match: Match) -> None:
        one.answers[rank] = match
        if len(one.answers) < self._ranks or not one.is_open:
            return
        answers = list(one.answers.values())
        least = min(answers, key=lambda match: match.blocks)
        if not self._geometry.groups or all(match.blocks == least.blocks for match in answers):
            one.give(agreed(answers, self._geometry))
            return
        # Windows have to be there for the hit as it is: who has more may not have that.
        one.names = one.names[: least.blocks]
        one.answers.clear()
        for again in range(self._ranks):
            self._ask_rank(again, [one])


class _Connection:
    """To one worker; answers may come in any order."""

    def __init__(self, client: LookupClient, rank: int, path: Path) -> None:
        self._client = client
        self._rank = rank
        self._path = path
        self._numbers = itertools.count()
        self._waiting: dict[int, LookUp] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._serving = asyncio.create_task(self._serve())
        self.broken = False

    def ask(self, asked: list[LookUp]) -> None:
        numbered = {next(self._numbers): one for one in asked}
        self._waiting |= numbered
        if self._writer is not None:
            self._send(numbered)

    def forget_ended(self) -> None:
        """Of those that were given up, which may never be answered."""
        self._waiting = {number: one for number, one in self._waiting.items() if one.is_open}

    async def close(self) -> None:
        self._serving.cancel()
        await asyncio.wait([self._serving])

    def _send(self, numbered: dict[int, LookUp]) -> None:
        assert self._writer is not None
        questions: list[Question] = []
        names = 0
        for number, one in numbered.items():
            questions.append(Question(number, one.names, one.claim))
            names += len(one.names)
            if names >= _NAMES_A_MESSAGE:
                self._writer.write(frame(questions))
                questions, names = [], 0
        if questions:
            self._writer.write(frame(questions))

    async def _serve(self) -> None:
        try:
            check_private(self._path.parent)
            reader, self._writer = await connect(self._path)
            self._send(self._waiting)
            while True:
                packed = await receive(reader, LARGEST_MESSAGE_BYTES)
                for found in msgspec.msgpack.decode(packed, type=list[Answer]):
                    if (one := self._waiting.pop(found.number, None)) is not None:
                        match = Match(found.blocks, found.tokens_by_tier, held=found.held)
                        self._client.answered(self._rank, one, match)
        except (asyncio.IncompleteReadError, OSError, msgspec.DecodeError, TierCacheError) as error:
            _miss(list(self._waiting.values()), error)
        finally:
            self.broken = True
            for one in self._waiting.values():
                one.give(Match(failed=True))
            if self._writer is not None:
                self._writer.close()


def _miss(asked: Sequence[LookUp], error: Exception) -> int:
    """Those that have no answer are misses; returns how many."""
    unanswered = [one for one in asked if one.is_open]
    if unanswered:
        logger.warning("%d look-ups got no answer from the workers: %r", len(unanswered), error)
    for one in unanswered:
        one.give(Match(failed=True))
    return len(unanswered)
