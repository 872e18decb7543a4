"""Whatever README.md shows is run: a command, a program or a configuration in it that fails, or that is new and has no entry
here, fails."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import shutil
import socket
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.readme.blocks import KINDS, REPOSITORY, Block, blocks, inline_commands, other_blocks, read_me, shell_commands
from tests.readme.conftest import Shell
from tests.vllm.shortened import shorten
from tiercache import Config
from tiercache.demo.server import quickest_dtype

EXCERPT = REPOSITORY / "tests/replay/excerpts/mooncake_conversation.jsonl"
ELSEWHERE = re.compile(r"make \S+")
"""Of targets, `test_makefile.py` runs every one."""


def doctor(command: str, shell: Shell, place: Path) -> None:
    said = shell(command.replace("DIR", str(place))).stdout
    assert f"disk at {place}" in said


def stored(command: str, shell: Shell, place: Path) -> None:
    """On a directory in which the README's first program has stored something."""
    (program,) = (one for one in blocks() if one.language == "python" and one.section == "Embedding")
    (place / "program.py").write_text(program.text)
    shell("python program.py", TIERCACHE_CONFIG_FILE="small.yaml")
    assert re.search(r"\b2 chunks", shell(command.replace("DIR", "kv")).stdout)


def explain(command: str, shell: Shell, place: Path) -> None:
    assert "max_local_disk_size: 0.2" in shell(command.replace("FILE", "small.yaml")).stdout


def bench(command: str, shell: Shell, place: Path) -> None:
    """Where it takes minutes: fewer and smaller chunks. Full sizes: `make bench` in `test_makefile.py`."""
    only = "" if "--only" in command else " --only core"
    assert "figure" in shell(f"{command.replace('FILE', 'found.json')} --quick --pairs 1{only}").stdout
    if "FILE" in command:
        assert "machine" in json.loads((place / "found.json").read_text())


def gpu_bench(command: str, shell: Shell, place: Path) -> None:
    assert "checks passed" in shell(f"{command} --parts events").stdout


def replay(command: str, shell: Shell, place: Path) -> None:
    for name in ("conversation_trace.jsonl", "trace.jsonl"):
        shutil.copy(EXCERPT, place / name)
    assert "TTFT" in shell(command).stdout


def torture(command: str, shell: Shell, place: Path) -> None:
    """For seconds instead of minutes."""
    named = command.replace("DIR", str(place)).replace("--minutes 5", "--minutes 0.1")
    assert named != command
    said = shell(named).stdout
    assert re.search(r"\b0  wrong bytes|\b0 failed", said)


def example(command: str, shell: Shell, place: Path) -> None:
    """With a shorter question."""
    link_model(place)
    assert "tokens hit" in shell(f"{command} --tokens 700").stdout


def chat_example(command: str, shell: Shell, place: Path) -> None:
    """With a shorter document."""
    link_model(place)
    assert "token by token, the one" in shell(f"{command} --tokens 300 --answer-tokens 2").stdout


def load_example(command: str, shell: Shell, place: Path) -> None:
    """With shorter documents; it starts the server."""
    link_model(place)
    small = "--users 2 --turns 3 --tokens 300 --answer-tokens 2 --typing-s 0"
    assert "with the cache" in shell(f"{command} {small}").stdout


def serve_example(command: str, shell: Shell, place: Path) -> None:
    """Asked for its page."""
    link_model(place)
    port = free_port()
    script = f"""
        {command} --port {port} >server.log 2>&1 &
        trap 'kill -INT $!; wait $!' EXIT
        until curl -sf http://127.0.0.1:{port}/; do kill -0 $! || {{ cat server.log; exit 1; }}; sleep 0.1; done
    """
    assert "<title>tiercache" in shell(script).stdout


