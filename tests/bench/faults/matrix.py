"""The faults, and what each store makes of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from tests.bench.faults.instance import Failed, Instance
from tests.bench.faults.stores import CHUNK_BYTES, STORES, Identity
from tests.needs import is_there
from tests.remote.fs.mount import SERVER

T = TypeVar("T")
WRITER = Identity()
_KILLS = 4
_MORE_TO_KILL = 8
"""Times as many chunks for a writer that is killed, so that the kill comes before the last one."""
_BEGUN_S = 10.0
_MOUNTED_S = 20.0


@dataclass
class Cell:
    """One fault on one store. All chunks were stored; each is served right, served wrong, missed, or an error."""

    fault: str
    store: str
    chunks: int
    wrong: int = 0
    hits: int = 0
    missed: int = 0
    errors: list[str] = field(default_factory=list)
    """Exceptions that reached the caller, and processes that crashed or hung."""
    note: str = ""
    cannot: str = ""
    """Why this store cannot be asked so."""

    def count(self, read: Counter[str]) -> None:
        self.hits += read.pop("right", 0)
        self.wrong += read.pop("wrong", 0)
        self.missed += read.pop("missed", 0)
        self.errors += read.elements()


class Cannot(Exception):
    """A store, or this machine, cannot be asked so; says why."""


@dataclass
class Trial:
    """A store on an empty directory, the file of each chunk once it is written, and the cell to fill."""

    cell: Cell
    directory: Path
    chunks: int

    def open(self, identity: Identity = WRITER) -> Instance:
        return Instance(self.cell.store, self.directory, identity, self.chunks)

    def files(self) -> list[Path]:
        found = (path for path in self.directory.rglob("*") if path.is_file() and ".tmp" not in path.name)
        return sorted(path for path in found if path.stat().st_size >= CHUNK_BYTES)

    def attempt(self, call: Callable[[], T]) -> T | None:
        """Return what `call` returns; a failure is an error of the cell."""
        try:
            return call()
        except Failed as error:
            self.cell.errors.append(str(error))
            return None

    def read(self, identity: Identity = WRITER, instance: Instance | None = None) -> None:
        """Read all chunks in a new process, unless another `instance` has to."""
        found = None
        if reader := instance or self.attempt(lambda: self.open(identity)):
            found = self.attempt(reader.read)
            self.attempt(reader.close)
        self.cell.count(Counter(missed=self.chunks) if found is None else found)

    def write_and_read(self, harm: Callable[[], AbstractContextManager[None]], identity: Identity = WRITER) -> None:
        """Store, close, do `harm`, and read. A store that finds nothing after a restart reads in the process that wrote."""
        stays = STORES[self.cell.store].index_in_memory
        if stays and identity != WRITER:
            raise Cannot("it finds nothing of another process")
        writer = self.open()
        self.attempt(writer.write)
        if not stays:
            self.attempt(writer.close)
        with harm():
            self.read(identity, writer if stays else None)


def every_fourth(harm: Callable[[Sequence[Path]], None]) -> Callable[[Trial], None]:
    """Do `harm` to the files of a quarter of the chunks."""

    def run(trial: Trial) -> None:
        @contextmanager
        def harmed() -> Iterator[None]:
            files = trial.files()
            if len(files) != trial.chunks:
                raise Cannot(f"it has {len(files)} files for {trial.chunks} chunks")
            harm(files[::4])
            yield

        trial.write_and_read(harmed)

    return run


def flip(files: Sequence[Path]) -> None:
    for path in files:
        with path.open("r+b") as file:
            file.seek(path.stat().st_size // 2)
            (byte,) = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))


def truncate(files: Sequence[Path]) -> None:
    for path in files:
        os.truncate(path, path.stat().st_size // 2)


def swap(files: Sequence[Path]) -> None:
    for one, other in zip(files[::2], files[1::2], strict=True):
        aside = one.with_suffix(".aside")
        one.rename(aside)
        other.rename(one)
        aside.rename(other)


def read_as(identity: Identity) -> Callable[[Trial], None]:
    return lambda trial: trial.write_and_read(nullcontext, identity)


def failed_load(trial: Trial) -> None:
    trial.write_and_read(lambda: sick(trial.directory, [path.name for path in trial.files()[::4]]))


def killed(trial: Trial) -> None:
    """Kill one writer after another, each on a directory of its own and further than the one before."""
    caught, chunks = 0, trial.chunks * _MORE_TO_KILL
    for turn in range(_KILLS):
        one = Trial(trial.cell, trial.directory / str(turn), chunks)
        one.directory.mkdir()
        writer = one.open()
        before = len(list(one.directory.rglob("*")))
        deadline_s = time.monotonic() + _BEGUN_S
        writer.begin("write")
        enough = before + turn * chunks // _KILLS
        while len(list(one.directory.rglob("*"))) <= enough and time.monotonic() < deadline_s:
            pass
        writer.kill()
        caught += len(one.files()) < chunks
        one.read()
    trial.cell.chunks = _KILLS * chunks
    trial.cell.note = f"{caught} of {_KILLS} kills before the last chunk"


def full_disk(trial: Trial) -> None:
    with small(trial.directory, trial.chunks * CHUNK_BYTES // 2 + (100 << 10)):
        trial.write_and_read(nullcontext)


def two_writers(trial: Trial) -> None:
    writers = [trial.open(), trial.open()]
    for writer in writers:
        writer.begin("write")
    for writer in writers:
        trial.attempt(partial(writer.end, "write"))
        trial.attempt(writer.close)
    trial.read()


@contextmanager
def small(directory: Path, size_bytes: int) -> Iterator[None]:
    """Make `directory` a file system of so many bytes."""
    if not is_there("mount"):
        raise Cannot("mounting a small file system takes CAP_SYS_ADMIN")
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", directory], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", directory], check=True)


_SICK = """
exec(SERVER)
class Sick(Loopback):
    def read(self, path, size, offset, fh):
        if os.path.basename(path) in sys.argv[3:]:
            raise mfusepy.FuseOSError(errno.EIO)
        return super().read(path, size, offset, fh)
