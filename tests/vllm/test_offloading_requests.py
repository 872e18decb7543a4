"""What is asked about the chunks of vLLM's requests, and when nothing has to be asked."""

from __future__ import annotations

import pytest

from tiercache import Config
from tiercache.integrations.vllm.hints import Wishes
from tiercache.integrations.vllm_offloading.identity import say_whose_quotas
from tiercache.integrations.vllm_offloading.requests import TieredRequest

FULL, WINDOW = (0).to_bytes(4, "big"), (1).to_bytes(4, "big")
ONE, TWO, THREE = (bytes([number]) * 32 + FULL for number in range(3))


def unknown(name: bytes) -> bool:
    return False


def known(name: bytes) -> bool:
    return True


def test_what_memory_knows_is_answered_at_once() -> None:
    request = TieredRequest()
    assert request.look_up(ONE, 32, known) is True
    assert request.take_unasked() == []


def test_what_nobody_knows_is_asked_once() -> None:
    request = TieredRequest()
    assert [request.look_up(ONE, 32, unknown), request.look_up(ONE, 32, unknown)] == [None, None]
    assert request.take_unasked() == [[ONE]]
    assert request.look_up(ONE, 32, unknown) is None
    assert request.take_unasked() == []


def test_an_answer_stays_until_the_request_ends() -> None:
    request = TieredRequest()
    request.look_up(ONE, 32, unknown)
    request.look_up(TWO, 64, unknown)
    request.answered(request.take_unasked(), [1], 0.1)
    assert [request.look_up(ONE, 32, unknown), request.look_up(TWO, 64, known)] == [True, False]


def test_a_prompt_is_one_run_as_far_as_vllm_walks_forward() -> None:
    request = TieredRequest()
    for end, name in enumerate((ONE, TWO, THREE)):
        request.look_up(name, end, unknown)
    assert request.take_unasked() == [[ONE, TWO, THREE]]


def test_chunks_of_windows_are_runs_of_their_own() -> None:
    """vLLM walks backward through them: one is of use though the one before it is missing."""
    request = TieredRequest()
    request.look_up(ONE, 32, unknown)
    request.look_up(TWO, 64, unknown)
    window = [name[:-4] + WINDOW for name in (ONE, TWO)]
    request.look_up(window[1], 96, unknown)
    request.look_up(window[0], 64, unknown)
    assert request.take_unasked() == [[ONE, TWO], [window[1]], [window[0]]]


def test_what_a_request_has_waited_adds_up() -> None:
    request = TieredRequest()
    for name, took_s in ((ONE, 0.25), (TWO, 0.5)):
        request.look_up(name, 32, unknown)
        request.answered(request.take_unasked(), [1], took_s)
    assert request.waited_s == 0.75


def test_a_load_that_failed_is_a_miss_though_memory_knows_the_chunk() -> None:
    request = TieredRequest()
    request.look_up(ONE, 32, known)
    request.could_not_load([ONE])
    assert request.look_up(ONE, 32, known) is False


def test_a_reset_makes_answers_void_and_requests_stale() -> None:
    request = TieredRequest()
    request.look_up(ONE, 32, unknown)
    request.answered(request.take_unasked(), [1], 0.1)
    request.reset()
    assert request.look_up(ONE, 32, unknown) is None
    assert request.stale


def test_chunks_of_a_session_are_told_in_the_order_of_the_prompt() -> None:
    request = TieredRequest(Wishes(session="chat"))
    assert not request.began
    request.look_up(TWO, 64, known)
    request.look_up(ONE, 32, known)
    assert request.began
    request.stores({THREE: 96})
    assert request.names == [ONE, TWO, THREE]


def test_of_requests_that_say_nothing_nothing_is_kept() -> None:
    request = TieredRequest()
    request.look_up(ONE, 32, known)
    request.stores({TWO: 64})
    assert not request.began and not request.names


def test_quotas_that_hold_for_all_tenants_together_are_named(caplog: pytest.LogCaptureFixture) -> None:
    say_whose_quotas(Config(max_local_cpu_size=0.1))
    assert not caplog.records
    say_whose_quotas(Config(max_local_cpu_size=0.1, tenant_max_local_cpu_size=0.05))
    assert "together" in caplog.text