def extra(command: str, shell: Shell, place: Path) -> None:
    """The project is not on a registry yet; the extra has to be there."""
    (name,) = re.findall(r"tiercache\[(\w+)\]", command)
    assert name in tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def serve(command: str, shell: Shell, place: Path) -> None:
    """With the model that `make demo` uses, a smaller cache, and a port of its own; asked by examples/query_twice.py.
    Without vLLM's own prefix cache, which would leave nothing to load, and not compiled, which takes long."""
    link_model(place)
    port = free_port()
    (place / "text.txt").write_text((REPOSITORY / "LICENSE").read_text()[:3000])
    named = command.replace("MODEL ", "demo/model ").replace("examples/configs/local_disk.yaml", "small.yaml")
    assert named.count("small.yaml") == named.count("demo/model ") == 1
    script = f"""
        {named} --port {port} --max-model-len 4096 --no-enable-prefix-caching --enforce-eager \\
            --dtype {quickest_dtype()} >server.log 2>&1 &
        trap 'kill $!; wait $!' EXIT
        until curl -sf http://127.0.0.1:{port}/health; do kill -0 $! || exit 1; sleep 0.2; done
        python examples/query_twice.py text.txt --url http://127.0.0.1:{port}/v1 --tokens 8
    """
    assert "times faster" in shell(script, VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1").stdout
    log = (place / "server.log").read_text()
    for line in (one for one in blocks() if one.language == "text"):
        for shape in shapes_of(line.text):
            assert shape.search(log), f"the log has no line like {shape.pattern}"


def offload(command: str, shell: Shell, place: Path) -> None:
    """As far as it goes without a GPU, which vLLM's own spec wants: vLLM reads it, and finds our tier by it. With a spec for
    the CPU: tests/vllm/test_offloading_engine.py."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    from tiercache.integrations.vllm_offloading import TierCacheTier

    _, _, options = command.partition("api_server ")
    parsed = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(shlex.split(options))
    transfer = EngineArgs.from_cli_args(parsed).kv_transfer_config
    assert (transfer.kv_connector, transfer.kv_role) == ("OffloadingConnector", "kv_both")
    extra = transfer.kv_connector_extra_config
    assert OffloadingSpecFactory.get_spec_cls(extra).__name__ == "TieringOffloadingSpec"
    assert [SecondaryTierFactory.get_tier_class(tier) for tier in extra["secondary_tiers"]] == [TierCacheTier]


def top(command: str, shell: Shell, place: Path) -> None:
    """Once, of an embedded cache: it would go on until Ctrl-C."""
    asyncio.run(watched(command, place, shell))


async def watched(command: str, place: Path, shell: Shell) -> None:
    from tests.control.test_socket import LAYOUT, config_of
    from tiercache import TierCache

    async with TierCache.open(config_of(place), LAYOUT):
        said = await asyncio.to_thread(shell, f"{command.replace('PATH', str(place / 'c.sock'))} --once")
    assert "disk" in said.stdout and "closed" in said.stdout


def control(command: str, shell: Shell, place: Path) -> None:
    """The three commands belong together: a token, the server, a request. The cache behind them is an embedded one."""
    asyncio.run(controlled(command, place, shell))


async def controlled(command: str, place: Path, shell: Shell) -> None:
    from tests.control.test_socket import LAYOUT, TOKENS, config_of
    from tiercache import TierCache

    (block,) = (one for one in blocks() if "serve-control" in one.text)
    *before, server, client = block.commands()
    assert command in (*before, server, client), "it is not in the block that is run here"
    assert "serve-control" in server and "curl" in client, "the README's three commands changed their order"
    port = free_port()
    async with TierCache.open(config_of(place), LAYOUT):
        for one in before:
            await asyncio.to_thread(shell, one)
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


PLAIN = r"[^;&|<>`$]*"
"""Arguments, and no second command behind them."""
SERVER = r"TIERCACHE_CONFIG_FILE=\S+ python -m vllm\.entrypoints\.openai\.api_server --model MODEL --kv-transfer-config"
ENTRIES: dict[str, Callable[[str, Shell, Path], None]] = {
    r"tiercache doctor --path DIR": doctor,
    r"tiercache config explain FILE": explain,
    r"tiercache (stat|verify) DIR": stored,
    rf"tiercache bench {PLAIN}": bench,
    r"python -m tiercache\.bench\.gpu --cpu": gpu_bench,
    rf"tiercache replay {PLAIN}\.jsonl {PLAIN}": replay,
    rf"tiercache torture {PLAIN}": torture,
    r"python examples/(hf3fs_serve|redis_shared)\.py": example,
    r"python examples/transformers_chat\.py": chat_example,
    r"python examples/serve_fastapi\.py": serve_example,
    r"python examples/serve_fastapi_load\.py": load_example,
    r"pip install 'tiercache\[\w+\]'": extra,
    rf"{SERVER} '{PLAIN}": serve,
    rf"{SERVER}\.{PLAIN}": offload,
    r"\(umask 077; openssl rand -hex 32 > token\)": control,
    rf"tiercache serve-control {PLAIN}": control,
    r"tiercache top --socket PATH": top,
    rf"curl -H {PLAIN}\$\(cat token\){PLAIN}": control,
}


NEEDS = {
    r"tiercache torture --real .*": pytest.mark.uses("redis-server"),
    r"python examples/hf3fs_serve\.py": pytest.mark.uses("fuse3"),
    r"python examples/redis_shared\.py": pytest.mark.needs("redis-server"),
    r"python examples/serve_fastapi\.py": pytest.mark.needs("curl"),
    rf"{SERVER} '{PLAIN}": pytest.mark.needs("curl"),
    r"\(umask 077; openssl .*|tiercache serve-control .*|curl .*": pytest.mark.needs("openssl", "curl"),
}
"""What a command takes over Python."""


def shown(text: str | None = None) -> list[str]:
    return list(dict.fromkeys([*shell_commands(text), *inline_commands(text)]))


def entry_of(command: str) -> Callable[[str, Shell, Path], None] | None:
    found = [entry for pattern, entry in ENTRIES.items() if re.fullmatch(pattern, command)]
    return found[0] if len(found) == 1 else None


def problems_of(text: str) -> list[str]:
    """What keeps the tests of this file from running everything that `text` shows."""
    problems = [
        f"only fenced blocks with one of the labels {sorted(KINDS)} are run: {one}" for one in other_blocks(text)
    ]
    for command in shown(text):
        if not ELSEWHERE.fullmatch(command) and entry_of(command) is None:
            problems.append(f"shown and run by nothing (ENTRIES has no line, or several): {command}")
    return problems


def test_every_command_of_the_readme_is_run() -> None:
    assert not problems_of(read_me())
    unused = [pattern for pattern in ENTRIES if not any(re.fullmatch(pattern, command) for command in shown())]
    assert not unused, f"entries for what the README does not show: {unused}"


@pytest.mark.parametrize(
    "more",
    [
        "```sh\ntiercache frobnicate X\n```",
        "```sh\ncurl http://127.0.0.1:8300/v1/bogus\n```",
        "```sh\ncurl http://127.0.0.1:8300/v1/x; tiercache frob\n```",
        "```sh\ntiercache bench --only core && tiercache frob\n```",
        "```sh\ntiercache bench --only $(tiercache frob)\n```",
        "```sh\nmake test FOO=1\n```",
        "- first:\n\n  ```sh\n  tiercache frobnicate Y\n  ```",
        "~~~sh\ntiercache frobnicate Y\n~~~",
        "```\ntiercache frobnicate Y\n```",
        "```sh title=x\ntiercache frobnicate Y\n```",
        "```console\n$ tiercache frobnicate Y\n```",
        "````sh\ntiercache frobnicate Y\n````",
        "text:\n\n    tiercache frobnicate Y",
        "<pre>tiercache frobnicate Y</pre>",
        "Use `tiercache frob DIR`.",
        "Use `python3 examples/nothing.py`.",
        "Use `docker run tiercache`.",
        "Use `TIERCACHE_X=1 tiercache frob`.",
        "Use `./examples/none.sh`.",
        "Use `.venv/bin/tiercache frob`.",
    ],
)
def test_nothing_new_is_shown_that_nothing_runs(more: str) -> None:
    assert problems_of(f"{read_me()}\n{more}\n")


def marked(command: str) -> Any:
    return pytest.param(command, marks=[mark for pattern, mark in NEEDS.items() if re.fullmatch(pattern, command)])


@pytest.mark.parametrize("command", [marked(one) for one in shown() if not ELSEWHERE.fullmatch(one)])
def test_command(command: str, shell: Shell, place: Path) -> None:
    entry = entry_of(command)
    assert entry is not None, "it has no entry in ENTRIES"
    entry(command, shell, place)


def test_a_server_with_other_options_is_not_taken_for_the_one_that_is_run(shell: Shell, place: Path) -> None:
    with pytest.raises(AssertionError, match="not in the block"):
        control("tiercache serve-control --bogus x", shell, place)


def test_every_text_is_compared_with_what_the_server_says() -> None:
    """In `serve`."""
    assert [block.section for block in blocks() if block.language == "text"] == ["Serving with vLLM"]


@pytest.mark.parametrize("block", [one for one in blocks() if one.language == "yaml"], ids=lambda one: one.name)
def test_configuration(block: Block, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "tiercache.yaml").write_text(block.text)
    assert Config.load(tmp_path / "tiercache.yaml", environ={}).chunk_size > 0
    assert not [record.message for record in caplog.records if "no effect" in record.message]


def test_what_configures_sglang() -> None:
    """In tests/sglang/test_storage.py."""
    sections = [block.section for block in blocks() if block.language == "json"]
    assert sections == ["Saying what is coming", "Serving with SGLang"]


def test_what_a_request_says(caplog: pytest.LogCaptureFixture) -> None:
    from tiercache.integrations.vllm.hints import Wishes, wishes_of

    (block,) = [one for one in blocks() if one.language == "json" and one.section == "Saying what is coming"]
    wishes = wishes_of(json.loads(block.text), set())
    assert (wishes.session, wishes.next_in_s) == ("chat-17", 20)
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
    "With transformers": """
import asyncio, tiercache
from transformers import GenerationConfig
from tests.transformers.models import make_model, tokens
async def main():
    model, ids, config = make_model("llama"), tokens(600), tiercache.Config.load()
""",
    "Device memory": """
import asyncio, torch, tiercache
import tiercache.device.driver
from tiercache.testing.twin import TwinDriver
async def main():
    tiercache.device.driver.CudaDriver = lambda device: TwinDriver()
    config = tiercache.Config.load()
    shape = 2, 32, 16, 4, 64  # K and V, blocks, tokens a block, heads, head size
    layer_tensors = [torch.randn(shape, dtype=torch.bfloat16) for _ in range(3)]
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
    "With transformers": """
    assert len(answer.new_ids) == 64
asyncio.run(main())
""",
    "Device memory": """
    assert torch.equal(layer_tensors[0][:, :16], layer_tensors[0][:, 16:])
asyncio.run(main())
""",
}


