"""What the simulation expects of a cache beside which somebody deletes or spoils files, when that is long past."""

from typing import Any

import pytest

from tests.torture.simulation.plan import Operation, Setting, cap_bytes
from tests.torture.simulation.run import run_seed
from tiercache.tiers.files.tier import FileTier


def setting() -> Setting:
    options = {"max_local_disk_size": cap_bytes(8, 1) / 2**30, "blocking_timeout_secs": 5, "lookup_timeout_ms": 200}
    return Setting(1, 8, ("disk",), options, 240, True, 12, False, 4)


def operation(kind: str, *keys: int, **values: Any) -> Operation:
    return Operation(kind, 0, 0.01, keys, None, values)


STORE = [operation("put_many", 1, 2, 3), operation("flush", timeout_s=5.0), operation("clear_hot")]
PRUNE = operation("prune", share=1.0)
EMPTY = operation("empty")
LONG_AFTER = operation("rest", for_s=400.0)
FLUSH = operation("flush", timeout_s=5.0)
CANNOT_READ = [
    operation("fault", place="disk", fault="eio", rate=1.0),
    operation("get", 1),
    operation("clear", place="disk"),
]
GET, PUT_ANOTHER = operation("get", 1), operation("put", 4)


@pytest.mark.parametrize(
    "then",
    [
        pytest.param([PRUNE, GET, LONG_AFTER, FLUSH], id="a-read-finds-that-a-file-is-gone"),
        pytest.param([PRUNE, LONG_AFTER, GET], id="and-finds-it-late"),
        pytest.param([EMPTY, LONG_AFTER, PUT_ANOTHER, FLUSH], id="a-write-finds-the-directory-emptied"),
        pytest.param([EMPTY, *STORE, GET, LONG_AFTER, FLUSH], id="what-is-put-while-a-tier-believes-to-have-it"),
        pytest.param([operation("spoil", share=1.0), GET, LONG_AFTER, FLUSH], id="files-that-cannot-be-read-for-good"),
        pytest.param([*CANNOT_READ, LONG_AFTER, FLUSH], id="or-for-a-moment"),
    ],
)
def test_nothing_is_wrong_with(then: list[Operation]) -> None:
    assert run_seed(0, [*STORE, *then], setting=setting()).failure is None


def test_a_tier_that_finds_out_and_does_not_write_what_is_put_then(monkeypatch: pytest.MonkeyPatch) -> None:
    write: Any = FileTier.write
    written = set()

    async def write_once(self: FileTier, key: bytes, *payload: Any) -> bool:
        if key in written:
            return True
        written.add(key)
        return bool(await write(self, key, *payload))

    monkeypatch.setattr(FileTier, "write", write_once)
    operations = [*STORE, PRUNE, GET, operation("put", 1), LONG_AFTER, FLUSH]
    failure = run_seed(0, operations, setting=setting()).failure
    assert "keys [1] are not there" in str(failure)
