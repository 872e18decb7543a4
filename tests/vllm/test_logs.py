"""What operators see: the connector's lines, once, whatever the libraries of a model do to the root logger; and in a
request's trace what the cache did for it."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import CHUNK_TOKENS, drive, prompt_of, tiercache_settings, tiny_engine
from tests.vllm.models import tiny_gemma
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


TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


@pytest.mark.usefixtures("imported")
def test_lookup_load_and_save_are_in_the_requests_trace(tmp_path: Path) -> None:
    prompt = prompt_of(5, 200)["prompt_token_ids"]
    engine = tiny_engine(tiny_gemma(tmp_path / "model", "full", "full"), tiercache=tiercache_settings(tmp_path / "kv"))
    ask: list[Any] = ["generate_traced", prompt]
    traced = [*ask, {"traceparent": f"00-{TRACE}-{PARENT}-01"}]
    (cold, _, hit, untraced), _ = drive(engine, [traced, ["reset_prefix_cache"], traced, [*ask, None]])
    assert untraced == []
    assert [span["name"] for span in cold] == ["tiercache.lookup", "tiercache.save", "tiercache.save"], "two steps"
    assert [span["name"] for span in hit][:2] == ["tiercache.lookup", "tiercache.load"]
    for span in (*cold, *hit):
        assert (span["trace"], span["parent"]) == (TRACE, PARENT)
        assert 0 <= span["seconds"] < 60
    chunks, a_token = 200 // CHUNK_TOKENS, 2 * 2 * 64 * 4
    nothing = {"tiercache.cpu_tokens": 0, "tiercache.disk_tokens": 0}
    assert cold[0]["attributes"] == nothing | {"tiercache.request_tokens": 200}
    saved = sum(span["attributes"]["tiercache.bytes"] for span in cold[1:])
    assert saved == pytest.approx(200 * a_token, abs=32 * a_token)
    assert hit[0]["attributes"]["tiercache.cpu_tokens"] >= chunks * CHUNK_TOKENS
    assert hit[1]["attributes"]["tiercache.outcome"] == "whole" and hit[1]["attributes"]["tiercache.rank"] == 0
