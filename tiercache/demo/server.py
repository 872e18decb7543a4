"""A vLLM OpenAI server on the CPU, started for a while."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

MODEL_NAME = "smollm2-135m"
_START_S = 300.0
_STOP_S = 30.0
_REQUEST_LINE = re.compile(r"Reqid: (\S+), Total tokens (\d+), .*?hit tokens: (\d+) \(([^)]*)\)")


class ServerFailed(RuntimeError):
    """The server did not start or died; the message ends with the tail of its log."""


@dataclass(frozen=True)
class Server:
    url: str
    log: Path

    def tiers_of_last_request(self) -> dict[str, int]:
        """Tokens by tier as the connector logged them for the newest request; empty without a connector."""
        found = _REQUEST_LINE.findall(self.log.read_text(errors="replace"))
        if not found:
            return {}
        pairs = (part.split(":") for part in found[-1][3].split(","))
        return {name.strip(): int(tokens) for name, tokens in pairs}

    def forget_prefix_cache(self) -> None:
        """Empty vLLM's own prefix cache, so that the next hit has to come from ours."""
        request = urllib.request.Request(f"{self.url}/reset_prefix_cache", method="POST")
        with urllib.request.urlopen(request, timeout=30) as response:
            if response.status != 200:
                raise ServerFailed(f"vLLM did not reset its prefix cache: {response.status}")

    def wait_for_stored(self, tokens: int, timeout_s: float = 60.0) -> None:
        """Wait until the connector has logged that so many tokens of one request are stored."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            stored: dict[str, int] = {}
            text = self.log.read_text(errors="replace")
            for count, request in re.findall(r"Stored (\d+) out of total \d+ tokens for request (\S+)", text):
                stored[request] = stored.get(request, 0) + int(count)
            if any(count >= tokens for count in stored.values()):
                return
            time.sleep(0.05)
        raise ServerFailed(f"{tokens} tokens were not stored within {timeout_s:.0f} s{_tail(self.log)}")


@contextmanager
def serving(model: Path, log: Path, config: Path) -> Iterator[Server]:
    """Run a server with prefix caching and our connector, configured by `config` (a tiercache.yaml), until the block ends.

    Ends the whole process group, whatever happens in the block, so that nothing is left running.
    """
    port = _free_port()
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--served-model-name", MODEL_NAME, "--host", "127.0.0.1", "--port", str(port)),
        *("--max-model-len", "8192", "--max-num-seqs", "4", "--enable-prompt-tokens-details"),
        "--enable-prefix-caching",
    ]
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
    }
    transfer = {
        "kv_connector": "TierCacheConnector",
        "kv_connector_module_path": "tiercache.integrations.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
    command += ["--kv-transfer-config", json.dumps(transfer)]
    environment["TIERCACHE_CONFIG_FILE"] = str(config)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment, start_new_session=True
        )
    try:
        _wait_until_healthy(process, port, log)
        yield Server(f"http://127.0.0.1:{port}", log)
    finally:
        _stop(process)


def _wait_until_healthy(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    until = time.monotonic() + _START_S
    while time.monotonic() < until:
        if process.poll() is not None:
            raise ServerFailed(f"vLLM ended with status {process.returncode}{_tail(log)}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise ServerFailed(f"vLLM was not ready within {_START_S:.0f} s{_tail(log)}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Politely first, so that the connector writes what is queued."""
    for signum, patience_s in ((signal.SIGTERM, _STOP_S), (signal.SIGKILL, _STOP_S)):
        try:
            os.killpg(process.pid, signum)
        except ProcessLookupError:
            break
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-25:]
    return f"; the end of {log}:\n" + "\n".join(lines)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
