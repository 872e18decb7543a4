"""Closing several parts by one deadline, whoever is cancelled meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from tiercache.closing import AbandonedTasks, Deadline, closed


class Thing:
    """Takes its time to close. `seconds` None: as long as `go_on` is not set."""

    def __init__(self, seconds: float | None = 0.05) -> None:
        self.seconds = seconds
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()
        self.closed = False

    async def close(self) -> None:
        self.begun.set()
        if self.seconds is None:
            await self.go_on.wait()
        else:
            await asyncio.sleep(self.seconds)
        self.closed = True


def soon(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds


async def test_parts_are_closed_side_by_side_and_what_hangs_is_handed_back() -> None:
    things = [Thing(0.2), Thing(0.2), Thing(None)]
    began_s = soon(0.0)
    left = await closed(Deadline(began_s + 0.5), *((str(number), thing.close) for number, thing in enumerate(things)))
    assert soon(0.0) - began_s < 0.9
    assert [thing.closed for thing in things] == [True, True, False]
    assert len(left) == 1 and not left[0].done()
    things[2].go_on.set()
    await left[0]


async def test_deadline_that_comes_nearer_ends_what_is_under_way() -> None:
    thing, deadline = Thing(None), Deadline(soon(100.0))
    closing = asyncio.ensure_future(closed(deadline, ("thing", thing.close)))
    await thing.begun.wait()
    began_s = soon(0.0)
    deadline.least_s = began_s + 0.2
    deadline.bring_forward(began_s)
    (left,) = await closing
    assert 0.2 <= soon(0.0) - began_s < 5.0
    thing.go_on.set()
    await left


async def test_loop_that_cancels_everything_at_any_moment_keeps_nothing_open() -> None:
    for steps in range(12):
        things = [Thing(), Thing()]
        closing = asyncio.ensure_future(closed(Deadline(soon(5.0)), *(("thing", thing.close) for thing in things)))
        for _ in range(steps):
            await asyncio.sleep(0.005)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        (outcome,) = await asyncio.gather(closing, return_exceptions=True)
        if steps:  # cancelled before its first step it has not begun
            assert outcome == []
            assert all(thing.closed for thing in things), steps


async def test_part_that_fails_is_told_and_the_others_are_closed(caplog: pytest.LogCaptureFixture) -> None:
    async def broken() -> None:
        raise OSError("the device is gone")

    thing = Thing()
    assert await closed(Deadline(soon(1.0)), ("broken", broken), ("thing", thing.close)) == []
    assert thing.closed
    assert "broken: closing failed" in caplog.text


async def test_memory_is_free_when_the_last_of_what_lingers_has_ended_and_not_after_a_cancelled_wait() -> None:
    free: list[int] = []
    abandoned = AbandonedTasks(lambda: free.append(len(abandoned.tasks)))
    thing, other = Thing(None), Thing(None)
    tasks = [asyncio.ensure_future(thing.close()), asyncio.ensure_future(other.close())]
    abandoned.keep(tasks)
    began_s = soon(0.0)
    await abandoned.ended(began_s + 0.2)
    assert 0.15 < soon(0.0) - began_s < 1.0
    thing.go_on.set()
    await tasks[0]
    await asyncio.sleep(0)
    assert free == [1]
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0)
    assert free == [1], "nobody knows whether its thread has ended"


async def test_what_has_ended_in_this_very_step_does_not_hang() -> None:
    abandoned = AbandonedTasks(lambda: None)
    thing = Thing(None)
    task = asyncio.ensure_future(thing.close())
    await asyncio.sleep(0)
    abandoned.keep([task])
    thing.go_on.set()
    await asyncio.sleep(0)
    assert task.done() and abandoned.tasks, "its callbacks come with the next step"
    await abandoned.ended(soon(0.0))
    assert not abandoned.tasks
    assert (abandoned.hanging, abandoned.called_off) == (0, 0)
