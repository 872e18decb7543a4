"""Run `tiercache export` and `tiercache import`: move the chunks of one layout between directories, as a tar stream.

The members are a manifest, the chunk files as they are on disk, oldest first, and an end that has their number. Both
commands verify every chunk, and work beside running caches.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import sys
import tarfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Annotated, Literal, TypeVar, cast

import msgspec
from rich.console import Console
from rich.progress import track

from tiercache.commands.directory import problem_with
from tiercache.commands.findings import complain
from tiercache.commands.stat import headers_in
from tiercache.commands.verify import opened_once, read_stored
from tiercache.core.header import HEADER_BYTES, Header, file_bytes
from tiercache.core.keys import HEX_KEY
from tiercache.errors import CorruptChunk, TierFull, TierUnavailable
from tiercache.tiers.files.access import access_as_found, open_regular
from tiercache.tiers.files.chunk_files import ChunkFiles
from tiercache.tiers.files.directories import FileSettings
from tiercache.tiers.files.directory import TOP_LEVELS, NameTaken, found_place, make_place
from tiercache.tiers.files.format import write_chunk_file

T = TypeVar("T")

_STREAM = "-"
_MANIFEST, _END = "tiercache.json", "end.json"
_MEMBER = re.compile(rf"([0-9a-f]{{2}})/(?P<key>(?=\1){HEX_KEY})")
_LONGEST_BYTES = 4096
"""Length limit of the manifest and the end."""
_GB = 1 << 30


class Manifest(msgspec.Struct, kw_only=True):
    """The first member. A later version may add fields."""

    format: Literal[1] = 1
    what: Literal["tiercache export"]
    layout: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
    """The fingerprint of the layout."""
    chunks: int
    """Number of chunks at the start; the end has the number of those that were written."""


class End(msgspec.Struct):
    """The last member: without it the file is cut."""

    chunks: int


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
    if output == _STREAM and sys.stdout.isatty():
        return complain("chunks are not for a terminal: name a file with -o, or pipe them to another program")
    try:
        with _output(output) as stream:
            found = export(directory, stream, layout, _console(as_json))
    except (OSError, ValueError) as error:
        return complain(f"{directory} cannot be exported: {error}")
    return _report(found, "exported", as_json, to=sys.stderr if output == _STREAM else sys.stdout)


def import_command(source: str, directory: Path, size_gb: float, as_json: bool) -> int:
    """Import a file. Return 1 if chunks are missing afterwards, 2 if nothing could be imported, else 0."""
    try:
        with sys.stdin.buffer if source == _STREAM else open(source, "rb") as stream:
            found = import_chunks(stream, directory, int(size_gb * _GB), _console(as_json))
    except (OSError, ValueError, tarfile.TarError, TierUnavailable) as error:
        return complain(f"{source} cannot be imported: {error}")
    return _report(found, "imported", as_json, to=sys.stdout)


def export(directory: Path, stream: IO[bytes], layout: str, console: Console) -> Moved:
    """Write the chunks of one layout to `stream`. Changes nothing in the directory; a chunk that vanishes was evicted.

    `layout` begins the hexadecimal fingerprint of the layout; it may be empty if there is one. Raises ValueError unless it
    means one layout, and OSError.
    """
    found, layouts = Moved(str(directory)), defaultdict[str, list[tuple[float, str]]](list)
    for top in TOP_LEVELS:
        for path, status, header in headers_in(found_place(directory) / top)[0]:
            if isinstance(header, Header):
                layouts[header.fingerprint.hex()].append((status.st_mtime, path))
            elif header is not None:
                found.bad.append(f"{path}: {header}")
    found.layout = _one_layout(layouts, layout)
    chunks = sorted(layouts[found.layout])
    manifest = Manifest(what="tiercache export", layout=found.layout, chunks=len(chunks))
    with tarfile.open(fileobj=stream, mode="w|") as tar:
        _add(tar, _MANIFEST, msgspec.json.encode(manifest))
        for time_s, path in track(chunks, "exporting", console=console):
            name = os.path.basename(path)
            try:
                with opened_once(Path(path)) as (file, length):
                    header, payload = read_stored(file, length, path, bytes.fromhex(name), bytes.fromhex(found.layout))
                    content = header.pack().ljust(HEADER_BYTES, b"\0") + payload[: length - HEADER_BYTES].tobytes()
            except FileNotFoundError:
                continue
            except (CorruptChunk, OSError) as error:
                found.bad.append(str(error))
                continue
            _add(tar, f"{name[:2]}/{name}", content, int(time_s))
            found.chunks += 1
            found.chunk_bytes += len(content)
        _add(tar, _END, msgspec.json.encode(End(found.chunks)))
    return found


def import_chunks(stream: IO[bytes], directory: Path, cap_bytes: int, console: Console) -> Moved:
    """Store the chunks of an export in `directory`, which is made when missing, up to `cap_bytes` of all its files.

    Nothing is evicted or replaced. Raises ValueError if `stream` is no export or the directory is foreign, TarError,
    OSError, TierUnavailable. Errors after the start are in the result.
    """
    found, seen = Moved(str(directory)), 0
    with tarfile.open(fileobj=stream, mode="r|") as tar:
        manifest = _content(tar, tar.next(), _MANIFEST, Manifest)
        found.layout = manifest.layout
        with _opened(directory, cap_bytes, bytes.fromhex(found.layout)) as files:
            try:
                for member in track(_members(tar), "importing", total=manifest.chunks, console=console):
                    if member.name == _END:
                        expected = _content(tar, member, _END, End).chunks
                        found.problem = "" if seen == expected else f"expected {expected:,} chunks, found {seen:,}"
                        return found
                    seen += 1
                    _import_one(tar, member, files, found)
                found.problem = (
                    f"it is cut: expected about {manifest.chunks:,} chunks and an end, found {seen:,} chunks"
                )
            except TierFull as error:
                found.problem = f"the directory is full, and an import evicts nothing: {error}"
            except (OSError, ValueError, tarfile.TarError, TierUnavailable) as error:
                found.problem = str(error)
    return found


def _import_one(tar: tarfile.TarFile, member: tarfile.TarInfo, files: ChunkFiles, found: Moved) -> None:
    match = _MEMBER.fullmatch(member.name)
    if match is None or not member.isreg():
        found.bad.append(f"{member.name!r}: expected a file with the name of a chunk")
        return
    key = bytes.fromhex(match["key"])
    if files.occupied_by(key):
        found.present += 1
        return
    if member.size > files.cap_bytes:
        raise TierFull(f"{member.name} has {member.size:,} bytes, and the directory may have {files.cap_bytes:,}")
    if not files.capacity.trusted:
        raise TierUnavailable(f"the chunks in {files.root} are not counted yet: let a cache open it, then import again")
    try:
        file = cast("io.BufferedReader", tar.extractfile(member))
        header, payload = read_stored(file, member.size, member.name, key, files.fingerprint)
        payload[header.payload_bytes : member.size - HEADER_BYTES] = 0

        def create(path: str) -> int:
            return write_chunk_file(path, header, payload, direct=files.direct, durable=True)

        files.write_by(key, header.payload_bytes, create)
    except (CorruptChunk, NameTaken) as error:
        found.bad.append(str(error))
        return
    found.chunks += 1
    found.chunk_bytes += file_bytes(header.payload_bytes)


def _one_layout(layouts: Mapping[str, Sized], wanted: str) -> str:
    """Return the layout whose fingerprint begins with `wanted`. Raises ValueError."""
    meant = [layout for layout in layouts if layout.startswith(wanted)]
    if len(meant) == 1:
        return meant[0]
    there = ", ".join(f"{layout[:16]} ({len(chunks):,} chunks)" for layout, chunks in sorted(layouts.items()))
    if not there:
        raise ValueError("it has no chunks")
    raise ValueError(f"--layout: expected the beginning of one of {there}; found {wanted!r}")


@contextmanager
def _output(output: str) -> Iterator[IO[bytes]]:
    """Yield the stream to write to. A new file is private, as chunks are, and an error removes it."""
    if output == _STREAM:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    with os.fdopen(open_regular(output, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as stream:
        try:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        except BaseException:
            os.unlink(output)
            raise


@contextmanager
def _opened(directory: Path, cap_bytes: int, fingerprint: bytes) -> Iterator[ChunkFiles]:
    """Open a directory as a cache does. Raises OSError, ValueError, TierUnavailable."""
    access = access_as_found(found_place(directory) / ".tiercache")
    place = make_place(directory, access)
    step_bytes = FileSettings((place,), cap_bytes).step_of(cap_bytes)
    files = ChunkFiles(
        place, cap_bytes, fingerprint, direct=None, durable=True, step_bytes=step_bytes, many_hosts=True, beside=True,
        access=access,
    )  # fmt: skip
    try:
        files.open()
        yield files
    finally:
        files.close()


def _members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    while (member := tar.next()) is not None:
        tar.members.clear()  # type: ignore[attr-defined]  # tarfile would keep them all
        yield member


def _add(tar: tarfile.TarFile, name: str, content: bytes, time_s: int = 0) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mtime, member.mode = len(content), time_s, 0o600
    tar.addfile(member, io.BytesIO(content))
    tar.members.clear()  # type: ignore[attr-defined]


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo | None, name: str, kind: type[T]) -> T:
    """Return what the JSON in a member says. Raises ValueError."""
    if member is None or member.name != name or not member.isreg() or member.size > _LONGEST_BYTES:
        raise ValueError(
            f"it is no export: expected {name}, found {'nothing' if member is None else repr(member.name)}"
        )
    try:
        return msgspec.json.decode(cast("io.BufferedReader", tar.extractfile(member)).read(), type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"it is no export of this version: {name}: {error}") from error


def _console(as_json: bool) -> Console:
    return Console(stderr=True, quiet=as_json or not sys.stderr.isatty())


def _report(found: Moved, done: str, as_json: bool, to: IO[str]) -> int:
    if as_json:
        print(json.dumps(asdict(found), indent=2), file=to)
    else:
        for line in found.bad:
            print(f"left out: {line}", file=to)
        present = f", {found.present:,} were there already" if found.present else ""
        size = f"{found.chunk_bytes / 2**20:,.1f} MiB"
        print(
            f"{found.chunks:,} chunks {done}, {size} of layout {found.layout[:16]}; {len(found.bad)} left out{present}",
            file=to,
        )
        if found.problem:
            complain(found.problem)
    return 1 if found.bad or found.problem else 0
