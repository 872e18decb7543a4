"""Names of blocks are chained, cryptographic, and the same in every process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tiercache.core.keys import keys_from_hashes, tenant_of, tenant_tag
from tiercache.integrations.vllm.names import Adapters, BlockNames
from tiercache.integrations.vllm.planning import (
    BlockGeometry,
    HeadParts,
    KvGroup,
    in_parts,
    keys_of,
    names_of,
    needed_chunks,
)


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


def own(made: Any) -> list[bytes]:
    return BlockNames("xxhash", 4).extend([], made)


def test_a_cryptographic_engine_hash_is_taken_as_it_is() -> None:
    made = request(list(range(10)))
    assert BlockNames("sha256", 4).extend([], made) == made.block_hashes


def test_own_names_cover_every_token_before_them() -> None:
    one, other = own(request(list(range(13)))), own(request([9, *range(1, 13)]))
    assert len(one) == 3 and len(set(one + other)) == 6
    assert own(request([*range(4), 99, *range(5, 13)]))[0] == one[0]


def test_own_names_cover_adapter_salt_and_images() -> None:
    tokens = list(range(8))
    image = SimpleNamespace(identifier="cat", mm_position=SimpleNamespace(offset=1, length=2))
    dog = SimpleNamespace(identifier="dog", mm_position=SimpleNamespace(offset=1, length=2))
    lora = SimpleNamespace(lora_name="a", lora_path="/a")
    variants = [
        request(tokens),
        request(tokens, cache_salt="tenant"),
        request(tokens, lora_request=lora),
        request(tokens, mm_features=[image]),
        request(tokens, mm_features=[dog]),
    ]
    assert len({own(variant)[1] for variant in variants}) == len(variants)


def test_own_names_grow_with_the_request() -> None:
    names = BlockNames("xxhash", 4)
    grown = names.extend(names.extend([], request(list(range(5)))), request(list(range(9))))
    assert grown == own(request(list(range(9))))


@pytest.mark.parametrize("algorithm", ["sha256", "xxhash"])
@pytest.mark.parametrize("geometry", ["one group", "two groups", "parts"])
def test_keys_of_a_request_with_a_salt_say_whose_they_are(algorithm: str, geometry: str) -> None:
    groups = (KvGroup(0, 4), KvGroup(1, 4, window_tokens=6))
    places = {
        "one group": BlockGeometry(4, 1),
        "two groups": BlockGeometry(4, 1, groups=groups),
        "parts": in_parts(BlockGeometry(4, 1), groups, HeadParts(4, 2, 2)),
    }
    found: dict[str, list[bytes]] = {}
    for salt in ("", "quiet", "noisy"):
        names = BlockNames(algorithm, 4).extend([], request(list(range(12)), cache_salt=salt or None))
        if geometry != "one group":
            names = names_of(needed_chunks(3, places[geometry]), names, places[geometry])
        found[salt] = keys_of(b"n" * 24, names, places[geometry])
        assert {tenant_of(key) for key in found[salt]} == {tenant_tag(salt)}
        if geometry == "one group" and not salt:
            assert found[salt] == keys_from_hashes(b"n" * 24, names), "as ever"
    if algorithm == "xxhash":  # else the salt is in vLLM's hashes, which are made up here
        bare = {key[:24] for keys in found.values() for key in keys}
        assert len(bare) == sum(map(len, found.values())), "the salt is in what tells chunks apart, too"


def test_a_caches_own_salt_and_a_requests_make_another_tenant_than_either() -> None:
    both = [
        BlockNames("sha256", 4, tenant_salt=own_salt).extend([], request(list(range(4)), cache_salt=salt))[0][32:]
        for own_salt, salt in [("", None), ("a", None), ("", "b"), ("a", "b")]
    ]
    assert both == [b"", tenant_tag("a"), tenant_tag("b"), tenant_tag("a", "b")]


@pytest.mark.parametrize("algorithm", ["sha256", "xxhash"])
def test_a_reset_gives_names_that_never_were(algorithm: str) -> None:
    names = BlockNames(algorithm, 4)
    made = request(list(range(8)))
    before = names.extend([], made)
    names.forget_everything()
    assert not set(names.extend([], made)) & set(before)


def test_engine_hashes_are_the_same_in_every_process() -> None:
    """vLLM's SHA-256 chain starts from a fixed seed; a change of that would turn every restart into a cold start."""
    script = (
        "from vllm.utils.hashing import sha256; from vllm.v1.core import kv_cache_utils as u; u.init_none_hash(sha256); "
        "print('HASH', u.hash_block_tokens(sha256, None, list(range(128)), (('cache_salt', 'x'),)).hex())"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    found = [
        subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    ]
    (one, other) = [output[output.index("HASH") :] for output in found]
    assert one == other


def adapter_at(directory: Path, content: bytes = b"weights") -> str:
    directory.mkdir()
    (directory / "adapter_model.safetensors").write_bytes(content)
    (directory / "adapter_config.json").write_text("{}")
    return str(directory)


def settled() -> Adapters:
    """As an engine has them that begins an hour from now."""
    return Adapters(Path, time.time_ns() + 3600 * 10**9)


@pytest.mark.parametrize("algorithm", ["sha256", "xxhash"])
def test_names_cover_what_an_adapter_holds_and_not_only_its_name_and_path(algorithm: str, tmp_path: Path) -> None:
    path, tokens, found = adapter_at(tmp_path / "a"), list(range(8)), []
    made = request(tokens, lora_request=SimpleNamespace(lora_name="a", lora_path=path))
    for content in (b"weights", b"weights", b"trained again"):
        (tmp_path / "a" / "adapter_model.safetensors").write_bytes(content)
        names = BlockNames(algorithm, 4, adapters=settled())
        found.append(tuple(names.extend([], made, names.adapters.key_of(path).result(10))))
    assert found[0] == found[1]
    assert not set(found[0]) & set(found[2])


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor", "xxhash"])
@pytest.mark.parametrize("salt", ["", "tenant"])
@pytest.mark.parametrize("adapted", [False, True], ids=["base model", "adapter"])
async def test_announced_tokens_get_the_names_of_a_real_request(
    algorithm: str, salt: str, adapted: bool, tmp_path: Path
) -> None:
    """A request of vLLM's own class, hashed as vLLM's scheduler does."""
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    hash_function = get_hash_fn_by_name(algorithm)
    init_none_hash(hash_function)
    tokens = [number * 7 % 1000 for number in range(16 * 70 + 5)]
    path = adapter_at(tmp_path / "a")
    real = Request(
        request_id="r",
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        lora_request=LoRARequest("a", 1, path) if adapted else None,
        cache_salt=salt or None,
        block_hasher=get_request_block_hasher(16, hash_function),
    )
    names = BlockNames(algorithm, 16, adapters=settled())
    adapter = names.adapters.key_of(path).result(10) if adapted else b""
    expected = names.extend([], real, adapter)
    assert len(expected) == 70
    worker, lora = BlockNames(algorithm, 16, adapters=settled()), ("a", path) if adapted else None
    assert await worker.of_tokens(tokens, salt, lora) == expected
    worker.follow(names.forget_everything())
    assert await worker.of_tokens(tokens, salt, lora) == names.extend([], real, adapter) != expected


async def test_announced_tokens_that_fill_no_block_have_no_name() -> None:
    assert await BlockNames("sha256", 16).of_tokens(list(range(15)), "", None) == []
