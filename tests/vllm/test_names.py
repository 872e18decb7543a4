"""Names of blocks are chained, cryptographic, and the same in every process. What a LoRA adapter holds is part of them,
where it is certain that the engine has loaded just that."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.memory.test_memory import no_thread_to_be_had
from tests.vllm.halves import Hanging, save_adapter
from tiercache.core.keys import keys_from_hashes, tenant_of, tenant_tag
from tiercache.integrations.model_files import identity_of_adapter
from tiercache.integrations.vllm.names import Adapters, BlockNames, nobodys_key
from tiercache.integrations.vllm.planning import BlockGeometry, HeadParts, KvGroup, in_parts, keys_of, names_of


def request(tokens: list[int], **more: Any) -> Any:
    made = SimpleNamespace(
        all_token_ids=tokens,
        num_tokens=len(tokens),
        mm_features=[],
        lora_request=None,
        cache_salt=None,
        prompt_embeds=None,
        block_hashes=[bytes([tokens[start]]) * 32 for start in range(0, len(tokens) - 3, 4)],
    )
    vars(made).update(more)
    return made


def test_a_cryptographic_engine_hash_is_taken_as_it_is() -> None:
    made = request(list(range(10)))
    assert BlockNames("sha256", 4).extend([], made) == made.block_hashes


def test_a_block_of_several_hashes_has_the_last() -> None:
    names, grown = BlockNames("sha256", 8, hash_tokens=4), request(list(range(37)))
    expected = grown.block_hashes[1:8:2]
    assert names.extend(names.extend([], request(list(range(23)))), grown) == expected


@pytest.mark.parametrize("geometry", ["one group", "two groups", "parts"])
def test_keys_of_a_request_with_a_salt_say_whose_they_are(geometry: str) -> None:
    groups = (KvGroup(0, 4), KvGroup(1, 4, window_tokens=6))
    place = {
        "one group": BlockGeometry(4, 1),
        "two groups": BlockGeometry(4, 1, groups=groups),
        "parts": in_parts(BlockGeometry(4, 1), groups, HeadParts(4, 2, 2)),
    }[geometry]
    for salt in ("", "quiet", "noisy"):
        names = BlockNames("sha256", 4).extend([], request(list(range(12)), cache_salt=salt or None))
        if geometry != "one group":
            names = names_of([(group, chunk) for group in range(len(place.groups)) for chunk in range(3)], names, place)
        found = keys_of(b"n" * 24, names, place)
        assert {tenant_of(key) for key in found} == {tenant_tag(salt)}
        if geometry == "one group" and not salt:
            assert found == keys_from_hashes(b"n" * 24, names), "as ever"


def test_a_caches_own_salt_and_a_requests_make_another_tenant_than_either() -> None:
    both = [
        BlockNames("sha256", 4, tenant_salt=own_salt).extend([], request(list(range(4)), cache_salt=salt))[0][32:]
        for own_salt, salt in [("", None), ("a", None), ("", "b"), ("a", "b")]
    ]
    assert both == [b"", tenant_tag("a"), tenant_tag("b"), tenant_tag("a", "b")]


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
@pytest.mark.parametrize("salt", ["", "tenant"])
@pytest.mark.parametrize("adapted", [False, True], ids=["base model", "adapter"])
async def test_announced_tokens_get_a_requests_names(algorithm: str, salt: str, adapted: bool, adapter: Path) -> None:
    """A request of vLLM's own class, hashed as vLLM's scheduler does."""
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    hash_function = get_hash_fn_by_name(algorithm)
    init_none_hash(hash_function)
    tokens = [number * 7 % 1000 for number in range(16 * 70 + 5)]
    real = Request(
        request_id="r",
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        lora_request=LoRARequest("a", 1, str(adapter)) if adapted else None,
        cache_salt=salt or None,
        block_hasher=get_request_block_hasher(16, hash_function),
    )
    names, worker = (BlockNames(algorithm, 16) for _ in range(2))
    names.adapters, worker.adapters = later_engine(), later_engine()
    adapter_key, lora = (key(names.adapters, adapter), ("a", str(adapter))) if adapted else (b"", None)
    expected = names.extend([], real, adapter_key)
    assert len(expected) == 70
    assert await worker.of_tokens(tokens, salt, lora) == expected
    worker.follow(names.forget_everything())
    after = names.extend([], real, adapter_key)
    assert await worker.of_tokens(tokens, salt, lora) == after and not set(after) & set(expected)
    assert await worker.of_tokens(tokens[:15], salt, lora) == [], "they fill no block"


# Adapters

AN_HOUR_NS = 3600 * 10**9


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return save_adapter(tmp_path / "adapter")


def later_engine(place_of: Callable[[str], Path | None] = Path) -> Adapters:
    """One that begins in an hour: what is written now is old then."""
    return Adapters(place_of, time.time_ns() + AN_HOUR_NS)


def key(of: Adapters, adapter: Path) -> bytes:
    found = of.key_of(str(adapter)).result(10)
    assert found is not None
    return found


def test_names_cover_what_an_adapter_holds_and_not_only_its_name_and_path(adapter: Path) -> None:
    made, found = request(list(range(8)), lora_request=SimpleNamespace(lora_name="a", lora_path=str(adapter))), []
    for content in (b"weights", b"weights", b"trained again"):
        save_adapter(adapter, content)
        names = BlockNames("sha256", 4)
        names.adapters = later_engine()
        found.append(names.extend([], made, key(names.adapters, adapter)))
    assert found[0] == found[1], "in every engine"
    assert not set(found[0]) & set(found[2])


def test_an_adapter_that_is_younger_than_the_engine_is_this_engines_affair(adapter: Path) -> None:
    """It may have loaded something else before."""
    engine = Adapters(Path)
    found = key(engine, adapter)
    assert key(engine, adapter) == found
    assert key(Adapters(Path), adapter) != found
    os.utime(adapter / "adapter_model.safetensors", ns=(AN_HOUR_NS, AN_HOUR_NS))
    assert key(Adapters(Path), adapter) != key(Adapters(Path), adapter), "copied just now with the time of long ago"
    save_adapter(adapter, b"trained again, and longer")
    assert key(engine, adapter) != found


def test_a_change_while_the_engine_runs_is_noticed_at_the_next_request(adapter: Path) -> None:
    engine = later_engine()
    found = key(engine, adapter)
    changed = key(engine, save_adapter(adapter, b"trained again"))
    assert len({found, changed, key(later_engine(), adapter)}) == 3, "the engine may have either"
    assert key(engine, adapter) == changed
    later = time.time_ns() + 2 * AN_HOUR_NS
    os.utime(save_adapter(adapter, b"Weights") / "adapter_model.safetensors", ns=(later, later))
    assert key(engine, adapter) not in (found, changed)
    assert key(later_engine(), adapter) != key(later_engine(), adapter)


@pytest.mark.parametrize("inside", [".", "adapter"], ids=["the adapter is a link", "a directory above it is one"])
def test_an_adapter_that_takes_the_place_of_another_is_this_engines_affair(tmp_path: Path, inside: str) -> None:
    """The engine may not have loaded it yet, though its files are older than the engine."""
    first, second = (tmp_path / name for name in ("first", "second"))
    for place in (first, second):
        place.mkdir()
        save_adapter(place / inside, place.name.encode())
    link = tmp_path / "link"
    link.symlink_to(first)
    engine, unasked = later_engine(), later_engine()
    assert key(engine, link / inside) == key(unasked, link / inside) == key(later_engine(), first / inside)
    for place in (second, first):
        link.unlink()
        link.symlink_to(place)
        assert key(engine, link / inside) != key(later_engine(), place / inside)
    assert key(unasked, link / inside) != key(later_engine(), first / inside), "it may have loaded the second one"


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("path", ["nowhere", "no\0where"])
async def test_nothing_is_ever_found_for_an_adapter_that_cannot_be_read(tmp_path: Path, path: str, there: bool) -> None:
    names = BlockNames("sha256", 4)
    names.adapters = Adapters(lambda path: Path(path) if there else None)
    for _ in range(2):
        assert names.adapters.key_of(str(tmp_path / path)).result(10) is None
    assert nobodys_key() != nobodys_key()
    one, other = [await names.of_tokens(range(8), "", ("a", str(tmp_path / path))) for _ in range(2)]
    assert not set(one) & set(other)


def test_files_that_change_meanwhile_are_not_an_adapter(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def changes(place: Path) -> str:
        found = identity_of_adapter(place)
        save_adapter(place, b"trained again, and longer")
        return found

    monkeypatch.setattr("tiercache.integrations.vllm.names.identity_of_adapter", changes)
    assert later_engine().key_of(str(adapter)).result(10) is None


def test_an_adapter_for_which_no_thread_can_start_is_unknown_until_one_can(adapter: Path) -> None:
    engine = later_engine()
    with no_thread_to_be_had():
        assert engine.key_of(str(adapter)).result(0) is None
    assert key(engine, adapter) == key(later_engine(), adapter)


def test_whoever_asks_does_not_wait_for_one_that_hangs(adapter: Path) -> None:
    """And those that ask before a check begins share it, so that few wait for a mount that hangs for long."""
    mount = Hanging()
    engine = later_engine(mount.place)
    running = engine.key_of(str(adapter))
    assert mount.hangs.wait(10)
    first, second = (engine.key_of(str(adapter)) for _ in range(2))
    assert not running.done() and not first.done()
    assert first is second is not running
    mount.go_on.set()
    assert running.result(10) == first.result(10) == key(later_engine(), adapter)


async def test_who_gives_up_an_announcement_takes_no_key_from_a_request(adapter: Path) -> None:
    mount, names = Hanging(), BlockNames("sha256", 4)
    names.adapters = later_engine(mount.place)
    running = names.adapters.key_of(str(adapter))
    assert mount.hangs.wait(10)
    announced = asyncio.create_task(names.of_tokens(range(8), "", ("a", str(adapter))))
    await asyncio.sleep(0)
    of_a_request = names.adapters.key_of(str(adapter))
    announced.cancel()
    await asyncio.wait([announced])
    mount.go_on.set()
    assert of_a_request.result(10) == running.result(10)


def test_many_may_ask_at_once(adapter: Path) -> None:
    engine = later_engine()
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: key(engine, adapter), range(200)))
    assert len(found) == 1
