"""The sentences of `tiercache advise`, each from figures that call for it."""

from dataclasses import replace
from typing import Any

import pytest

from tiercache.core.advice import REASONS, Advice, TierAdvice, Usage, sentences, size

GIB = 1 << 30
RAM = TierAdvice(64 * GIB, 0.40, 0.30, 0.51, 0, 0, True)
DISK = TierAdvice(2048 * GIB, 0.43, 0.42, 0.431, 2048 * GIB, 1024 * GIB, True)
QUIET = Advice(86400.0, 1000, 5000, None, 100, 1.0, Usage(10_000, 4000), {}, {"cpu": RAM})


def missed(**tokens: float) -> Advice:
    return replace(QUIET, usage=replace(QUIET.usage, missed_tokens=dict.fromkeys(REASONS, 0.0) | tokens))


def with_disk(advice: Advice = QUIET, **disk: Any) -> list[str]:
    return sentences(replace(advice, tiers={"cpu": RAM, "disk": replace(DISK, **disk)}))


def test_few_requests_are_no_ground_for_advice() -> None:
    assert sentences(replace(QUIET, requests=12)) == ["12 requests so far: too few for advice, which begins at 100."]


@pytest.mark.parametrize(
    ("halved", "doubled", "said"),
    [
        (0.30, 0.51, "64 GB more RAM: +11.0 points of hit rate."),
        (0.30, 0.402, "More RAM is not worth it: twice as much brings +0.2 points of hit rate."),
        (0.397, 0.402, "Less RAM would do: 32 GB less costs 0.3 points of hit rate."),
    ],
)
def test_more_ram_enough_ram_and_too_much(halved: float, doubled: float, said: str) -> None:
    ram = replace(RAM, hit_rate_halved=halved, hit_rate_doubled=doubled)
    assert sentences(replace(QUIET, tiers={"cpu": ram}))[0] == said


def test_more_ram_above_a_disk_that_has_the_chunks_moves_hits_to_ram() -> None:
    said = with_disk(hit_rate=0.5, hit_rate_doubled=0.5)[0]
    assert said == "64 GB more RAM: +11.0 points of hits in RAM, +1.0 points of hit rate with the other tiers."


def test_a_disk_that_is_read_back() -> None:
    assert with_disk()[1] == "disk: +3.0 points, 2 TB written a day, 2.0 bytes for each byte read again."


@pytest.mark.parametrize("read_bytes", [0, GIB])
def test_a_disk_that_is_written_in_vain(read_bytes: int) -> None:
    in_vain: dict[str, Any] = {"hit_rate": 0.403, "hit_rate_doubled": 0.403, "read_bytes": read_bytes}
    said = with_disk(**in_vain)[1]
    assert said.startswith("disk: +0.3 points, 2 TB written a day")
    assert said.endswith(": consider `flash_admission: second_touch`.")
    assert "second_touch" not in with_disk(**in_vain, admits_all=False)[1]


def test_a_tier_whose_admission_cannot_be_set_gets_no_advice_about_it() -> None:
    weka = replace(DISK, read_bytes=0)
    assert "second_touch" not in " ".join(sentences(replace(QUIET, tiers={"cpu": RAM, "weka": weka})))


def test_a_larger_disk() -> None:
    assert with_disk(hit_rate_doubled=0.48)[2] == "2 TB more disk: +5.0 points of hit rate."


def test_reasons_of_many_misses_come_in_their_order() -> None:
    found = sentences(missed(never_stored=69.0, partial_chunk=31.0))
    assert found[1:3] == [
        "69 % of misses are asked for the first time: no cache of any size has those.",
        "31 % of misses are partial chunks: `save_unfull_chunk`, or a smaller `chunk_size`.",
    ]


def test_a_reason_of_few_misses_is_not_mentioned() -> None:
    assert not any("partial" in said for said in sentences(missed(never_stored=95.0, partial_chunk=5.0)))


def test_hits_that_a_tier_is_too_slow_for_are_not_counted_on() -> None:
    sampled = replace(QUIET, usage=replace(QUIET.usage, sampled_tokens=10_000.0))
    rates = {"hit_rate": 0.6, "hit_rate_halved": 0.5, "hit_rate_doubled": 0.7}
    said = with_disk(sampled, **rates, slow_tokens=2000.0)
    assert said[0] == "64 GB more RAM: +11.0 points of hit rate."
    assert said[1].startswith("disk: +0.0 points, 2 TB written a day")
    assert said[2] == "More disk is not worth it while loading from it is slower than computing."
    said = with_disk(sampled, **rates, slow_tokens=500.0)
    assert said[0] == "64 GB more RAM: +11.0 points of hits in RAM, +0.0 points of hit rate with the other tiers."
    assert said[1].startswith("disk: +15.0 points")
    assert said[2] == "2 TB more disk: +10.0 points of hit rate."


def test_prefill_that_was_saved() -> None:
    assert sentences(QUIET)[-1] == (
        "5,000 tokens were loaded instead of computed; how many seconds that saved is unknown: set `prefill_tokens_per_s`."
    )
    assert sentences(replace(QUIET, saved_s=7200.0))[-1] == (
        "5,000 tokens were loaded instead of computed: 7,200 s of prefill saved in 86,400 s."
    )


@pytest.mark.parametrize(
    ("size_bytes", "said"), [(512, "0.5 KB"), (3 << 20, "3 MB"), (96 * GIB, "96 GB"), (1.5 * 1024 * GIB, "1.5 TB")]
)
def test_sizes_have_the_unit_of_the_configuration(size_bytes: float, said: str) -> None:
    assert size(size_bytes) == said
