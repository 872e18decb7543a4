"""Threads for calls that ask a mount about its files, and the clean-ups that they are left."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

from tiercache.memory.workers import Workers, retrieve_exception

logger = logging.getLogger("tiercache.disk")

_CLOSE_S = 5.0


class MetadataWorkers(Workers):
    """The mount may hang, and the loop must not: whatever is closed is closed here."""

    def __init__(self, name: str, threads: int) -> None:
        super().__init__(f"{name}-metadata", threads)
        self.background = Workers(f"{name}-scan", threads)
        """For scans, and deletions after one: look-ups do not wait for them. The next scan waits for those deletions."""
        self._cleanups: set[asyncio.Future[Any]] = set()

    async def opened(self, open_it: Callable[[], object], close_it: Callable[[], object]) -> None:
        """Call `open_it` in a thread. Where it fails or the caller is cancelled, `close_it` is called when it has ended."""
        unwanted = threading.Event()

        def run() -> None:
            try:
                open_it()
            finally:
                if unwanted.is_set():  # here, too: by now there may be no loop that would close it
                    close_it()

        opening = self.submit(run)
        try:
            await asyncio.shield(opening)
        except BaseException:
            # Cancelled, it may still be at work in its thread.
            unwanted.set()
            opening.add_done_callback(retrieve_exception)
            opening.add_done_callback(lambda _: self.later(close_it))
            self.watch(opening)
            raise

    def later(self, clean_up: Callable[..., object], *arguments: object) -> None:
        """Do it in a thread. Nobody waits for it but `cleaned_up`; when the threads are closed, one is made for it."""

        def run() -> None:
            try:
                clean_up(*arguments)
            except OSError as error:
                logger.info("%s: could not clean up: %s", self.name, error)

        try:
            work = self.submit(run)
        except RuntimeError:  # closed meanwhile
            threading.Thread(target=run, name=f"tiercache-{self.name}-late", daemon=True).start()
            return
        self.watch(work)

    def close(self) -> None:
        super().close()
        self.background.close()

    def watch(self, work: asyncio.Future[Any]) -> None:
        """Something that is still at work, though nobody waits for it any more."""
        self._cleanups.add(work)
        work.add_done_callback(self._cleanups.discard)

    async def cleaned_up(self) -> None:
        """Wait for all that, but not for long, and let the threads end."""
        until_s = asyncio.get_running_loop().time() + _CLOSE_S
        try:
            while self._cleanups and (left_s := until_s - asyncio.get_running_loop().time()) > 0:
                await asyncio.wait(self._cleanups, timeout=left_s)
        finally:
            self.close()
