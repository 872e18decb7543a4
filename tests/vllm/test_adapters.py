"""What an adapter holds is part of the names of its blocks, where it is certain that the engine has loaded just that."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tiercache.integrations.vllm import names
from tiercache.integrations.vllm.names import Adapters

AN_HOUR_NS = 3600 * 10**9


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return save(tmp_path / "adapter", b"weights")


def save(directory: Path, content: bytes) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_model.safetensors").write_bytes(content)
    (directory / "adapter_config.json").write_text('{"r": 8}')
    return directory


def later_engine() -> Adapters:
    """One that begins in an hour: what is written now is old then."""
    return Adapters(Path, time.time_ns() + AN_HOUR_NS)


def key(of: Adapters, adapter: Path) -> bytes:
    return of.key_of(str(adapter)).result(10)


def test_an_adapter_that_is_older_than_the_engine_is_known_by_its_content(adapter: Path, tmp_path: Path) -> None:
    engine = later_engine()
    found = key(engine, adapter)
    assert key(engine, adapter) == found
    assert key(later_engine(), save(tmp_path / "copy", b"weights")) == found, "in every engine"
    assert key(later_engine(), save(adapter, b"trained again")) != found, "though name and path are the same"


def test_an_adapter_that_is_younger_than_the_engine_is_this_engines_affair(adapter: Path) -> None:
    """It may have loaded something else before."""
    engine = Adapters(Path)
    found = key(engine, adapter)
    assert key(engine, adapter) == found
    assert key(Adapters(Path), adapter) != found
    save(adapter, b"trained again, and longer")
    assert key(engine, adapter) != found


def test_a_change_while_the_engine_runs_is_noticed_at_the_next_request(adapter: Path) -> None:
    engine = later_engine()
    found = key(engine, adapter)
    later = time.time_ns() + 2 * AN_HOUR_NS
    os.utime(save(adapter, b"Weights") / "adapter_model.safetensors", ns=(later, later))
    changed = key(engine, adapter)
    assert changed != found
    assert key(later_engine(), adapter) != changed


@pytest.mark.parametrize("there", [True, False])
def test_nothing_is_ever_found_for_an_adapter_that_cannot_be_read(tmp_path: Path, there: bool) -> None:
    engine = Adapters(lambda path: Path(path) if there else None)
    assert key(engine, tmp_path / "nowhere") != key(engine, tmp_path / "nowhere")


def test_whoever_asks_does_not_wait_for_one_that_hangs(adapter: Path) -> None:
    hang = threading.Event()

    def place(path: str) -> Path:
        hang.wait(30)
        return Path(path)

    engine = Adapters(place, time.time_ns() + AN_HOUR_NS)
    first, second = engine.key_of(str(adapter)), engine.key_of(str(adapter))
    assert not first.done() and not second.done()
    hang.set()
    assert first.result(10) == second.result(10) == key(later_engine(), adapter)


def test_so_many_may_wait_for_one_that_hangs_and_more_are_answered(
    adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names, "_MOST_WAITING", 2)
    hangs, hang = threading.Event(), threading.Event()

    def place(path: str) -> Path:
        hangs.set()
        hang.wait(30)
        return Path(path)

    engine = Adapters(place, time.time_ns() + AN_HOUR_NS)
    answering = engine.key_of(str(adapter))
    assert hangs.wait(10)
    waiting = [engine.key_of(str(adapter)) for _ in range(2)]
    assert engine.key_of(str(adapter)).result(0) != engine.key_of(str(adapter)).result(0)
    hang.set()
    assert {answering.result(10)} == {future.result(10) for future in waiting} == {key(later_engine(), adapter)}


def test_an_answer_that_nobody_wants_any_more_holds_up_nobody(adapter: Path) -> None:
    begin = threading.Event()

    def place(path: str) -> Path:
        begin.wait(30)
        return Path(path)

    engine = Adapters(place)
    first, second = engine.key_of(str(adapter)), engine.key_of(str(adapter))
    assert first.cancel()
    begin.set()
    assert second.result(10) == key(engine, adapter)


def test_many_may_ask_at_once(adapter: Path) -> None:
    engine = later_engine()
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: key(engine, adapter), range(200)))
    assert len(found) == 1
