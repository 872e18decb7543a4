"""Ports of the loopback for the servers that tests start."""

import socket

held_ports: list[socket.socket] = []
"""Bound, and open until this process ends."""


def hold_port(*offsets: int) -> int:
    """Return a port that no other program is given until this process ends; with `offsets`, these above it are held too.

    A port that is only looked for can go to another test before the server listens, seconds later. Here a socket stays
    bound to it without listening. Linux then gives the port to nobody who asks for any free one, and lets a server
    that names it listen there, because both set SO_REUSEADDR (redis-server, vLLM, uvicorn and programs in Go do).
    """
    while True:
        sockets = [_bound(0)]
        port = int(sockets[0].getsockname()[1])
        try:
            sockets += [_bound(port + offset) for offset in offsets]
        except (OSError, OverflowError):  # in use, or above 65535
            for each in sockets:
                each.close()
            continue
        held_ports.extend(sockets)
        return port


def _bound(port: int) -> socket.socket:
    held = socket.socket()
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", port))
    except BaseException:
        held.close()
        raise
    return held
