"""Run LMCache in a separate process, in turn with tiercache."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, Any

from tiercache.bench.figures import Figures
from tiercache.bench.workload import Plan
from tiercache.errors import TierCacheError

_START_S = 300.0
_ANSWER_S = 120.0


class PeerError(TierCacheError):
    """The peer cannot be measured. The message contains its last output."""


class Peer:
    """A child process that executes and measures one command at a time. Does nothing without a process."""

    def __init__(self, process: subprocess.Popen[bytes] | None, said: IO[bytes] | None) -> None:
        """`said` has the errors that `process` prints."""
        self._process = process
        self._said = said

    def add(self, figures: Figures, what: str, **names: tuple[str, str]) -> None:
        """Run `what` in the peer, and record the parts of its answer that are keys of `names`.

        Each part is recorded as `peer.lmcache.<first name>`, and compared with tiercache's figure, the second name.
        """
        if self._process is None:
            return
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{what}\n".encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._error("it has ended") from None
        answer = self.answer(_ANSWER_S)
        for part, (name, ours) in names.items():
            figures.add(f"peer.lmcache.{name}", float(answer[part]))
            figures.compare(ours, f"peer.lmcache.{name}")

    def answer(self, timeout_s: float) -> dict[str, Any]:
        """Return the next answer. Raises PeerError if there is none in time, or if the peer failed."""
        assert self._process is not None and self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                raise self._error(f"it has not answered for {timeout_s:.0f} s")
        line = self._process.stdout.readline()
        try:
            answer = json.loads(line)
        except ValueError:
            raise self._error("it has ended") from None
        if not isinstance(answer, dict) or "error" in answer:
            raise self._error(str(answer))
        return answer

    def _error(self, problem: str) -> PeerError:
        assert self._said is not None
        self._said.seek(0)
        last = self._said.read().decode(errors="replace").strip().splitlines()[-1:]
        return PeerError(f"LMCache could not be measured: {problem}; it last said: {last[0] if last else 'nothing'}")


@contextmanager
def running(command: list[str] | None) -> Iterator[Peer]:
    """Run the peer that `command` starts, until the block ends. Without a command, the peer does nothing."""
    if command is None:
        yield Peer(None, None)
        return
    environment = os.environ | {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "ERROR", "PYTHONHASHSEED": "0"}
    pipe = subprocess.PIPE
    with (
        tempfile.TemporaryFile() as said,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=said, env=environment) as process,
    ):
        try:
            peer = Peer(process, said)
            peer.answer(_START_S)
            yield peer
        finally:
            process.kill()


def peer_of(python: Path | None, plan: Plan, chunk_bytes: int, count: int, place: Path) -> AbstractContextManager[Peer]:
    """Return the running peer. `python` has LMCache; None measures nothing."""
    if python is None:
        return running(None)
    plan.progress("starting LMCache")
    program = [str(python), str(Path(__file__).with_name("peer_lmcache.py"))]
    return running([*program, str(chunk_bytes), str(count), str(place)])
