"""Engines that serve the same model side by side (data parallelism) and have one configuration."""

from __future__ import annotations

from dataclasses import replace

from tiercache.config import Config
from tiercache.control.server import socket_path


def beside_others(config: Config, index: int, engines: int) -> Config:
    """`config` with names of its own for the engine of that index, where an engine cannot share them.

    Of a dense model each engine is told that it is the only one (0 of 1), but for its index.
    """
    engine = (index, max(engines, index + 1))
    if config.control_socket is not None:
        config = replace(config, control_socket=str(socket_path(config.control_socket, engine)))
    if config.shm_name is not None:
        config = replace(config, shm_name=str(socket_path(config.shm_name, engine)))
    return config
