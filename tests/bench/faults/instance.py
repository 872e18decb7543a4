"""A store in a process of its own, forked from one that has imported what stores need. It can be killed, crash or hang."""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.bench.faults.stores import STORES, Identity, content

_OPEN_S = 240.0
_CALL_S = 60.0
_CLOSE_S = 40.0


class Failed(Exception):
    """The process raised, crashed or hung; says which."""


def prepare(names: Iterable[str]) -> None:
    """Set up the process that all others are forked from, before the first of them."""
    os.environ |= {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    os.environ |= {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "WARNING"}
    modules = [module for name in names for module in STORES[name].imports]
    multiprocessing.set_forkserver_preload(["tests.bench.faults.instance", *modules])


class Instance:
    """A store that is open until `close` or `kill`. Calls raise `Failed`."""

    def __init__(self, store: str, directory: Path, identity: Identity, count: int) -> None:
        context = multiprocessing.get_context("forkserver")
        self._connection, theirs = context.Pipe()
        log = directory.with_suffix(".log")
        arguments = (theirs, store, directory, identity, count, log)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        self._answer("open", _OPEN_S)

    def write(self) -> None:
        self.begin("write")
        self.end("write")

    def begin(self, what: str) -> None:
        with suppress(ConnectionError):  # a process that has ended is noticed by `end`
            self._connection.send(what)

    def end(self, what: str) -> Any:
        return self._answer(what, _CALL_S)

    def read(self) -> Counter[str]:
        """Return how many chunks were "right", "wrong", "missed" and, by its words, an error."""
        self.begin("read")
        return Counter(self.end("read"))

    def close(self) -> None:
        try:
            self.begin("close")
            self._answer("close", _CLOSE_S)
        finally:
            self.kill()

    def kill(self) -> None:
        """kill -9."""
        self._process.kill()
        self._process.join()
        self._connection.close()

    def _answer(self, what: str, timeout_s: float) -> Any:
        try:
            if not self._connection.poll(timeout_s):
                raise Failed(f"{what}: hung for {timeout_s:.0f} s")
            error, value = self._connection.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            raise Failed(f"{what}: the process ended with {self._process.exitcode}") from None
        if error:
            raise Failed(f"{what}: {error}")
        return value


def _serve(connection: Connection, name: str, directory: Path, identity: Identity, count: int, log: Path) -> None:
    descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    chunks = [content(number, identity) for number in range(count)]
    what = "open"
    while True:
        error, value = "", None
        try:
            if what == "open":
                store = STORES[name](directory, identity, count)
            elif what == "write":
                store.write(chunks)
            elif what == "read":
                value = [_verdict(found, right.tobytes()) for found, right in zip(store.read(), chunks, strict=True)]
            else:
                store.close()
        except Exception as raised:
            error = repr(raised)
        connection.send((error, value))
        if what == "close" or (what == "open" and error):
            os._exit(0)  # threads of a peer may never end
        what = connection.recv()


def _verdict(found: Any, right: bytes) -> str:
    if found is None:
        return "missed"
    if isinstance(found, BaseException):
        return f"read: {found!r}"
    return "right" if found == right else "wrong"
