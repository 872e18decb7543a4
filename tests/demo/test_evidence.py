"""Where a hit came from is read from the request's own log line."""

import pytest

from tiercache.demo.evidence import found_for, stored_tokens

# ruff: noqa: E501
LOG = """\
INFO 11-21 06:34:13 [tiercache.vllm] Reqid: chatcmpl-afd7-bbe6, Total tokens 6043, engine computed tokens: 0, hit tokens: 0 (cpu: 0, disk: 0), need to load: 0
INFO 11-21 06:34:18 [tiercache.vllm] Stored 2048 out of total 6043 tokens for request chatcmpl-afd7-bbe6
INFO 11-21 06:34:26 [tiercache.vllm] Stored 3968 out of total 6043 tokens for request chatcmpl-afd7-bbe6
INFO 11-21 06:34:32 [tiercache.vllm] Reqid: chatcmpl-ac9a-a548, Total tokens 6043, engine computed tokens: 6016, hit tokens: 6016 (cpu: 6016, disk: 0), need to load: 0
INFO 11-21 06:34:34 [tiercache.vllm] Reqid: chatcmpl-8dfc-a622, Total tokens 6043, engine computed tokens: 0, hit tokens: 6016 (cpu: 4096, disk: 1920), need to load: 6016
INFO 11-21 06:34:35 [tiercache.vllm] Reqid: chatcmpl-77aa-1234, Total tokens 6043, engine computed tokens: 1024, hit tokens: 6016 (cpu: 0, disk: 6016), need to load: 4992
"""


@pytest.mark.parametrize(
    ("request_id", "by_tier", "source"),
    [
        ("chatcmpl-afd7", {"cpu": 0, "disk": 0}, ""),
        ("chatcmpl-ac9a", {"cpu": 6016, "disk": 0}, "vllm"),
        ("chatcmpl-8dfc", {"cpu": 4096, "disk": 1920}, "cpu+disk"),
        ("chatcmpl-77aa", {"cpu": 0, "disk": 6016}, "vllm+disk"),
    ],
    ids=["cold", "only the engine loads nothing", "two tiers", "engine and tier"],
)
def test_a_hit_is_credited_to_the_engine_and_to_the_tiers_that_load(
    request_id: str, by_tier: dict[str, int], source: str
) -> None:
    found = found_for(request_id, LOG)
    assert found is not None
    assert (found.total_tokens, found.hit_tokens, found.tokens_by_tier) == (6043, sum(by_tier.values()), by_tier)
    assert found.source == source


def test_a_request_without_a_line_has_no_evidence() -> None:
    assert found_for("chatcmpl-0000", LOG) is None


def test_stored_tokens_add_up_over_the_steps_of_a_prefill() -> None:
    assert stored_tokens("chatcmpl-afd7", LOG) == 6016
    assert stored_tokens("chatcmpl-ac9a", LOG) == 0
