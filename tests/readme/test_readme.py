"""Whatever README.md shows is run: a command, a program or a configuration in it that fails, or that is new and has no entry
here, fails."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.readme.blocks import REPOSITORY, Block, blocks, inline_commands, shell_commands
from tests.readme.conftest import Shell
from tiercache import Config

EXCERPT = REPOSITORY / "tests/replay/excerpts/mooncake_conversation.jsonl"
ELSEWHERE = re.compile(r"make \S+")
"""Of targets, `test_makefile.py` runs every one."""


def doctor(command: str, shell: Shell, place: Path) -> None:
    said = shell(command.replace("DIR", str(place))).stdout
    assert f"disk at {place}" in said


def explain(command: str, shell: Shell, place: Path) -> None:
    assert "max_local_disk_size: 0.2" in shell(command.replace("FILE", "small.yaml")).stdout


def bench(command: str, shell: Shell, place: Path) -> None:
    """Where it takes minutes: fewer and smaller chunks. Full sizes: `make bench` in `test_makefile.py`."""
    only = "" if "--only" in command else " --only core"
    assert "figure" in shell(f"{command.replace('FILE', 'found.json')} --quick --pairs 1{only}").stdout
    if "FILE" in command:
        assert "machine" in json.loads((place / "found.json").read_text())


def gpu_bench(command: str, shell: Shell, place: Path) -> None:
    pytest.importorskip("torch")
    assert "checks passed" in shell(f"{command} --parts events").stdout


def replay(command: str, shell: Shell, place: Path) -> None:
    for name in ("conversation_trace.jsonl", "trace.jsonl"):
        shutil.copy(EXCERPT, place / name)
    assert "TTFT" in shell(command).stdout


def example(command: str, shell: Shell, place: Path) -> None:
    """With a shorter question."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    if "redis" in command:
        pytest.importorskip("redis", reason="redis-py is not installed")
        if shutil.which("redis-server") is None:
            pytest.skip("redis-server is not installed")
    link_model(place)
    assert "tokens hit" in shell(f"{command} --tokens 700").stdout


def extra(command: str, shell: Shell, place: Path) -> None:
    """The project is not on a registry yet; the extra has to be there."""
    (name,) = re.findall(r"tiercache\[(\w+)\]", command)
    assert name in tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def serve(command: str, shell: Shell, place: Path) -> None:
    """With the model that `make demo` uses, a smaller cache, and a port of its own; asked by examples/query_twice.py."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    link_model(place)
    port = free_port()
    (place / "text.txt").write_text((REPOSITORY / "LICENSE").read_text()[:6000])
    named = command.replace("MODEL ", "demo/model ").replace("examples/configs/local_disk.yaml", "small.yaml")
    assert named.count("small.yaml") == named.count("demo/model ") == 1
    script = f"""
        {named} --port {port} --max-model-len 4096 >server.log 2>&1 &
        trap 'kill $!; wait $!' EXIT
        until curl -sf http://127.0.0.1:{port}/health; do kill -0 $! || exit 1; sleep 0.2; done
        python examples/query_twice.py text.txt --url http://127.0.0.1:{port}/v1 --tokens 8
    """
    assert "times faster" in shell(script, VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1").stdout
    log = (place / "server.log").read_text()
    for line in (one for one in blocks() if one.language == "" and "Reqid" in one.text):
        for shape in shapes_of(line.text):
            assert shape.search(log), f"the log has no line like {shape.pattern}"


def control(command: str, shell: Shell, place: Path) -> None:
    """The three commands belong together: a token, the server, a request. The cache behind them is an embedded one."""
    asyncio.run(controlled(place, shell))


async def controlled(place: Path, shell: Shell) -> None:
    from tests.control.test_socket import LAYOUT, TOKENS, config_of
    from tiercache import TierCache

    (block,) = (one for one in blocks() if "serve-control" in one.text)
    *before, server, client = block.commands()
    assert "serve-control" in server and "curl" in client, "the README's three commands changed their order"
    port = free_port()
    async with TierCache.open(config_of(place), LAYOUT):
        for command in before:
            await asyncio.to_thread(shell, command)
        named = server.replace("/run/tiercache/control.sock", str(place / "c.sock"))
        asked = client.replace("504, 3280, ...", ", ".join(map(str, TOKENS))).replace(":8300", f":{port}")
        assert named != server and str(TOKENS[-1]) in asked and str(port) in asked
        script = f"""
            {named} --port {port} >control.log 2>&1 &
            trap 'kill -INT $!; wait $!' EXIT
            until curl -s http://127.0.0.1:{port}/ >/dev/null
            do kill -0 $! || {{ cat control.log; exit 1; }}; sleep 0.05; done
            {asked.replace("curl ", "curl --fail-with-body -s ", 1)}
        """
        answer = (await asyncio.to_thread(shell, script)).stdout
    assert json.loads(answer)["handle"]


ENTRIES: dict[str, Callable[[str, Shell, Path], None]] = {
    r"tiercache doctor --path DIR": doctor,
    r"tiercache config explain FILE": explain,
    r"tiercache bench .*": bench,
    r"python -m tiercache\.bench\.gpu --twin": gpu_bench,
    r"tiercache replay .*\.jsonl .*": replay,
    r"python examples/(hf3fs_serve|redis_shared)\.py": example,
    r"pip install 'tiercache\[\w+\]'": extra,
    r"TIERCACHE_CONFIG_FILE=\S+ python -m vllm\.entrypoints\.openai\.api_server .*": serve,
    r".*openssl rand .*": control,
    r"tiercache serve-control .*": control,
    r"curl .*": control,
}
ONE_OF_SEVERAL = re.compile(r"tiercache serve-control .*|curl .*")
"""Run with the first of their block."""


def shown() -> list[str]:
    return list(dict.fromkeys([*shell_commands(), *inline_commands()]))


def entry_of(command: str) -> Callable[[str, Shell, Path], None] | None:
    found = [entry for pattern, entry in ENTRIES.items() if re.fullmatch(pattern, command)]
    return found[0] if len(found) == 1 else None


def test_every_command_of_the_readme_has_an_entry() -> None:
    missing = [command for command in shown() if not ELSEWHERE.fullmatch(command) and entry_of(command) is None]
    assert not missing, f"shown and run by nothing: {missing}"
    unused = [pattern for pattern in ENTRIES if not any(re.fullmatch(pattern, command) for command in shown())]
    assert not unused, f"entries for what the README does not show: {unused}"


@pytest.mark.parametrize(
    "command", [one for one in shown() if not ELSEWHERE.fullmatch(one) and not ONE_OF_SEVERAL.fullmatch(one)]
)
def test_command(command: str, shell: Shell, place: Path) -> None:
    entry = entry_of(command)
    assert entry is not None, "it has no entry in ENTRIES"
    entry(command, shell, place)


def test_every_block_is_of_a_kind_that_is_run() -> None:
    kinds = {block.language for block in blocks()}
    assert kinds == {"", "sh", "python", "yaml", "json"}


@pytest.mark.parametrize("block", [one for one in blocks() if one.language == "yaml"], ids=lambda one: one.name)
def test_configuration(block: Block, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "tiercache.yaml").write_text(block.text)
    assert Config.load(tmp_path / "tiercache.yaml", environ={}).chunk_size > 0
    assert not [record.message for record in caplog.records if "no effect" in record.message]


@pytest.mark.parametrize("block", [one for one in blocks() if one.language == "json"], ids=lambda one: one.name)
def test_what_a_request_says(block: Block, caplog: pytest.LogCaptureFixture) -> None:
    from tiercache.integrations.vllm.turns import Wishes, wishes_of

    wishes = wishes_of(json.loads(block.text), set())
    assert (wishes.session, wishes.step, wishes.next_in_s) == ("chat-17", "plan", 20)
    assert wishes != Wishes() and not caplog.records


PROLOGUE = {
    "Embedding": "",
    "Prefetching": """
