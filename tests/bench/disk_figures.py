"""Measure the disk tier as `tiercache bench` does, in turn with LMCache's."""

from __future__ import annotations

from pathlib import Path

from tests.bench.peer import peer_of
from tiercache.bench.disk_figures import measure_disk
from tiercache.bench.figures import Figures
from tiercache.bench.workload import CHUNK_SIZES, Plan, size_name

SETTINGS = ("disk_default", "disk_odirect", "fs_odirect", "native_odirect")
"""LMCache's local disk with defaults and with `use_odirect`; its file system connector and C++ client with O_DIRECT."""


async def measure_disk_and_peer(figures: Figures, plan: Plan, peer_python: Path | None) -> None:
    for chunk_bytes in CHUNK_SIZES:
        size = size_name(chunk_bytes)
        with peer_of(peer_python, plan, chunk_bytes, plan.count(chunk_bytes), plan.directory / "peer") as peer:

            async def write() -> None:
                for setting in SETTINGS:
                    name = f"put_durable_gbps.{size}"
                    peer.add(figures, f"put {setting}", put=(f"{setting}.{name}", f"disk.{name}"))

            async def read() -> None:
                for setting in SETTINGS:
                    name = f"get_cold_gbps.{size}"
                    peer.add(figures, f"get {setting}", get=(f"{setting}.{name}", f"disk.{name}"))

            await measure_disk(figures, plan, chunk_bytes, [write], [read])