@pytest.mark.parametrize("block", [one for one in blocks() if one.language == "python"], ids=lambda one: one.name)
def test_program(block: Block, shell: Shell, place: Path) -> None:
    prologue = PROLOGUE[block.section]
    indent = re.findall(r"^( *)\S.*$", prologue, re.MULTILINE)[-1] if prologue else ""
    body = "".join(f"{indent}{line}" if line.strip() else line for line in block.text.splitlines(keepends=True))
    (place / "program.py").write_text(prologue + body + EPILOGUE.get(block.section, ""))
    shell("python program.py", TIERCACHE_CONFIG_FILE="small.yaml")


def shapes_of(lines: str) -> list[re.Pattern[str]]:
    """Log lines as patterns: ids and numbers may differ."""
    varies = re.compile(r"(chatcmpl-)\w+|\d[\d.]*")

    def shape(line: str) -> str:
        fixed = [re.escape(part) for part in varies.split(line)[::2]]
        between = [r"chatcmpl-\S+" if match[1] else r"\d[\d.]*" for match in varies.finditer(line)]
        return "".join(one + other for one, other in zip(fixed, [*between, ""], strict=True))

    return [re.compile(shape(line)) for line in lines.splitlines()]


def link_model(place: Path) -> None:
    """Its first layers; `make demo` runs with all of them in `test_makefile.py`."""
    from tiercache.demo.model import prepare_model

    (place / "demo").mkdir()
    shorten(prepare_model(REPOSITORY / "demo" / "model"), place / "demo" / "model")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
