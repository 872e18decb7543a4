"""examples/serve_fastapi.py as a real process: streamed answers, sessions, typing, the page, a restart."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.servers.ports import hold_port
from tests.vllm.models import shorten
from tiercache.demo.model import prepare_model

REPOSITORY = Path(__file__).parents[2]
EXAMPLE = REPOSITORY / "examples" / "serve_fastapi.py"
START_S = 60.0
TEXT = "The quick brown fox jumps over the lazy dog. " * 30


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the first layers of the demo's model where the example looks for it."""
    place = tmp_path_factory.mktemp("serve")
    (place / "demo").mkdir()
    shorten(prepare_model(REPOSITORY / "demo" / "model"), place / "demo" / "model")
    return place


@contextmanager
def serving(place: Path, ends_by: signal.Signals = signal.SIGINT) -> Iterator[tuple[httpx.Client, subprocess.Popen[bytes]]]:
    """Told to end behind the test, unless it has been. What it has made for itself is gone then."""
    port = hold_port()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TIERCACHE_", "LMCACHE_"))}
    command = sys.executable, str(EXAMPLE), "--port", str(port), "--directory", str(place / "kv"), "--hot-gb", "0.1"
    with (place / "server.log").open("w") as log:
        environment = kept | {"PYTHONPATH": str(REPOSITORY), "TMPDIR": str(place)}
        process = subprocess.Popen(command, cwd=place, env=environment, stdout=log, stderr=subprocess.STDOUT)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            try:
                wait_for(client, process)
                yield client, process
            finally:
                process.send_signal(ends_by)
                status = process.wait(30)
    assert status == 0, (place / "server.log").read_text()
    assert not list(place.glob("tiercache-serve-*"))


def wait_for(client: httpx.Client, process: subprocess.Popen[bytes]) -> None:
    until_s = time.monotonic() + START_S
    while True:
        assert process.poll() is None and time.monotonic() < until_s, "the server did not start"
        try:
            client.get("/state").raise_for_status()
            return
        except httpx.TransportError:
            time.sleep(0.05)


def ask(client: httpx.Client, session: str, text: str, **more: Any) -> list[dict[str, Any]]:
    """The events of the answer."""
    body = {"session": session, "text": text, "max_tokens": 3, **more}
    with client.stream("POST", "/chat", json=body) as response:
        response.raise_for_status()
        assert response.headers["content-type"].startswith("text/event-stream")
        return [json.loads(line.removeprefix("data: ")) for line in response.iter_lines() if line]


def test_a_session_goes_on_from_memory_and_after_a_restart_from_disk(place: Path) -> None:
    with serving(place, signal.SIGTERM) as (client, _):
        assert list(place.glob("tiercache-serve-*"))
        *pieces, first = ask(client, "one", TEXT)
        assert pieces[0] == {"text": ""}, "as soon as there is a token"
        assert first["done"] and not any(first["hit_by_tier"].values()) and first["ttft_s"] > 0
        assert client.post("/typing", json={"session": "one"}).json()["chunks"] > 0
        *_, second = ask(client, "one", "Say more.")
        assert 0 < second["hit_by_tier"]["cpu"] <= first["prompt_tokens"]
        *_, plain = ask(client, "plain", TEXT, cached=False)
        assert plain["hit_by_tier"] == {}
        *_, other = ask(client, "one", TEXT, tenant="somebody else")
        assert not any(other["hit_by_tier"].values()), "tenants share neither sessions nor KV"

        state = client.get("/state").json()
        assert [tier["name"] for tier in state["tiers"]] == ["cpu", "disk"]
        assert state["count"] == 4 and state["waiting"] == 0
        assert any(chunk & 1 for one in state["sessions"] for chunk in one["chunks"])
        with client.stream("GET", "/live") as response:
            assert json.loads(next(response.iter_lines()).removeprefix("data: "))["count"] == 4
        assert "<svg" in client.get("/").text
    with serving(place) as (client, _):
        (refused,) = ask(client, "long", TEXT * 30)
        assert "too long" in refused["error"]
        *_, again = ask(client, "two", TEXT)
        hits = again["hit_by_tier"]
        assert hits["cpu"] + hits["disk"] > 0, "a new process has only the disk's, promoted before the load or by it"


def test_an_open_page_does_not_hold_the_end_up(place: Path) -> None:
    with serving(place) as (client, process), client.stream("GET", "/live") as page:
        events = page.iter_lines()
        assert next(events).startswith("data: ")
        process.send_signal(signal.SIGINT)
        for _ in events:
            pass
        process.wait(30)
    assert (place / "server.log").read_text() == ""
