"""What a token costs, from an engine whose steps are known."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tiercache.core.estimate import PrefillCost

BASE_S, TOKEN_S = 0.03, 0.001


def engine(prompts: list[int], budget: int = 512, tokens: int = 20) -> Iterator[tuple[list[str], int]]:
    """One request after the other joins those that decode, each for so many steps."""
    decoding: dict[str, int] = {}
    for number, prompt in enumerate(prompts):
        left = prompt
        while left:
            part = min(left, budget)
            left -= part
            yield [*decoding, f"r{number}"], part + len(decoding)
            decoding = {name: steps - 1 for name, steps in decoding.items() if steps > 1}
        decoding[f"r{number}"] = tokens
    while decoding:
        yield list(decoding), len(decoding)
        decoding = {name: steps - 1 for name, steps in decoding.items() if steps > 1}


def watch(cost: PrefillCost, steps: Iterator[tuple[list[str], int]], late: int = 0, now_s: float = 100.0) -> float:
    """An engine that says when it schedules a step: up to `late` steps before it computes it."""
    ends = [now_s] * (late + 1)
    for requests, tokens in steps:
        cost.began(requests, tokens, ends[0])
        ends = [*ends[1:], ends[-1] + BASE_S + TOKEN_S * tokens]
    return ends[-1]


@pytest.mark.parametrize("late", [0, 1, 2])
def test_found_also_where_steps_are_scheduled_ahead(late: int) -> None:
    cost = PrefillCost()
    watch(cost, engine([900, 300, 1700, 40, 500, 1200, 800, 100, 350, 1500]), late)
    assert cost.token_s == pytest.approx(TOKEN_S, rel=0.15 if late else 1e-6)


def test_of_decoding_alone_nothing_is_known() -> None:
    cost = PrefillCost()
    watch(cost, engine([8] * 4, tokens=200))
    assert cost.token_s is None and cost.news() is None


def test_pauses_do_not_count() -> None:
    cost = PrefillCost()
    end_s = 0.0
    for _ in range(10):
        end_s = watch(cost, engine([900, 300, 1700]), now_s=end_s + 60)
    assert cost.token_s == pytest.approx(TOKEN_S, rel=1e-6)


def test_noise_does_not_make_the_engine_quick_beyond_belief() -> None:
    cost, now_s = PrefillCost(), 0.0
    for step in range(400):
        tokens = 512 if step // 8 % 2 else 1
        cost.began(["r"], tokens, now_s)
        now_s += 0.1 if tokens == 512 else 0.4
    assert cost.token_s == pytest.approx(0.25 * 0.1 / 512, rel=0.1)


def test_news_are_what_changed() -> None:
    cost = PrefillCost()
    end_s = watch(cost, engine([900, 300, 1700] * 2))
    assert cost.news() == cost.token_s is not None
    end_s = watch(cost, engine([900, 300, 1700] * 2), now_s=end_s)
    assert cost.news() is None
    steps = [(requests, 3 * tokens) for requests, tokens in engine([900, 300, 1700] * 20)]
    seen_s, now_s = [], end_s
    for requests, tokens in steps:  # a token takes three times as long as it says
        cost.began(requests, tokens // 3, now_s)
        now_s += BASE_S + TOKEN_S * tokens
        seen_s += [news] if (news := cost.news()) else []
    assert seen_s and seen_s[-1] == pytest.approx(3 * TOKEN_S, rel=0.15)
