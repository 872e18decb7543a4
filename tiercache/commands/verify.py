"""Run `tiercache verify DIR`: read every chunk and check it against its header."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from itertools import repeat
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track

from tiercache.commands.findings import complain
from tiercache.commands.stat import header_of, problem_with
from tiercache.core.compression import Codec
from tiercache.core.header import Header, file_bytes
from tiercache.core.layout import FINGERPRINT_BYTES
from tiercache.errors import CorruptChunk, TierUnavailable
from tiercache.tiers.compression import plain_bytes, unpacked
from tiercache.tiers.files.access import ABSENT, access_as_found
from tiercache.tiers.files.chunk_files import ChunkFiles
from tiercache.tiers.files.directory import CHUNK_NAME, TOP_LEVELS, place_of, reads_directly
from tiercache.tiers.files.format import read_chunk_file

_THREADS = 4
_thread = threading.local()


@dataclass
class Verified:
    directory: str
    checked: int = 0
    checked_bytes: int = 0
    bad: list[str] = field(default_factory=list)
    """A sentence for each deleted file: what was expected, what was found."""
    unreadable: list[str] = field(default_factory=list)
    """Files that could not be read, and bad ones that could not be deleted; they stay in place."""


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
            print(f"bad, deleted: {line}")
        for line in found.unreadable:
            print(f"unreadable: {line}")
        size = f"{found.checked_bytes / 2**20:,.1f} MiB"
        print(f"{found.checked:,} chunks checked, {size}; {len(found.bad)} bad, {len(found.unreadable)} unreadable")
    return 1 if found.bad or found.unreadable else 0


def verify(directory: Path, console: Console) -> Verified:
    """Check all chunks of all layouts. Caches may use the directory meanwhile: a chunk that vanishes was evicted."""
    found, direct = Verified(str(directory)), reads_directly(place_of(directory))
    paths = list(chunk_files(directory))
    with ExitStack() as stack, ThreadPoolExecutor(_THREADS) as threads:
        files: ChunkFiles | None = None
        checks = zip(paths, threads.map(_check, paths, repeat(direct)), strict=True)
        for path, outcome in track(checks, "verifying", total=len(paths), console=console):
            if isinstance(outcome, FileNotFoundError):
                continue
            found.checked += 1
            if isinstance(outcome, int):
                found.checked_bytes += outcome
            elif isinstance(outcome, CorruptChunk):
                problem = "it could not be deleted"
                try:
                    # Opened for the first bad chunk only, so that a check without errors leaves no files.
                    files = files or open_files(place_of(directory), stack)
                    files.delete_bad(bytes.fromhex(path.name))
                except OSError as error:
                    problem += f": {error.strerror}"
                if os.path.lexists(path):
                    found.unreadable.append(f"{outcome}; {problem}")
                else:
                    found.bad.append(str(outcome))
            else:
                found.unreadable.append(f"{path}: {outcome.strerror}")
    return found


def chunk_files(directory: Path) -> Iterator[Path]:
    """Yield the paths with names of chunks. Raises OSError if a directory cannot be read."""
    place = place_of(directory)
    for top in TOP_LEVELS:
        with suppress(*ABSENT):
            yield from sorted(path for path in (place / top).iterdir() if CHUNK_NAME.fullmatch(path.name))


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


def _check(path: Path, direct: bool) -> int | CorruptChunk | OSError:
    """Return the payload bytes of a good chunk, or the error."""
    try:
        header, memory = read_verified(path, None, direct=direct)
        if header.codec is Codec.PLAIN:
            return header.payload_bytes
        stored = memory[: header.payload_bytes]
        memory = buffer_of(max(memory.nbytes, plain_bytes(stored)))
        memory[: stored.nbytes] = stored
        return unpacked(header, memory)
    except ValueError as error:
        return CorruptChunk(f"{path}: {error}")
    except (CorruptChunk, OSError) as problem:
        return problem


def read_verified(path: Path | str, fingerprint: bytes | None, *, direct: bool) -> tuple[Header, np.ndarray]:
    """Return the header and the stored payload of a chunk, in this thread's buffer. Raises as `read_chunk_file` does.

    The chunk may be removed and stored again meanwhile, with another length.
    """
    known = header_of(path)
    while True:
        payload = buffer_of(file_bytes(known.payload_bytes if isinstance(known, Header) else 0))
        try:
            key = bytes.fromhex(os.path.basename(path))
            return read_chunk_file(path, key, fingerprint, payload, direct=direct), payload
        except CorruptChunk:
            if (now := header_of(path)) == known:
                raise
            known = now


def buffer_of(size_bytes: int) -> np.ndarray:
    """Return this thread's buffer of at least that size: fresh pages for each chunk would cost more than the check."""
    memory: np.ndarray | None = getattr(_thread, "memory", None)
    if memory is None or memory.nbytes < size_bytes:
        memory = _thread.memory = np.frombuffer(mmap.mmap(-1, size_bytes), dtype=np.uint8)
    return memory
