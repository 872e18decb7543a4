"""The GDS tier with device memory, in both of its ways: what is put comes back bit by bit, and how fast."""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from tests.bench.gpu.accelerator import Accelerator
from tests.bench.gpu.report import Report
from tiercache.bench.workload import new_keys
from tiercache.core.header import HEADER_BYTES
from tiercache.device.device import Device
from tiercache.errors import CorruptChunk
from tiercache.tiers import gds
from tiercache.tiers.gds import GdsSettings, GdsTier, import_kvikio, probe_gds

MIB = 1 << 20
_THREADS = 4
_FINGERPRINT = b"gpu benchmark   "


def measure_gds(report: Report, accelerator: Accelerator) -> None:
    """`gds.WAY.put_gbps`, `.get_gbps`: chunks of 32 MiB between slots of device memory and files, the checksum included.
    What was written is dropped from the page cache before it is read."""
    reason = asyncio.run(probe_gds([report.directory], accelerator.driver))
    report.facts["gpudirect_storage"] = reason or "works"
    os.environ["KVIKIO_COMPAT_MODE"] = "ON" if reason else "OFF"
    for way in ("posix", "cufile"):
        if way == "cufile" and (missing := _without_kvikio()):
            report.facts["cufile"] = missing
            continue
        with report.step(f"gds: {way}"):
            asyncio.run(_measure(report, accelerator, way))


async def _measure(report: Report, accelerator: Accelerator, way: str) -> None:
    import torch

    chunk_bytes, count = report.amount.of(32 * MIB, 32 * MIB, MIB // 4), report.amount.of(24, 12, 4)
    device = Device(accelerator.driver, chunk_bytes, count * (chunk_bytes + 2 * HEADER_BYTES))
    slots = [device.pool.view(device.pool.take() or 0) for _ in range(count)]
    contents = [accelerator.random((chunk_bytes,), torch.uint8, seed=seed) for seed in range(count)]
    place, keys = report.directory / way, new_keys(count)
    for pair in range(report.amount.pairs + 1):
        async with _opened(device, place, way, chunk_bytes) as tier:
            for slot, content in zip(slots, contents, strict=True):
                slot[:chunk_bytes] = content
            for key in keys:
                await tier.remove(key)
            accelerator.synchronize()
            began = time.perf_counter()
            chunks = zip(keys, slots, strict=True)
            assert all(await asyncio.gather(*(tier.write_device(key, slot, chunk_bytes) for key, slot in chunks)))
            written_s = time.perf_counter() - began
            await asyncio.to_thread(_drop_from_page_cache, [Path(tier.path(key)) for key in keys])
        for slot in slots:
            slot.zero_()
        accelerator.synchronize()
        async with _opened(device, place, way, chunk_bytes) as tier:  # after a restart
            await tier.scanned()
            began = time.perf_counter()
            found = await asyncio.gather(*(tier.read_device(key, slot) for key, slot in zip(keys, slots, strict=True)))
            read_s = time.perf_counter() - began
            same = all(torch.equal(slot[:chunk_bytes], one) for slot, one in zip(slots, contents, strict=True))
            report.check("gds: bit by bit", same and found == [chunk_bytes] * count, f"failed: {way}")
            if not pair:  # the first one warms up
                await _check_damage(report, tier, keys[0], slots[0], chunk_bytes)
                continue
        report.figures.add(f"gds.{way}.put_gbps", count * chunk_bytes / written_s / 1e9)
        report.figures.add(f"gds.{way}.get_gbps", count * chunk_bytes / read_s / 1e9)
    device.close()


async def _check_damage(report: Report, tier: GdsTier, key: bytes, slot: Any, chunk_bytes: int) -> None:
    await asyncio.to_thread(_change_one_bit, tier.path(key), HEADER_BYTES + chunk_bytes // 2)
    try:
        await tier.read_device(key, slot)
    except CorruptChunk:
        report.check("gds: one wrong bit is found", True)
    else:
        report.check("gds: one wrong bit is found", False)


@asynccontextmanager
async def _opened(device: Device, directory: Path, way: str, chunk_bytes: int) -> AsyncIterator[GdsTier]:
    """A GDS tier whose chunks move by `way`."""
    settings = GdsSettings((directory,), 1 << 32, threads=_THREADS, chunk_bytes=chunk_bytes, way=way)
    tier = GdsTier(settings, _FINGERPRINT, device)
    with mock.patch.object(gds, "probe_gds", mock.AsyncMock(return_value="")):  # kvikio's fallbacks are measured too
        await tier.open()
    try:
        yield tier
    finally:
        await tier.close()


def _without_kvikio() -> str:
    """Why kvikio cannot be used here; empty when it can."""
    try:
        ctypes.CDLL("libcuda.so.1")  # which it needs for host memory too
        import_kvikio()
    except (ImportError, OSError) as error:
        return str(error)
    return ""


def _change_one_bit(path: str, position: int) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)
        file.seek(position)
        file.write(bytes([byte[0] ^ 1]))


def _drop_from_page_cache(paths: list[Path]) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
