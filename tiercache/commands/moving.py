"""Run `tiercache export` and `tiercache import`: move the chunks of one layout between directories.

The file has the chunk files as they are on disk, the oldest first, and a last header whose checksum field is the number of
chunks. An import looks for the next header behind a damaged one. Both verify every chunk, and work beside running caches.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import IO, cast

from tiercache.commands.findings import complain
from tiercache.commands.stat import headers_in, problem_with
from tiercache.commands.verify import buffer_of, open_files, read_verified
from tiercache.core.header import HEADER_BYTES, Header, HeaderError, aligned, file_bytes, payload_checksum
from tiercache.core.keys import check_key
from tiercache.errors import CorruptChunk, TierFull, TierUnavailable
from tiercache.tiers.files.access import access_as_found
from tiercache.tiers.files.chunk_files import ChunkFiles
from tiercache.tiers.files.directory import TOP_LEVELS, make_place, place_of, reads_directly
from tiercache.tiers.files.format import write_chunk_file

_STREAM = "-"
_END = b"end of export"
"""The key of the last header."""
_LARGEST_BYTES = 4 << 30
"""Limit of a payload, which an import reads as a whole."""


@dataclass
class Moved:
    directory: str
    layout: str = ""
    """The fingerprint of the chunks' layout."""
    chunks: int = 0
    chunk_bytes: int = 0
    """Bytes of the chunks' files."""
    present: int = 0
    """Chunks that an import found in the directory already."""
    bad: list[str] = field(default_factory=list)
    """A sentence for each chunk that was left out."""
    problem: str = ""
    """The reason why an import ended before the last chunk."""


def export_command(directory: Path, output: str, layout: str, as_json: bool) -> int:
    """Export a directory. Return 1 if a chunk was bad or unreadable, 2 if nothing was exported, else 0."""
    if (problem := asyncio.run(problem_with(directory))) is not None:
        return complain(problem)
    try:
        with _output(output) as stream:
            found = _export(directory, stream, layout)
    except (OSError, ValueError) as error:
        return complain(f"{directory} cannot be exported: {error}")
    return _report(found, "exported", as_json, to=sys.stderr if output == _STREAM else sys.stdout)


def import_command(source: str, directory: Path, size_gb: float, as_json: bool) -> int:
    """Import a file. Return 1 if chunks are missing afterwards, 2 if nothing could be imported, else 0."""
    try:
        with sys.stdin.buffer if source == _STREAM else open(source, "rb") as stream:
            found = _import(cast("BufferedReader", stream), directory, int(size_gb * 2**30))
    except (OSError, ValueError, TierUnavailable) as error:
        return complain(f"{source} cannot be imported: {error}")
    return _report(found, "imported", as_json, to=sys.stdout)


def _export(directory: Path, stream: IO[bytes], layout: str) -> Moved:
    """Write the chunks of the layout whose fingerprint begins with `layout`. Raises OSError, and ValueError unless there is
    one such layout.
    """
    found, place = Moved(str(directory)), place_of(directory)
    layouts = defaultdict[str, list[tuple[float, str]]](list)
    for top in TOP_LEVELS:
        for path, status, header in headers_in(place / top):
            if isinstance(header, Header):
                layouts[header.fingerprint.hex()].append((status.st_mtime, path))
            elif header is not None:
                found.bad.append(f"{path}: {header}")
    meant = [each for each in layouts if each.startswith(layout)]
    if len(meant) != 1:
        there = ", ".join(f"{each[:16]} ({len(chunks):,} chunks)" for each, chunks in sorted(layouts.items()))
        raise ValueError(f"--layout: expected the beginning of one layout of {there or 'no chunks'}; found {layout!r}")
    found.layout, direct = meant[0], reads_directly(place)
    fingerprint = bytes.fromhex(found.layout)
    for _, path in sorted(layouts[found.layout]):
        try:
            header, payload = read_verified(path, fingerprint, direct=direct)
        except FileNotFoundError:
            continue  # it was evicted
        except (CorruptChunk, OSError) as error:
            found.bad.append(str(error))
            continue
        stream.write(header.pack().ljust(HEADER_BYTES, b"\0"))
        stream.write(payload[: aligned(header.payload_bytes)].data)
        found.chunks += 1
        found.chunk_bytes += file_bytes(header.payload_bytes)
    stream.write(Header(_END, fingerprint, 0, found.chunks).pack().ljust(HEADER_BYTES, b"\0"))
    return found


