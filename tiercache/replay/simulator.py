"""Simulate the cache by discrete events: real policies and indexes, simulated bytes and time.

The contents of a tier change only when a request arrives, in the order of the trace, so hit rates depend on the policy
and not on speeds. They change in the same order as in the live cache, which `tiercache replay --real` verifies. Time
decides when a demand read or a prefetch is done, how long a request waits, and when a turn has ended. Demand reads go
before prefetches, block by block.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from tiercache.core.admission import Admission
from tiercache.core.eviction import LeafLru, Resident
from tiercache.core.index import CappedIndex, counts_in
from tiercache.core.keys import KEY_BYTES, ChunkKey, Tenant, tenant_of, tenant_tag
from tiercache.core.prefetch import PrefetchPlan, Promotion
from tiercache.core.tenants import Shares
from tiercache.replay.figures import Figures
from tiercache.replay.formats import Request
from tiercache.replay.programs import Programs
from tiercache.replay.setting import Setting

_NOISY_TAG = tenant_tag("noisy")
_NOISY_BLOCKS = 16
"""Blocks of each request of the scanning tenant."""


class Ram:
    """The hot cache: blocks of equal size, and optionally a quota of blocks for each tenant."""

    def __init__(self, policy: str, blocks: int, quota_blocks: int = 0) -> None:
        """Create an empty cache; `quota_blocks` 0 means no quota."""
        self.blocks = blocks
        self._order: LeafLru = LeafLru(policy, by_tenant=quota_blocks > 0)
        self._shares = Shares(quota_blocks) if quota_blocks else None
        self.entries = self._order.entries
        self.access = self._order.access
        self.link = self._order.link
        self.renew = self._order.renew

    def __contains__(self, key: object) -> bool:
        return key in self.entries

    def prefix(self, keys: Sequence[ChunkKey]) -> int:
        """Return the length of the prefix of `keys` whose blocks are all resident."""
        return counts_in((self.entries,), keys)[0]

    def add(
        self, key: ChunkKey, parent: ChunkKey | None, time: int | None = None, *, in_order: bool = False
    ) -> None:
        self._order.insert(Resident(key), parent, time, in_order=in_order)
        if self._shares is not None:
            self._shares.hold(tenant_of(key), 1, 1)

    def make_room(self, key: ChunkKey) -> bool:
        """Evict until the block `key` has room. Return False if all candidates are pinned."""
        while (tenant := self._tenant_at_quota(key)) is not None or len(self.entries) >= self.blocks:
            victim = self._order.pop_victim(tenant)
            if victim is None:
                return False
            if self._shares is not None:
                self._shares.hold(tenant_of(victim.key), -1, -1)
        return True

    def pin(self, key: ChunkKey) -> None:
        """Keep a resident block until `unpin`."""
        entry = self.entries[key]
        entry.leases = 1
        self._order.leased(entry)

    def unpin(self, key: ChunkKey) -> None:
        """Make a block evictable again. Does nothing if the block is absent or not pinned."""
        entry = self.entries.get(key)
        if entry is not None and entry.leases:
            entry.leases = 0
            self._order.released(entry)

    def _tenant_at_quota(self, key: ChunkKey) -> Tenant | None:
        tenant = tenant_of(key)
        return tenant if self._shares is not None and self._shares.lacking_bytes(tenant, 1) else None


class Simulator:
    """Simulate one setting. Call `run` once, or process requests piece by piece."""

    def __init__(self, setting: Setting, block_tokens: int) -> None:
        self.setting = setting
        hardware = setting.hardware
        self.block_bytes = block_tokens * hardware.bytes_per_token
        self.figures = Figures()
        self.ram = Ram(setting.policy, setting.ram_blocks, setting.ram_blocks // 2 if setting.quotas else 0)
        self.flash: CappedIndex | None = None
        if setting.flash_blocks is None or setting.flash_blocks > 0:
            quota_bytes = (setting.flash_blocks or 0) * self.block_bytes // 2 if setting.quotas else 0
            self.flash = CappedIndex(quota_bytes)
        self.admission = Admission(setting.admission)
        self._flash_cap_bytes = None if setting.flash_blocks is None else setting.flash_blocks * self.block_bytes
        self._flash_free_s = 0.0
        self._engines = [0.0] * hardware.engines
        self._scanned = 0
        self._to_scan = 0.0
        self._measuring = False
        self._prefetched_s = 0.0
        self._coming: tuple[Promotion, float] | None = None
        self.programs: Programs | None = None
        if setting.prefetch and self.flash is not None:
            self.programs = Programs(setting, self.block_bytes, self.ram.renew)

    def run(self, requests: Iterable[Request], measure_from: int = 0) -> Figures:
        """Replay the requests; measure from the request number `measure_from` on."""
        figures, programs = self.figures, self.programs
        if programs is not None:
            requests = programs.looking_ahead(requests)
        for number, request in enumerate(requests):
            if not self._measuring and number >= measure_from:
                self._measuring = True
                if programs is not None:
                    programs.plan.accounts.clear()
            if programs is not None:
                self._until(programs, request.time_s)
            self._scan(request)
            self._arrive(request)
            figures.span_s = request.time_s
        if programs is not None:
            programs.plan.clear()
            figures.accounts = programs.plan.accounts
        return figures

    def _until(self, programs: Programs, time_s: float) -> None:
        """Process the events before `time_s`."""
        while programs.next_s <= time_s:
            self._prefetch(programs.plan, programs.next_s)
            programs.fire()
        self._prefetch(programs.plan, time_s)
        for key in programs.plan.take_unexpected():
            self.ram.unpin(key)

    def _prefetch(self, plan: PrefetchPlan, until_s: float) -> None:
        """Prefetch block by block while no demand read uses the flash. A block not read by `until_s` comes too late."""
        assert self.flash is not None
        block_s = self.block_bytes / self.setting.hardware.flash_read_bytes_per_s
        now_s = max(self._prefetched_s, self._flash_free_s)
        while now_s < until_s:
            if self._coming is not None:
                promotion, done_s = self._coming
                if done_s > until_s:
                    break
                now_s = done_s
                self._coming = None
                self._promote(plan, promotion)
                continue
            plan.run_timers(now_s)
            found = plan.next(now_s, self._pin_hot)
            if found is not None:
                self._coming = found, now_s + block_s
                continue
            wake_s = plan.wake_s(now_s)
            now_s = until_s if wake_s is None else min(until_s, max(wake_s, now_s + block_s))
        self._prefetched_s = now_s

    def _promote(self, plan: PrefetchPlan, promotion: Promotion) -> None:
        """Insert a block that has been read, and pin it until it is accessed or no longer expected."""
        key = promotion.key
        if self.flash is not None:
            self.flash.touch(key)
        there = key in self.ram or self.ram.make_room(key)
        if there and key not in self.ram:
            self.ram.add(key, promotion.parent)
        if plan.ended(promotion, promoted=there):
            self.ram.pin(key)

    def _pin_hot(self, key: ChunkKey, pin: bool) -> bool | None:
        """Answer the plan about an expected block, and pin it if `pin`; see `hot` of `PrefetchPlan.next`."""
        if key in self.ram:
            if pin:
                self.ram.pin(key)
            return pin
        return None if self.flash is not None and key in self.flash else False

    def _scan(self, request: Request) -> None:
        """Store the scanning tenant's blocks that precede this request. No figure counts them."""
        self._to_scan += self.setting.noisy * len(request.keys)
        while self._to_scan >= _NOISY_BLOCKS:
            self._to_scan -= _NOISY_BLOCKS
            parent = None
            for _ in range(_NOISY_BLOCKS):
                self._scanned += 1
                key = self._scanned.to_bytes(KEY_BYTES, "big") + _NOISY_TAG
                if self.ram.make_room(key):
                    self.ram.add(key, parent)
                if self.flash is not None:
                    self._add_to(self.flash, key)
                parent = key

    def _arrive(self, request: Request) -> None:
        keys = request.keys
        hot = self.ram.prefix(keys)
        found = self._found(keys, hot)
        loaded = sum(key not in self.ram for key in keys[hot:found])
        begun_s, ready_s = self._serve(request, found, loaded)
        self._count(request, found, loaded, begun_s, ready_s)
        if self.programs is not None:
            for key in keys:
                self.programs.plan.used(key, hot=key in self.ram)
                self.ram.unpin(key)
            self.programs.arrived(request, ready_s, self.setting.hardware.decode_tokens_per_s)
        self._note_uses(request, found)
        self._deliver(keys, 0, found)
        self._put(keys, found)

    def _found(self, keys: list[ChunkKey], hot: int) -> int:
        """Return the length of the contiguous prefix in both tiers together."""
        if self.flash is None:
            return hot
        ram, flash = self.ram.entries, self.flash
        position = hot
        while position < len(keys) and (keys[position] in flash or keys[position] in ram):
            position += 1
        return position

    def _serve(self, request: Request, found: int, loaded: int) -> tuple[float, float]:
        """Return the times at which an engine takes the request, and of the first token."""
        hardware = self.setting.hardware
        begun_s = request.time_s
        if hardware.engines:
            begun_s = max(begun_s, heapq.heappop(self._engines))
        at_s = begun_s
        if loaded:
            at_s = max(at_s, self._flash_free_s) + hardware.flash_latency_s
            at_s += loaded * self.block_bytes / hardware.flash_read_bytes_per_s
            self._flash_free_s = at_s
        at_s += found * self.block_bytes / hardware.ram_bytes_per_s
        at_s += self._tokens(request, found) / hardware.prefill_tokens_per_s
        if hardware.engines:
            heapq.heappush(self._engines, at_s)
        return begun_s, at_s

    @staticmethod
    def _tokens(request: Request, found: int) -> int:
        """Return the tokens to compute if `found` blocks are loaded; the last token is always computed."""
        return max(1, request.input_tokens - found * request.block_tokens)

    def _count(self, request: Request, found: int, loaded: int, begun_s: float, ready_s: float) -> None:
        if not self._measuring:
            return
        figures = self.figures
        figures.requests += 1
        figures.blocks += len(request.keys)
        figures.ram_blocks += found - loaded
        figures.flash_blocks += loaded
        figures.wanted_blocks += found
        figures.ttft_s.append(ready_s - request.time_s)
        computed_s = self._tokens(request, 0) / self.setting.hardware.prefill_tokens_per_s
        figures.saved_s += computed_s - (ready_s - begun_s)

    def _note_uses(self, request: Request, found: int) -> None:
        if self.flash is None or self.setting.admission == "all":
            return
        admission = self.admission
        if admission.policy == "live_session" and found > 1:
            for key in request.keys:
                admission.continued(key)
            return
        for key in request.keys:
            admission.used(key)

    def _deliver(self, keys: list[ChunkKey], begin: int, end: int) -> None:
        """Deliver one batched get."""
        entries, part = self.ram.entries, keys[begin:end]
        time = self.ram.access(part)
        # Decide all reads before the first insertion: a block that an insertion evicts was delivered before.
        for place in [place for place in range(begin, end) if keys[place] not in entries]:
            self._into_ram(keys[place], keys[place - 1] if place else None, time - (place - begin))
        if self.flash is not None:
            self.flash.touch_prefix(part)
            if self.setting.admission == "all":
                return  # it was written at its put, and is not written again after its eviction
            # Do not write blocks that insertions for this same request evicted.
            for key in [key for key in part if key not in self.flash and key in entries]:
                self._write(key, self.flash)

    def _put(self, keys: list[ChunkKey], begin: int) -> None:
        """Put the computed blocks one by one."""
        time = self.ram.access(keys[begin:])
        for place, key in enumerate(keys[begin:], begin):
            parent = keys[place - 1] if place else None
            self._into_ram(key, parent, time - (place - begin), in_order=True)
            if self.flash is not None:
                self.flash.touch(key)
                self._write(key, self.flash)
        self.ram.link(keys)

    def _into_ram(
        self, key: ChunkKey, parent: ChunkKey | None, time: int, *, in_order: bool = False
    ) -> None:
        """Make room for one chunk before inserting it."""
        if key in self.ram or not self.ram.make_room(key):
            return
        self.ram.add(key, parent, time, in_order=in_order)
        self.figures.inserted_blocks += 1

    def _write(self, key: ChunkKey, flash: CappedIndex) -> None:
        """Offer a block to flash, which may have it already or refuse it."""
        if key in flash or not self.admission.admits(key):
            return
        self._add_to(flash, key)
        self.figures.flash_written_blocks += 1

    def _add_to(self, flash: CappedIndex, key: ChunkKey) -> None:
        if self._flash_cap_bytes is not None:
            flash.evict_own(key, flash.lacking_bytes(key, self.block_bytes))
            flash.evict(flash.used_bytes + self.block_bytes - self._flash_cap_bytes)
        flash.add(key, self.block_bytes)
