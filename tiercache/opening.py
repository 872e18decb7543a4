"""How a cache takes what it needs: in threads that nobody has to wait for, and each part by a deadline.

A device, a mount or a lock may hang. An executor's threads are joined when the interpreter exits, so what may hang runs in
daemon threads of our own; and whoever opens a cache gets one clear sentence instead of waiting for good.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from tiercache.assembly import make_tiers
from tiercache.closing import AbandonedTasks, Deadline, closed
from tiercache.config import Config
from tiercache.core.layout import Layout
from tiercache.device.device import Device
from tiercache.errors import ConfigError, DeviceError, TierUnavailable
from tiercache.memory.arena import Arena, ArenaSettings
from tiercache.memory.workers import Workers
from tiercache.tiers.base import Tier

logger = logging.getLogger("tiercache")

T = TypeVar("T")

FILE_SYSTEMS_S = 30.0
"""What the file systems of the configured directories have to say what they are."""
DEVICE_S = 120.0
"""What an accelerator has to come up."""
_LET_GO_S = 2.0
"""What a tier or a device that is too late, or called off, has to give back what it holds, before it is left behind."""
_LET_GO_OF_MEMORY_S = 30.0
"""As much for the arena: no device can hang in it, and whoever starts again at once needs its name."""


async def made(
    what: str,
    within_s: float | None,
    give_back: Callable[[T], object] | None,
    make: Callable[..., T],
    *arguments: Any,
    unwanted: threading.Event | None = None,
    let_go_s: float = _LET_GO_S,
) -> T:
    """`make(*arguments)` in a thread. Raises ConfigError about `what` when that takes longer; None: it takes what it takes.

    What comes too late, or after a cancellation, is given back by `give_back` (None: it holds nothing), in the thread.
    Cancelled, this ends when that is done, or after `let_go_s`. `unwanted` is set when nobody needs the result any more.
    """
    workers = Workers("start", 1)
    unwanted = unwanted or threading.Event()

    def run() -> tuple[T, bool]:
        result = make(*arguments)
        if (late := unwanted.is_set()) and give_back is not None:
            give_back(result)
        return result, late

    def disown(work: asyncio.Future[tuple[T, bool]]) -> None:
        if not work.cancelled() and work.exception() is None:
            result, given_back = work.result()
            if not given_back and give_back is not None:  # it came at this very moment
                give_back(result)

    try:
        work = workers.submit(run)
    except TierUnavailable as error:
        raise ConfigError(f"{what}: {error}") from error
    workers.close()
    try:
        await asyncio.wait([work], timeout=within_s)
    except asyncio.CancelledError:
        unwanted.set()
        if give_back is not None:
            await Deadline(asyncio.get_running_loop().time() + let_go_s).ended([work])
        if work.done():  # a callback would come after the caller has gone on
            disown(work)
        else:
            work.add_done_callback(disown)
        raise
    if not work.done():
        unwanted.set()
        work.add_done_callback(disown)
        raise ConfigError(f"{what}: no answer within {within_s:.0f} s; does a device, a mount or a server hang?")
    return work.result()[0]


async def make_tiers_in_time(config: Config, layout: Layout, device: Device | None) -> list[Tier]:
    """`make_tiers`, which asks the file systems of directories what they are."""
    places = ", ".join([*(config.gds_path or ()), *(config.weka_path or ())])
    return await made(f"gds_path, weka_path: {places}", FILE_SYSTEMS_S, None, make_tiers, config, layout, device)


async def make_arena(settings: ArenaSettings) -> Arena:
    """As long as it takes to touch its pages; cancelled, it stops that."""
    unwanted = threading.Event()
    return await made(
        "max_local_cpu_size",
        None,
        Arena.close,
        Arena,
        settings,
        unwanted.is_set,
        unwanted=unwanted,
        let_go_s=_LET_GO_OF_MEMORY_S,
    )


def close_device(device: Device | None) -> None:
    if device is not None:
        device.close()


async def open_tier(tier: Tier, abandoned: AbandonedTasks) -> None:
    """`tier.open` by the tier's own deadline, and ConfigError after it.

    A tier that is too late, or whose opening is cancelled, gives back what it holds. Where it does not get to that at once
    it is left to itself, and to `abandoned`.
    """
    opening = asyncio.ensure_future(tier.open())
    within_s = max(tier.open_s, 2 * (tier.patience_s or 0.0))
    try:
        await asyncio.wait([opening], timeout=within_s)
    except asyncio.CancelledError:
        await _call_off(tier, opening, abandoned)
        raise
    if not opening.done():
        await _call_off(tier, opening, abandoned)
        option = getattr(tier, "option", tier.name)
        raise ConfigError(
            f"{option}: {tier.describe()} did not open within {within_s:.0f} s; does its device, "
            "mount or server hang, or a process that holds its lock?"
        )
    try:
        opening.result()
    except (TierUnavailable, DeviceError, OSError) as error:
        raise ConfigError(f"{getattr(tier, 'option', tier.name)}: {error}") from error


async def _call_off(tier: Tier, opening: asyncio.Future[None], abandoned: AbandonedTasks) -> None:
    opening.cancel()
    ended = asyncio.ensure_future(_closed_again(tier, opening))
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.wait([ended], timeout=_LET_GO_S)
    abandoned.keep([ended])


async def _closed_again(tier: Tier, opening: asyncio.Future[None]) -> None:
    never = Deadline()
    await never.ended([opening])
    if not opening.cancelled() and opening.exception() is None:
        logger.warning("%s: came up too late, and is closed again", tier.name)
        await closed(never, (tier.name, tier.close))
