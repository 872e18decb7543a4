"""Run a vLLM OpenAI server on the CPU."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODEL_NAME = "smollm2-135m"
CONNECTOR = "tiercache.integrations.vllm:TierCacheConnector"
_START_S = 1200.0
_STOP_S = 30.0
_POLL_S = 0.05

# Lines that the connector logs. vLLM adds a suffix to the id of a request that its client sees.
_HITS = (
    r"Reqid: {request}\S*, Total tokens \d+, engine computed tokens: (\d+), "
    r"hit tokens: \d+ \(([^)]*)\), need to load: (\d+)"
)
_STORED = r"Stored (\d+) out of total \d+ tokens for request {request}"

# Bypass a proxy of the environment for a server on the loopback interface.
open_url = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


class ServerFailed(RuntimeError):
    """The server did not start, died or refused. The message ends with the tail of its log."""


@dataclass(frozen=True)
class Server:
    url: str
    log: Path
    group: int
    """Process group of the server."""

    def source_of(self, request_id: str) -> str:
        """Return the source of a request's KV: `vllm`, the names of the tiers, both joined by `+`, or an empty text."""
        lines = self._logged(_HITS, request_id)
        if not lines:
            return ""
        engine_tokens, tiers, load_tokens = lines[-1]
        sources = ["vllm"] if int(engine_tokens) else []
        if int(load_tokens):
            by_tier = [part.split(":") for part in tiers.split(",")]
            sources += [name.strip() for name, tokens in by_tier if int(tokens)]
        return "+".join(sources)

    def stored_tokens(self, request_id: str) -> int:
        """Return how many tokens of the request have been stored; each step of a prefill logs its own line."""
        return sum(int(count) for count in self._logged(_STORED, request_id))

    def _logged(self, line: str, request_id: str) -> list[Any]:
        return re.findall(line.format(request=re.escape(request_id)), self.log.read_text(errors="replace"))

    def forget_prefix_cache(self, timeout_s: float = 30.0) -> None:
        """Empty vLLM's own prefix cache, so that the next hit has to come from tiercache.

        vLLM refuses while a request holds blocks, for instance after its client has disconnected or during stores, so
        this retries.
        """
        request = urllib.request.Request(f"{self.url}/reset_prefix_cache", method="POST")
        until = time.monotonic() + timeout_s
        try:
            while True:
                with open_url(request, timeout=30) as response:
                    answer = response.read()
                if not answer or json.loads(answer).get("success", True):
                    return
                if time.monotonic() > until:
                    raise self.failed(f"blocks were still in use after {timeout_s:.0f} s")
                time.sleep(_POLL_S)
        except OSError as error:
            raise self.failed(f"vLLM did not reset its prefix cache: {error}") from error

    def wait_for_stored(self, request_id: str, tokens: int, timeout_s: float = 60.0) -> None:
        """Wait until the connector has logged that `tokens` tokens of a request are stored."""
        until = time.monotonic() + timeout_s
        while self.stored_tokens(request_id) < tokens:
            if time.monotonic() > until:
                raise self.failed(f"{tokens} tokens were not stored within {timeout_s:.0f} s")
            time.sleep(_POLL_S)

    def failed(self, what: str) -> ServerFailed:
        lines = self.log.read_text(errors="replace").splitlines()[-25:]
        return ServerFailed(f"{what}; the end of {os.path.relpath(self.log)}:\n" + "\n".join(lines))


@contextmanager
def serving(
    model: Path,
    log: Path,
    config: Path | None,
    *,
    connector: str = CONNECTOR,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Run a server with prefix caching and a connector, configured by `config` (a tiercache.yaml), until the block
    ends.

    `connector` is a module and a class in it; without `config` there is none. `arguments` and `environment` override
    the defaults. Ends the whole process group at the end of the block in any case, so that nothing is left running.
    """
    with held_port() as port, log.open("wb") as output:
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
            *("--served-model-name", MODEL_NAME, "--host", "127.0.0.1", "--port", str(port)),
            *("--max-model-len", "8192", "--max-num-seqs", "4", "--dtype", quickest_dtype()),
            "--enforce-eager",  # compiling takes longer than the whole demo
            *("--enable-prefix-caching", "--enable-prompt-tokens-details"),
            *(_with_connector(connector) if config is not None else ()),
            *arguments,
        ]
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=_environment(config) | dict(environment or {}),
            start_new_session=True,
        )
        server = Server(f"http://127.0.0.1:{port}", log, process.pid)
        try:
            _wait_until_healthy(process, server)
            yield server
        finally:
            _stop(process)


def _with_connector(connector: str) -> tuple[str, str]:
    module, _, name = connector.partition(":")
    transfer = {
        "kv_connector": name,
        "kv_connector_module_path": module,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
    return "--kv-transfer-config", json.dumps(transfer)


def quickest_dtype(cpu: Path = Path("/proc/cpuinfo")) -> str:
    """Return bfloat16 if the CPU multiplies it, else float32: an emulated bfloat16 prefill takes four times as long."""
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", cpu.read_text(), re.MULTILINE)
    return "bfloat16" if flags and {"avx512_bf16", "amx_bf16", "bf16"} & set(flags[1].split()) else "float32"


def _environment(config: Path | None) -> dict[str, str]:
    """Return this environment without variables that would change the demo's configuration."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TIERCACHE_", "LMCACHE_"))}
    kept.pop("VLLM_API_KEY", None)
    if config is not None:
        kept["TIERCACHE_CONFIG_FILE"] = str(config)
    return kept | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
        # Let glibc keep freed memory. Otherwise the layout of the heap, which differs between starts, decides whether the
        # memory of vLLM's tensors is faulted in again in each step: a prefill on the CPU took up to 20 % longer.
        "MALLOC_TRIM_THRESHOLD_": str(2 << 30),
        "MALLOC_MMAP_THRESHOLD_": str(2 << 30),
    }


def _wait_until_healthy(process: subprocess.Popen[bytes], server: Server) -> None:
    until = time.monotonic() + _START_S
    while time.monotonic() < until:
        if process.poll() is not None:
            raise server.failed(f"vLLM ended with status {process.returncode}")
        try:
            open_url(f"{server.url}/health", timeout=2).close()
            return
        except OSError:
            time.sleep(_POLL_S)
    raise server.failed(f"vLLM was not ready within {_START_S:.0f} s")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Terminate the group, so that the connector writes queued chunks; kill it at a timeout or an interruption."""
    group = process.pid
    try:
        for signum in (signal.SIGTERM, signal.SIGKILL):
            _signal_group(group, signum)
            until = time.monotonic() + _STOP_S
            while time.monotonic() < until:
                if process.poll() is not None and not group_lives(group):
                    return
                time.sleep(_POLL_S)
    except BaseException:
        _signal_group(group, signal.SIGKILL)
        process.wait()
        raise


def _signal_group(group: int, signum: int) -> None:
    try:
        os.killpg(group, signum)
    except ProcessLookupError:
        return


def group_lives(group: int) -> bool:
    """Return True if a process of the group runs. Ignores zombies, which may remain for ever in a container."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, process_group = stat.read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):
            continue
        if int(process_group) == group and state != "Z":
            return True
    return False


@contextmanager
def held_port() -> Iterator[int]:
    """Yield a port that no other program is given until the block ends: a bound socket without a listener holds it,
    and a server that sets SO_REUSEADDR may listen there.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])
