"""Whatever README.md and the guides show is run: a command, a program or a configuration that fails, that prints something
else than the page says, or that is new and has no entry here, fails."""

from __future__ import annotations

import gzip
import itertools
import json
import re
import shlex
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.control.conftest import LAYOUT, TOKENS, config_of
from tests.needs import needs_fuse
from tests.readme.blocks import (
    KINDS,
    REPOSITORY,
    Block,
    all_blocks,
    all_shown,
    block_of,
    blocks,
    other_blocks,
    pages,
    shown,
    text_of,
)
from tests.readme.conftest import Shell
from tests.servers.ports import hold_port
from tests.test_cache_advice import ask
from tests.vllm.models import shorten
from tiercache import CacheThread, Config
from tiercache.demo.server import quickest_dtype

EXCERPTS = REPOSITORY / "tests/replay/excerpts"
ELSEWHERE = {
    r"make \S+": "tests/readme/test_makefile.py",
    r"python -m sglang\.launch_server .*": "tests/sglang/test_storage.py",
    r"python -m tests\.bench --only vllm --pairs \d": "tests/vllm/test_bench.py",
    r"python -m tests\.replay\.predictions TRACE\.\.\.": "tests/replay/test_predictions.py",
}
"""Commands that another test runs, as far as it can be run here."""

Entry = Callable[[str, Shell, Path], str]
"""Runs a command, or what is possible of it, and returns what it printed."""


def with_options(options: str, expected: str = "", model: bool = False) -> Entry:
    """Run a command with options that make it short. `model`: the command needs the demo's model."""

    def run(command: str, shell: Shell, place: Path) -> str:
        if model:
            link_model(place)
        said = shell(f"{command} {options}").stdout
        assert expected in said
        return said

    return run


def doctor(command: str, shell: Shell, place: Path) -> str:
    (place / "DIR").mkdir()
    said = shell(command).stdout
    assert f"disk at {command.split()[-1]}" in said
    return said


def stored(command: str, shell: Shell, place: Path) -> str:
    """On a directory in which the README's first program has stored something."""
    (place / "program.py").write_text(block_of("README.md", "Embedding", "python").text)
    (place / "disk.yaml").write_text("local_disk: DIR\nmax_local_disk_size: 0.2\n")
    shell("python program.py", TIERCACHE_CONFIG_FILE="disk.yaml")
    said = shell(command).stdout
    assert re.search(r"\b2 chunks", said)
    return said


def imported(command: str, shell: Shell, place: Path) -> str:
    stored("tiercache export DIR -o FILE", shell, place)
    (place / "DIR").rename(place / "OLD")
    return shell(command).stdout


def explain(command: str, shell: Shell, place: Path) -> str:
    (place / command.split()[-1]).write_text(block_of("docs/tiers.md", "Tiers", "yaml").text)
    said = shell(command).stdout
    assert "max_local_disk_size: 100.0" in said
    return said


def bench(command: str, shell: Shell, place: Path) -> str:
    """Where it takes minutes: fewer and smaller chunks. Full sizes: `make bench` in `test_makefile.py`."""
    only = "" if "--only" in command else " --only core"
    given = command.replace("FILE", "found.json").replace("PYTHON", sys.executable).replace(" --chunks demo/kv", "")
    said = shell(f"{re.sub(r' --pairs [0-9]+', '', given)} --quick --pairs 1{only}").stdout
    assert "figure" in said
    if "FILE" in command:
        assert "machine" in json.loads((place / "found.json").read_text())
    return said


def replay(command: str, shell: Shell, place: Path) -> str:
    """On excerpts of the traces, and in no time."""
    names = set(re.findall(r"\S+\.jsonl(?:\.gz)?(?= )", command))
    for name in names:
        excerpt = EXCERPTS / ("agentic_coding.jsonl" if "agentic" in name else "mooncake_conversation.jsonl")
        (place / name).write_bytes(gzip.compress(excerpt.read_bytes()) if name.endswith(".gz") else excerpt.read_bytes())
    (place / "DIRECTORY").mkdir()
    short = re.sub(r"--(limit|repeat) \d+", lambda match: f"--{match[1]} {20 if match[1] == 'limit' else 2}", command)
    said = shell(re.sub(r"--speed-up \d+", "--speed-up 5000", short)).stdout
    assert names
    assert "TTFT" in said
    return said


