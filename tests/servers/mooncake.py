"""A real mooncake_master and processes that give memory to it, on the loopback: for tests, and to measure with."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.servers.ports import hold_port
from tests.servers.processes import Process, until

_HOLDER = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
print(store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 16 << 20, "tcp", "", sys.argv[1]), flush=True)
sys.stdin.read()
"""


def missing() -> str | None:
    """Why there can be no store on this machine; None when there can."""
    try:
        import mooncake.store  # noqa: F401
    except ImportError as error:
        return f"no Mooncake ({error}): pip install mooncake-transfer-engine-non-cuda; apt install libibverbs1"
    return None


def _package() -> Path:
    found = importlib.util.find_spec("mooncake")
    assert found is not None and found.submodule_search_locations
    return Path(found.submodule_search_locations[0])


class Master(Process):
    """Forgets a process that gave memory 2 s after it last heard of it. What it says goes to a file in `place`."""

    def __init__(self, place: Path, *, lease_ms: int = 10_000, port: int | None = None) -> None:
        self.port = port or hold_port()
        self._log = place / f"master-{self.port}.log"
        self._lease_ms = lease_ms

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"mooncakestore://{self.address}"

    def start(self) -> Master:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    str(_package() / "mooncake_master"),
                    *("--rpc_address=127.0.0.1", f"--rpc_port={self.port}"),
                    *("--metrics_host=127.0.0.1", f"--metrics_port={hold_port()}", "--client_ttl=2"),
                    f"--default_kv_lease_ttl={self._lease_ms}",
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        until(self._listens, why=self._log.read_text)
        return self

    def _listens(self) -> bool:
        with socket.create_connection(("127.0.0.1", self.port), 1.0):
            return True


class Holder(Process):
    """A process whose memory is the store's."""

    def __init__(self, place: Path, master: Master, size_bytes: int = 256 << 20) -> None:
        self._log = place / f"holder-{master.port}.log"
        self._arguments = [master.address, str(size_bytes)]

    def start(self) -> Holder:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _HOLDER, *self._arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | {"MC_TCP_BIND_ADDRESS": "127.0.0.1"},
            )
        assert self.process.stdout is not None
        answer = self.process.stdout.readline()
        assert answer == b"0\n", f"{answer!r}: {self._log.read_text()[-2000:]}"
        return self


@contextlib.contextmanager
def running(place: Path, *, size_bytes: int = 256 << 20, **options: Any) -> Iterator[tuple[Master, Holder]]:
    place.mkdir(parents=True, exist_ok=True)
    master = Master(place, **options)
    holder = Holder(place, master, size_bytes)
    try:
        master.start()
        holder.start()
        yield master, holder
    finally:
        for process in (holder, master):
            process.thaw()
            process.kill()


@contextlib.contextmanager
def plain_client(master: Master) -> Iterator[Any]:
    """Mooncake's own client, for what a test does behind the tier's back."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", master.address) == 0
    try:
        yield store
    finally:
        store.close()
