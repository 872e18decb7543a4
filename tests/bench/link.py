"""A network link for measurements: a proxy to a server on this machine that lets through so many bits a second, each way.

A process of its own; bytes go from socket to socket through a pipe in the kernel (splice), so a fast link costs little of
the machine that is measured.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time

_BLOCK_S = 250e-6
"""What is let through at a time, as time: short enough that connections take turns."""
_BACKLOG = 128


class Link:
    """Used with `with`. `port` is what to connect to in place of the server's."""

    def __init__(self, server_port: int, gbit_per_s: float) -> None:
        command = [sys.executable, "-m", "tests.bench.link", str(server_port), str(gbit_per_s)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.communicate()


class _Way:
    """One direction of the link, shared by all connections: each transfer gets the next free stretch of time."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self.block_bytes = max(4096, int(bytes_per_s * _BLOCK_S))
        self._free_s = 0.0
        self._lock = threading.Lock()

    def wait(self, count: int) -> None:
        """Until so many bytes are through."""
        with self._lock:
            self._free_s = max(self._free_s, time.monotonic()) + count / self._bytes_per_s
            until_s = self._free_s
        time.sleep(max(0.0, until_s - time.monotonic()))


def _carry(source: socket.socket, target: socket.socket, way: _Way) -> None:
    reads, writes = os.pipe()
    try:
        while count := os.splice(source.fileno(), writes, way.block_bytes):
            way.wait(count)
            while count:
                count -= os.splice(reads, target.fileno(), count)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        for each in (source, target):
            each.close()
    finally:
        os.close(reads)
        os.close(writes)


def main(server_port: int, gbit_per_s: float) -> None:
    """Serve until the parent process closes stdin."""
    there, back = _Way(gbit_per_s * 1e9 / 8), _Way(gbit_per_s * 1e9 / 8)
    listener = socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
    print(listener.getsockname()[1], flush=True)
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    while True:
        client, _ = listener.accept()
        server = socket.create_connection(("127.0.0.1", server_port))
        for each in (client, server):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for source, target, way in ((client, server, there), (server, client, back)):
            threading.Thread(target=_carry, args=(source, target, way), daemon=True).start()


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
