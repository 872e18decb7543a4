"""Fixtures of the Mooncake tests."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.remote.arena import ARENA, payloads_in_the_arena  # noqa: F401 - a fixture
from tests.remote.made import configured
from tests.servers.mooncake import Holder, Master, plain_client, running
from tiercache.tiers.remote.mooncake import MooncakeTier

os.environ.setdefault("MC_TCP_BIND_ADDRESS", "127.0.0.1")  # clients listen, too


@pytest.fixture(scope="session")
def lasting_descriptors() -> str:
    """Mooncake's client keeps its pool of connections and event loops until the process ends; the Go runtime in it keeps
    the CPU limit's files, where the machine has them.
    """
    return r"socket:|anon_inode:|/sys/fs/cgroup/.*cpu\."


def make_tier(url: str, **settings: Any) -> MooncakeTier:
    given = {"local_hostname": "127.0.0.1", "timeout_s": 10.0} | settings
    tier = MooncakeTier(configured("mooncake", url, **given))
    tier.use_arena(ARENA)
    return tier


@pytest.fixture(scope="package")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Master, Holder]]:
    with running(tmp_path_factory.mktemp("mooncake")) as store:
        yield store


@pytest.fixture(scope="package")
def shared_client(shared_store: tuple[Master, Holder]) -> Iterator[Any]:
    with plain_client(shared_store[0]) as client:
        yield client


@pytest.fixture
def master(shared_store: tuple[Master, Holder], shared_client: Any) -> Master:
    """Empty, with a holder of 256 MiB."""
    assert shared_client.remove_all(True) >= 0
    return shared_store[0]


@pytest.fixture
def client(shared_client: Any, master: Master) -> Any:
    """Mooncake's own client, for what a test does behind the tier's back."""
    return shared_client
