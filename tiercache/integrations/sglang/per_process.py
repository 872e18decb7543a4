"""A server has a process for each rank and replica, with one configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tiercache.config import Config
from tiercache.control.server import socket_path

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig


def for_process(config: Config, storage: HiCacheStorageConfig) -> Config:
    """With a socket and shared memory of its own for each process of a server. Pages come from and go to host memory: no
    device is used, unless a tier needs one."""
    ranks = [(storage.dp_rank, storage.dp_rank + 1)]
    if storage.is_mla_model:  # of others the layout tells ranks apart
        ranks.append((storage.tp_rank, storage.tp_size))
    if config.control_socket is not None:
        config = replace(config, control_socket=str(socket_path(config.control_socket, *ranks)))
    if config.shm_name is not None:
        config = replace(config, shm_name=str(socket_path(config.shm_name, *ranks)))
    if config.device == "auto" and not config.gds_path and not config.weka_path:
        config = replace(config, device="none")
    return config
