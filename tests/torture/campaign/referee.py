"""One place and those who work on it: started, killed, heard, and what they say held against what they promised."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import TypeVar

from tests.torture.campaign import messages
from tests.torture.campaign.crew import RESIDENT, VISITOR, Crew
from tests.torture.campaign.messages import Find, Found, Prove, Proved, Rest, Rested, Work, now_s
from tests.torture.campaign.operations import GET_S
from tests.torture.campaign.payloads import KEYS_A_LANE, KEYS_A_SLOT, LANES, SLOTS, key_of, number_of
from tests.torture.campaign.places.base import RECOVERY_S, Place
from tests.torture.campaign.plan import Fault, Round
from tests.torture.campaign.processes import Nursery, Process
from tests.torture.campaign.promises import Promises
from tests.torture.campaign.report import Report
from tests.torture.campaign.usage import Usage, usage_of
from tiercache.memory.workers import Workers

T = TypeVar("T")

CALL_S = 60.0
"""What the place is asked, and walks through its files."""
_PRIVATE_BYTES = 512 << 10
"""Of a tier's own files, when nobody but the resident lives."""
_CAP_SLACK_BYTES = 16 * 4096
"""A directory is counted when it has been made: one for each write that is under way may be there beyond the cap."""
_OTHERS_READ_S = GET_S + 1.0
"""A get may be answered by a read that began for another caller, and ends by that caller's deadline."""
_NAMED = 5