def _import(stream: BufferedReader, directory: Path, cap_bytes: int) -> Moved:
    """Store the chunks of an export, up to `cap_bytes` of all files in `directory`. The result has errors after the start.

    Raises ValueError if `stream` is no export or the directory has another format, OSError, TierUnavailable.
    """
    block, seen = stream.read(HEADER_BYTES), 0
    fingerprint = Header.unpack(block).fingerprint
    found = Moved(str(directory), fingerprint.hex(), problem="the file is cut: it has no end; copy or export it again")
    place = make_place(directory, access_as_found(place_of(directory) / ".tiercache"))
    with ExitStack() as stack:
        files = open_files(place, stack, cap_bytes, fingerprint)
        try:
            for header in _headers(stream, block, fingerprint):
                if header.key == _END:
                    expected = header.payload_checksum
                    found.problem = ""
                    if seen != expected:
                        found.problem = f"expected {expected:,} chunks, found {seen:,}; copy or export the file again"
                    elif stream.read(1):
                        found.problem = "more follows behind its end: import several exports one by one"
                    break
                seen += 1
                _import_one(stream, header, files, found)
        except TierFull as error:
            found.problem = f"the directory is full, and an import evicts nothing: {error}"
        except (OSError, TierUnavailable) as error:
            found.problem = str(error)
    return found


def _headers(stream: BufferedReader, block: bytes, fingerprint: bytes) -> Iterator[Header]:
    """Yield the headers from `block` on. The caller reads the payloads; blocks that are no headers are skipped."""
    while block:
        with suppress(HeaderError):
            header = Header.check(block, Header.unpack(block).key, fingerprint)
            if header.payload_bytes <= _LARGEST_BYTES:
                yield header
        block = stream.read(HEADER_BYTES)


def _import_one(stream: BufferedReader, header: Header, files: ChunkFiles, found: Moved) -> None:
    """Import the chunk whose payload comes next. Raises TierFull, OSError, TierUnavailable."""
    length, key = aligned(header.payload_bytes), header.key
    payload = buffer_of(file_bytes(length))[:length]
    if stream.readinto(payload.data) < length:
        return  # it is cut
    if not files.capacity.trusted:
        raise TierUnavailable(f"the chunks in {files.root} are not counted yet: let a cache open it, then import again")
    try:
        check_key(key)
        if files.occupied_by(key):
            found.present += 1
            return
        header.check_payload(payload_checksum(payload[: header.payload_bytes]))
        payload[header.payload_bytes :] = 0
        write = partial(write_chunk_file, header=header, payload=payload, direct=files.direct, durable=True)
        files.write_by(key, header.payload_bytes, write)
    except ValueError as error:
        found.bad.append(f"{key.hex()}: {error}")
        return
    found.chunks += 1
    found.chunk_bytes += file_bytes(header.payload_bytes)


@contextmanager
def _output(output: str) -> Iterator[IO[bytes]]:
    """Yield the stream to write to. A file is private, as chunks are, and has its name once it is complete."""
    if output == _STREAM:
        with open(sys.stdout.fileno(), "wb", closefd=False) as stream:
            yield stream
        return
    if os.path.lexists(output):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), output)
    directory, name = os.path.split(output)
    with tempfile.NamedTemporaryFile(prefix=f"{name}.", dir=directory or ".") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
        os.link(file.name, output)


def _report(found: Moved, done: str, as_json: bool, to: IO[str]) -> int:
    if as_json:
        print(json.dumps(asdict(found), indent=2), file=to)
    else:
        for line in found.bad:
            print(f"left out: {line}", file=to)
        present = f", {found.present:,} were there already" if found.present else ""
        size = f"{found.chunk_bytes / 2**20:,.1f} MiB of layout {found.layout[:16]}"
        print(f"{found.chunks:,} chunks {done}, {size}; {len(found.bad)} left out{present}", file=to)
        if found.problem:
            complain(found.problem)
    return 1 if found.bad or found.problem else 0
