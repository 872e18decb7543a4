"""One Mooncake client: set up in the background, as often as it takes, and taken down when nothing uses it any more."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

from tiercache.errors import TierUnavailable
from tiercache.tiers.remote.mooncake.place import Place
from tiercache.tiers.remote.mooncake.wired import WiredMemory

logger = logging.getLogger("tiercache.mooncake")

_LOOK_S = 1.0
_AGAIN_S = 0.5


def import_mooncake() -> Any:
    """The module `mooncake.store`. Raises ImportError, also when a library of the system is missing."""
    import mooncake.store

    return mooncake.store


class Client:
    """Thread-safe. What was set up once looks after itself: it finds a master that comes back, and mounts its segment again.

    `setup` waits for 90 s when there is no master, so nobody waits for it: a thread of its own first looks whether anybody
    listens there.
    """

    def __init__(self, name: str, place: Place, memory: WiredMemory) -> None:
        self.name = name
        self.place = place
        self._memory = memory
        self._store: Any = None
        self._problem = "it is being set up"
        self._changed = threading.Condition()
        self._first_try = threading.Event()
        self._closing = threading.Event()
        self._users = 0
        self.write_config: Any = None

    def start(self) -> None:
        self._users += 1  # whoever closes waits for the thread as for any other user
        threading.Thread(target=self._set_up, name=f"tiercache-{self.name}-setup", daemon=True).start()

    def wait_for_first_try(self, wait_s: float) -> str | None:
        """What is wrong; None once the client can be used. Blocks for up to `wait_s`."""
        self._first_try.wait(wait_s)
        return None if self._store is not None else self._problem

    @contextlib.contextmanager
    def use(self) -> Iterator[Any]:
        """The store, which stays until the block ends. Raises TierUnavailable while there is none."""
        with self._changed:
            if self._closing.is_set():
                raise TierUnavailable(f"{self.name} is closed")
            if self._store is None:
                raise TierUnavailable(f"{self.name}: {self._problem}")
            self._users += 1
        try:
            yield self._store
        finally:
            self._leave()

    def close(self) -> None:
        """Nobody can use it any more. Does not wait."""
        self._closing.set()

    def take_down(self) -> None:
        """After `close`: wait, however long it takes, until the last user has gone; unregister all memory; leave the store.

        Blocks: in a thread of its own.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._users == 0)
        store, self._store = self._store, None
        if store is not None:
            self._memory.release(store.unregister_buffer)
            store.close()

    def _set_up(self) -> None:
        try:
            while not self._closing.is_set():
                problem = self._nobody_there() or self._try_once()
                if problem is None:
                    break
                if problem != self._problem:
                    logger.warning("%s: not there yet: %s", self.name, problem)
                    self._problem = problem
                self._first_try.set()
                self._closing.wait(_AGAIN_S)
        except Exception:
            self._problem = "it could not be set up, see the log"
            logger.exception("%s: %s", self.name, self._problem)
        finally:
            self._first_try.set()
            self._leave()

    def _nobody_there(self) -> str | None:
        endpoint = self.place.master_endpoint
        if endpoint is None:
            return None
        try:
            with socket.create_connection(endpoint, _LOOK_S):
                return None
        except OSError as error:
            return f"mooncake_master at {self.place.master} cannot be reached: {error.strerror or error}"

    def _try_once(self) -> str | None:
        """What went wrong. One store for each try: what a failed one holds is let go with it."""
        module = import_mooncake()
        place, store = self.place, module.MooncakeDistributedStore()
        began_s = time.monotonic()
        code = store.setup(
            place.local_hostname,
            place.metadata_server,
            place.global_segment_bytes,
            place.local_buffer_bytes,
            place.protocol,
            place.device_name,
            place.master,
        )
        if code:
            return f"Mooncake's setup ({place.protocol}, master {place.master}) says {code}"
        code = self._memory.wire(store.register_buffer)
        if code:
            store.close()
            return f"Mooncake registers no memory: code {code}"
        config = module.ReplicateConfig()
        config.replica_num = 1
        if place.prefer_local:
            config.preferred_segment = store.get_hostname()
        self.write_config = config
        with self._changed:
            self._store = store
        logger.info("%s: at %s (%.1f s)", self.name, place.master, time.monotonic() - began_s)
        return None

    def _leave(self) -> None:
        with self._changed:
            self._users -= 1
            self._changed.notify_all()
