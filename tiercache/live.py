"""Change a running cache: limits, quotas and credentials, and tiers that are detached and attached.

Whatever may fail comes first. Then everything changes in one step of the loop, and at the end the tiers that are no longer
in use are closed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from tiercache.assembly import hot_quota_bytes, writer_settings
from tiercache.config import Config
from tiercache.config.changes import Change, changes
from tiercache.config.plan import ON, PlannedTier, plan_of
from tiercache.core.layout import Layout
from tiercache.device.device import Device
from tiercache.errors import CacheClosed, ConfigError
from tiercache.lifecycle import FILE_SYSTEMS_S, Parts, by_deadline, in_thread, log_close, new_tiers, open_tier
from tiercache.memory.slots import slots_in
from tiercache.scheduler.reads import Reader
from tiercache.scheduler.writer import TierWriter
from tiercache.tiers.base import Tier
from tiercache.tiers.files.tier import FileTier
from tiercache.tiers.shared_memory import SharedMemoryTier, require_memory

logger = logging.getLogger("tiercache")

_CLOSE_S = 10.0
"""Longest wait for a tier that is no longer in use to close, and before that for the operations in it."""


Replaced = tuple[Tier, list[asyncio.Task[Any]]]
"""A tier that is no longer used, and the operations in flight in it."""


async def apply(parts: Parts, layout: Layout, old: Config, new: Config) -> tuple[list[Change], list[Replaced]]:
    """Make `new` the configuration of a cache that has `old`. Return what changed, and the tiers for `settle`.

    Raises ConfigError if that needs a restart, if a value is too small or too large, or if credentials are refused;
    nothing has changed then, nor after a cancellation.
    """
    found = changes(old, new)
    if lasting := [str(change) for change in found if not change.live]:
        raise ConfigError(f"needs a restart, so nothing was changed: {'; '.join(lasting)}")
    if not found:
        return found, []
    slots, quota_bytes = _slots(parts, layout, new), hot_quota_bytes(new, parts.cpu.pool.slot_bytes)
    made = await new_tiers(new, layout, _device(parts))
    limited: list[tuple[FileTier, FileTier]] = []
    renewed: list[tuple[Tier, Tier]] = []
    for before, after, tier, fresh in zip(_planned(old), _planned(new), parts.tiers, made, strict=True):
        if before == after or tier.traffic.detached:
            continue
        if isinstance(tier, FileTier) and isinstance(fresh, FileTier):
            limited.append((tier, fresh))
        elif before.remote != after.remote:
            renewed.append((tier, fresh))
    for tier, fresh in limited:
        if isinstance(tier, SharedMemoryTier):
            settings = fresh.settings
            checking = in_thread(tier.option, require_memory, settings.directories[0], settings.cap_bytes)
            await by_deadline(checking, FILE_SYSTEMS_S, f"{tier.option}: no answer")
    pool = parts.cpu.slot_pool
    try:
        populated = await pool.populated(slots)
    except OSError as error:
        raise ConfigError(f"max_local_cpu_size: there is no memory for that: {error}") from error
    try:
        await _open(parts, [fresh for _, fresh in renewed])
    except BaseException:
        pool.resize(pool.most, populated)
        raise
    if slots < pool.most and parts.arena.pinned:
        logger.warning("max_local_cpu_size: the memory stays with this process, since a device has registered it")
    parts.cpu.limit(slots, populated, quota_bytes)
    for writer in parts.fan_out.writers:
        writer.settings = writer_settings(new, len(parts.tiers), pool.slot_bytes, parts.cpu.budget)
    parts.ahead.plan.share_bytes = int(new.prefetch_share * slots) * layout.chunk_bytes
    parts.ahead.pump()  # prefetches may have waited for room
    for tier, fresh in limited:
        tier.limit(fresh.settings.cap_bytes or tier.settings.cap_bytes, fresh.settings.tenant_bytes)
    return found, [(tier, _replace(parts, tier, fresh)) for tier, fresh in renewed]


async def settle(parts: Parts, replaced: Sequence[Replaced]) -> None:
    """Evict what is above the new limits of the hot cache, and close tiers when the operations in them have ended, or after
    a time; at once if cancelled.
    """
    try:
        await parts.cpu.evict_excess()
        if in_flight := [work for _, works in replaced for work in works]:
            await asyncio.wait(in_flight, timeout=_CLOSE_S)
    finally:
        await _close([tier for tier, _ in replaced])


async def detach(parts: Parts, name: str, timeout_s: float) -> None:
    """Close a tier until `attach`. New chunks are not queued for it from now on; what is queued is written, and what is in
    flight ends, for up to `timeout_s` together. The rest is given up, as by a tier that fails.

    A cancelled call leaves the tier attached, or closes it at once. Raises ConfigError for an unknown name.
    """
    tier, loop = _tier(parts, name), asyncio.get_running_loop()
    if tier.traffic.detached:
        return
    until_s = loop.time() + timeout_s
    writers = [writer for writer in parts.fan_out.writers if writer.tier is tier]
    tier.traffic.draining = True
    try:
        async with asyncio.timeout_at(until_s):
            for writer in writers:
                await writer.drained()
                await writer.removals.tried()
    except TimeoutError:
        logger.warning("%s: not all that was queued for it could be written before it was detached", name)
    except asyncio.CancelledError:
        tier.traffic.draining = False
        raise
    tier.traffic.detached = True
    try:
        for writer in writers:
            await writer.give_up(until_s)
        readers = [each for reader in parts.readers for each in reader.tiers if each.tier is tier]
        if reads := [work for each in readers for work in each.in_tier]:
            await asyncio.wait(reads, timeout=max(0.0, until_s - loop.time()))
    finally:
        await _close([tier])
    parts.opened.pop(name, None)
    logger.info("%s is detached", name)


async def attach(parts: Parts, layout: Layout, config: Config, name: str) -> None:
    """Open a tier that was detached, as `config` describes it. Raises ConfigError as a start does; the tier stays detached
    then, and after a cancellation.
    """
    tier = _tier(parts, name)
    if not tier.traffic.detached:
        return
    fresh = (await new_tiers(config, layout, _device(parts)))[parts.tiers.index(tier)]
    await _open(parts, [fresh])
    _replace(parts, tier, fresh)
    fresh.traffic.draining = fresh.traffic.detached = False
    logger.info("%s is attached", name)


def _slots(parts: Parts, layout: Layout, config: Config) -> int:
    """Return the number of slots for a configuration. Raises ConfigError if the arena has fewer, or a cache needs more."""
    slots, pool = slots_in(config.arena_bytes, layout.chunk_bytes), parts.cpu.slot_pool
    if slots > pool.reserved:
        reserved_gb = parts.arena.size_bytes / 2**30
        raise ConfigError(
            f"max_local_cpu_size: expected at most {reserved_gb:g} GB, which were reserved at the start, found "
            f"{config.max_local_cpu_size:g}; more needs a restart"
        )
    return slots


def _device(parts: Parts) -> Device | None:
    return None if parts.on_device is None else parts.on_device.device


def _planned(config: Config) -> list[PlannedTier]:
    return [planned for planned in plan_of(config)[1:] if planned.state == ON]


async def _open(parts: Parts, tiers: Sequence[Tier]) -> None:
    """Open all of the tiers, or none. Raises ConfigError, and CacheClosed if the cache was closed meanwhile."""
    opened: list[Tier] = []
    try:
        for tier in tiers:
            tier.use_arena(parts.arena)
            await open_tier(tier)
            opened.append(tier)
        if parts.closing.unwinding:
            raise CacheClosed("the cache was closed meanwhile")
    except BaseException as error:
        await _close(opened)
        if isinstance(error, Exception) and parts.closing.unwinding:  # by its deadline: the tier may need what was closed
            raise CacheClosed("the cache was closed meanwhile") from error
        raise


def _replace(parts: Parts, before: Tier, after: Tier) -> list[asyncio.Task[Any]]:
    """Use an open tier in place of another one. Return the operations in flight in that one."""
    after.take_over(before)
    parts.tiers[parts.tiers.index(before)] = after
    parts.opened[after.name] = after.close
    users: list[Reader | TierWriter] = [*parts.readers, *parts.fan_out.writers]
    return [work for user in users for work in user.replace_tier(before, after)]


def _tier(parts: Parts, name: str) -> Tier:
    for tier in parts.tiers:
        if tier.name == name:
            return tier
    names = ", ".join(tier.name for tier in parts.tiers) or "none"
    raise ConfigError(f"{name}: there is no such tier below the hot cache; expected one of: {names}")


async def _close(tiers: Sequence[Tier]) -> None:
    """Close tiers that are not in use. One that does not close in time is abandoned, and goes on by itself."""
    closing = {asyncio.ensure_future(tier.close()): tier.name for tier in tiers}
    try:
        if closing:
            await asyncio.wait(closing, timeout=_CLOSE_S)
    finally:
        for work, name in closing.items():
            log_close(work, name)
