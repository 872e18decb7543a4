"""Tenants: whose chunk it is, what each holds, and who has to give up what."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tiercache.core.index import CappedIndex
from tiercache.core.keys import KEY_BYTES, TAGGED_KEY_BYTES, check_keys, chunk_keys, tenant_of, tenant_tag
from tiercache.core.layout import Layout
from tiercache.core.tenants import DEFAULT, MOST_SHOWN, OTHERS, TenantStatistics, shown

LAYOUT = Layout("m", chunk_tokens=16, bytes_per_token=64)
SALTS = ("", "quiet", "noisy")


def key(number: int, salt: str = "") -> bytes:
    return number.to_bytes(KEY_BYTES, "big") + tenant_tag(salt)


def test_a_key_says_whose_it_is_and_without_a_salt_is_as_it_was() -> None:
    namespace, tag = LAYOUT.named_by("", "a secret")
    tagged = chunk_keys(namespace, range(48), 16, tenant=tag)
    check_keys(tagged)
    assert {len(one) for one in tagged} == {TAGGED_KEY_BYTES}
    assert {tenant_of(one) for one in tagged} == {tag} == {tenant_tag("a secret")}
    plain = chunk_keys(LAYOUT.namespace(), range(48), 16)
    assert LAYOUT.named_by("") == (LAYOUT.namespace(), b"")
    assert [tenant_of(one) for one in plain] == [b""] * 3
    assert plain[0].hex() == "418d6144ee37ad2dd1cfc5fb02d9f7ff8871ef7ee7773f8d", "what was stored before is found"
    assert plain[1].hex() == "57e5efd23009777b5ae33eae6c9ea9e276ee4797c4f3f2d8", "in every process"


def test_tenants_differ_by_all_of_their_salts_and_in_the_part_before_the_tag() -> None:
    assert len({tenant_tag(*salts) for salts in [("a",), ("b",), ("a", "b"), ("b", "a"), ("ab",), ("a", "a")]}) == 6
    assert tenant_tag("", "a") == tenant_tag("a", "") == tenant_tag("a")
    spaces = {LAYOUT.namespace(*salts) for salts in [(), ("a",), ("", "a"), ("b",), ("a", "b"), ("b", "a")]}
    assert len(spaces) == 6


def test_ranks_that_hold_the_same_write_equal_parts_of_a_tenants_chunks() -> None:
    """It was the key's last bytes that said who writes: of a tenant's keys these are all alike."""
    ranks = [Layout("m", 16, 64, rank=rank, world_size=4, replicas=4) for rank in range(4)]
    tagged = chunk_keys(bytes(24), range(16 * 400), 16, tenant=tenant_tag("a"))
    parts = [sum(rank.keeps(one) for one in tagged) for rank in ranks]
    assert sum(parts) == len(tagged) and min(parts) > 60


def test_few_tenants_are_named_and_the_rest_is_one() -> None:
    found = {tenant_tag(str(number)): TenantStatistics(number, 1, 2) for number in range(1, MOST_SHOWN + 6)}
    found[b""] = TenantStatistics(1000, 1)
    named = shown(found)
    assert len(named) == MOST_SHOWN + 1
    assert next(iter(named)) == DEFAULT and tenant_tag(str(MOST_SHOWN + 5)).hex() in named
    assert named[OTHERS] == TenantStatistics(1 + 2 + 3 + 4 + 5 + 6, 6, 12)


class Quotas(RuleBasedStateMachine):
    """Random uses of an index with quotas: no tenant exceeds its quota except by found files, and the accounts are right."""

    QUOTA = 12
    KEYS = st.builds(key, st.integers(0, 12), st.sampled_from(SALTS))

    def __init__(self) -> None:
        super().__init__()
        self.index = CappedIndex(self.QUOTA)
        self.sizes: dict[bytes, int] = {}
        self.coming: dict[bytes, int] = {}

    def took(self, victims: list[tuple[bytes, int]]) -> None:
        for victim, size in victims:
            assert self.sizes.pop(victim) == size

    def of(self, tenant: bytes, sizes: dict[bytes, int]) -> int:
        return sum(size for one, size in sizes.items() if tenant_of(one) == tenant)

    @rule(key=KEYS, size=st.integers(1, 5))
    def begin_write(self, key: bytes, size: int) -> None:
        if key in self.sizes or key in self.coming or not self.index.fits(key, size):
            return
        self.index.expect(key, size)
        self.coming[key] = size
        self.took(own := self.index.evict_own(key, self.index.lacking_bytes(key)))
        assert all(tenant_of(victim) == tenant_of(key) for victim, _ in own)
        assert self.of(tenant_of(key), self.sizes) + self.of(tenant_of(key), self.coming) <= self.QUOTA

    @precondition(lambda self: self.coming)
    @rule(data=st.data())
    def end_write(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.coming)))
        size = self.coming.pop(key)
        self.index.expect(key, -size)
        self.index.add(key, size)
        self.sizes[key] = size

    @rule(key=KEYS, size=st.integers(1, 5))
    def find(self, key: bytes, size: int) -> None:
        """Of another process."""
        if key not in self.coming:
            self.index.add(key, size, cold=True)
            self.sizes[key] = size

    @rule(key=KEYS)
    def remove(self, key: bytes) -> None:
        assert self.index.remove(key) == self.sizes.pop(key, None)

    @rule(keys=st.lists(KEYS, max_size=6))
    def use(self, keys: list[bytes]) -> None:
        self.index.touch_prefix(keys)

    @rule(key=KEYS)
    def age(self, key: bytes) -> None:
        self.index.age([key])

    @rule(needed=st.integers(1, 8))
    def make_room(self, needed: int) -> None:
        over = [tenant for tenant in map(tenant_tag, SALTS) if self.of(tenant, self.sizes) > self.QUOTA]
        victims = self.index.evict(needed)
        if over and victims:
            assert tenant_of(victims[0][0]) in over
        self.took(victims)

    @rule()
    def trim(self) -> None:
        while excess_bytes := self.index.excess_bytes:
            self.took(self.index.evict(excess_bytes))
        assert all(self.of(tenant, self.sizes) <= self.QUOTA for tenant in map(tenant_tag, SALTS))

    @invariant()
    def accounts_are_a_recount(self) -> None:
        assert self.index.used_bytes == sum(self.sizes.values())
        for tenant in map(tenant_tag, SALTS):
            held = self.index.tenant_statistics().get(tenant, TenantStatistics())
            assert held.held_bytes == self.of(tenant, self.sizes)
            assert held.chunks == sum(tenant_of(one) == tenant for one in self.sizes)
        excess = [max(0, self.of(tenant, self.sizes) - self.QUOTA) for tenant in map(tenant_tag, SALTS)]
        assert self.index.excess_bytes == sum(excess)
        assert set(self.index.keys) == set(self.sizes)


TestQuotas = Quotas.TestCase
TestQuotas.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("salt", [5, b"x", ["a"]])
def test_a_salt_that_is_no_text_is_refused_with_a_word(salt: object) -> None:
    for call in (LAYOUT.namespace, tenant_tag):
        with pytest.raises(TypeError, match="salt: expected a text, found"):
            call("", salt)  # type: ignore[arg-type]


def test_any_text_is_a_salt() -> None:
    assert tenant_tag("\ud800") != tenant_tag("\ud801")
