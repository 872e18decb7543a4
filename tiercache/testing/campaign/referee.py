"""One place and those who work on it: started, killed, heard, and what they say held against what they promised."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tiercache.memory.workers import Workers
from tiercache.testing.campaign import messages
from tiercache.testing.campaign.messages import End, Find, Found, Order, Prove, Proved, Rest, Rested, Work, now_s
from tiercache.testing.campaign.payloads import KEYS_A_LANE, LANES, SLOTS, key_of, number_of
from tiercache.testing.campaign.places.base import RECOVERY_S, Place
from tiercache.testing.campaign.plan import Fault, Round
from tiercache.testing.campaign.processes import Nursery, Process
from tiercache.testing.campaign.promises import Promises
from tiercache.testing.campaign.report import Report
from tiercache.testing.campaign.usage import Usage, usage_of

T = TypeVar("T")

RESIDENT = 0
"""The slot of the process that is never killed."""
VISITOR = SLOTS + 1
"""The slot of one that begins when all others have stopped, and looks at what they left."""
ANSWER_S = 60.0
"""For what may take several deadlines of the cache's own."""
SILENCE_S = 30.0
"""A worker gives a sign of life twice a second."""
CALL_S = 60.0
"""What the place is asked, and walks through its files."""
_TEND_EVERY_S = 0.5
_PRIVATE_BYTES = 512 << 10
"""Of a tier's own files, when nobody but the resident lives."""
_CAP_SLACK_BYTES = 16 * 4096
"""A directory is counted when it has been made: one for each write that is under way may be there beyond the cap."""
_NAMED = 5


