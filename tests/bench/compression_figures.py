"""What compression leaves of chunks, what it takes, and what it brings behind a link and on a disk."""

from __future__ import annotations

import shutil
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import numpy as np

from tests.bench.lanes import in_lanes
from tests.bench.link import Link
from tests.bench.redis_figures import redis_server
from tests.bench.s3_store import s3_options, s3_server
from tests.servers.s3 import BUCKET, weed
from tiercache.bench.figures import Figures
from tiercache.bench.workload import MIB, Plan, in_turn, new_keys
from tiercache.commands.verify import chunk_files
from tiercache.config.remote_options import options_of
from tiercache.core.compression import COMPRESSING, Codec
from tiercache.core.header import HEADER_BYTES, Header, HeaderError, aligned
from tiercache.errors import ConfigError
from tiercache.memory.arena import Arena, ArenaSettings
from tiercache.tiers.base import Tier
from tiercache.tiers.compression import Compression, unpacked
from tiercache.tiers.disk import DiskTier
from tiercache.tiers.files.directories import FileSettings
from tiercache.tiers.remote.base import RemoteSettings
from tiercache.tiers.remote.registry import make_remote

_LINKS_GBIT = (1.0, 10.0)
_SECONDS = 0.4
"""What a transfer of all chunks takes on the link, about, if nothing is compressed."""
_MODES = ("none", "auto", "zstd", "lz4")
_DEPTH = 4
_PAYLOADS = 8
_GENERATED_BYTES = 2 * MIB
_FINGERPRINT = bytes(16)


async def measure_compression(figures: Figures, plan: Plan, chunks: Path | None) -> None:
    """GB/s of plain bytes, four chunks in flight.

    `compression.<codec>.ratio`: stored bytes to plain ones; `in_gbps`, `out_gbps`: one thread. `compression.redis.<link>.*`
    and `compression.s3.<link>.*`: a server of its own behind a link of 1 or 10 Gbit/s, by mode; `compression.disk.*`: a disk
    without a link. `*_times.<mode>`: beside `none`, pair by pair. The payloads are those of the chunks in `--chunks`
    (bfloat16 is assumed), or normally distributed numbers in bfloat16. What measures, compresses, serves and is the link
    shares the machine's cores.
    """
    payloads = _payloads(chunks)
    _measure_codecs(figures, plan, payloads)
    await _measure_modes(
        figures, plan, payloads, "compression.disk", _disks(plan, payloads[0].nbytes), _counts(plan, None)
    )
    if shutil.which("redis-server") is not None:
        with redis_server(plan.directory / "redis") as server:
            for gbit in _LINKS_GBIT:
                with Link(server.port, gbit) as link:
                    tiers = {mode: _redis(link.port, mode, payloads[0].nbytes) for mode in _MODES}
                    name = f"compression.redis.{gbit:g}Gbit"
                    await _measure_modes(figures, plan, payloads, name, tiers, _counts(plan, gbit))
    if weed() is not None:
        with s3_server(plan) as store:
            for gbit in _LINKS_GBIT:
                with Link(store.port, gbit) as link:
                    tiers = {mode: _s3(link.port, mode, payloads[0].nbytes) for mode in _MODES}
                    name = f"compression.s3.{gbit:g}Gbit"
                    await _measure_modes(figures, plan, payloads, name, tiers, _counts(plan, gbit))


def _counts(plan: Plan, gbit: float | None) -> Callable[[int], int]:
    """How many chunks of so many bytes are moved."""

    def count(chunk_bytes: int) -> int:
        total_bytes = plan.sizes.total_bytes / 4 if gbit is None else gbit / 8 * 1e9 * _SECONDS
        return max(_DEPTH, int(min(total_bytes, plan.sizes.total_bytes) / chunk_bytes))

    return count


