"""The simulator against traces small enough to follow by hand."""

from dataclasses import replace
from pathlib import Path

import pytest

from tiercache.replay.bounds import optimal_hits, survey
from tiercache.replay.figures import Figures, ttft_figures
from tiercache.replay.formats import Request, Trace, TraceError
from tiercache.replay.setting import Hardware, Setting, SettingError, parse_size
from tiercache.replay.simulator import Simulator

EXCERPTS = Path(__file__).parent / "excerpts"
TOKENS = 10
BLOCK = 100  # bytes
HARDWARE = Hardware(
    bytes_per_token=BLOCK // TOKENS, prefill_tokens_per_s=10.0, decode_tokens_per_s=1.0, ram_bytes_per_s=1000.0,
    flash_read_bytes_per_s=200.0, flash_latency_s=0.0,
)  # fmt: skip


def request(time_s: float, blocks: str, session: str | None = None, *, took_s: float = 1.0) -> Request:
    keys = [blocks[: end + 1].encode() for end in range(len(blocks))]
    return Request(time_s, keys, TOKENS, TOKENS * len(blocks), session=session, duration_s=took_s)


def simulated(requests: list[Request], ram: int, flash: int | None = 0, **known: object) -> Figures:
    setting = Setting(ram, flash, **({"hardware": HARDWARE} | known))  # type: ignore[arg-type]
    return Simulator(setting, TOKENS).run(requests)


def test_only_the_contiguous_prefix_counts() -> None:
    """abc, then xyz pushes c and b out (the tail first), then abc finds a alone."""
    figures = simulated([request(0, "abc"), request(10, "xy"), request(20, "abc")], ram=3)
    assert figures.blocks == 8
    assert figures.ram_blocks == 1
    assert figures.inserted_blocks == 3 + 2 + 2


def test_time_to_first_token_is_loading_and_computing() -> None:
    """RAM: 100 bytes at 1000 B/s; flash: 100 bytes at 200 B/s; computing: 10 tokens at 10/s. The last token always is."""
    first = simulated([request(0, "ab")], ram=4)
    assert max(first.ttft_s) == pytest.approx(2.0, rel=0.01)
    again = simulated([request(0, "ab"), request(10, "abc")], ram=4)
    assert max(again.ttft_s) == pytest.approx(2.0, rel=0.01)
    assert min(again.ttft_s) == pytest.approx(0.2 + 1.0, rel=0.01)
    assert again.saved_s == pytest.approx(3.0 - 1.2)


def test_what_lies_on_flash_is_waited_for() -> None:
    figures = simulated([request(0, "ab"), request(10, "xy"), request(20, "abc")], ram=2, flash=None)
    assert (figures.ram_blocks, figures.flash_blocks) == (0, 2)
    assert figures.flash_written_blocks == 5
    # 2 blocks from flash (1 s), onto the GPU (0.2 s), one computed (1 s).
    assert max(figures.ttft_s) == pytest.approx(2.2, rel=0.01)


def test_demand_reads_wait_for_each_other() -> None:
    requests = [request(0, "ab"), request(1, "cd"), request(2, "xy"), request(20, "ab"), request(20, "cd")]
    figures = simulated(requests, ram=2, flash=None)
    # The second one finds the flash busy for a second; the last token of each is computed.
    assert max(figures.ttft_s) == pytest.approx(2 + 0.2 + 0.1, rel=0.01)


def test_an_engine_takes_one_request_at_a_time() -> None:
    two = [request(0, "ab"), request(0, "cd")]
    assert max(simulated(two, ram=4).ttft_s) == pytest.approx(2, rel=0.01)
    one_engine = Hardware(**{**vars(HARDWARE), "engines": 1})
    assert max(simulated(two, ram=4, hardware=one_engine).ttft_s) == pytest.approx(4, rel=0.01)