class Referee:
    def __init__(self, place: Place, nursery: Nursery, report: Report, log: Path) -> None:
        self.place = place
        self.samples: list[Usage] = []
        self._nursery = nursery
        self._report = report
        self._log = log
        self._promises = Promises()
        self._numbers = itertools.count()
        self._began_s = now_s()
        self._workers: dict[int, Process] = {}
        self._calls = Workers(f"campaign-{place.name}", 2)
        self._struck = False
        self._healed_s = 0.0
        self._seed = ""

    async def open(self) -> None:
        """Raises Skipped."""
        await self._call(self.place.open)

    async def play(self, played: Round) -> None:
        self._seed = f"{self._report.seed}/{played.number}"
        slots = range(played.writers)
        for slot in slots:
            self._tend(slot)
        self._workers[RESIDENT].tell(Work())
        began_s = now_s()
        for fault in played.faults:
            await self._wait_until(began_s + fault.at_s, slots)
            await self._carry_out(fault, slots)
        await self._wait_until(began_s + played.seconds, slots)
        await self._heal()
        await self._dismiss(slots[1:])
        await self._verify()

    async def close(self) -> None:
        """Everybody goes, then the place. Never raises, and ends by its deadlines."""
        if self._struck:
            with contextlib.suppress(Exception):
                await self._call(self.place.close)  # who waits for it can die then
        for process in list(self._workers.values()):
            await process.kill()
        with contextlib.suppress(Exception):
            await self._call(self.place.close)
        self._calls.close()

    async def end(self) -> None:
        """At the end of the campaign, of who is left: a close as it should be."""
        for process in list(self._workers.values()):
            await self._end(process)
        self._report.promises += self._promises.made

    # What strikes

    async def _carry_out(self, fault: Fault, slots: range) -> None:
        if fault.kind == "kill":
            mortals = [slot for slot in slots if slot != RESIDENT]
            slot = mortals[int(fault.choice * len(mortals))]
            process = self._workers[slot]
            if not await process.kill():
                self._found("process hangs", f"{process.name} did not die of kill -9")
            self._report.faults["worker killed"] += 1
            self._tend(slot)
        elif fault.kind == "audit":
            await self._audit()
        elif fault.kind == "heal":
            await self._heal()
        else:
            self._struck = True
            if await self._call(self.place.strike, fault.kind):
                self._promises.void()
            self._report.faults[f"{self.place.name}: {fault.kind}"] += 1

    async def _heal(self) -> None:
        if not self._struck:
            return
        await self._call(self.place.heal)
        self._struck = False
        self._healed_s = now_s()
        if self._promises.is_void:
            self._promises.void(now_s() + self.place.remembers_s)

    async def _audit(self) -> None:
        """What the files occupy while nobody does anything."""
        living = [process for process in self._workers.values() if process.is_alive]
        stopped = await asyncio.gather(*(process.stop() for process in living))
        try:
            if all(stopped):
                occupied = await self._call(self.place.occupied)
                if occupied is not None:
                    self._count(occupied.counted_bytes)
        finally:
            for process in living:
                process.go_on()

    def _count(self, occupied_bytes: int) -> None:
        cap_bytes = self.place.cap_bytes
        assert cap_bytes is not None
        self._report.audits += 1
        most, _ = self._report.occupied.get(self.place.name, (0, 0))
        self._report.occupied[self.place.name] = max(most, occupied_bytes), cap_bytes
        if occupied_bytes > cap_bytes + _CAP_SLACK_BYTES:
            self._found(
                "cap exceeded", f"{self.place.name}: files occupy {occupied_bytes} bytes, the cap is {cap_bytes}"
            )

    # Who works

    def _tend(self, slot: int) -> None:
        """See to it that somebody works in this slot."""
        process = self._workers.get(slot)
        if process is not None and process.is_alive:
            process.drain()
            if now_s() - process.heard_s > SILENCE_S and not self._struck:
                self._found(
                    "process hangs",
                    f"{process.name} has said nothing for {SILENCE_S:.0f} s; its stacks are in {self._log}",
                )
                process.expected_to_end = True
                process.send(signal.SIGUSR1)
                process.send(signal.SIGKILL)
            return
        if process is not None and not process.expected_to_end:
            self._found("process broke", f"{process.name} ended by itself; see {self._log}")
        self._start(slot).tell(Work())

    def _start(self, slot: int) -> Process:
        number = next(self._numbers)
        order = Order(
            f"{self.place.name}-{slot}.{number}",
            self.place.name,
            slot,
            f"{self._seed}/{slot}/{number}",
            self.place.overrides(slot),
            str(self._log),
            emulator=self.place.name == "hf3fs",
        )
        process = self._nursery.start(order)
        process.hear = self._hear
        self._workers[slot] = process
        return process

    async def _dismiss(self, slots: range) -> None:
        """Some are killed, the others may close."""
        for slot in slots:
            process = self._workers[slot]
            if slot % 2:
                await process.kill()
                self._report.faults["worker killed"] += 1
            else:
                await self._end(process)
            del self._workers[slot]

    async def _end(self, process: Process) -> None:
        process.expected_to_end = True
        process.tell(End())
        if not await process.is_gone(ANSWER_S):
            self._found("process hangs", f"{process.name} did not close within {ANSWER_S:.0f} s")
            process.send(signal.SIGUSR1)
            await process.kill()

    async def _wait_until(self, at_s: float, slots: range) -> None:
        while (left_s := at_s - now_s()) > 0:
            await asyncio.sleep(min(left_s, _TEND_EVERY_S))
            for slot in slots:
                self._tend(slot)

    # What they say

    def _hear(self, process: Process, said: messages.Report) -> None:
        promises, report = self._promises, self._report
        if isinstance(said, messages.Putting | messages.Promised | messages.Forgetting | messages.Forgotten):
            promises.note(process.name, type(said).__name__.lower(), said.numbers, now_s())
        if isinstance(said, messages.Putting):
            promises.putting(said.numbers)
        elif isinstance(said, messages.Promised):
            promises.promised(said.numbers, said.since_s, said.at_s)
        elif isinstance(said, messages.Forgetting):
            promises.forgetting(said.numbers)
        elif isinstance(said, messages.Forgotten):
            promises.forgotten(said.numbers)
        elif isinstance(said, messages.Missed):
            asyncio.get_running_loop().call_soon(self._judge, process, said)
        elif isinstance(said, messages.Counted):
            report.operations.update(said.operations)
            for name, took_s in said.longest_s.items():
                report.longest_s[name] = max(took_s, report.longest_s.get(name, 0.0))
            if said.corrupt:
                self._found("corrupt", f"{process.name} found {said.corrupt} chunks that fail verification")
            if said.evicted and self.place.keeps:
                self._found("evicted though there was room", f"{process.name} evicted {said.evicted} chunks")
        elif isinstance(said, messages.Opened):
            process.is_open = True
            report.openings_s.append(said.after_s)
        elif isinstance(said, messages.Wrong):
            self._found("wrong bytes", f"{process.name}: {self._chunk(said.number)}: {said.what}")
        elif isinstance(said, messages.Broken):
            self._found("process broke", f"{process.name}: {said.what}")
        elif isinstance(said, messages.Refused):
            process.expected_to_end = True
            if self.place.is_calm:
                self._found("process broke", f"{process.name} could not open its cache: {said.why}")

    def _judge(self, process: Process, missed: messages.Missed) -> None:
        """Once everything that was said before has been heard."""
        for each in self._workers.values():
            each.drain()
        since_s = missed.since_s - (self.place.stale_s if missed.by == "lookup" else 0.0)
        if not self.place.keeps or self._struck or since_s < self._healed_s + RECOVERY_S:
            return
        if self._promises.was_due(missed.number, since_s):
            self._found(
                "lost", f"{process.name} did not find by {missed.by} {self._chunk(missed.number)}, which was flushed"
            )

    # What is left

    async def _verify(self) -> None:
        """All others have gone: what is there, for who lived through it and for who comes new?"""
        resident = self._workers[RESIDENT]
        proof = number_of(RESIDENT, LANES, self._report.rounds % KEYS_A_LANE)
        if not await self._proves(resident, proof, now_s()):
            return
        visitor = self._start(VISITOR)
        if await visitor.until(messages.Opened, RECOVERY_S) is None:
            self._found("not working again", f"{visitor.name} could not open a cache within {RECOVERY_S:.0f} s")
        else:
            await self._look(visitor, proof)
            await self._proves(visitor, number_of(SLOTS - 1, LANES, 0), now_s())
        await self._end(visitor)
        del self._workers[VISITOR]
        if await resident.ask(Rest(), Rested, ANSWER_S) is None:
            self._found("process hangs", f"{resident.name} did not come to rest within {ANSWER_S:.0f} s")
        if (usage := usage_of(resident.pid, now_s() - self._began_s)) is not None:
            self.samples.append(usage)
        await self._inspect()

    async def _proves(self, process: Process, number: int, from_s: float) -> bool:
        """Whether a put is flushed again, soon after `from_s`, when all was well."""
        while (left_s := from_s + RECOVERY_S - now_s()) > 0:
            proved = await process.ask(Prove(number), Proved, left_s)
            if proved is not None and proved.well:
                longest_s = self._report.recoveries_s.get(self.place.name, 0.0)
                self._report.recoveries_s[self.place.name] = max(longest_s, now_s() - from_s)
                return True
            await asyncio.sleep(0.2)
        self._found(
            "not working again", f"{process.name} stored nothing within {RECOVERY_S:.0f} s after the last fault"
        )
        return False

    async def _look(self, visitor: Process, proof: int) -> None:
        due = self._promises.due if self.place.keeps else [proof]
        gone = self._promises.gone if self.place.keeps_forgotten_away else []
        found = await visitor.ask(Find([*due, *gone]), Found, ANSWER_S)
        if found is None:
            self._found(
                "process hangs", f"{visitor.name} did not read {len(due) + len(gone)} chunks in {ANSWER_S:.0f} s"
            )
            return
        self._report.verified += len(due)
        there = set(found.numbers)
        for number in [number for number in due if number not in there][:_NAMED]:
            self._found("lost", f"{visitor.name}, a new process, did not find {self._chunk(number)}, which was flushed")
        for number in [number for number in gone if number in there][:_NAMED]:
            self._found(
                "not forgotten", f"{visitor.name}, a new process, found {self._chunk(number)}, which was forgotten"
            )

    async def _inspect(self) -> None:
        occupied = await self._call(self.place.occupied)
        if occupied is None:
            return
        self._count(occupied.counted_bytes)
        if occupied.private_bytes > _PRIVATE_BYTES:
            self._found("left behind", f"{self.place.name}: the tier's own files take {occupied.private_bytes} bytes")
        if occupied.quarantined:
            self._found("corrupt", f"{self.place.name}: {occupied.quarantined} files are in quarantine")

    def _found(self, kind: str, sentence: str) -> None:
        self._report.findings.add(kind, sentence)

    def _chunk(self, number: int) -> str:
        told = self._promises.history(number) or "nothing"
        return f"chunk {number} ({key_of(self.place.name, number).hex()}; what was heard of it: {told})"

    async def _call(self, call: Callable[..., T], *arguments: object) -> T:
        """In a thread: what hangs is left there."""
        async with asyncio.timeout(CALL_S):
            return await self._calls.submit(call, *arguments)
