"""Blocks that the engine takes back are not touched any more."""

from __future__ import annotations

import threading

import pytest

from tiercache.integrations.vllm.blocks import Lending, TakenBack


def test_no_copy_begins_after_blocks_were_taken_back() -> None:
    lending = Lending()
    with lending:
        pass
    assert lending.take_back(0.0)
    with pytest.raises(TakenBack), lending:
        pytest.fail("the copy ran")


def test_taking_back_waits_for_the_copy_under_way() -> None:
    lending, inside, finish = Lending(), threading.Event(), threading.Event()
    spoilt: list[bool] = []

    def copy() -> None:
        with lending:
            inside.set()
            finish.wait(10)
            try:
                lending.check()
            except TakenBack:
                spoilt.append(True)

    thread = threading.Thread(target=copy)
    thread.start()
    inside.wait(10)
    assert not lending.take_back(0.0)
    finish.set()
    assert lending.take_back(10.0)
    thread.join(10)
    # What it read may have been overwritten, so it must not be stored.
    assert spoilt == [True]
