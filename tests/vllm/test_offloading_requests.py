"""What is asked about the chunks of vLLM's requests, and when nothing has to be asked."""

from __future__ import annotations

from tiercache.integrations.vllm.hints import Wishes
from tiercache.integrations.vllm_offloading.requests import TieredRequest

FULL, WINDOW = (0).to_bytes(4, "big"), (1).to_bytes(4, "big")
ONE, TWO, THREE = (bytes([number]) * 32 + FULL for number in range(3))


def unknown(name: bytes) -> bool:
    return False


def known(name: bytes) -> bool:
    return True


def test_what_memory_knows_is_answered_at_once_unless_its_load_failed() -> None:
    request = TieredRequest()
    assert request.look_up(ONE, 32, known) is True
    assert request.take_unasked() == []
    request.could_not_load([ONE])
    assert request.look_up(ONE, 32, known) is False


def test_what_nobody_knows_is_asked_once_and_its_answer_stays_until_a_reset() -> None:
    request = TieredRequest()
    for name, end in ((ONE, 32), (TWO, 64), (ONE, 32)):
        assert request.look_up(name, end, unknown) is None
    asked = request.take_unasked()
    assert asked == [[ONE, TWO]]
    assert request.look_up(ONE, 32, unknown) is None
    assert request.take_unasked() == []
    request.answered(asked, [1], 0.1)
    assert [request.look_up(ONE, 32, unknown), request.look_up(TWO, 64, known)] == [True, False]
    assert not request.stale
    request.reset()
    assert request.look_up(ONE, 32, unknown) is None
    assert request.stale


def test_chunks_of_windows_are_runs_of_their_own() -> None:
    """vLLM walks backward through them: one is of use though the one before it is missing. A prompt is one run."""
    request = TieredRequest()
    for end, name in ((32, ONE), (64, TWO), (96, THREE)):
        request.look_up(name, end, unknown)
    window = [name[:-4] + WINDOW for name in (ONE, TWO)]
    request.look_up(window[1], 96, unknown)
    request.look_up(window[0], 64, unknown)
    assert request.take_unasked() == [[ONE, TWO, THREE], [window[1]], [window[0]]]


def test_what_a_request_has_waited_adds_up() -> None:
    request = TieredRequest()
    for name, took_s in ((ONE, 0.25), (TWO, 0.5)):
        request.look_up(name, 32, unknown)
        request.answered(request.take_unasked(), [1], took_s)
    assert request.waited_s == 0.75


def test_chunks_of_a_session_are_told_in_the_order_of_the_prompt_and_of_others_none_are_kept() -> None:
    request, silent = TieredRequest(Wishes(session="chat")), TieredRequest()
    assert not request.began
    for one in (request, silent):
        one.look_up(TWO, 64, known)
        one.look_up(ONE, 32, known)
        one.stores({THREE: 96})
    assert request.began and request.names == [ONE, TWO, THREE]
    assert not silent.began and not silent.names
