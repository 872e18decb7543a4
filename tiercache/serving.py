"""The control socket of a cache: neither knows the other, this knows both."""

from __future__ import annotations

from tiercache.closing import Part
from tiercache.control.naming import Naming, TokenNaming
from tiercache.control.served import ServedCache
from tiercache.control.server import ControlServer, socket_path

__all__ = ["Naming", "serve"]


async def serve(cache: ServedCache, naming: Naming | None) -> list[Part]:
    """What is to be closed with the cache: its socket, if the configuration wants one. Raises ConfigError."""
    if cache.config.control_socket is None:
        return []
    path = socket_path(cache.config.control_socket, (cache.layout.rank, cache.layout.world_size))
    server = ControlServer(path, cache, naming or TokenNaming())
    await server.start()
    return [("control socket", server.close)]
