"""The scheduler's half against a real cache: what it finds, loads, saves, and tells the workers."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.vllm.halves import NAMES, TOKENS, Hanging, Scheduled, output_of, save_adapter
from tiercache.bridge import CacheThread
from tiercache.config import Config
from tiercache.core.layout import Layout
from tiercache.integrations.vllm.hints import RequestBegan
from tiercache.integrations.vllm.lookup import HELD_FOR_S, Lookup, LookupClient, LookupServer, Question
from tiercache.integrations.vllm.metadata import StepReport, StepWork
from tiercache.integrations.vllm.names import Adapters, BlockNames
from tiercache.integrations.vllm.planning import BlockGeometry, Match
from tiercache.integrations.vllm.scheduler import SchedulerSide

GEOMETRY = BlockGeometry(TOKENS, blocks_per_chunk=2)
BLOCKS = list(range(100, 164))


class Engine(Scheduled):
    """A scheduler's half, its worker's cache, and vLLM's side of the conversation."""

    def __init__(self, role: str = "kv_both", geometry: BlockGeometry = GEOMETRY, size: int = 128, **more: Any) -> None:
        """`size`: bytes of a token."""
        name = uuid.uuid4().hex
        layout = Layout("m", chunk_tokens=32, bytes_per_token=size, block_tokens=TOKENS)
        config = Config(**({"max_local_cpu_size": 0.01} | more))
        self.thread = CacheThread(config, layout)
        self.server = LookupServer(name, 0, self.thread, geometry)
        self.client = LookupClient(name, 1, geometry)
        self.side = SchedulerSide(config, geometry, BlockNames("sha256", TOKENS), self.client, 1, role=role)

    def close(self) -> None:
        self.client.close()
        self.server.close()
        self.thread.close(1.0)

    def holds(self, blocks: int) -> None:
        self.puts(*NAMES[1:blocks:2])

    def claims(self) -> int:
        """Chunks that are held for requests."""
        return int(self.on_loop(lambda: len(self.server.claims.leases)))

    def enters(self, request: Any, computed: int = 0) -> tuple[int, bool]:
        return self.admits(request, BLOCKS[: request.num_tokens // TOKENS + 1], computed=computed)

    def steps(self, *scheduled: tuple[Any, int], preempted: tuple[str, ...] = ()) -> StepWork:
        """One step, from scheduling to the processed output of a worker that moved everything."""
        work = self.side.step_work(output_of(scheduled, lambda _: (BLOCKS,), preempted))
        for request, tokens in scheduled:
            request.num_computed_tokens += tokens
        return work

    def reports(self, work: StepWork, *failed: int) -> None:
        if failed:
            self.side.loads_failed(set(failed))
        saves, loads = ({one.request_id for one in ones} for ones in (work.saves, work.loads))
        self.side.progress(StepReport(dict.fromkeys(saves, 1), loads))

    def ends(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        return self.side.finished(request, (BLOCKS[: request.num_tokens // TOKENS + 1],))


Make = Callable[..., Engine]


@pytest.fixture
def made(opened: Callable[..., Any]) -> Make:
    return partial(opened, Engine)


@pytest.fixture
def engine(made: Make) -> Engine:
    return made()


@pytest.fixture
def with_disk(made: Make, tmp_path: Path) -> Engine:
    return made(local_disk=str(tmp_path), max_local_disk_size=0.1)


def saved(work: StepWork) -> list[bytes]:
    return [transfer.name for save in work.saves for transfer in save.transfers]


# Loading


def test_hit_is_loaded_and_not_saved_again(engine: Engine) -> None:
    engine.holds(6)
    request = engine.arrives(132)
    assert engine.enters(request) == (96, False)
    work = engine.steps((request, 36))
    assert [transfer.blocks for transfer in work.loads[0].transfers] == [(100, 101), (102, 103), (104, 105)]
    engine.reports(work)
    assert saved(engine.steps((request, 1))) == [NAMES[7]]


def test_only_what_is_held_to_the_last_chunk_is_loaded_at_once(with_disk: Engine, made: Make) -> None:
    """Half of the hot cache may be held: two chunks of the small one."""
    engine, small = with_disk, made(size=16384, max_local_cpu_size=2 / 1024)
    engine.holds(6)
    assert engine.enters(engine.arrives(132, "hot")) == (96, False)
    engine.only_on_disk(NAMES[5])
    assert engine.enters(engine.arrives(132, "promoted")) == (96, False)
    assert engine.claims() == 3
    small.holds(6)
    for name in ("no room", "no more than the first"):
        assert small.enters(small.arrives(132, name)) == (96, True)
    loads = engine.steps().loads + small.steps().loads
    assert [load.asynchronous for load in loads] == [False, False, True, True]


def test_what_the_engine_has_itself_is_not_waited_for(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Operators find the request's line all the same."""
    caplog.set_level(logging.INFO, "tiercache.vllm")
    never = Lookup(Question("never", []))
    monkeypatch.setattr(engine.client, "begin", lambda *_, **__: never)
    request = engine.arrives(132)
    assert engine.side.matched_tokens(request, 112) == (None, False)
    assert engine.side.matched_tokens(request, 128) == (0, False)
    assert never.match == Match(failed=True), "it was given up"
    line = "Reqid: r, Total tokens 132, engine computed tokens: 128, hit tokens: 0 (cpu: 0, disk: 0), need to load: 0"
    assert [found for found in caplog.messages if "Reqid: r," in found] == [line]


def test_an_answer_is_waited_for_half_a_millisecond_a_step(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without that a request would wait for the whole of a step: it arrives right before its turn."""
    waited: list[float] = []
    engine.holds(6)
    requests = [engine.arrives(132, name) for name in ("a", "b")]
    for request in requests:
        engine.side.matched_tokens(request, 0)
    assert [engine.finds(request) for request in requests] == [(96, False)] * 2
    monkeypatch.setattr(Lookup, "wait", lambda _, timeout_s: waited.append(timeout_s))
    monkeypatch.setattr(engine.client, "begin", lambda *_, **__: Lookup(Question("never", [])))
    engine.steps()
    for number in range(3):
        engine.side.matched_tokens(engine.arrives(132, str(number)), 0)
    engine.steps()
    engine.side.matched_tokens(engine.arrives(132, "last"), 0)
    assert max(waited) <= 0.0005 and len(waited) >= 2


@pytest.fixture
def clock_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of the scheduler's half, which stands still, in a list."""
    now_s = [time.monotonic()]
    monkeypatch.setattr("tiercache.integrations.vllm.scheduler.time.monotonic", lambda: now_s[0])
    return now_s


def test_what_was_found_long_ago_is_not_loaded_at_once(engine: Engine, clock_s: list[float]) -> None:
    """It may not be held any more when the load begins."""
    engine.holds(6)
    request = engine.arrives(100)
    assert engine.finds(request) == (96, False)
    clock_s[0] += HELD_FOR_S
    assert engine.finds(request) == (96, True)


@pytest.mark.parametrize("considered", [True, False])
def test_what_is_stored_while_a_request_waits_is_found(engine: Engine, clock_s: list[float], considered: bool) -> None:
    engine.holds(2)
    request = engine.arrives(132)
    engine.steps()
    engine.until(lambda: engine.claims() == 1)
    if considered:
        assert engine.finds(request) == (32, False), "the engine had no room for it"
    engine.holds(6)
    clock_s[0] += HELD_FOR_S
    assert engine.finds(request) == (96, False)
    assert engine.server.thread.cache.statistics().advice.requests == 1


def test_what_is_let_go_of_one_lookup_is_not_what_the_next_one_holds(engine: Engine) -> None:
    """Of a request that was put back: the first is let go as the second begins."""
    engine.holds(6)
    request = engine.arrives(132)
    assert engine.enters(request) == (96, False)
    (load,) = engine.steps((request, 36)).loads
    assert engine.finds(request) == (96, False)
    engine.server.release(load.claim)
    engine.steps()
    assert engine.claims() == 3


def test_what_another_engine_is_storing_is_waited_for(engine: Engine) -> None:
    engine.holds(2)
    expecting = {"kv_transfer_params": {"tiercache.expect_tokens": 96}}
    request = engine.arrives(132, **expecting)
    for _ in range(100):
        assert engine.side.matched_tokens(request, 0) == (None, False)
    engine.holds(6)
    assert engine.finds(request) == (96, False)
    assert engine.finds(engine.arrives(132, "plain")) == (96, False)
    assert engine.finds(engine.arrives(90, "short", **expecting)) == (80, False), "no more than it can use"
    assert engine.server.thread.cache.statistics().advice.requests == 3, "however often each was looked up"


def test_what_does_not_come_is_waited_for_as_long_as_a_lookup_may_take(made: Make) -> None:
    engine = made(lookup_timeout_ms=300)
    engine.holds(2)
    began_s = time.monotonic()
    request = engine.arrives(132, kv_transfer_params={"tiercache.expect_tokens": 96})
    assert engine.finds(request) == (32, False)
    assert time.monotonic() - began_s >= 0.3


def test_a_worker_that_hangs_costs_the_time_limit(made: Make) -> None:
    engine = made(lookup_timeout_ms=100)
    engine.holds(6)
    go_on = engine.stops_its_loop()
    assert engine.finds(engine.arrives(132)) == (0, False)
    go_on.set()
    engine.steps()
    assert engine.claims() == 0


def test_short_hits_are_not_loaded_and_who_wants_no_cached_kv_gets_none(made: Make) -> None:
    engine = made(min_retrieve_tokens=65)
    engine.holds(6)
    assert engine.enters(engine.arrives(68, "short")) == (0, False)
    assert engine.enters(engine.arrives(100, "long")) == (96, False)
    prompt_logprobs = engine.arrives(100, "none", skip_reading_prefix_cache=True)
    assert engine.enters(prompt_logprobs) == (0, False)
    engine.steps(preempted=("none",))
    assert engine.finds(prompt_logprobs) == (0, False)


def test_load_that_cannot_be_planned_is_reported_as_failed(engine: Engine) -> None:
    engine.holds(4)
    request = engine.arrives(100)
    assert engine.admits(request, BLOCKS[:3]) == (64, False)
    (load,) = engine.steps((request, 36)).loads
    assert load.impossible == (100, 101, 102) and not load.transfers


def test_failed_load_is_recomputed_saved_anew_and_not_tried_again(engine: Engine) -> None:
    engine.holds(4)
    request = engine.arrives(132)
    engine.enters(request)
    engine.reports(engine.steps((request, 68)), 102, 103)
    request.num_computed_tokens = 32
    assert saved(engine.steps((request, 100))) == NAMES[1:8:2]
    request.num_computed_tokens = 0
    assert engine.side.matched_tokens(request, 0) == (0, False)


def test_preempted_request_is_looked_up_and_saved_again(engine: Engine) -> None:
    request = engine.arrives(64)
    engine.enters(request)
    engine.reports(engine.steps((request, 32)))
    request.num_computed_tokens = 0
    assert engine.steps(preempted=("r",)).preempted == {"r"}
    engine.holds(2)
    assert engine.enters(request) == (32, False)


# Saving


def test_a_tail_is_replaced_by_what_it_becomes(made: Make) -> None:
    engine = made(geometry=BlockGeometry.for_chunk_size(64, TOKENS, save_tails=True))
    request = engine.arrives(4 * TOKENS + 2 * TOKENS + 1)
    assert engine.enters(request) == (0, False)
    work = engine.steps((request, request.num_tokens))
    assert saved(work) == [NAMES[3], NAMES[5]]
    assert not any(save.replaced for save in work.saves)
    engine.reports(work)
    engine.ends(request)
    tail = engine.keys(NAMES[5])
    assert engine.ask(engine.thread.cache.put_many(tail, [b"x" * 4096]))
    engine.puts(NAMES[3])
    follows = engine.arrives(9 * TOKENS, "next")
    assert engine.enters(follows) == (6 * TOKENS, False)
    engine.reports(engine.steps((follows, 3 * TOKENS)))
    (save,) = engine.steps((follows, 1)).saves
    assert (save.replaced, [transfer.name for transfer in save.transfers]) == (NAMES[5], [NAMES[7], NAMES[8]])
    assert save.previous == NAMES[3]


def test_nothing_is_saved_beside_an_unconfirmed_load(engine: Engine) -> None:
    """If the load fails, what the step computes from its blocks is wrong - for all that share them."""
    engine.holds(4)
    loading, second, other = engine.arrives(132), engine.arrives(132, "second"), engine.arrives(132, "other")
    engine.enters(loading)
    engine.enters(second)
    engine.enters(other, computed=64)
    assert saved(engine.steps((loading, 68), (second, 68), (other, 68))) == []
    engine.side.progress(StepReport({}, {"second"}))
    assert saved(engine.steps((other, 1))) == []
    assert engine.ends(second) == (False, None)
    engine.side.progress(StepReport({}, {"r"}))
    assert set(saved(engine.steps((loading, 1), (other, 1)))) == {NAMES[5], NAMES[7]}


def test_blocks_of_a_finished_request_are_held_until_they_are_copied(engine: Engine) -> None:
    held, copied = engine.arrives(64), engine.arrives(64, "copied")
    engine.enters(held)
    engine.enters(copied)
    engine.reports(engine.steps((copied, 64)))
    work = engine.steps((held, 64))
    assert not engine.ends(copied)[0]
    assert engine.ends(held)[0] and engine.side.holds_blocks
    assert engine.steps().held == {"r"}
    engine.reports(work)
    assert not engine.side.holds_blocks


def test_what_could_not_be_saved_yet_is_saved_at_the_end(engine: Engine) -> None:
    engine.holds(2)
    request = engine.arrives(68)
    engine.enters(request)
    engine.reports(engine.steps((request, 36)))
    assert engine.ends(request)[0]
    work = engine.steps()
    assert saved(work) == [NAMES[3]] and work.held == {"r"}


def test_tokens_in_flight_at_the_end_are_not_saved(engine: Engine) -> None:
    request = engine.arrives(68)
    engine.enters(request)
    engine.reports(engine.steps((request, 36)))
    request.num_computed_tokens, request.num_in_flight_tokens = 68, 32
    assert engine.ends(request) == (False, None)
    assert engine.steps().saves == []


def test_request_aborted_while_it_receives_is_held_by_the_load_alone(made: Make) -> None:
    engine = made(enable_async_loading=True)
    engine.holds(4)
    request = engine.arrives(100)
    assert engine.enters(request) == (64, True)
    assert engine.steps().loads[0].asynchronous
    assert not engine.ends(request)[0]


def test_request_aborted_while_another_connector_loads_for_it_stores_nothing(engine: Engine) -> None:
    request = engine.arrives(100)
    assert engine.finds(request) == (0, False)
    engine.side.after_allocation(request, (), 0)
    request.num_computed_tokens = 96  # vLLM counts the tokens of an asynchronous load when it begins
    assert engine.ends(request) == (False, None)
    assert engine.steps().saves == []


def test_after_a_reset_nothing_stored_before_is_found(engine: Engine) -> None:
    engine.holds(4)
    running = engine.arrives(64, "running")
    engine.enters(running, computed=48)
    engine.side.reset()
    assert engine.side.has_news
    work = engine.steps((running, 16))
    assert len(work.generation) == 16
    assert saved(work) == [] == saved(engine.steps((running, 1)))
    request = engine.arrives(100)
    assert engine.enters(request) == (0, False)
    names = saved(engine.steps((request, 100)))
    assert len(names) == 3 and not set(names) & set(NAMES)


def test_a_request_that_begins_again_after_a_reset_is_saved(engine: Engine) -> None:
    request = engine.arrives(64)
    engine.enters(request)
    engine.reports(engine.steps((request, 64)))
    request.num_computed_tokens = 0
    engine.steps(preempted=("r",))
    engine.side.reset()
    assert engine.enters(request) == (0, False)
    names = saved(engine.steps((request, 64)))
    assert len(names) == 2 and not set(names) & set(NAMES)


def test_generated_tokens_are_saved_and_unimportant_requests_are_not(made: Make) -> None:
    engine = made(save_decode_cache=True, priority_limit=1)
    request, unimportant = engine.arrives(32), engine.arrives(64, "unimportant", priority=2)
    engine.enters(request)
    engine.enters(unimportant)
    assert saved(engine.steps((request, 32), (unimportant, 64))) == [NAMES[1]]
    request.num_tokens, request.block_hashes = 64, NAMES[:4]
    request.num_computed_tokens = 63
    assert saved(engine.steps((request, 1))) == [NAMES[3]]


# What workers are told


def test_workers_are_told_what_a_token_costs_when_it_is_known(engine: Engine, clock_s: list[float]) -> None:
    """Of a request whose prefill and decoding go on without a pause; once, as long as it stays the same."""
    request = SimpleNamespace(request_id="elsewhere", num_computed_tokens=0)
    told = []
    for _ in range(10):
        for tokens in (400, 400, 100, *[1] * 11):
            told.append(engine.steps((request, tokens)).token_s)
            clock_s[0] += 0.02 + 0.001 * tokens
    found = [token_s for token_s in told if token_s is not None]
    assert found == [pytest.approx(0.001, rel=0.05)]


# Adapters


class Adapter:
    """A LoRA's directory, which a thread looks at when `there` is set."""

    def __init__(self, directory: Path, engine: Engine) -> None:
        mount = Hanging()
        self.there = mount.go_on
        self.request = SimpleNamespace(lora_name="a", lora_path=str(save_adapter(directory)))
        self._names = engine.side.names
        self._names.adapters = Adapters(mount.place, time.time_ns() + 3600 * 10**9)

    def names(self) -> list[bytes]:
        """Of its blocks, while what they hold is not known to be something else."""
        key = self._names.adapters.key_of(self.request.lora_path).result(10)
        return self._names.extend([], cast(Any, SimpleNamespace(block_hashes=NAMES, cache_salt=None)), key)


def test_a_request_with_an_adapter_waits_until_it_is_known_what_it_holds(engine: Engine, tmp_path: Path) -> None:
    adapter = Adapter(tmp_path / "adapter", engine)
    request = engine.arrives(100, lora_request=adapter.request, kv_transfer_params={"tiercache.session": "s"})
    assert engine.side.matched_tokens(request, 0) == (None, False)
    assert not engine.side.has_news
    assert engine.enters(engine.arrives(100, "plain")) == (0, False), "others do not wait for it"
    adapter.there.set()
    names = adapter.names()
    assert not set(names) & set(NAMES)
    engine.puts(names[1])
    assert engine.enters(request) == (32, False)
    work = engine.steps((request, 68))
    assert [turn.names for turn in work.turns if isinstance(turn, RequestBegan)] == [names[1:6:2]]
    engine.reports(work)
    assert saved(engine.steps((request, 0))) == names[3:6:2]


def test_an_adapter_that_is_not_known_in_time_has_names_of_its_own(made: Make, tmp_path: Path) -> None:
    engine = made(lookup_timeout_ms=1)
    adapter = Adapter(tmp_path / "adapter", engine)
    request = engine.arrives(100, lora_request=adapter.request)
    assert engine.enters(request) == (0, False)
    given = set(saved(engine.steps((request, 100))))
    adapter.there.set()
    assert len(given) == 3 and not given & {*NAMES, *adapter.names()}
