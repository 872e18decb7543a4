"""`tiercache doctor`: what this machine offers to each part of the cache, and what to do about the rest."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import resource
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from tiercache.tiers.chunk_file import supports_direct_io

OK, NOTE, PROBLEM = "ok", "note", "problem"
_MARKS = {OK: "[green]ok[/green]", NOTE: "[yellow]note[/yellow]", PROBLEM: "[red]problem[/red]"}


@dataclass(frozen=True)
class Finding:
    topic: str
    status: str
    found: str
    advice: str = ""


def doctor_command(path: Path | None, as_json: bool) -> int:
    """Prints the findings; the exit status is 1 when there is a problem."""
    findings = examine(path)
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        from rich.console import Console
        from rich.table import Table

        table = Table()
        for column in ("", "what", "found", "what to do"):
            table.add_column(column)
        for finding in findings:
            table.add_row(_MARKS[finding.status], finding.topic, finding.found, finding.advice)
        Console().print(table)
    return 1 if any(finding.status == PROBLEM for finding in findings) else 0


def examine(path: Path | None = None) -> list[Finding]:
    findings = [
        Finding("python", OK, f"{platform.python_version()} on Linux {platform.release()}, {os.cpu_count()} CPUs"),
        *_memory(),
        *_disk(path or Path(".")),
        *_devices(),
        *_mounts(),
        *_packages(),
    ]
    return findings


def _memory() -> list[Finding]:
    meminfo = {line.split(":")[0]: int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines()}
    findings = [
        Finding(
            "memory", OK, f"{meminfo['MemAvailable'] / 2**20:.1f} of {meminfo['MemTotal'] / 2**20:.1f} GB available"
        )
    ]
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    mode = setting.read_text().split("[")[1].split("]")[0] if setting.exists() else "absent"
    if mode in ("always", "madvise"):
        findings.append(Finding("transparent huge pages", OK, mode))
    else:
        advice = f"echo madvise > {setting} (reads into small pages are about 2.5 times slower)"
        findings.append(Finding("transparent huge pages", NOTE, mode, advice))
    reserved, free = meminfo.get("HugePages_Total", 0), meminfo.get("HugePages_Free", 0)
    advice = "" if reserved else "only for local_cpu_use_hugepages: sysctl vm.nr_hugepages=<arena in MB / 2>"
    findings.append(
        Finding("reserved huge pages", OK if reserved else NOTE, f"{free} of {reserved} free (2 MiB each)", advice)
    )
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / 2**20:.0f} MiB"
    low = soft != resource.RLIM_INFINITY and soft < 1 << 30
    advice = "raise `ulimit -l` where memory is to be pinned for a GPU or RDMA" if low else ""
    findings.append(Finding("memlock limit", NOTE if low else OK, limit, advice))
    shm = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    if shm is None:
        findings.append(Finding("shared memory", NOTE, "/dev/shm is absent", "needed only for shm_name and 3FS"))
    else:
        findings.append(Finding("shared memory", OK, f"{shm.free / 2**30:.1f} GB free in /dev/shm"))
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))
    findings.append(Finding("NUMA nodes", OK, str(max(1, nodes)), "numa_mode: auto" if nodes > 1 else ""))
    return findings


def _disk(path: Path) -> list[Finding]:
    topic = f"disk at {path}"
    if not path.is_dir():
        return [Finding(topic, PROBLEM, "not a directory", "create it, or name another with --path")]
    kind = _file_system(path)
    free = shutil.disk_usage(path).free / 2**30
    findings = [Finding(topic, OK, f"{kind}, {free:.1f} GB free")]
    try:
        direct = supports_direct_io(path)
    except OSError as error:
        return [
            *findings,
            Finding("O_DIRECT", PROBLEM, f"cannot write there: {error.strerror}", "give this user write access"),
        ]
    if direct:
        findings.append(Finding("O_DIRECT", OK, "works there"))
    else:
        advice = "the page cache is used instead (slower, stalls of 20 ms); a local ext4 or XFS has it"
        findings.append(Finding("O_DIRECT", NOTE, f"does not work on {kind}", advice))
    return findings


def _file_system(path: Path) -> str:
    """Type of the mount that holds `path`: the longest mount point above it."""
    place = str(path.resolve())
    best = ("", "unknown file system")
    for line in Path("/proc/mounts").read_text().splitlines():
        _, point, kind, *_ = line.split(" ")
        inside = place == point or place.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best[0]):
            best = (point, kind)
    return best[1]


def _devices() -> list[Finding]:
    """Without touching a driver from this process: opening one may hang or spin for ever."""
    gpus = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
    if not gpus:
        return [Finding("GPU", NOTE, "none", "the CPU and disk tiers do not need one")]
    gds = Path("/proc/driver/nvidia-fs/stats").exists() or Path("/dev/nvidia-fs0").exists()
    advice = "" if gds else "GPUDirect Storage needs the nvidia-fs driver; without it kvikio copies through host memory"
    return [
        Finding("GPU", OK, ", ".join(gpus)),
        Finding("GPUDirect Storage", OK if gds else NOTE, "driver loaded" if gds else "driver not loaded", advice),
    ]


def _mounts() -> list[Finding]:
    lines = [line.split(" ") for line in Path("/proc/mounts").read_text().splitlines()]
    findings = []
    for kind, name in (("fuse.hf3fs", "3FS mount"), ("wekafs", "Weka mount")):
        points = [line[1] for line in lines if line[2] == kind]
        advice = "its tier comes in a later version" if points else ""
        findings.append(Finding(name, NOTE, ", ".join(points) or "none", advice))
    return findings


def _packages() -> list[Finding]:
    findings = []
    wanted = {
        "uvloop": "a faster loop for engines: pip install 'tiercache[uvloop]'",
        "torch": "needed only to hand over tensors",
        "vllm": "needed only for the vLLM connector",
        "kvikio-cu13": "for the GDS tier of a later version",
        "redis": "for the Redis tier of a later version",
    }
    for name, advice in wanted.items():
        for candidate in (name, f"{name}-cpu"):
            try:
                findings.append(Finding(f"package {name}", OK, f"{candidate} {importlib.metadata.version(candidate)}"))
                break
            except importlib.metadata.PackageNotFoundError:
                continue
        else:
            findings.append(Finding(f"package {name}", NOTE, "not installed", advice))
    return findings


if __name__ == "__main__":
    sys.exit(doctor_command(None, False))
