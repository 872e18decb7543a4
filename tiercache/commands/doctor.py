"""Run `tiercache doctor`: report what this machine offers to each part of the cache, with advice for problems."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tiercache.assembly import WEKAFS, ask_server, try_remote
from tiercache.commands.findings import NOTE, OK, PROBLEM, Finding
from tiercache.commands.storage import Place, explain, has_gpu, has_nvidia_fs
from tiercache.config import Config
from tiercache.config.machine import meminfo
from tiercache.config.plan import ON, PlannedTier, plan_of
from tiercache.errors import ConfigError, TierUnavailable
from tiercache.lifecycle import in_thread
from tiercache.tables import INDENT, Line, say
from tiercache.tiers.files.access import mount_of
from tiercache.tiers.files.capacity import counted_in
from tiercache.tiers.files.directory import place_of
from tiercache.tiers.files.format import supports_direct_io
from tiercache.tiers.shared_memory import require_memory

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_ANSWER_S = 10
_ASKED = ("redis", "s3")
"""Kinds of tiers whose servers are asked. To join others, the cache has to give them memory."""
_STYLES = {OK: "green", NOTE: "yellow", PROBLEM: "red"}


def doctor_command(path: Path, as_json: bool) -> int:
    """Print the findings. Return 1 if there is a problem, else 0."""
    findings = examine(path)
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _show(findings)
    return 1 if any(finding.status == PROBLEM for finding in findings) else 0


def _show(findings: list[Finding]) -> None:
    lines: list[Line] = []
    for finding in findings:
        status = Text(finding.status, style=_STYLES[finding.status])
        lines.append((0, Text.assemble(status, f"  {finding.topic}: {finding.found}")))
        if finding.advice:
            lines.append((INDENT, finding.advice))
    say(Console(highlight=False), lines)


def examine(path: Path) -> list[Finding]:
    """Return all findings, ending with a finding for each tier in the configuration of this environment.

    Writes a small file at `path` and removes it; changes nothing else.
    """
    disk = _answered(f"disk at {path}", partial(_disk, path))
    return [*_memory(), *disk, *_verdicts()]


def _answered(topic: str, look: Callable[[], list[Finding]]) -> list[Finding]:
    """Return what `look` finds, or the problem: each call on a mount that hangs waits for ever."""

    async def answered() -> list[Finding]:
        async with asyncio.timeout(_ANSWER_S):
            return await in_thread(topic, look)

    try:
        return asyncio.run(answered())
    except TimeoutError:
        found = f"no answer within {_ANSWER_S:g} s: a mount hangs"
        return [Finding(topic, PROBLEM, found, "look at its server or daemon, or name another directory")]
    except OSError as error:
        found = f"it cannot be used: {error.strerror or error}"
        return [Finding(topic, PROBLEM, found, "give this user write access, or name another directory")]


def _memory() -> list[Finding]:
    sizes = meminfo()
    size = f"{sizes.get('MemAvailable', 0) / 2**20:.1f} of {sizes.get('MemTotal', 0) / 2**20:.1f} GB available"
    findings = [Finding("memory", OK, size), *_memory_limit()]
    mode = huge_page_mode()
    if mode in ("always", "madvise"):
        findings.append(Finding("transparent huge pages", OK, mode))
    else:
        advice = f"echo madvise > {_HUGE_PAGES} (reads into small pages are about 2.5 times slower)"
        findings.append(Finding("transparent huge pages", NOTE, mode, advice))
    return [*findings, *_shared_memory()]


def _memory_limit() -> list[Finding]:
    """Return the limit of the control group, if there is one: the kernel kills a process that exceeds it."""
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return []
    if not limit.isdigit():
        return []
    return [Finding("memory limit", NOTE, f"{int(limit) / 2**30:.1f} GB", "max_local_cpu_size has to stay well below it")]


def huge_page_mode() -> str:
    """Return the mode of transparent huge pages: "always", "madvise", "never" or "absent"."""
    try:
        return _HUGE_PAGES.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return "absent"


def _shared_memory() -> list[Finding]:
    topic = "shared memory"
    try:
        size = shutil.disk_usage("/dev/shm")
    except OSError:
        return [Finding(topic, NOTE, "/dev/shm is absent", "needed only for shm_name, shared_memory_path and 3FS")]
    found = f"{size.free / 2**30:.1f} of {size.total / 2**30:.1f} GB free in /dev/shm"
    return [Finding(topic, OK, found)]


def _disk(path: Path) -> list[Finding]:
    topic = f"disk at {path}"
    if not path.is_dir():
        return [Finding(topic, PROBLEM, "not a directory", "create it, or name another with --path")]
    mount = mount_of(path)
    free = shutil.disk_usage(path).free / 2**30
    place = Place(mount, supports_direct_io(path), has_gpu(), has_nvidia_fs())
    return [Finding(topic, OK, f"{mount.kind}, {free:.1f} GB free"), *explain(place)]


def _verdicts() -> list[Finding]:
    try:
        config = Config.load(quiet=True)
    except ConfigError as error:
        return [Finding("configuration", PROBLEM, str(error), "correct it: the cache does not start")]
    findings = []
    for tier in plan_of(config):
        findings += _answered(f"tier {tier.name}", partial(_verdict, config, tier))
    return findings


def _verdict(config: Config, tier: PlannedTier) -> list[Finding]:
    """Return one finding that says if a tier works here."""
    if tier.state != ON:
        return [Finding(f"tier {tier.name}", NOTE, tier.state, tier.note)]
    directories = tuple(map(Path, tier.directories))
    if tier.remote is not None:
        try:
            directories = try_remote(config, tier)
            if tier.kind in _ASKED:
                asyncio.run(ask_server(config, tier))
        except ConfigError as error:
            return [Finding(f"tier {tier.name}", PROBLEM, str(error), "correct it: the cache does not start")]
        except TierUnavailable as error:
            return [Finding(f"tier {tier.name}", PROBLEM, str(error), "the cache starts, and works without this tier")]
    return [_verdict_on(tier, directories)]


def _verdict_on(tier: PlannedTier, directories: Sequence[Path]) -> Finding:
    topic = f"tier {tier.name}"
    cap = f"{tier.cap_bytes / 2**30:g} GB" if tier.cap_bytes else "what is free"
    if tier.kind == "cpu":
        available_bytes = meminfo().get("MemAvailable", 0) * 1024
        if 0 < available_bytes < (tier.cap_bytes or 0):
            found = f"{cap} of memory, and {available_bytes / 2**30:.1f} GB are available"
            return Finding(topic, PROBLEM, found, "lower max_local_cpu_size, or free memory")
        return Finding(topic, OK, f"{cap} of memory")
    if not directories:
        asked = "the server answers" if tier.kind in _ASKED else "the server was not asked"
        return Finding(topic, OK, f"{tier.place}: {asked}")
    found = f"{cap} for {tier.place}"
    try:
        if tier.kind == "shared_memory":
            require_memory(Path(tier.place), tier.cap_bytes or 0)
        for place in directories if tier.kind == "weka" else ():
            if (kind := mount_of(place).kind) != WEKAFS:
                raise ConfigError(
                    f"weka_path: {place} lies on {kind}, not on WekaFS; mount WekaFS there, or use gds_path"
                )
        room_bytes = sum({place: _room_bytes(place) for place in directories}.values())
    except ConfigError as error:
        problem, _, advice = str(error).partition("; ")
        return Finding(topic, PROBLEM, problem.partition(": ")[2], advice)
    except OSError as error:
        return Finding(
            topic, PROBLEM, f"{found}: {error.strerror}", "give this user write access, or mount what is missing"
        )
    if room_bytes < (tier.cap_bytes or 0):
        advice = "other files use the rest, so chunks are evicted below the cap: lower the cap, or enlarge the mount"
        return Finding(topic, NOTE, f"{found}, and {room_bytes / 2**30:.2f} GB are free", advice)
    if tier.kind == "shared_memory" and mount_of(Path(tier.place)).option("huge") in (None, "never"):
        advice = "mount a tmpfs with huge=within_size for it: chunks are then mapped in half the time"
        return Finding(topic, NOTE, f"{found}, in pages of 4 KiB", advice)
    return Finding(topic, OK, found)


def _room_bytes(directory: Path) -> int:
    """Return the bytes for chunks in a directory or its nearest parent: free space plus the present chunks.

    Raises OSError if this user cannot write there.
    """
    counted_bytes = counted_in(place_of(directory) / ".tiercache" / "ledger") or 0
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    if not directory.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{directory} is not a directory")
    if not os.access(directory, os.W_OK | os.X_OK, effective_ids=True):
        raise PermissionError(errno.EACCES, f"{directory} cannot be written to")
    return shutil.disk_usage(directory).free + counted_bytes
