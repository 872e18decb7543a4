"""Run `tiercache verify DIR`: read every chunk and check it against its header."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track

from tiercache.commands.directory import chunk_files, problem_with
from tiercache.commands.findings import complain
from tiercache.core.compression import Codec
from tiercache.core.header import HEADER_BYTES, PACKED_BYTES, Header, HeaderError, aligned, file_bytes
from tiercache.core.layout import FINGERPRINT_BYTES
from tiercache.errors import CorruptChunk, TierUnavailable
from tiercache.tiers.compression import plain_bytes, unpacked
from tiercache.tiers.files.access import access_as_found, open_regular
from tiercache.tiers.files.chunk_files import ChunkFiles
from tiercache.tiers.files.directory import found_place, has_our_header
from tiercache.tiers.files.format import host_checksum, verify_chunk

_THREADS = 4
_thread = threading.local()


@dataclass
class Verified:
    directory: str
    checked: int = 0
    checked_bytes: int = 0
    bad: list[str] = field(default_factory=list)
    """A sentence for each file moved to quarantine: what was expected, what was found."""
    unreadable: list[str] = field(default_factory=list)
    """Files that could not be read; they stay in place."""


def verify_command(directory: Path, as_json: bool) -> int:
    """Verify a directory. Return 1 if a chunk was bad or unreadable, 2 if `directory` cannot be verified, else 0."""
    if (problem := asyncio.run(problem_with(directory))) is not None:
        return complain(problem)
    try:
        # A progress bar would be noise in a pipe or a log.
        found = verify(directory, Console(stderr=True, quiet=as_json or not sys.stderr.isatty()))
    except (OSError, ValueError, TierUnavailable) as error:
        return complain(f"{directory} cannot be verified: {error}")
    if as_json:
        print(json.dumps(asdict(found), indent=2))
    else:
        for line in found.bad:
            print(f"bad, now in quarantine: {line}")
        for line in found.unreadable:
            print(f"unreadable: {line}")
        size = f"{found.checked_bytes / 2**20:,.1f} MiB"
        print(f"{found.checked:,} chunks checked, {size}; {len(found.bad)} bad, {len(found.unreadable)} unreadable")
    return 1 if found.bad or found.unreadable else 0


def verify(directory: Path, console: Console) -> Verified:
    """Check all chunks of all layouts. Caches may use the directory meanwhile: a chunk that vanishes was evicted."""
    found = Verified(str(directory))
    paths = list(chunk_files(directory))
    with ExitStack() as stack, ThreadPoolExecutor(_THREADS) as threads:
        files: ChunkFiles | None = None
        checks = zip(paths, threads.map(_check, paths), strict=True)
        for path, outcome in track(checks, "verifying", total=len(paths), console=console):
            if isinstance(outcome, FileNotFoundError):
                continue
            found.checked += 1
            if isinstance(outcome, int):
                found.checked_bytes += outcome
            elif isinstance(outcome, CorruptChunk):
                # Opened for the first bad chunk only, so that a check without errors leaves no files.
                files = files or open_files(found_place(directory), stack)
                if has_our_header(str(path)):
                    files.quarantine(bytes.fromhex(path.name))
                    found.bad.append(str(outcome))
                else:
                    found.unreadable.append(f"{outcome}: it may belong to another program")
            else:
                found.unreadable.append(f"{path}: {outcome.strerror}")
    return found


def open_files(
    place: Path, stack: ExitStack, cap_bytes: int = 0, fingerprint: bytes = bytes(FINGERPRINT_BYTES)
) -> ChunkFiles:
    """Open a directory beside its caches, until the end of `stack`. Raises OSError, ValueError, TierUnavailable."""
    access = access_as_found(place / ".tiercache")
    files = ChunkFiles(
        place, cap_bytes, fingerprint, direct=None, durable=True, many_hosts=True, beside=True, access=access
    )
    stack.callback(files.close)
    files.open()
    return files


def _check(path: Path) -> int | CorruptChunk | OSError:
    """Return the payload bytes of a good chunk, or the error."""
    try:
        return _read_and_verify(path)
    except (CorruptChunk, OSError) as problem:
        return problem


def _read_and_verify(path: Path) -> int:
    with os.fdopen(open_regular(path, os.O_RDONLY), "rb", buffering=0) as file:
        length = os.fstat(file.fileno()).st_size
        header = file.read(HEADER_BYTES)
        got = len(header)
        memory = buffer_of(4096)
        # Read the payload only if the header gives this length.
        if _promised_bytes(header) == length:
            memory = buffer_of(aligned(length))
            while got < length and (more := file.readinto(memory[got - HEADER_BYTES :].data)):
                got += more
        # Drop these pages from the page cache, since they are not read again soon.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    raw_header = memoryview(header)[:PACKED_BYTES]
    found = verify_chunk(path, raw_header, bytes.fromhex(path.name), None, got, length, host_checksum(memory))
    if found.codec is not Codec.PLAIN:
        stored = memory[: found.payload_bytes]
        try:
            memory = buffer_of(max(length, plain_bytes(stored)))
        except ValueError as error:
            raise CorruptChunk(f"{path}: {error}") from error
        memory[: stored.nbytes] = stored
    return unpacked(found, memory)


def _promised_bytes(header: bytes) -> int | None:
    try:
        return file_bytes(Header.unpack(header).payload_bytes)
    except HeaderError:
        return None


def buffer_of(size_bytes: int) -> np.ndarray:
    """Return this thread's buffer of at least that size: fresh pages for each chunk would cost more than the check."""
    memory: np.ndarray | None = getattr(_thread, "memory", None)
    if memory is None or memory.nbytes < size_bytes:
        memory = _thread.memory = np.frombuffer(mmap.mmap(-1, size_bytes), dtype=np.uint8)
    return memory
