"""The GDS tier with device memory: what is put comes back bit by bit, and as fast as plain kvikio moves it."""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from tiercache.bench.gpu.accelerator import Accelerator, span_of
from tiercache.bench.gpu.report import Report
from tiercache.bench.workload import config_of, new_keys
from tiercache.cache import TierCache
from tiercache.core.header import HEADER_BYTES, file_bytes
from tiercache.core.layout import Layout
from tiercache.device import checksum
from tiercache.device.device import Device
from tiercache.device.driver import Span
from tiercache.errors import CorruptChunk
from tiercache.tiers.files.cufile import CuFileFiles, import_kvikio
from tiercache.tiers.files.device_files import BounceFiles, DeviceFiles
from tiercache.tiers.files.gds_probe import probe_gds
from tiercache.tiers.gds import GdsSettings, GdsTier

MIB = 1 << 20
_THREADS = 4
_FINGERPRINT = b"gpu benchmark   "

Transfer = Callable[[], Coroutine[Any, Any, None]]


def measure_gds(report: Report, accelerator: Accelerator) -> None:
    """`gds.WAY.put_gbps`, `.get_gbps`: chunks of 32 MiB between slots of device memory and files, the checksum included.
    Beside them `gds.kvikio.write_gbps`, `.read_gbps`: plain `pwrite` and `pread` of as many bytes by as many threads to the
    same file system. What was written is dropped from the page cache before it is read. `gds.checksum_gbps`: the digest by
    kernels, beside a copy to pinned memory that is hashed there.
    """
    reason = asyncio.run(probe_gds([report.directory], accelerator.driver))
    report.facts["gpudirect_storage"] = reason or "works"
    os.environ["KVIKIO_COMPAT_MODE"] = "ON" if reason else "OFF"
    for way in ("posix", "cufile"):
        with report.step(f"GDS tier: round trips, {way}"):
            asyncio.run(_round_trips(report, accelerator, way))
    with report.step("checksums"):
        _measure_checksums(report, accelerator)
    with report.step("GDS tier: throughput"):
        asyncio.run(_measure_tier(report, accelerator))


async def _round_trips(report: Report, accelerator: Accelerator, way: str) -> None:
    """With the tier restarted in between; a file that was damaged is not served."""
    import torch

    if way == "cufile" and (missing := _without_kvikio()):
        report.facts["cufile"] = missing
        return
    chunk_bytes = report.amount.of(8 * MIB, 8 * MIB, MIB // 4)
    layout = Layout("bench-gds", chunk_tokens=256, bytes_per_token=chunk_bytes // 256)
    dtypes = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float32)
    for number, dtype in enumerate(dtypes):
        directory = report.directory / "round-trips" / way / str(number)
        count = chunk_bytes // dtype.itemsize
        tensors = [accelerator.random((count,), dtype, seed=seed) for seed in range(6)]
        keys = new_keys(len(tensors))
        name = f"{way}: {str(dtype).removeprefix('torch.')}"

        device = Device(accelerator.driver, chunk_bytes, 8 * (chunk_bytes + 2 * HEADER_BYTES))
        device.begin()
        async with _tier(device, directory, way, chunk_bytes) as tier:
            for key, tensor in zip(keys, tensors, strict=True):
                slot = _slot(device)
                _copy(accelerator, slot, span_of(tensor))
                assert await tier.write_device(key, slot, chunk_bytes)
                _give_back(device, slot)
        async with _tier(device, directory, way, chunk_bytes) as tier:
            await tier.scanned()
            await asyncio.to_thread(_change_one_bit, tier.path(keys[-1]), HEADER_BYTES + chunk_bytes // 2)
            for key, tensor in zip(keys, tensors, strict=True):
                slot = _slot(device)
                try:
                    length = await tier.read_device(key, slot)
                except CorruptChunk:
                    length = None
                if key == keys[-1]:
                    report.check(f"{name}: one wrong bit is found", length is None)
                else:
                    back = accelerator.empty(tuple(tensor.shape), dtype)
                    _copy(accelerator, span_of(back), slot.part(0, chunk_bytes))
                    same = torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))
                    report.check(f"{name}: bit by bit", same and length == chunk_bytes)
                _give_back(device, slot)
        device.close()
    if way == "posix":
        await _through_the_cache(report, accelerator, layout)