import asyncio, numpy as np, tiercache
async def main():
    layout = tiercache.Layout("my-model", chunk_tokens=256, bytes_per_token=8192)
    async with tiercache.TierCache.open(tiercache.Config.load(), layout) as cache:
        tokens = list(range(512))
        keys = cache.keys(tokens)
        await cache.store(tokens, [np.ones(layout.chunk_bytes, np.uint8)] * 2)
        await cache.flush()
        cache.clear_hot()
""",
    "Device memory": """
import asyncio, torch, tiercache
import tiercache.device.cuda
from tiercache.device.twin import TwinDriver
async def main():
    tiercache.device.cuda.CudaDriver = lambda device: twin
    twin = TwinDriver()
    config = tiercache.Config.load()
    shape = 2, 32, 16, 4, 64  # K and V, blocks, tokens a block, heads, head size
    def tensor():
        length = 2 * torch.Size(shape).numel()
        return torch.from_numpy(twin.view(twin.allocate(length))).view(torch.bfloat16).reshape(shape)
    layer_tensors = [tensor() for _ in range(3)]
    block_lists, other_blocks = [list(range(16))], [list(range(16, 32))]
    keys = [bytes(24)]
""",
}
"""What the text around each program takes for granted: the cache, the engine's tensors, a function that may await."""
EPILOGUE = {
    "Prefetching": """
        assert progress.promoted == 2, progress
asyncio.run(main())
""",
    "Device memory": """
    assert torch.equal(layer_tensors[0][:, :16], layer_tensors[0][:, 16:])
asyncio.run(main())
""",
}


@pytest.mark.parametrize("block", [one for one in blocks() if one.language == "python"], ids=lambda one: one.name)
def test_program(block: Block, shell: Shell, place: Path) -> None:
    if block.section == "Device memory":
        pytest.importorskip("torch")
    prologue = PROLOGUE[block.section]
    indent = re.findall(r"^( *)\S.*$", prologue, re.MULTILINE)[-1] if prologue else ""
    body = "".join(f"{indent}{line}" if line.strip() else line for line in block.text.splitlines(keepends=True))
    (place / "program.py").write_text(prologue + body + EPILOGUE.get(block.section, ""))
    shell("python program.py", TIERCACHE_CONFIG_FILE="small.yaml")


def shapes_of(lines: str) -> list[re.Pattern[str]]:
    """Log lines as patterns: ids and numbers may differ."""
    return [
        re.compile(re.sub(r"(\\)?\d[\d.\\]*", r"[\\d.]+", re.sub(r"chatcmpl\\-\w+", r"chatcmpl-\\S+", re.escape(line))))
        for line in lines.splitlines()
    ]


def link_model(place: Path) -> None:
    from tiercache.demo.model import prepare_model

    (place / "demo").mkdir()
    (place / "demo" / "model").symlink_to(prepare_model(REPOSITORY / "demo" / "model"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
