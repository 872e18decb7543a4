"""What is asked about the chunks of vLLM's requests, and when nothing has to be asked."""

from __future__ import annotations

import pytest

from tiercache import Config
from tiercache.integrations.vllm.hints import Wishes
from tiercache.integrations.vllm_offloading.identity import say_whose_quotas
from tiercache.integrations.vllm_offloading.requests import Answer, TieredRequests

FULL, WINDOW = (0).to_bytes(4, "big"), (1).to_bytes(4, "big")
ONE, TWO, THREE = (bytes([number]) * 32 + FULL for number in range(3))


def test_what_memory_knows_is_answered_at_once() -> None:
    requests = TieredRequests({ONE}.__contains__)
    assert requests.look_up("a", ONE) is True
    assert requests.questions() == []


def test_what_nobody_knows_is_asked_once() -> None:
    requests = TieredRequests(set[bytes]().__contains__)
    assert [requests.look_up("a", ONE), requests.look_up("a", ONE)] == [None, None]
    (question,) = requests.questions()
    assert (question.request_id, question.runs) == ("a", [[ONE]])
    assert requests.look_up("a", ONE) is None
    assert requests.questions() == []


def test_an_answer_stays_until_the_request_ends() -> None:
    requests = TieredRequests(set[bytes]().__contains__)
    requests.look_up("a", ONE)
    requests.look_up("a", TWO)
    requests.answer(Answer("a", {ONE: True, TWO: False}, 0.1))
    assert [requests.look_up("a", ONE), requests.look_up("a", TWO)] == [True, False]
    requests.end("a")
    assert requests.look_up("a", TWO) is None


def test_an_answer_to_a_request_that_has_ended_is_dropped() -> None:
    requests = TieredRequests(set[bytes]().__contains__)
    requests.look_up("a", ONE)
    requests.end("a")
    requests.answer(Answer("a", {ONE: True}, 0.1))
    assert len(requests) == 0


def test_a_prompt_is_one_question_as_far_as_vllm_walks_forward() -> None:
    requests = TieredRequests(set[bytes]().__contains__)
    for end, name in enumerate((ONE, TWO, THREE)):
        requests.look_up("a", name, end)
    (question,) = requests.questions()
    assert question.runs == [[ONE, TWO, THREE]]


def test_chunks_of_windows_are_asked_for_one_by_one() -> None:
    """vLLM walks backward through them: one is of use though the one before it is missing."""
    requests = TieredRequests(set[bytes]().__contains__)
    requests.look_up("a", ONE, 32)
    requests.look_up("a", TWO, 64)
    window = [name[:-4] + WINDOW for name in (ONE, TWO)]
    requests.look_up("a", window[1], 64)
    requests.look_up("a", window[0], 32)
    (question,) = requests.questions()
    assert question.runs == [[ONE, TWO], [window[1]], [window[0]]]


def test_what_a_request_has_waited_counts_for_its_next_questions() -> None:
    requests = TieredRequests(set[bytes]().__contains__)
    requests.look_up("a", ONE)
    requests.questions()
    requests.answer(Answer("a", {ONE: True}, 0.3))
    requests.look_up("a", TWO)
    requests.look_up("b", TWO)
    assert [question.waited_s for question in requests.questions()] == [0.3, 0.0]


def test_a_load_that_failed_is_a_miss_though_memory_knows_the_chunk() -> None:
    requests = TieredRequests({ONE}.__contains__)
    requests.look_up("a", ONE)
    requests.could_not_load("a", [ONE])
    assert requests.look_up("a", ONE) is False
    assert requests.look_up("b", ONE) is True


def test_a_reset_makes_answers_void_and_requests_stale() -> None:
    requests = TieredRequests(set[bytes]().__contains__)
    requests.look_up("a", ONE)
    requests.answer(Answer("a", {ONE: True}, 0.1))
    requests.forget_everything()
    assert requests.look_up("a", ONE) is None
    assert requests.is_stale("a") and not requests.is_stale("b")


def test_chunks_of_a_session_are_told_in_the_order_of_the_prompt() -> None:
    requests = TieredRequests(set[bytes]().__contains__)
    requests.begin("a", Wishes(session="chat"))
    requests.look_up("a", TWO, 64)
    requests.look_up("a", ONE, 32)
    (begun,) = requests.begun()
    assert begun.names == [ONE, TWO]
    assert requests.begun() == []
    requests.stores("a", {THREE: 96})
    ended = requests.end("a")
    assert ended is not None and ended.names == [ONE, TWO, THREE]


def test_of_requests_that_say_nothing_nothing_is_kept() -> None:
    requests = TieredRequests({ONE}.__contains__)
    requests.begin("a", Wishes())
    requests.look_up("a", ONE, 32)
    requests.stores("a", {TWO: 64})
    ended = requests.end("a")
    assert ended is not None and not ended.ends and not ended.answers


def test_quotas_that_hold_for_all_tenants_together_are_named(caplog: pytest.LogCaptureFixture) -> None:
    say_whose_quotas(Config(max_local_cpu_size=0.1))
    assert not caplog.records
    say_whose_quotas(Config(max_local_cpu_size=0.1, tenant_max_local_cpu_size=0.05))
    assert "together" in caplog.text
