"""A real Redis server that is killed, frozen and started again."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.servers.ports import hold_port
from tests.servers.processes import stop_process
from tests.torture.campaign.places.base import Place, Skipped

_READY_S = 15.0
_END_S = 10.0


class RedisPlace(Place):
    keeps = True
    keeps_forgotten_away = False
    """A server that went on may carry out late what a process had sent that is dead by now."""
    remembers_s = 11.0
    descriptors_kept = 12
    is_calm = False

    def __init__(self, name: str, directory: Path) -> None:
        super().__init__(name, directory)
        self._server: subprocess.Popen[bytes] | None = None

    def open(self) -> None:
        if shutil.which("redis-server") is None:
            raise Skipped("redis-server is not installed")
        if importlib.util.find_spec("redis") is None:
            raise Skipped("redis-py is not installed (pip install 'tiercache[redis]')")
        self.directory.mkdir(parents=True, exist_ok=True)
        self._port = hold_port()
        self._start()

    def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.kill()
            server.wait(_END_S)

    def overrides(self, slot: int) -> dict[str, Any]:
        remote = "remote_storage_plugin.redis"
        options = {"url": f"redis://127.0.0.1:{self._port}", "timeout_s": 1}
        options["compression"] = "zstd" if slot % 2 else "none"
        named = {f"{remote}.{name}": value for name, value in options.items()}
        return self.config(remote_storage_plugins=["redis"], **named)

    def strike(self, kind: str) -> bool:
        assert self._server is not None
        if kind == "freeze":
            stop_process(self._server.pid)
            return False
        self.close()
        return True

    def heal(self) -> None:
        if self._server is None:
            self._start()
        else:
            self._server.send_signal(signal.SIGCONT)

    def _start(self) -> None:
        """Until it answers. Raises RuntimeError when it does not."""
        # It goes when the thread goes that has started it, which lives as long as the campaign.
        dying_with_us = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        command = [*dying_with_us, "redis-server", "--port", str(self._port), "--bind", "127.0.0.1"]
        command += ["--dir", str(self.directory), "--save", "", "--daemonize", "no"]
        with (self.directory / "redis.log").open("ab") as log:
            self._server = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        until_s = time.monotonic() + _READY_S
        while not self._answers():
            if time.monotonic() > until_s or self._server.poll() is not None:
                raise RuntimeError(f"redis-server did not start; see {self.directory / 'redis.log'}")
            time.sleep(0.01)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), 1.0) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith(b"+PONG")
        return False