async def _through_the_cache(report: Report, accelerator: Accelerator, layout: Layout) -> None:
    import torch

    config = config_of(
        64 * MIB,
        gds_path=(str(report.directory / "round-trips" / "cache"),),
        gds_buffer_size=-(-8 * (layout.chunk_bytes + 2 * HEADER_BYTES) // MIB),
        max_gds_size=1.0,
        local_cpu=False,
    )
    shape = (layout.chunk_bytes // 2,)
    tensors = [accelerator.random(shape, torch.bfloat16, seed=seed) for seed in range(20)]
    keys = new_keys(len(tensors))
    async with TierCache.open(config, layout, device=accelerator.driver) as cache:
        assert await cache.put_many(keys, tensors) == len(keys)
        await cache.flush(60)
    async with TierCache.open(config, layout, device=accelerator.driver) as cache:
        backs = [accelerator.empty(shape, torch.bfloat16) for _ in keys]
        assert await cache.get_into(keys, backs) == len(keys)
        same = all(torch.equal(back, tensor) for back, tensor in zip(backs, tensors, strict=True))
        report.check("through the cache and a restart: bit by bit", same)


def _measure_checksums(report: Report, accelerator: Accelerator) -> None:
    import torch

    driver = accelerator.driver
    if not driver.has_kernels:
        report.facts["checksum"] = "no kernels"
        return
    length, count = report.amount.of(32 * MIB, 32 * MIB, MIB), report.amount.of(32, 16, 4)
    payload = accelerator.random((count * length,), torch.uint8, seed=4)
    scratch = [accelerator.empty((checksum.scratch_bytes(length),), torch.uint8) for _ in range(count)]
    host = accelerator.pinned(length)
    streams = [driver.make_stream() for _ in range(_THREADS)]
    parts = [span_of(payload).part(number * length, length) for number in range(count)]

    def by_kernels() -> None:
        for number, part in enumerate(parts):
            checksum.begin(driver, part, span_of(scratch[number]), streams[number % len(streams)])

    def one_at_a_time() -> None:
        for part in parts:
            checksum.begin(driver, part, span_of(scratch[0]), streams[0])

    def on_the_host() -> None:
        for part in parts:
            driver.copy(host.ctypes.data, part.address, length, streams[0])
            event = driver.record(streams[0])
            driver.synchronize(event)
            driver.release(event)
            xxhash.xxh3_64_intdigest(host.data)

    by_kernels()
    accelerator.synchronize()
    for number in (0, count - 1):
        found = checksum.finish(scratch[number][:64].cpu().numpy().view(np.uint64), length)
        expected = xxhash.xxh3_64_intdigest(payload[number * length : (number + 1) * length].cpu().numpy())
        report.check("checksum by kernels is XXH3-64", found == expected)
    on_the_host()
    for _ in range(report.amount.pairs):
        for name, measure in (
            ("gds.checksum_gbps", by_kernels),
            ("gds.checksum_one_stream_gbps", one_at_a_time),
            ("gds.checksum_host_gbps", on_the_host),
        ):
            report.figures.add(name, count * length / accelerator.seconds(measure) / 1e9)
    report.figures.compare("gds.checksum_gbps", "gds.checksum_host_gbps")
    report.figures.compare("gds.checksum_one_stream_gbps", "gds.checksum_host_gbps")


async def _measure_tier(report: Report, accelerator: Accelerator) -> None:
    import torch

    chunk_bytes, count = report.amount.of(32 * MIB, 32 * MIB, MIB), report.amount.of(24, 12, 4)
    room = chunk_bytes + 2 * HEADER_BYTES
    device = Device(accelerator.driver, chunk_bytes, count * room)
    device.begin()
    slots = [_slot(device) for _ in range(count)]
    for seed, slot in enumerate(slots):
        _copy(accelerator, slot, span_of(accelerator.random((chunk_bytes,), torch.uint8, seed=seed)))
    place = report.directory / "throughput"
    ways = ["posix"] if _without_kvikio() else ["posix", "cufile"]
    if "cufile" in ways:
        for way in ways:
            report.figures.compare(f"gds.{way}.put_gbps", "gds.kvikio.write_gbps")
            report.figures.compare(f"gds.{way}.get_gbps", "gds.kvikio.read_gbps")
    keys = {way: new_keys(count) for way in ways}
    paths: dict[str, list[Path]] = {}
    with ThreadPoolExecutor(_THREADS) as executor:
        tiers = {way: _tier(device, place / way, way, chunk_bytes, 4 * count * room) for way in ways}
        opened = {way: await tier.__aenter__() for way, tier in tiers.items()}
        for way, tier in opened.items():
            paths[way] = [Path(tier.path(key)) for key in keys[way]]
        measurements: list[tuple[str, str, Transfer]] = []
        for way, tier in opened.items():
            measurements += _of_tier(way, tier, keys[way], slots, chunk_bytes)
        if "cufile" in ways:
            paths["kvikio"] = [place / f"plain-{number}" for number in range(count)]
            measurements += _of_kvikio(accelerator, executor, paths["kvikio"], slots, chunk_bytes)
        for pair in range(report.amount.pairs + 1):
            for action in ("put", "get"):
                some = [row for row in measurements if row[0] == action]
                for _, figure, transfer in some if pair % 2 == 0 else some[::-1]:
                    way = figure.split(".")[1]
                    if action == "put":
                        for path in paths[way]:
                            path.unlink(missing_ok=True)
                        if way in opened:
                            for key in keys[way]:
                                await opened[way].remove(key)
                    else:
                        await asyncio.to_thread(_drop_from_page_cache, paths[way])
                    accelerator.synchronize()
                    began = time.perf_counter()
                    await transfer()
                    accelerator.synchronize()
                    if pair:  # the first one warms up
                        report.figures.add(figure, count * chunk_bytes / (time.perf_counter() - began) / 1e9)
            report.save()
        for manager in tiers.values():
            await manager.__aexit__(None, None, None)
    device.close()


def _of_tier(
    way: str, tier: GdsTier, keys: list[bytes], slots: list[Span], chunk_bytes: int
) -> list[tuple[str, str, Transfer]]:
    async def put() -> None:
        done = await asyncio.gather(
            *(tier.write_device(key, slot, chunk_bytes) for key, slot in zip(keys, slots, strict=True))
        )
        assert all(done)

    async def get() -> None:
        found = await asyncio.gather(*(tier.read_device(key, slot) for key, slot in zip(keys, slots, strict=True)))
        assert found == [chunk_bytes] * len(keys)

    return [("put", f"gds.{way}.put_gbps", put), ("get", f"gds.{way}.get_gbps", get)]


def _of_kvikio(
    accelerator: Accelerator, executor: ThreadPoolExecutor, paths: list[Path], slots: list[Span], chunk_bytes: int
) -> list[tuple[str, str, Transfer]]:
    kvikio = import_kvikio()
    total = file_bytes(chunk_bytes)

    def write(path: Path, slot: Span) -> None:
        with kvikio.CuFile(str(path), "w") as file:
            assert file.pwrite(accelerator.driver.array(_whole(slot, total)), total, 0).get() == total

    def read(path: Path, slot: Span) -> None:
        with kvikio.CuFile(str(path), "r") as file:
            assert file.pread(accelerator.driver.array(_whole(slot, total)), total, 0).get() == total

    async def all_of(transfer: Callable[[Path, Span], None]) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.gather(
            *(loop.run_in_executor(executor, transfer, *row) for row in zip(paths, slots, strict=True))
        )

    return [
        ("put", "gds.kvikio.write_gbps", lambda: all_of(write)),
        ("get", "gds.kvikio.read_gbps", lambda: all_of(read)),
    ]


class _tier:
    """A GDS tier whose chunks move by `way`."""

    def __init__(self, device: Device, directory: Path, way: str, chunk_bytes: int, cap_bytes: int = 1 << 30) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        files: DeviceFiles
        if way == "posix":
            files = BounceFiles(device.driver, chunk_bytes, 2 * _THREADS)
        else:
            files = CuFileFiles(device.driver, device.pool.memory, chunk_bytes, 2 * _THREADS)
        settings = GdsSettings((directory,), cap_bytes, threads=_THREADS, chunk_bytes=chunk_bytes)
        self._tier = GdsTier(settings, _FINGERPRINT, device, files)

    async def __aenter__(self) -> GdsTier:
        await self._tier.open()
        return self._tier

    async def __aexit__(self, *_: object) -> None:
        await self._tier.close()


def _without_kvikio() -> str:
    """Why plain kvikio cannot be used here; empty when it can."""
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


def _slot(device: Device) -> Span:
    slot = device.pool.take()
    assert slot is not None, "the pool has a slot for each"
    return device.pool.view(slot)


def _give_back(device: Device, span: Span) -> None:
    device.pool.give_back((span.address - device.pool.memory.address) // device.pool.slot_bytes)


def _whole(slot: Span, total_bytes: int) -> Span:
    """With the header's page before it."""
    return Span(slot.address - HEADER_BYTES, total_bytes)


def _copy(accelerator: Accelerator, to: Span, source: Span) -> None:
    driver = accelerator.driver
    stream = driver.current_stream()
    driver.copy(to.address, source.address, min(to.length_bytes, source.length_bytes), stream)
    event = driver.record(stream)
    driver.synchronize(event)
    driver.release(event)


def _drop_from_page_cache(paths: list[Path]) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
