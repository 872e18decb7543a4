"""A campaign from its beginning to its end, and nothing of it left but the report."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import subprocess
import traceback
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from tests.torture.campaign.messages import now_s
from tests.torture.campaign.places import Skipped, make_place
from tests.torture.campaign.plan import PARTS, PLACES, Round, rounds
from tests.torture.campaign.processes import Nursery
from tests.torture.campaign.referee import CALL_S, Referee
from tests.torture.campaign.report import Report
from tests.torture.campaign.usage import growth, left_behind, shared_memory_of
from tiercache.errors import ConfigError
from tiercache.tiers.files.access import mounts

WORKER = "tests.torture.campaign.worker"
_OF_A_CAMPAIGN = re.compile(r"campaign-\d+-(\d+)/")
_ROUND_S = 12.0
_SHORTEST_ROUND_S = 1.0
_ROUNDS_A_PLACE = 3
"""At least, where there is time for it: what leaks is seen from the second on."""


def run_campaign(
    directory: Path,
    minutes: float,
    seed: int,
    parts: Sequence[str] = PARTS,
    *,
    worker: str = WORKER,
) -> Report:
    """A campaign of real faults in `directory`, which is made where it is missing. It ends with the round in which something
    was found; then its files stay, else none does.

    `parts` are some of `plan.PARTS`; `worker` names a module whose `run(order, connection)` is a worker's life. SIGTERM and
    Ctrl-C end it early, with a report. Raises ConfigError for a part that is none, or a directory that cannot be used.
    """
    for part in parts:
        if part not in PARTS:
            raise ConfigError(f"parts: expected some of {', '.join(PARTS)}, found {part!r}")
    place = directory.resolve() / f"campaign-{seed}-{os.getpid()}"
    try:
        place.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"{place} cannot be made: {error.strerror}") from error
    _unmount_what_the_dead_left(place.parent)
    report = Report(seed, tuple(parts), place)
    asyncio.run(_Campaign(place, minutes * 60, worker, report).run())
    if not report.failed:
        shutil.rmtree(place, ignore_errors=True)
    return report


def _unmount_what_the_dead_left(directory: Path) -> None:
    """Of campaigns that were killed in this directory."""
    for mount in mounts():
        found = _OF_A_CAMPAIGN.match(mount.point.removeprefix(f"{directory}/"))
        if found and not Path(f"/proc/{found[1]}").exists():
            subprocess.run(["umount", "-l", mount.point], capture_output=True, timeout=CALL_S, check=False)


class _Campaign:
    def __init__(self, directory: Path, seconds: float, worker: str, report: Report) -> None:
        self._directory = directory
        self._seconds = seconds
        self._nursery = Nursery(worker, directory / "nursery.log")
        self._report = report
        self._referees: dict[str, Referee] = {}
        self._played: set[str] = set()

    async def run(self) -> None:
        """Run until the time is up or a signal comes; both close all in the same way."""
        loop = asyncio.get_running_loop()
        playing = asyncio.create_task(self._play())
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(RuntimeError, ValueError):  # not in the main thread
                loop.add_signal_handler(number, playing.cancel)
        began_s = now_s()
        try:
            await asyncio.wait([playing])
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
            self._report.seconds = now_s() - began_s
        self._report.interrupted = playing.cancelled()
        if not playing.cancelled():
            playing.result()
        self._judge_news()
        if self._report.interrupted or self._report.failed:
            # Of who was killed it is removed by who begins next, and nobody does.
            for entry in shared_memory_of(self._directory):
                entry.unlink(missing_ok=True)
        for line in left_behind(self._directory):
            self._report.findings.add("left behind", line)

    async def _play(self) -> None:
        began_s = now_s()
        places = sum(len(PLACES[part]) for part in self._report.parts)
        round_s = min(_ROUND_S, max(_SHORTEST_ROUND_S, self._seconds / places / _ROUNDS_A_PLACE / 2))
        with self._nursery:
            async with self._open_referees():
                for played in rounds(self._report.seed, self._report.parts, round_s):
                    if now_s() - began_s + round_s / 2 > self._seconds or not self._referees:
                        break
                    if played.place in self._referees:
                        await self._play_round(self._referees[played.place], played)
                    if self._report.failed:
                        break
                for referee in self._referees.values():
                    await referee.end()
                self._judge_audits()
                self._judge_growth(now_s() - began_s)

    async def _play_round(self, referee: Referee, played: Round) -> None:
        try:
            await referee.play(played)
            self._played.add(played.place)
        except (TimeoutError, OSError, RuntimeError):
            self._report.findings.add("campaign broke", f"{played.place}: {traceback.format_exc()}")
        self._report.rounds += 1
        self._judge_news()

    def _judge_news(self) -> None:
        """Workers that do what they should write nothing."""
        if news := self._nursery.news():
            self._report.findings.add("process broke", f"nursery.log says: {news}")

    @asynccontextmanager
    async def _open_referees(self) -> AsyncIterator[None]:
        try:
            for name in (name for part in self._report.parts for name in PLACES[part]):
                place = make_place(name, self._directory / name)
                referee = Referee(place, self._nursery, self._report, self._directory / f"{name}.log")
                self._referees[name] = referee
                try:
                    await referee.open()
                except Skipped as reason:
                    self._report.skipped[name] = str(reason)
                    del self._referees[name]
                    await referee.close()
            yield
        finally:
            await asyncio.gather(*(referee.close() for referee in self._referees.values()))

    def _judge_audits(self) -> None:
        """What is not looked at cannot be found."""
        for part in self._report.parts:
            capped = [name for name in self._played.intersection(PLACES[part]) if self._referees[name].place.cap_bytes]
            if capped and not any(self._report.audits[name] for name in capped):
                skipped = sum(self._report.audits_skipped[name] for name in capped)
                self._report.findings.add(
                    "not audited", f"{part}: its files were never counted, {skipped} times skipped"
                )

    def _judge_growth(self, seconds: float) -> None:
        for name, referee in self._referees.items():
            found = growth(referee.samples, seconds, referee.place.descriptors_kept)
            if found is None:
                continue
            self._report.growths[name] = found
            for leak in found.leaks:
                self._report.findings.add("leak", f"{name}: the process that lives longest: {leak}")
