"""Operators see the connector's lines, once, whatever the libraries of a model do to the root logger."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tiercache.integrations.vllm.logs import show_our_log


@contextmanager
def bare() -> Iterator[logging.Logger]:
    """The root logger without handlers and ours without settings, as in a new process."""
    root, ours = logging.getLogger(), logging.getLogger("tiercache")
    before = root.handlers[:], root.level, ours.handlers[:], ours.level, ours.propagate
    root.handlers, ours.handlers, ours.propagate = [], [], True
    root.setLevel(logging.WARNING)
    ours.setLevel(logging.NOTSET)
    try:
        yield root
    finally:
        root.handlers, ours.handlers, ours.propagate = before[0], before[2], before[4]
        root.setLevel(before[1])
        ours.setLevel(before[3])


@pytest.mark.parametrize("library", [False, True], ids=["vLLM alone", "a library that gave the root logger a handler"])
def test_a_line_is_shown_once_unless_an_operator_set_a_level(library: bool, capsys: pytest.CaptureFixture[str]) -> None:
    shown, ours = io.StringIO(), logging.getLogger("tiercache.vllm")
    with bare() as root:
        if library:
            root.addHandler(logging.StreamHandler(shown))
        show_our_log()
        show_our_log()
        ours.info("Stored 64 tokens")
        logging.getLogger("another").info("of no interest")
        logging.getLogger("tiercache").setLevel(logging.ERROR)
        show_our_log()
        ours.info("Stored 128 tokens")
    lines = shown.getvalue() + capsys.readouterr().err
    assert lines.count("Stored 64 tokens") == 1
    assert "of no interest" not in lines and "Stored 128 tokens" not in lines
