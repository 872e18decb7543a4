"""The parts of the soak: what is asked, what is the same answer, and what it concludes; its servers run for an hour."""

from __future__ import annotations

from array import array
from dataclasses import replace

from tests.bench.vllm.soak import Answer, Asked, Look, Soak, findings, prompt_of, same
from tiercache.replay.formats import Request

ANSWER = Answer(["token_id:5", "token_id:6"], [-0.5, -1.5], [1.0, 0.002], 128)
ASKED = Asked(0.0, 1.0, array("i", [1, 2]), ANSWER)
FLAT = [Look(5.0 * number, 3000.0, 90, 60) for number in range(400)]


def request(*keys: bytes, time_s: float = 0.0) -> Request:
    return Request(time_s, list(keys), 64, 64 * len(keys), session="one")


def test_prompts_share_what_the_requests_share_and_end_differently() -> None:
    short, long = (prompt_of(one, 4) for one in (request(b"a"), request(b"a", b"b", time_s=1.0)))
    assert (len(short), len(long)) == (7, 11)
    assert short[:4] == long[:4] and short[4:] != long[4:7]
    assert prompt_of(request(b"a", b"b", time_s=1.0), 4) == long


def test_an_answer_is_the_same_up_to_a_token_where_two_were_equally_good() -> None:
    assert same(ANSWER, ANSWER)
    assert same(replace(ANSWER, logprobs=[-0.501, -1.5]), ANSWER)
    assert not same(replace(ANSWER, logprobs=[-0.52, -1.5]), ANSWER)
    assert same(replace(ANSWER, tokens=["token_id:5", "token_id:7"]), ANSWER)
    assert not same(replace(ANSWER, tokens=["token_id:7", "token_id:6"]), ANSWER)


def test_growth_failures_and_wrong_answers_miss_their_goals() -> None:
    def missed(found: Soak, wrong: int = 0, noticed: int = 5) -> list[str]:
        return [line for line in findings(found, 9, wrong, noticed, 5) if not line.startswith("reached")]

    assert missed(Soak([ASKED], FLAT)) == []
    grown = [replace(one, rss_mb=3000 + one.at_s / 10, descriptors=90 + int(one.at_s > 900)) for one in FLAT]
    assert [line.split()[1] for line in missed(Soak([ASKED], grown))] == ["rss_mb", "descriptors"]
    assert missed(Soak([ASKED], FLAT, ["refused"])) == ["missed: 1 of 2 requests failed"]
    assert missed(Soak([ASKED], FLAT), wrong=1) == ["missed: 1 of 9 answers are wrong (1 requests had hits)"]
    assert missed(Soak([ASKED], FLAT), noticed=4) == ["missed: 4 of 5 prompts with another first block are told apart"]
    assert missed(Soak([ASKED], FLAT[:200])) == ["missed: too short to say whether anything grows"]
