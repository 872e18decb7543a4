"""Clients of a control socket that mean no good, or much at once, as a process of their own: `python flood.py SOCKET WHAT`.

Prints a line when it has connected, and one when everything is answered; ends when its standard input does.
"""

import asyncio
import socket
import sys
from typing import Any

import msgspec


def framed(content: Any) -> bytes:
    packed = msgspec.msgpack.encode(content)
    return len(packed).to_bytes(4, "big") + packed


async def pipelined(path: str, message: bytes, times: int) -> None:
    """All questions at once, and then the answers."""
    reader, writer = await asyncio.open_unix_connection(path)

    async def send() -> None:
        for _ in range(times):
            writer.write(message)
            await writer.drain()

    sending = asyncio.create_task(send())
    for _ in range(times):
        await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))
    await sending
    writer.close()


async def ask_much(path: str, connections: int, message: bytes, times: int) -> None:
    await asyncio.gather(*(pipelined(path, message, times) for _ in range(connections)))
    print("answered", flush=True)


def ask_and_never_read(path: str, clients: int) -> list[socket.socket]:
    """One after the other; each asks until the cache takes no more of it."""
    message = framed({"command": "statistics"}) * 64
    kept = []
    for _ in range(clients):
        client = socket.socket(socket.AF_UNIX)
        client.connect(path)
        client.setblocking(False)
        try:
            while True:
                client.send(message)
        except OSError:
            kept.append(client)
    print("asked", flush=True)
    return kept


def message_of(what: str) -> bytes:
    name, _, kind = what.partition("-")
    if kind == "nested":
        packed = (b"\x82\xa7command\xa6lookup\xa6tokens" + b"\x91" * (1 << 20))[: 1 << 20]
        return len(packed).to_bytes(4, "big") + packed
    prefix: dict[str, Any] = {
        "": {},
        "tokens": {"tokens": [2**31 + number for number in range(209_000)]},
        "small": {"tokens": [number % 100 for number in range(1_048_000)]},
        "keys": {"keys": [f"{number:048x}" for number in range(20_900)]},
    }[kind]
    return framed({"command": name, **prefix})


def main() -> None:
    path, what, connections, times = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    message = message_of(what)
    print("ready", flush=True)
    sys.stdin.readline()
    kept = ask_and_never_read(path, connections) if times == 0 else asyncio.run(ask_much(path, connections, message, times))
    sys.stdin.read()
    del kept


if __name__ == "__main__":
    main()