class Referee:
    def __init__(self, place: Place, nursery: Nursery, report: Report, log: Path) -> None:
        self.place = place
        self.samples: list[Usage] = []
        self._report = report
        self._crew = Crew(place, nursery, log, self._hear, report.findings.add)
        self._promises = Promises()
        self._began_s = now_s()
        self._calls = Workers(f"campaign-{place.name}", 2)
        self._struck = False
        self._healed_s = 0.0
        self._damaged = 0
        """Chunks that the visitor may find damaged."""

    async def open(self) -> None:
        """Raises Skipped."""
        await self._call(self.place.open)

    async def play(self, played: Round) -> None:
        """A round: work and faults, then a look at what is left."""
        self._crew.seed = f"{self._report.seed}/{played.number}"
        slots = range(played.writers)
        self._crew.tend(slots, patient=False)
        self._crew[RESIDENT].tell(Work())
        began_s = now_s()
        for fault in played.faults:
            await self._crew.tend_until(began_s + fault.at_s, slots, patient=self._struck)
            await self._carry_out(fault, slots)
        await self._crew.tend_until(began_s + played.seconds, slots, patient=self._struck)
        await self._heal()
        for slot in slots[1:]:
            await (self._kill(slot) if slot % 2 else self._crew.end(slot))
        self._crew.tend(slots[:1], patient=False)  # where its place was away when it began
        await self._verify()

    async def end(self) -> None:
        """At the end of the campaign: who lives longest closes as it should."""
        if self._crew.living:
            await self._crew.end(RESIDENT)
        self._report.promises += self._promises.made

    async def close(self) -> None:
        """Stop all workers, then close the place. Never raises, and ends by its deadlines."""
        if self._struck:
            await self._close_place()  # who waits for it can die then
        await self._crew.kill_all()
        await self._close_place()
        self._calls.close()

    async def _close_place(self) -> None:
        with contextlib.suppress(Exception):
            await self._call(self.place.close)

    # What strikes

    async def _carry_out(self, fault: Fault, slots: range) -> None:
        if fault.kind == "kill":
            mortals = [slot for slot in slots if slot != RESIDENT]
            slot = mortals[int(fault.choice * len(mortals))]
            await self._kill(slot)
            self._crew.tend(slots, patient=self._struck)
        elif fault.kind == "audit":
            await self._audit()
        elif fault.kind == "heal":
            await self._heal()
        else:
            self._struck = True
            if await self._call(self.place.strike, fault.kind):
                self._promises.void()
            self._report.faults[f"{self.place.name}: {fault.kind}"] += 1

    async def _kill(self, slot: int) -> None:
        await self._crew.kill(slot)
        self._report.faults["worker killed"] += 1

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
        async with self._crew.standing_still() as all_do:
            occupied = await self._call(self.place.occupied) if all_do else None
        if not all_do:
            self._report.audits_skipped[self.place.name] += 1
        if occupied is not None:
            self._report.audits[self.place.name] += 1
            self._count(occupied.counted_bytes)

    def _count(self, occupied_bytes: int) -> None:
        cap_bytes = self.place.cap_bytes
        assert cap_bytes is not None
        most, _ = self._report.occupied.get(self.place.name, (0, 0))
        self._report.occupied[self.place.name] = max(most, occupied_bytes), cap_bytes
        if occupied_bytes > cap_bytes + _CAP_SLACK_BYTES:
            self._found(
                "cap exceeded", f"{self.place.name}: files occupy {occupied_bytes} bytes, the cap is {cap_bytes}"
            )

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
            if process.order.slot == VISITOR and said.corrupt <= self._damaged:
                self._damaged -= said.corrupt
                report.damage_found += said.corrupt
            elif said.corrupt:
                self._found("corrupt", f"{process.name} found {said.corrupt} chunks that fail verification")
            if said.evicted and self.place.keeps:
                self._found("evicted though there was room", f"{process.name} evicted {said.evicted} chunks")
        elif isinstance(said, messages.Opened):
            report.openings_s.append(said.after_s)
        elif isinstance(said, messages.Wrong):
            self._found("wrong bytes", f"{process.name}: {self._chunk(said.number)}: {said.what}")
        elif isinstance(said, messages.Broken):
            self._found("process broke", f"{process.name}: {said.what}")
        elif isinstance(said, messages.Refused):
            process.may_end_with.add(0)
            if self.place.is_calm:
                self._found("process broke", f"{process.name} could not open its cache: {said.why}")

    def _judge(self, process: Process, missed: messages.Missed) -> None:
        """Once everything that was said before has been heard."""
        self._crew.hear_all()
        since_s = missed.since_s - (self.place.stale_s if missed.by == "lookup" else _OTHERS_READ_S)
        if not self.place.keeps or self._struck or since_s < self._healed_s + RECOVERY_S:
            return
        if self._promises.was_due(missed.number, since_s):
            chunk = self._chunk(missed.number)
            self._found("lost", f"{process.name} did not find by {missed.by} {chunk}, which was flushed; {missed.found}")

    # What is left

    async def _verify(self) -> None:
        """All others have gone: what is there, for who lived through it and for who comes new?"""
        resident = self._crew[RESIDENT]
        proof = number_of(RESIDENT, LANES, self._report.rounds % KEYS_A_LANE)
        if not await self._proves(resident, proof):
            return
        await self._crew.ask(resident, Rest(), Rested)
        await self._damage(proof)
        visitor = self._crew.start(VISITOR)
        if await visitor.until(messages.Opened, RECOVERY_S) is None:
            self._found("not working again", f"{visitor.name} could not open a cache within {RECOVERY_S:.0f} s")
        else:
            await self._look(visitor, proof)
            await self._proves(visitor, number_of(SLOTS - 1, LANES, 0))
        await self._crew.end(VISITOR)
        if (usage := usage_of(resident.pid, now_s() - self._began_s)) is not None:
            self.samples.append(usage)
        await self._inspect()

    async def _damage(self, proof: int) -> None:
        """A byte of some chunk but `proof`, while nobody writes: who begins later must miss it, and find all others."""
        numbers = {key_of(self.place.name, number): number for number in range(SLOTS * KEYS_A_SLOT) if number != proof}
        random = Random(f"{self._crew.seed}/damage")
        key = await self._call(self.place.damage, list(numbers), random)
        self._damaged = int(key is not None)
        if key is not None:
            self._promises.note("the campaign:", "a byte of its file was flipped", [numbers[key]], now_s())
            self._promises.forgetting([numbers[key]])
            self._promises.forgotten([numbers[key]])
            self._report.faults[f"{self.place.name}: byte flipped"] += 1

    async def _proves(self, process: Process, number: int) -> bool:
        """Whether a put is flushed, soon."""
        from_s = now_s()
        while (left_s := from_s + RECOVERY_S - now_s()) > 0:
            proved = await process.ask(Prove(number), Proved, left_s)
            if proved is not None and proved.well:
                longest_s = self._report.recoveries_s.get(self.place.name, 0.0)
                self._report.recoveries_s[self.place.name] = max(longest_s, now_s() - from_s)
                return True
            if not process.is_alive:
                return False
            await asyncio.sleep(0.2)
        process.send(signal.SIGUSR1)
        self._found(
            "not working again", f"{process.name} stored nothing within {RECOVERY_S:.0f} s after the last fault"
        )
        return False

    async def _look(self, visitor: Process, proof: int) -> None:
        due = self._promises.due if self.place.keeps else [proof]
        gone = self._promises.gone if self.place.keeps_forgotten_away else []
        found = await self._crew.ask(visitor, Find([*due, *gone]), Found)
        if found is None:
            return
        self._report.verified += len(due)
        there = set(found.numbers)
        if late := [number for number in due if number not in there]:
            # What came after a deadline was a miss, and is no loss. What is lost stays lost.
            self._report.looked_twice += len(late)
            again = await self._crew.ask(visitor, Find(late), Found)
            there.update(again.numbers if again is not None else ())
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

    def _found(self, kind: str, sentence: str) -> None:
        self._report.findings.add(kind, f"{sentence}; see {self._crew.log}")

    def _chunk(self, number: int) -> str:
        told = self._promises.history(number) or "nothing"
        return f"chunk {number} ({key_of(self.place.name, number).hex()}; what was heard of it: {told})"

    async def _call(self, call: Callable[..., T], *arguments: object) -> T:
        """In a thread: what hangs is left there."""
        async with asyncio.timeout(CALL_S):
            return await self._calls.submit(call, *arguments)
