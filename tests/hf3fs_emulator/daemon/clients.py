"""Notices when a client process has died, so that what it registered goes with it."""

from __future__ import annotations

import os
import selectors
import threading
from collections.abc import Callable


class ClientWatch:
    """`on_death(pid)` is called, in a thread of the watch, once for each process that was given to `watch` and ended."""

    def __init__(self, on_death: Callable[[int], None]) -> None:
        self._on_death = on_death
        self._lock = threading.Lock()
        self._watched: dict[int, int] = {}
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="client-watch", daemon=True)
        self._stopping = False

    def start(self) -> None:
        self._thread.start()

    def watch(self, pid: int) -> None:
        """Also for a process that is watched already. 0, a process of a namespace we cannot see, is ignored."""
        with self._lock:
            if pid <= 0 or pid in self._watched:
                return
            try:
                descriptor = os.pidfd_open(pid)
            except OSError:
                return
            self._watched[pid] = descriptor
            self._selector.register(descriptor, selectors.EVENT_READ, pid)

    def stop(self) -> None:
        self._stopping = True
        os.write(self._wake_write, b"x")
        self._thread.join()
        for descriptor in [*self._watched.values(), self._wake_read, self._wake_write]:
            os.close(descriptor)
        self._selector.close()

    def _run(self) -> None:
        while not self._stopping:
            for key, _ in self._selector.select():
                if key.data is not None:
                    with self._lock:
                        self._selector.unregister(key.fd)
                        del self._watched[key.data]
                        os.close(key.fd)
                    self._on_death(key.data)
