"""`tiercache verify DIR`: read every chunk and check every promise of its header."""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from tiercache.commands.directory import chunk_files, complain, problem_with
from tiercache.core.header import HEADER_BYTES, PACKED_BYTES, aligned
from tiercache.core.layout import FINGERPRINT_BYTES
from tiercache.errors import CorruptChunk
from tiercache.tiers.chunk_file import verify_chunk
from tiercache.tiers.volume import Volume


def verify_command(directory: Path, as_json: bool) -> int:
    if (problem := problem_with(directory)) is not None:
        return complain(problem)
    found = verify(directory, Console(stderr=True, quiet=as_json))
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        console = Console()
        for line in found["bad"]:
            console.print(f"bad, now in quarantine: {line}", soft_wrap=True)
        console.print(
            f"{found['checked']:,} chunks checked, {found['checked_bytes'] / 2**20:,.1f} MiB; {len(found['bad'])} bad"
        )
    return 1 if found["bad"] else 0


def verify(directory: Path, console: Console) -> dict[str, Any]:
    """Check all chunks, of whatever layout. May run while caches use the directory: a chunk that vanishes was evicted."""
    volume = Volume(directory, 0, bytes(FINGERPRINT_BYTES), direct=False, durable=False)
    volume.open()
    checked = checked_bytes = 0
    bad: list[str] = []
    try:
        for path in track(list(chunk_files(directory)), "verifying", console=console):
            try:
                checked_bytes += _check(path)
            except FileNotFoundError:
                continue
            except CorruptChunk as error:
                bad.append(str(error))
                volume.quarantine(bytes.fromhex(path.name))
            checked += 1
    finally:
        volume.close()
    return {"directory": str(directory), "checked": checked, "checked_bytes": checked_bytes, "bad": bad}


def _check(path: Path) -> int:
    with path.open("rb") as file:
        length = path.stat().st_size
        raw = file.read(HEADER_BYTES)
        memory = np.frombuffer(mmap.mmap(-1, max(4096, aligned(length))), dtype=np.uint8)
        got = len(raw) + file.readinto(memory.data)
    return verify_chunk(path, memoryview(raw)[:PACKED_BYTES], bytes.fromhex(path.name), None, memory, got, length)