def _payloads(directory: Path | None) -> list[np.ndarray]:
    """Padded to whole pages, of equal length."""
    if directory is None:
        rng = np.random.default_rng(4)
        numbers = (rng.standard_normal((_PAYLOADS, _GENERATED_BYTES // 2), np.float32).view("<u4") >> 16).astype("<u2")
        return list(numbers.view(np.uint8))
    found: list[np.ndarray] = []
    for path in chunk_files(directory):
        raw = np.fromfile(path, dtype=np.uint8)
        try:
            header = Header.unpack(raw)
        except HeaderError:
            continue
        if header.codec is Codec.PLAIN:
            found.append(raw[HEADER_BYTES : HEADER_BYTES + header.payload_bytes])
    longest = max((payload.nbytes for payload in found), default=0)
    whole = [payload for payload in found if payload.nbytes == longest][:_PAYLOADS]
    if not whole:
        raise ConfigError(f"--chunks: {directory} holds no plain chunk")
    return [np.resize(payload, aligned(longest)) for payload in whole]


def _measure_codecs(figures: Figures, plan: Plan, payloads: Sequence[np.ndarray]) -> None:
    for pair in range(plan.pairs):
        plan.progress(f"codecs, {pair + 1} of {plan.pairs}")
        for codec in COMPRESSING:
            compression, into = Compression(codec.name.lower(), 2), np.empty_like(payloads[0])
            stored_bytes, in_s, out_s = 0, 0.0, 0.0
            for payload in payloads:
                began_s = time.perf_counter()
                with compression.pack(bytes(24), _FINGERPRINT, payload, payload.nbytes) as packed:
                    in_s += time.perf_counter() - began_s
                    stored_bytes += packed.header.payload_bytes
                    into[: packed.payload.nbytes] = packed.payload
                began_s = time.perf_counter()
                assert unpacked(packed.header, into) == payload.nbytes
                out_s += time.perf_counter() - began_s
            plain_bytes, name = len(payloads) * payloads[0].nbytes, f"compression.{codec.name.lower()}"
            figures.add(f"{name}.ratio", stored_bytes / plain_bytes)
            figures.add(f"{name}.in_gbps", plain_bytes / in_s / 1e9)
            figures.add(f"{name}.out_gbps", plain_bytes / out_s / 1e9)


async def _measure_modes(
    figures: Figures,
    plan: Plan,
    payloads: Sequence[np.ndarray],
    name: str,
    tiers: dict[str, Tier],
    count: Callable[[int], int],
) -> None:
    chunk_bytes = payloads[0].nbytes
    arena = Arena(ArenaSettings(size_bytes=(_DEPTH + len(payloads)) * chunk_bytes))
    slots = [arena.memory[number * chunk_bytes :][:chunk_bytes] for number in range(_DEPTH + len(payloads))]
    sources, targets = slots[_DEPTH:], slots[:_DEPTH]
    for source, payload in zip(sources, payloads, strict=True):
        source[:] = payload
    keys = {mode: new_keys(count(chunk_bytes)) for mode in tiers}

    def turn(mode: str, tier: Tier) -> Callable[[], Awaitable[None]]:
        async def put(numbered: tuple[int, bytes], lane: int) -> None:
            number, key = numbered
            assert await tier.write(key, sources[number % len(sources)], chunk_bytes)

        async def get(numbered: tuple[int, bytes], lane: int) -> None:
            assert await tier.read(numbered[1], targets[lane]) == chunk_bytes

        async def measure() -> None:
            for way, move in (("put", put), ("get", get)):
                began_s = time.perf_counter()
                await in_lanes(enumerate(keys[mode]), range(_DEPTH), move)
                took_s = time.perf_counter() - began_s
                figures.add(f"{name}.{way}_gbps.{mode}", len(keys[mode]) * chunk_bytes / took_s / 1e9)
            for key in keys[mode]:
                await tier.remove(key)

        return measure

    try:
        for tier in tiers.values():
            await tier.open()
        for pair in range(plan.pairs):
            plan.progress(f"{name}, pair {pair + 1} of {plan.pairs}")
            await in_turn(pair, *(turn(mode, tier) for mode, tier in tiers.items()))
    finally:
        for tier in tiers.values():
            await tier.close()
        slots.clear()
        sources.clear()
        targets.clear()
        arena.close()
    for way in ("put", "get"):
        for mode in _MODES[1:]:
            gbps, plain_gbps = (figures.samples[f"{name}.{way}_gbps.{each}"] for each in (mode, "none"))
            for with_it, without in zip(gbps, plain_gbps, strict=True):
                figures.add(f"{name}.{way}_times.{mode}", with_it / without)


def _disks(plan: Plan, chunk_bytes: int) -> dict[str, Tier]:
    def disk(mode: str) -> Tier:
        place, cap_bytes = plan.directory / f"kv-{mode}", 2 * plan.sizes.total_bytes
        settings = FileSettings((place,), cap_bytes, compression=mode, item_bytes=2, chunk_bytes=chunk_bytes)
        return DiskTier(settings, _FINGERPRINT)

    return {mode: disk(mode) for mode in _MODES}


def _redis(port: int, mode: str, chunk_bytes: int) -> Tier:
    options = {option.name: option.default for option in options_of("redis").values()} | {"compression": mode}
    return make_remote(_settings("redis", chunk_bytes, f"redis://127.0.0.1:{port}", options))


def _s3(port: int, mode: str, chunk_bytes: int) -> Tier:
    options = s3_options(f"http://127.0.0.1:{port}") | {"prefix": mode, "compression": mode}
    return make_remote(_settings("s3", chunk_bytes, f"s3://{BUCKET}", options))


def _settings(type_name: str, chunk_bytes: int, url: str, options: dict[str, object]) -> RemoteSettings:
    return RemoteSettings(
        type_name, type_name, _FINGERPRINT, chunk_bytes, url, options, timeout_s=30.0, concurrency=_DEPTH, item_bytes=2
    )