def torture(command: str, shell: Shell, place: Path) -> str:
    """For seconds instead of minutes."""
    short = command.replace("DIR", str(place)).replace("--minutes 5", "--minutes 0.1")
    if "--minutes" not in short:
        short += " --minutes 0.1" if "--seed" not in short else ""
    said = shell(short.replace("--seed N", "--seed 1"), PYTHONPATH=f"{REPOSITORY}:{REPOSITORY / 'examples'}").stdout
    assert re.search(r"\b0  wrong bytes|\b0 failed|seed 1", said), said
    return said


def serve_example(command: str, shell: Shell, place: Path) -> str:
    """Asked for its page."""
    link_model(place)
    port = hold_port()
    script = f"""
        {command} --port {port} >server.log 2>&1 &
        trap 'kill -INT $!; wait $!' EXIT
        until curl -sf http://127.0.0.1:{port}/; do kill -0 $! || {{ cat server.log; exit 1; }}; sleep 0.1; done
    """
    said = shell(script).stdout
    assert "<title>tiercache" in said
    return said


def install(command: str, shell: Shell, place: Path) -> str:
    """Its extras are there. tests/packaging installs the wheel; on PyPI the name is another project's."""
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"\w+", command.partition("[")[2])) <= extras.keys()
    return ""


def serve(command: str, shell: Shell, place: Path) -> str:
    """With the model that `make demo` uses, a smaller cache, and a port of its own; asked by examples/query_twice.py.
    Without vLLM's own prefix cache, which would leave nothing to load, and not compiled, which takes long."""
    link_model(place)
    port = hold_port()
    (place / "text.txt").write_text((REPOSITORY / "LICENSE").read_text()[:3000])
    small = command.replace("MODEL ", "demo/model ").replace("examples/configs/local_disk.yaml", "small.yaml")
    assert small.count("small.yaml") == small.count("demo/model ") == 1
    script = f"""
        {small} --port {port} --max-model-len 4096 --no-enable-prefix-caching --enforce-eager \\
            --dtype {quickest_dtype()} >server.log 2>&1 &
        trap 'kill $!; wait $!' EXIT
        until curl -sf http://127.0.0.1:{port}/health; do kill -0 $! || exit 1; sleep 0.2; done
        python examples/query_twice.py text.txt --url http://127.0.0.1:{port}/v1 --tokens 8
    """
    assert "times faster" in shell(script, VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1").stdout
    return (place / "server.log").read_text()


def serve_as_with_lmcache(command: str, shell: Shell, place: Path) -> str:
    """It is the README's command, which is run, but for the variable that names the file."""
    (run,) = block_of("README.md", "vLLM", "sh").commands()
    assert command.partition(" ")[2] == run.partition(" ")[2]
    file = str(place / "small.yaml")
    assert Config.load(environ={"LMCACHE_CONFIG_FILE": file}) == Config.load(environ={"TIERCACHE_CONFIG_FILE": file})
    return ""


def offload(command: str, shell: Shell, place: Path) -> str:
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
    return ""


@contextmanager
def embedded(place: Path, config: Config | None = None) -> Iterator[CacheThread]:
    """A cache with a disk and a control socket, for commands that ask it."""
    with closing(CacheThread(config or config_of(place), LAYOUT)) as thread:
        yield thread


def top(command: str, shell: Shell, place: Path) -> str:
    """Once, of an embedded cache: without `--once` it would go on until Ctrl-C."""
    with embedded(place) as thread:
        payloads = [bytes(LAYOUT.chunk_bytes)] * (len(TOKENS) // LAYOUT.chunk_tokens)
        thread.submit(thread.cache.store(TOKENS, payloads)).result(60)
        thread.submit(thread.cache.flush()).result(60)
        said = shell(command.replace("PATH", str(place / "c.sock")).removesuffix(" --once") + " --once").stdout
    assert "disk" in said and "closed" in said
    return said


def advise(command: str, shell: Shell, place: Path) -> str:
    """Of an embedded cache whose RAM is a little smaller than what its requests ask for in turns."""
    with embedded(place) as thread:
        for number in range(960):
            thread.submit(ask(thread.cache, [(number % 96).to_bytes(24, "big")])).result(60)
            thread.submit(thread.cache.flush()).result(60)
        said = shell(command.replace("PATH", str(place / "c.sock"))).stdout
    assert "960 requests" in said
    return said


def ctl(command: str, shell: Shell, place: Path) -> str:
    (place / "tiercache.yaml").write_text("queue_wait_s: 1\n")
    like = config_of(place)
    given = {name: getattr(like, name) for name in ("local_disk", "max_local_disk_size", "control_socket")}
    config = Config.load(place / "tiercache.yaml", environ={}, overrides={"max_local_cpu_size": 0.002, **given})
    with embedded(place, config):
        return shell(command.replace("PATH", str(place / "c.sock"))).stdout


def differs(command: str, shell: Shell, place: Path) -> str:
    (place / "OLD").write_text("max_local_disk_size: 1")
    (place / "NEW").write_text("max_local_disk_size: 2")
    said = shell(command).stdout
    assert said == "max_local_disk_size: 1.0 -> 2.0 (live)\n"
    return said


def control(command: str, shell: Shell, place: Path) -> str:
    """The three commands belong together: a token, the server, a request. The cache behind them is an embedded one."""
    (block,) = (one for one in all_blocks("sh") if "serve-control" in one.text)
    *before, server, client = block.commands()
    assert command in (*before, server, client), "it is not in the block that is run here"
    assert "serve-control" in server and "curl" in client, "the three commands changed their order"
    port = hold_port()
    with embedded(place):
        for one in before:
            shell(one)
        here = server.replace("/run/tiercache/control.sock", str(place / "c.sock"))
        asked = client.replace("504, 3280, ...", ", ".join(map(str, TOKENS))).replace(":8300", f":{port}")
        assert here != server and str(TOKENS[-1]) in asked and str(port) in asked
        script = f"""
            {here} --port {port} >control.log 2>&1 &
            trap 'kill -INT $!; wait $!' EXIT
            until curl -s http://127.0.0.1:{port}/ >/dev/null
            do kill -0 $! || {{ cat control.log; exit 1; }}; sleep 0.05; done
            {asked.replace("curl ", "curl --fail-with-body -s ", 1)}
        """
        answer = shell(script).stdout
    assert json.loads(answer)["handle"]
    return answer


def secrets(command: str, shell: Shell, place: Path) -> str:
    said = shell(f'{command} && echo "$TIERCACHE_CONTROL_TOKEN"').stdout
    assert re.fullmatch(r"[0-9a-f]{64}\n", said)
    return said


def deploy(command: str, shell: Shell, place: Path) -> str:
    """What it names is there; no image is built and no cluster asked. tests/deploy reads the files."""
    files = re.findall(r"deploy/\S+", command)
    assert all((REPOSITORY / file).exists() for file in files)
    for target in re.findall(r"--target (\w+)", command):
        assert re.search(rf"^FROM .* AS {target}$", (REPOSITORY / files[0]).read_text(), re.MULTILINE)
    return ""


def reference(command: str, shell: Shell, place: Path) -> str:
    """The pages are up to date, so that nothing changes."""
    (place / "docs").mkdir()
    pages = ("docs/configuration.md", "docs/migrating.md")
    for page in pages:
        (place / page).write_text(text_of(page))
    said = shell(command).stdout
    assert [(place / page).read_text() for page in pages] == [text_of(page) for page in pages]
    return said


PLAIN = r"[^;&|<>`$]*"
"""Arguments, and no second command behind them."""
VLLM = r"python -m vllm\.entrypoints\.openai\.api_server --model MODEL --kv-transfer-config"
SERVER = rf"TIERCACHE_CONFIG_FILE=\S+ {VLLM}"
ENTRIES: dict[str, Entry] = {
    r"tiercache doctor --path (DIR|/dev/shm)": doctor,
    r"tiercache config explain (FILE|your-lmcache\.yaml)": explain,
    r"tiercache (stat|verify|export) DIR( -o FILE)?": stored,
    r"tiercache import FILE DIR --max-size 100": imported,
    r"tiercache( config)? (?!config)[a-z-]+": with_options("--help"),  # it is only mentioned
    rf"(tiercache bench|python -m tests\.bench) (?!--only vllm)-{PLAIN}": bench,
    r"python -m tests\.bench\.gpu --cpu": with_options("--parts events", "checks passed"),
    # It starts engines for half an hour. Its parts: tests/bench/test_vllm_offloading.py.
    r"python -m tests\.bench\.vllm\.offloading --pairs \d": with_options("--help"),
    # It starts a server for each that is compared. Its parts: tests/bench/test_rivals.py.
    rf"python -m tests\.bench\.vllm\.rivals( -{PLAIN})?": with_options("--help"),
    # It starts two servers twice. Its parts: tests/bench/test_rolling.py.
    rf"python -m tests\.bench\.vllm\.rolling( -{PLAIN})?": with_options("--help"),
    # It loads a server for an hour. Its parts: tests/bench/test_soak.py.
    rf"python -m tests\.bench\.vllm\.soak TRACE( -{PLAIN})?": with_options("--help"),
    rf"tiercache replay {PLAIN}\.jsonl(\.gz)? {PLAIN}": replay,
    rf"python -m tests\.torture( -{PLAIN})?": torture,
    r"python -m tests\.docs\.generated": reference,
    r"python examples/embed\.py": with_options(""),
    r"python examples/(hf3fs_serve|redis_shared)\.py": with_options("--tokens 700", "tokens hit", model=True),
    r"python examples/transformers_chat\.py": with_options(
        "--tokens 300 --answer-tokens 2", "token by token, the one", model=True
    ),
    r"python examples/serve_fastapi\.py": serve_example,
    r"python examples/serve_fastapi_load\.py": with_options(
        "--users 2 --turns 3 --tokens 300 --answer-tokens 2 --typing-s 0", "with the cache", model=True
    ),
    r"pip install ('\.\[[\w,]+\]'|\.)": install,
    rf"{SERVER} '{PLAIN}": serve,
    rf"LMCACHE_CONFIG_FILE=your-lmcache\.yaml {VLLM} '{PLAIN}": serve_as_with_lmcache,
    rf"{SERVER}\.{PLAIN}": offload,
    r"\(umask 077; openssl rand -hex 32 > token\)": control,
    rf"tiercache serve-control -{PLAIN}": control,
    r"tiercache top --socket PATH( --once)?": top,
    r"tiercache advise --socket PATH": advise,
    rf"tiercache ctl --socket PATH {PLAIN}": ctl,
    r"tiercache config diff OLD NEW": differs,
    rf"curl -H {PLAIN}\$\(cat token\){PLAIN}": control,
    r"export TIERCACHE_CONTROL_TOKEN=\$\(openssl rand -hex 32\) \w+=\$\(openssl rand -hex 16\) MODEL=\S+": secrets,
    r"docker build -f \S+ --target \w+ -t \S+ \.": deploy,
    r"docker compose -f \S+ up --build": deploy,
    r"kubectl (kustomize|apply -k) \S+": deploy,
    r"kubectl create secret generic tiercache --from-literal=control-token=\$\(openssl rand -hex 32\)": deploy,
}


NEEDS = {
    r"python -m tests\.torture --real .*": pytest.mark.uses("redis-server"),
    r"python examples/hf3fs_serve\.py": needs_fuse,
    r"python examples/redis_shared\.py": pytest.mark.needs("redis-server"),
    r"python examples/serve_fastapi\.py": pytest.mark.needs("curl"),
    rf"{SERVER} '{PLAIN}": pytest.mark.needs("curl"),
    r"\(umask 077; openssl .*|tiercache serve-control -.*|curl .*": pytest.mark.needs("openssl", "curl"),
    r"export .*openssl .*": pytest.mark.needs("openssl"),
}
"""What a command takes over Python."""


def is_elsewhere(command: str) -> bool:
    return any(re.fullmatch(pattern, command) for pattern in ELSEWHERE)


def entry_of(command: str) -> Entry | None:
    found = [entry for pattern, entry in ENTRIES.items() if re.fullmatch(pattern, command)]
    return found[0] if len(found) == 1 else None


def problems_of(text: str) -> list[str]:
    """What keeps the tests of this file from running everything that `text` shows."""
    problems = [f"only fenced blocks with one of the labels {sorted(KINDS)} are run: {one}" for one in other_blocks(text)]
    for command in shown(text):
        if not is_elsewhere(command) and entry_of(command) is None:
            problems.append(f"shown and run by nothing (ENTRIES has no line, or several): {command}")
    return problems


@pytest.mark.parametrize("page", pages())
def test_every_command_of_a_page_is_run(page: str) -> None:
    assert not problems_of(text_of(page))


def test_every_entry_is_for_a_command_that_is_shown() -> None:
    patterns = [*ENTRIES, *ELSEWHERE]
    unused = [pattern for pattern in patterns if not any(re.fullmatch(pattern, command) for command in all_shown())]
    assert not unused
    assert all((REPOSITORY / path).is_file() for path in ELSEWHERE.values())


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
    assert problems_of(f"{text_of('README.md')}\n{more}\n")


def marked(command: str) -> Any:
    return pytest.param(command, marks=[mark for pattern, mark in NEEDS.items() if re.fullmatch(pattern, command)])


def printed() -> Iterator[tuple[Block, Block]]:
    """Each block of text, with the commands or the program before it."""
    for page in pages():
        for before, block in itertools.pairwise(blocks(page)):
            if block.language == "text" and before.language in ("sh", "python") and before.section == block.section:
                yield before, block


def compare(block: Block, said: str) -> None:
    for shape in shapes_of(block.text):
        assert shape.search(said), f"{block.name}: nothing like {shape.pattern} in\n{said[-4000:]}"


@pytest.mark.parametrize("command", [marked(one) for one in all_shown() if not is_elsewhere(one)])
def test_command(command: str, shell: Shell, place: Path) -> None:
    """It does what its entry checks, and prints what a page shows behind it."""
    entry = entry_of(command)
    assert entry is not None, "it has no entry in ENTRIES"
    said = entry(command, shell, place)
    for before, block in printed():
        if before.language == "sh" and before.commands()[-1] == command:
            compare(block, said)


def test_a_server_with_other_options_is_not_taken_for_the_one_that_is_run(shell: Shell, place: Path) -> None:
    with pytest.raises(AssertionError, match="not in the block"):
        control("tiercache serve-control --bogus x", shell, place)


def test_every_text_is_compared_with_what_is_printed() -> None:
    """It follows a command or a program, or repeats lines of a text that does."""
    compared = [block for _, block in printed()]
    lines = {line for block in compared for line in block.text.splitlines()}
    others = [block for block in all_blocks("text") if block not in compared]
    assert {line for block in others for line in block.text.splitlines()} <= lines
    elsewhere = [before.name for before, _ in printed() if before.language == "sh" and is_elsewhere(before.commands()[-1])]
    assert not elsewhere, "what another test runs is compared by nothing"


@pytest.mark.parametrize("block", all_blocks("yaml"), ids=lambda one: one.name)
def test_configuration(block: Block, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "tiercache.yaml").write_text(block.text)
    assert Config.load(tmp_path / "tiercache.yaml", environ={}).chunk_size > 0
    assert not [record.message for record in caplog.records if "no effect" in record.message]


def test_every_json_is_read() -> None:
    """SGLang's: in tests/sglang/test_storage.py."""
    assert {(block.page, block.section) for block in all_blocks("json")} == {
        ("docs/vllm.md", "Say what is coming"),
        ("docs/sglang.md", "SGLang"),
        ("docs/policies.md", "Formats"),
    }


def test_what_a_request_says(caplog: pytest.LogCaptureFixture) -> None:
    from tiercache.integrations.vllm.hints import Wishes, wishes_of

    said = json.loads(block_of("docs/vllm.md", "Say what is coming", "json").text)
    wishes = wishes_of(SimpleNamespace(kv_transfer_params=said), set())
    assert (wishes.session, wishes.next_in_s) == ("chat-17", 20)
    assert wishes != Wishes() and not caplog.records


def test_a_request_of_a_trace(shell: Shell, place: Path) -> None:
    request = json.loads(block_of("docs/policies.md", "Formats", "json").text)
    (place / "ours.jsonl").write_text(f"{json.dumps(request)}\n" * 2)
    assert "TTFT" in shell("tiercache replay ours.jsonl --strict --sweep 10").stdout


PROLOGUE = {
    ("README.md", "Embedding"): "",
    ("docs/embedding.md", "Prefetching"): """
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
    ("docs/transformers.md", "transformers"): """
import asyncio, tiercache
from transformers import GenerationConfig
from tests.transformers.models import make_model, tokens
async def main():
    model, ids, config = make_model("llama"), tokens(600), tiercache.Config.load()
""",
    ("docs/embedding.md", "Device memory"): """
import asyncio, torch, tiercache
import tiercache.device.driver
from tests.device.twin import TwinDriver
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
_API = """
import asyncio, hashlib, sys, numpy as np, tiercache
from tiercache.tiers.remote.base import RemoteSettings
sys.path.insert(0, "examples")
from sqlite_tier import SqliteTier
async def main():
    layout = tiercache.Layout("my-model", chunk_tokens=256, bytes_per_token=8192)
    config, tokens = tiercache.Config.load(), list(range(512))
    payloads = [np.full(layout.chunk_bytes, value, np.uint8) for value in (1, 2)]
    async with tiercache.TierCache.open(config, layout) as cache:
        await cache.store(tokens, payloads)
        await cache.flush()
"""
_API_OF_TRANSFORMERS = """
import asyncio, torch, tiercache
from transformers import GenerationConfig
from tests.transformers.models import make_model, tokens
from tiercache.integrations.transformers import Generator, ModelKv, PrefixCache
async def main():
    model, ids, config = make_model("llama"), tokens(600), tiercache.Config.load()
"""
_API_OF_DEVICES = """
import asyncio, torch, tiercache
from tiercache.device.paged import PagedChunk, PagedKv
from tests.device.twin import TwinDriver
def CudaDriver(ordinal): return TwinDriver()
async def main():
    layout = tiercache.Layout("my-model", chunk_tokens=256, bytes_per_token=8192)
    config, tokens, driver = tiercache.Config.load(), list(range(512)), CudaDriver(0)
    layer_tensors = [torch.randn((2, 32, 16, 4, 64), dtype=torch.bfloat16) for _ in range(3)]
    kv = PagedKv(driver, [plane for layer in layer_tensors for plane in layer])
    paged_layout = tiercache.Layout("my-model", chunk_tokens=256, bytes_per_token=kv.block_bytes // 16)
"""
_API_SECTIONS = {
    _API_OF_TRANSFORMERS: ("ModelKv", "Generator", "PrefixCache"),
    _API_OF_DEVICES: ("CudaDriver", "PagedKv", "PagedChunk"),
}
"""Sections of docs/api.md by what their examples take for granted; `_API` for all others."""
EPILOGUE = {
    ("docs/embedding.md", "Prefetching"): "assert progress.promoted == 2, progress",
    ("docs/transformers.md", "transformers"): "assert len(answer.new_ids) == 64",
    ("docs/embedding.md", "Device memory"): "assert torch.equal(layer_tensors[0][:, :16], layer_tensors[0][:, 16:])",
}


def program_of(block: Block, prologue: str, epilogue: str = "") -> str:
    if not prologue:
        return block.text
    indent = re.findall(r"^( *)\S.*$", prologue, re.MULTILINE)[-1]
    return f"{prologue}{textwrap.indent(f'{block.text}{epilogue}', indent)}\nasyncio.run(main())\n"


@pytest.mark.parametrize(
    "block", [one for one in all_blocks("python") if one.page != "docs/api.md"], ids=lambda one: one.name
)
def test_program(block: Block, shell: Shell, place: Path) -> None:
    where = block.page, block.section
    (place / "program.py").write_text(program_of(block, PROLOGUE[where], EPILOGUE.get(where, "")))
    said = shell("python program.py", TIERCACHE_CONFIG_FILE="small.yaml").stdout
    for before, text in printed():
        if before == block:
            compare(text, said)


@pytest.mark.parametrize("prologue", [_API, *_API_SECTIONS], ids=["the cache", "transformers", "device memory"])
def test_examples_of_the_api(prologue: str, shell: Shell, place: Path) -> None:
    special = [section for sections in _API_SECTIONS.values() for section in sections]
    sections = _API_SECTIONS.get(prologue)
    examples = [
        block for block in blocks("docs/api.md") if (block.section in sections if sections else block.section not in special)
    ]
    assert len(examples) >= 3
    (place / "program.py").write_text("".join(program_of(block, prologue) for block in examples))
    shell("python program.py", TIERCACHE_CONFIG_FILE="small.yaml")


def shapes_of(lines: str) -> list[re.Pattern[str]]:
    """Lines as patterns: ids, numbers and spaces may differ."""
    varies = re.compile(r"(?P<id>chatcmpl-)\w+|(?P<hex>\b[0-9a-f]{16,}\b)|(?P<number>\d[\d.]*)|(?P<space>\s+)")
    patterns = {"id": r"chatcmpl-\S+", "hex": r"[0-9a-f]{16,}", "number": r"\d[\d.]*", "space": r"\s+"}

    def shape(line: str) -> str:
        found, end = "", 0
        for match in varies.finditer(line):
            found += re.escape(line[end : match.start()]) + patterns[str(match.lastgroup)]
            end = match.end()
        return found + re.escape(line[end:])

    return [re.compile(shape(line.strip())) for line in lines.splitlines() if line.strip()]


def link_model(place: Path) -> None:
    """Its first layers; `make demo` runs with all of them in `test_makefile.py`."""
    from tiercache.demo.model import prepare_model

    (place / "demo").mkdir()
    shorten(prepare_model(REPOSITORY / "demo" / "model"), place / "demo" / "model")