def test_waiting_for_an_engine_neither_saves_nor_costs_prefill() -> None:
    one_engine = Hardware(**{**vars(HARDWARE), "engines": 1})
    two = [request(0, "ab"), request(0, "cd")]
    assert simulated(two, ram=0, hardware=one_engine).saved_s == pytest.approx(0)


def test_second_touch_writes_what_was_needed_twice() -> None:
    requests = [request(0, "ab"), request(1, "ac"), request(2, "ab")]
    figures = simulated(requests, ram=8, flash=None, admission="second_touch")
    assert figures.flash_written_blocks == 2, "a at its second use, ab at its second; ac was needed once"


def test_live_sessions_are_written_with_their_newest_turn() -> None:
    requests = [request(0, "ab"), request(1, "abc"), request(2, "xy")]
    figures = simulated(requests, ram=8, flash=None, admission="live_session")
    assert figures.flash_written_blocks == 3


SESSION = [request(0, "ab", "s"), request(5, "xy", "other"), request(20, "abc", "s")]


def test_what_is_announced_is_in_ram_when_it_is_needed() -> None:
    without = simulated(SESSION, ram=2, flash=None)
    assert (without.ready, without.flash_blocks) == (0, 2)
    figures = simulated(SESSION, ram=2, flash=None, prefetch=("hints",), prefetch_share=1.0)
    assert (figures.ready, figures.flash_blocks) == (1, 0)
    assert figures.accounts["hints"].used_bytes == 2 * BLOCK
    assert figures.accounts["hints"].wasted_bytes == 0
    assert figures.hit == without.hit
    assert max(figures.ttft_s) <= max(without.ttft_s)


def test_what_is_announced_too_late_is_late_and_read_on_demand() -> None:
    figures = simulated(SESSION, ram=2, flash=None, prefetch=("hints",), prefetch_share=1.0, hint_lead_s=0.75)
    account = figures.accounts["hints"]
    assert (account.used_bytes, account.late_bytes) == (BLOCK, BLOCK)
    assert figures.flash_blocks == 1


@pytest.mark.parametrize(("took_s", "used_blocks"), [(19.8, 0), (10.0, 2)])
def test_a_turn_is_announced_when_the_answer_before_it_has_ended(took_s: float, used_blocks: int) -> None:
    """The next turn comes at 20 s, and its lead is longer than what is left then."""
    requests = [request(0, "ab", "s", took_s=took_s), request(5, "xy", "other"), request(20, "abc", "s")]
    figures = simulated(requests, ram=2, flash=None, prefetch=("hints",), prefetch_share=1.0, hint_lead_s=15.0)
    assert figures.accounts["hints"].used_bytes == used_blocks * BLOCK


def test_a_request_is_announced_as_long_before_as_it_says() -> None:
    """Its two blocks take a second to read, and another request comes four times a second."""
    busy = [request(1 + number / 4, "xy") for number in range(84)]
    announced = replace(request(22, "abc"), lead_s=10.0)
    requests = [request(0, "ab"), request(0.5, "pqrs"), *busy, announced]
    figures = simulated(requests, ram=4, flash=None, prefetch=("hints",), prefetch_share=1.0, hint_lead_s=0.0)
    assert figures.accounts["hints"].used_bytes == 2 * BLOCK


def test_sessions_learn_when_the_next_turn_comes() -> None:
    """Two sessions take turns, ten seconds each, in a cache that holds one of them."""
    requests = [request(5.0 * turn, "ab" if turn % 2 else "xy", f"s{turn % 2}", took_s=0.5) for turn in range(100)]
    without = simulated(requests, ram=2, flash=None)
    figures = simulated(requests, ram=2, flash=None, prefetch=("sessions",), prefetch_share=1.0)
    account = figures.accounts["sessions"]
    assert without.ready == 0
    assert figures.ready > 0.8
    assert account.wasted_bytes < 0.1 * account.promoted_bytes