mfusepy.FUSE(Sick(), sys.argv[2], foreground=True, nothreads=False)
"""


@contextmanager
def sick(directory: Path, names: Sequence[str]) -> Iterator[None]:
    """Put a mount before `directory` that shows its files, and fails each read of those called `names` with EIO."""
    if not (is_there("fuse3") and is_there("/dev/fuse")):
        raise Cannot("a mount whose reads fail takes fuse3 and /dev/fuse")
    behind = directory.with_suffix(".behind")
    directory.rename(behind)
    directory.mkdir()
    program = f"SERVER = {SERVER.partition('mfusepy.FUSE(')[0]!r}{_SICK}"
    command = [sys.executable, "-W", "ignore", "-c", program, str(behind), str(directory), *names]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        until_s = time.monotonic() + _MOUNTED_S
        while not os.path.ismount(directory):
            if server.poll() is not None or time.monotonic() > until_s:
                raise Cannot("the mount whose reads fail did not come up")
            time.sleep(0.01)
        yield
    finally:
        subprocess.run(["umount", "-l", directory], check=False)
        server.kill()
        server.wait()


FAULTS: dict[str, Callable[[Trial], None]] = {
    "nothing": lambda trial: trial.write_and_read(nullcontext),
    "flipped bit": every_fourth(flip),
    "truncated file": every_fourth(truncate),
    "swapped files": every_fourth(swap),
    "other layout": read_as(replace(WRITER, layout=1)),
    "other dtype": read_as(replace(WRITER, dtype="float16")),
    "other model": read_as(replace(WRITER, model="another")),
    "other weights": read_as(replace(WRITER, weights="2")),
    "other salt": read_as(replace(WRITER, salt="two")),
    "failed load": failed_load,
    "kill -9 in a write": killed,
    "full disk": full_disk,
    "two writers": two_writers,
}


def measure(fault: str, store: str, chunks: int, place: Path) -> Cell:
    """Run one fault on one store, in a directory below `place` that is there only meanwhile."""
    trial = Trial(Cell(fault, store, chunks), place / "trial" / "kv", chunks)
    trial.directory.mkdir(parents=True)
    try:
        FAULTS[fault](trial)
    except (Cannot, Failed) as error:
        trial.cell.cannot = str(error)
    finally:
        shutil.rmtree(trial.directory.parent, ignore_errors=True)
    return trial.cell
