"""One Mooncake client: set up in the background, as often as it takes, and left when nothing uses it any more."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

from tiercache.errors import TierUnavailable
from tiercache.tiers.remote.mooncake.address import MooncakeAddress
from tiercache.tiers.remote.mooncake.wired import WiredMemory

logger = logging.getLogger("tiercache.mooncake")

_LOOK_S = 1.0
_AGAIN_S = 0.5


def import_mooncake() -> Any:
    """The module `mooncake.store`. Raises ImportError, also when a library of the system is missing."""
    import mooncake.store

    return mooncake.store


class Session:
    """A store that was set up, and who uses it."""

    def __init__(self, store: Any, write_config: Any) -> None:
        self.store = store
        self.write_config = write_config
        self.users = 0
        self.left = threading.Event()
        """No thread of Mooncake's touches our memory any more."""


class MooncakeClient:
    """Thread-safe. A session looks after itself: it finds a master that comes back, and mounts its segment again.

    `setup` waits for 90 s when there is no master, so nobody waits for it: a thread of its own first looks whether anybody
    listens there.
    """

    def __init__(self, name: str, address: MooncakeAddress, memory: WiredMemory) -> None:
        self.name = name
        self.address = address
        self._memory = memory
        self._session: Session | None = None
        self._problem = "it is being set up"
        self._changed = threading.Condition()
        self._setting_up = False
        self._sessions = 0
        self._first_try = threading.Event()
        self._closing = threading.Event()

    def start(self) -> None:
        with self._changed:
            self._start_setting_up()

    def wait_for_first_try(self, wait_s: float) -> str | None:
        """What is wrong; None once the client can be used. Blocks for up to `wait_s`."""
        self._first_try.wait(wait_s)
        return None if self._session is not None else self._problem

    @contextlib.contextmanager
    def use(self) -> Iterator[Session]:
        """A session that stays until the block ends. Raises TierUnavailable while there is none."""
        with self._changed:
            if self._closing.is_set():
                raise TierUnavailable(f"{self.name} is closed")
            if self._session is None:
                raise TierUnavailable(f"{self.name}: {self._problem}")
            session = self._session
            session.users += 1
        try:
            yield session
        finally:
            self._done_with(session)

    @contextlib.contextmanager
    def reading(self) -> Iterator[ReadGuard]:
        """As `use`, for reads that Mooncake may give up while their bytes still travel: see `ReadGuard`."""
        guard: ReadGuard | None = None
        try:
            with self.use() as session:
                guard = ReadGuard(session)
                try:
                    yield guard
                finally:
                    if guard.suspect:
                        self._retire(session, "a read was given up: a new client is being set up")
        finally:
            if guard is not None and guard.suspect:
                guard.session.left.wait()

    def leave(self) -> None:
        """For good. Waits, however long it takes, until nothing of it is in use: in a thread of its own."""
        self._closing.set()
        with self._changed:
            session = self._session
        if session is not None:
            self._retire(session, "it is closed")
        with self._changed:
            self._changed.wait_for(lambda: not self._setting_up and self._sessions == 0)

    def _retire(self, session: Session, problem: str) -> None:
        """No new users for `session`; whoever is the last one leaves the store."""
        with self._changed:
            if self._session is not session:
                return
            self._session, self._problem = None, problem
            session.users += 1
        self._done_with(session)

    def _done_with(self, session: Session) -> None:
        with self._changed:
            session.users -= 1
            if session.users or self._session is session:
                return
        try:
            self._memory.release(session.store.unregister_buffer)
            session.store.close()
        finally:
            session.left.set()
            with self._changed:
                self._sessions -= 1
                if not self._closing.is_set():
                    self._start_setting_up()
                self._changed.notify_all()

    def _start_setting_up(self) -> None:
        self._setting_up = True
        threading.Thread(target=self._set_up, name=f"tiercache-{self.name}-setup", daemon=True).start()

    def _set_up(self) -> None:
        session: Session | None = None
        try:
            while session is None and not self._closing.is_set():
                found = self._nobody_there() or self._try_once()
                if isinstance(found, Session):
                    session = found
                    break
                if found != self._problem:
                    logger.warning("%s: not there yet: %s", self.name, found)
                    self._problem = found
                self._first_try.set()
                self._closing.wait(_AGAIN_S)
        except Exception:
            self._problem = "it could not be set up, see the log"
            logger.exception("%s: %s", self.name, self._problem)
        with self._changed:
            self._setting_up = False
            self._session = session
            self._sessions += session is not None
            self._changed.notify_all()
        self._first_try.set()
        if session is not None and self._closing.is_set():
            self._retire(session, "it is closed")

    def _nobody_there(self) -> str | None:
        endpoint = self.address.master_endpoint
        if endpoint is None:
            return None
        try:
            with socket.create_connection(endpoint, _LOOK_S):
                return None
        except OSError as error:
            return f"mooncake_master at {self.address.shown_master} cannot be reached: {error.strerror or error}"

    def _try_once(self) -> Session | str:
        """The session, or what went wrong. One store for each try: what a failed one holds is let go with it."""
        module = import_mooncake()
        address, store = self.address, module.MooncakeDistributedStore()
        began_s = time.monotonic()
        code = store.setup(
            address.local_hostname,
            address.metadata_server,
            address.global_segment_bytes,
            address.local_buffer_bytes,
            address.protocol,
            address.device_name,
            address.master,
        )
        if code:
            return f"Mooncake's setup ({address.protocol}, master {address.shown_master}) says {code}"
        code = self._memory.wire(store.register_buffer)
        if code:
            self._memory.release(store.unregister_buffer)
            store.close()
            return f"Mooncake registers no memory: code {code}"
        config = module.ReplicateConfig()
        config.replica_num = 1
        if address.prefer_local:
            config.preferred_segment = store.get_hostname()
        logger.info("%s: at %s (%.1f s)", self.name, address.shown_master, time.monotonic() - began_s)
        return Session(store, config)


class ReadGuard:
    """Keeps memory from being used for something else while Mooncake may still write to it.

    A call that fails waits for all parts of its transfer first - but for 60 s at most, and then bytes that trickle in go on
    doing so: they were seen to land after the call had returned. Only leaving the store ends that for certain.
    """

    _GIVEN_UP_S = 20.0

    def __init__(self, session: Session) -> None:
        self.session = session
        self.suspect = False
        self._began_s = time.monotonic()

    def failed(self) -> None:
        """A transfer did not end well: if it took long, the block that this guard is for waits until the store is left."""
        self.suspect = time.monotonic() - self._began_s >= self._GIVEN_UP_S