def test_measuring_begins_where_it_is_told_to() -> None:
    requests = [request(0, "ab"), request(1, "ab")]
    figures = Simulator(Setting(4, hardware=HARDWARE), TOKENS).run(requests, measure_from=1)
    assert (figures.requests, figures.blocks, figures.ram_blocks, figures.hit) == (1, 2, 2, 1.0)


def test_the_optimum_knows_what_comes() -> None:
    """One place: LRU never hits, the all-knowing keeps a."""
    requests = [request(number, "a" if number % 2 else "xy"[number // 2 % 2]) for number in range(20)]
    assert simulated(requests, ram=1).hit == 0
    assert optimal_hits(requests, [1], 0)[1] == pytest.approx(9 / 20)


@pytest.mark.parametrize("policy", ["LRU", "FIFO", "LFU", "MRU"])
@pytest.mark.parametrize("name", ["mooncake_conversation", "agentic_coding"])
def test_no_policy_beats_the_bounds_on_real_requests(name: str, policy: str) -> None:
    trace = Trace(EXCERPTS / f"{name}.jsonl")
    found = survey(trace)
    ram_blocks = found.unique_blocks // 10
    hit = Simulator(Setting(ram_blocks, policy=policy), found.block_tokens).run(trace).hit
    infinite = Simulator(Setting(1 << 40), found.block_tokens).run(trace).hit
    assert hit <= optimal_hits(trace, [ram_blocks], 0)[ram_blocks] <= infinite + 1e-9


def test_real_requests_give_the_figures_that_they_gave() -> None:
    """A regression: the excerpts through LRU and FIFO, at a tenth of the unique blocks."""
    found = {}
    for name in ("mooncake_conversation", "agentic_coding"):
        trace = Trace(EXCERPTS / f"{name}.jsonl")
        known = survey(trace)
        for policy in ("LRU", "FIFO"):
            setting = Setting(known.unique_blocks // 10, policy=policy)
            figures = Simulator(setting, known.block_tokens).run(trace, known.requests // 2)
            found[name, policy] = round(100 * figures.hit, 1)
    assert found == {
        ("mooncake_conversation", "LRU"): 3.4,
        ("mooncake_conversation", "FIFO"): 3.4,
        ("agentic_coding", "LRU"): 27.7,
        ("agentic_coding", "FIFO"): 27.7,
    }


def test_quantiles_of_times() -> None:
    assert ttft_figures([number / 100 for number in range(1, 1001)]) == pytest.approx(
        {"ttft_mean_s": 5.005, "ttft_p50_s": 5.0, "ttft_p95_s": 9.5, "ttft_p99_s": 9.9}
    )
    assert not any(ttft_figures([]).values())


def test_sizes() -> None:
    assert parse_size("10%", BLOCK, 50) == 5
    assert parse_size("1KB", BLOCK, None) == 10
    assert parse_size("12", BLOCK, None) == 12
    assert parse_size("all", BLOCK, None) is None
    for text in ("ten", "-3", "5PB"):
        with pytest.raises(SettingError, match="expected 10%, 64GB, a number of blocks or all"):
            parse_size(text, BLOCK, 50)


def test_blocks_of_two_sizes_are_refused() -> None:
    with pytest.raises(TraceError, match="expected one size, found 10 and 20 tokens"):
        survey([request(0, "a"), Request(1, [b"x"], 20, 20)])
    with pytest.raises(TraceError, match="no request"):
        survey([])


@pytest.mark.parametrize("policy", ["LRU", "LFU"])
def test_a_scan_beside_a_trace_costs_nothing_with_quotas_and_everything_without(policy: str) -> None:
    turns = [request(10 * number, "abcdefgh") for number in range(10)]
    alone = simulated(turns, ram=8, policy=policy)
    beside = simulated(turns, ram=16, policy=policy, noisy=10.0)
    quotas = simulated(turns, ram=16, policy=policy, noisy=10.0, quotas=True)
    assert (alone.hit, quotas.hit) == (0.9, 0.9) and beside.hit < 0.2
