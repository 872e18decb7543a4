"""The process from which workers are forked: it has imported everything, so that a start takes milliseconds.

It is single-threaded and holds nothing: no cache, no lock, no file of a tier. When the campaign goes, however it goes, the
nursery finds its socket closed, kills its children and ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Iterable
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_IMPORTED = (
    "tiercache.cache",
    "tiercache.config.loading",
    "tiercache.tiers.remote.fs",
    "tiercache.tiers.remote.redis",
    "tiercache.tiers.hf3fs",
)
_LONGEST_ORDER = 1 << 16


def main() -> None:
    """`python -m tests.torture.campaign.nursery FD MODULE`: fork a worker for each order that comes by the socket.

    An order comes with the worker's end of its own socket and a pipe for the status with which it ends, as text. The answer
    has a pidfd, which means that process and no other.
    """
    asking = socket.socket(fileno=int(sys.argv[1]))
    worker = importlib.import_module(sys.argv[2])
    for name in _IMPORTED:
        with contextlib.suppress(ImportError):  # a library of one part; its workers will say so
            importlib.import_module(name)
    children: dict[int, tuple[int, int]] = {}
    """Pidfds -> pids and pipes."""
    asking.sendall(b"\n")
    poll = select.poll()
    poll.register(asking, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready in children:
                poll.unregister(ready)
                pid, ending = children.pop(ready)
                _, status = os.waitpid(pid, 0)
                with contextlib.suppress(BrokenPipeError):  # the campaign is gone
                    os.write(ending, str(os.waitstatus_to_exitcode(status)).encode())
                os.close(ending)
                os.close(ready)
                continue
            order, given, _, _ = socket.recv_fds(asking, _LONGEST_ORDER, 2)
            if not order:
                _end(children)
            pid = os.fork()
            if not pid:
                pipes = [pipe for _, pipe in children.values()]
                _become(worker, order, given[0], [asking.detach(), given[1], *children, *pipes])
            os.close(given[0])
            child = os.pidfd_open(pid)
            children[child] = pid, given[1]
            poll.register(child, select.POLLIN)
            socket.send_fds(asking, [json.dumps(pid).encode()], [child])


def _become(worker: object, order: bytes, connection: int, inherited: list[int]) -> NoReturn:
    """A worker, in the child."""
    status = 70
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        for descriptor in inherited:
            os.close(descriptor)
        worker.run(order, socket.socket(fileno=connection))  # type: ignore[attr-defined]
        status = 0
    except BaseException:
        traceback.print_exc()  # into the nursery's log
    finally:
        os._exit(status)


def _end(children: Iterable[int]) -> NoReturn:
    for child in children:
        signal.pidfd_send_signal(child, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main()
