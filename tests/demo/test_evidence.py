"""Where a hit came from is read from the request's own log line."""

from pathlib import Path

import pytest

from tiercache.demo.server import Server

# ruff: noqa: E501
LOG = """\
INFO 11-21 06:34:13 [tiercache.vllm] Reqid: chatcmpl-afd7-bbe6, Total tokens 6043, engine computed tokens: 0, hit tokens: 0 (cpu: 0, disk: 0), need to load: 0
INFO 11-21 06:34:18 [tiercache.vllm] Stored 2048 out of total 6043 tokens for request chatcmpl-afd7-bbe6
INFO 11-21 06:34:26 [tiercache.vllm] Stored 3968 out of total 6043 tokens for request chatcmpl-afd7-bbe6
INFO 11-21 06:34:32 [tiercache.vllm] Reqid: chatcmpl-ac9a-a548, Total tokens 6043, engine computed tokens: 6016, hit tokens: 6016 (cpu: 6016, disk: 0), need to load: 0
INFO 11-21 06:34:34 [tiercache.vllm] Reqid: chatcmpl-8dfc-a622, Total tokens 6043, engine computed tokens: 0, hit tokens: 6016 (cpu: 4096, disk: 1920), need to load: 6016
INFO 11-21 06:34:35 [tiercache.vllm] Reqid: chatcmpl-77aa-1234, Total tokens 6043, engine computed tokens: 1024, hit tokens: 6016 (cpu: 0, disk: 6016), need to load: 4992
"""


@pytest.fixture
def server(tmp_path: Path) -> Server:
    (tmp_path / "server.log").write_text(LOG)
    return Server("", tmp_path / "server.log", 0)


@pytest.mark.parametrize(
    ("request_id", "source"),
    [
        ("chatcmpl-afd7", ""),
        ("chatcmpl-ac9a", "vllm"),
        ("chatcmpl-8dfc", "cpu+disk"),
        ("chatcmpl-77aa", "vllm+disk"),
        ("chatcmpl-0000", ""),
    ],
    ids=["cold", "only the engine loads nothing", "two tiers", "engine and tier", "no line"],
)
def test_a_hit_is_credited_to_the_engine_and_to_the_tiers_that_load(server: Server, request_id: str, source: str) -> None:
    assert server.source_of(request_id) == source


def test_stored_tokens_add_up_over_the_steps_of_a_prefill(server: Server) -> None:
    assert server.stored_tokens("chatcmpl-afd7") == 6016
    assert server.stored_tokens("chatcmpl-ac9a") == 0
