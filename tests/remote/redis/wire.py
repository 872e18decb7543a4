"""A relay between a tier and its server that can damage what passes, once: a bit that flips on the wire."""

import contextlib
import socket
import threading
from collections.abc import Iterator

_LARGE_BYTES = 2048


class Relay:
    """Listens on `port` of the loopback. `flip_next` damages the next large pieces of answers, one for each request."""

    def __init__(self, server_port: int) -> None:
        self.flips = 0
        self._to_flip = 0
        self._asked = False
        self._server_port = server_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def flip_next(self, times: int = 1) -> None:
        self._to_flip = times

    def close(self) -> None:
        for each in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                client = self._listener.accept()[0]
                server = socket.create_connection(("127.0.0.1", self._server_port))
            except OSError:
                return
            self._sockets += [client, server]
            threading.Thread(target=self._pass_on, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._pass_on, args=(server, client, True), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        try:
            while piece := bytearray(source.recv(1 << 16)):
                self._asked |= not answers
                if answers and self._to_flip and self._asked and len(piece) > _LARGE_BYTES:
                    self._to_flip -= 1
                    self._asked = False
                    self.flips += 1
                    piece[-_LARGE_BYTES // 2] ^= 1
                target.sendall(piece)
        except OSError:
            pass
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def relay_to(server_port: int) -> Iterator[Relay]:
    relay = Relay(server_port)
    try:
        yield relay
    finally:
        relay.close()
