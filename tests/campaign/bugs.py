"""A worker with one of the bugs that the campaign must find: the one that the environment names. It is a `--worker`."""

import asyncio
import os
import signal
import time

import numpy as np

from tests.torture.campaign.worker import Worker, run
from tiercache.core.header import Header
from tiercache.core.keys import ChunkKey
from tiercache.tiers.files.chunk_files import ChunkFiles
from tiercache.tiers.files.tier import FileTier

__all__ = ["BUG", "run"]

BUG = "CAMPAIGN_BUG"
"""The environment's name for the bug."""
_read, _write, _remove, _limit = FileTier.read, FileTier.write, FileTier.remove, ChunkFiles.limit
_close = Worker._close
_kept: list[object] = []


async def flips_bits(self: FileTier, key: ChunkKey, into: np.ndarray) -> int | None:
    """Damage what was read, after it was verified."""
    length = await _read(self, key, into)
    if length is not None:
        into[length // 2] ^= 1
    return length


async def loses_chunks(self: FileTier, key: ChunkKey, payload: np.ndarray, payload_bytes: int) -> bool:
    """Say that all was written, and write some."""
    return key[1] % 4 == 0 or await _write(self, key, payload, payload_bytes)


def takes_too_much(self: ChunkFiles, cap_bytes: int, step_bytes: int) -> None:
    """Take a cap for twice as much as it is."""
    _limit(self, 2 * cap_bytes, step_bytes)


async def keeps_forgotten(self: FileTier, key: ChunkKey) -> bool:
    return True


async def crashes(self: FileTier, key: ChunkKey) -> bool:
    """End in the middle of a forget."""
    os.abort()


async def complains(self: FileTier, key: ChunkKey) -> bool:
    """Write what a library writes before it goes on as well as it can."""
    os.write(2, b"a destructor failed\n")
    return await _remove(self, key)


async def drops_an_error(self: FileTier, key: ChunkKey) -> bool:
    """Let a task fail for which nobody waits."""

    async def fail() -> None:
        raise RuntimeError("nobody waits for this")

    asyncio.get_running_loop().create_task(fail())
    return await _remove(self, key)


async def hangs(self: FileTier, key: ChunkKey) -> bool:
    """Let the event loop wait for ever in a forget."""
    time.sleep(3600)
    return True


async def leaks(self: FileTier, key: ChunkKey) -> bool:
    """Keep a file open, and half a MiB, for each chunk that is forgotten."""
    _kept.append((open("/dev/null"), bytes(1 << 19).replace(b"\0", b"x")))  # noqa: SIM115
    return await _remove(self, key)


async def raises_at_the_end(self: Worker) -> None:
    """Raise in the close after which the process ends."""
    if self._work is None:
        raise RuntimeError("the last close fails")
    await _close(self)


async def crashes_at_the_end(self: Worker) -> None:
    if self._work is None:
        os.kill(os.getpid(), signal.SIGSEGV)
    await _close(self)


def trusts_payloads(self: Header, checksum: int) -> None:
    """Take every payload that has a header for a good one."""


match bug := os.environ.get(BUG):
    case "flips_bits":
        FileTier.read = flips_bits  # type: ignore[method-assign]
    case "loses_chunks":
        FileTier.write = loses_chunks  # type: ignore[method-assign]
    case "takes_too_much":
        ChunkFiles.limit = takes_too_much  # type: ignore[method-assign]
    case "keeps_forgotten" | "crashes" | "complains" | "drops_an_error" | "hangs" | "leaks":
        FileTier.remove = globals()[bug]  # type: ignore[method-assign]
    case "trusts_payloads":
        Header.check_payload = trusts_payloads  # type: ignore[method-assign]
    case "raises_at_the_end" | "crashes_at_the_end":
        Worker._close = globals()[bug]  # type: ignore[method-assign]
