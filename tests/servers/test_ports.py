"""A held port goes to nobody but the server that names it."""

import socket

from tests.servers.ports import hold_port


def test_a_held_port_is_given_to_nobody_who_asks_for_any() -> None:
    held = {hold_port() for _ in range(200)}
    assert len(held) == 200
    others = [socket.socket() for _ in range(400)]
    try:
        for number, each in enumerate(others):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, number % 2)
            each.bind(("127.0.0.1", 0))
        assert not held & {each.getsockname()[1] for each in others}
    finally:
        for each in others:
            each.close()


def test_a_server_listens_on_a_held_port() -> None:
    port = hold_port(10_000)
    for address in ("127.0.0.1", ""):
        with socket.create_server((address, port)), socket.create_connection(("127.0.0.1", port), 5.0) as client:
            assert client.getpeername()[1] == port
