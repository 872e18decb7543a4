"""`explain`: effective values, where they came from, and the tiers they make."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tests.docs.generated import reference
from tiercache.commands.explain import explain_command, render
from tiercache.config import Config, explain
from tiercache.config.kinds import Choice
from tiercache.config.schema import KEYS
from tiercache.core.admission import ADMISSIONS
from tiercache.core.eviction import POLICIES

REPOSITORY = Path(__file__).parents[2]


def rendered(config: Config) -> str:
    out = io.StringIO()
    render(explain(config), Console(file=out, width=200))
    return out.getvalue()


def test_tiers_come_in_the_order_of_the_cascade(load_text) -> None:
    text = """
        remote_url: lm://host:6379
        remote_storage_plugins: [hf3fs, redis]
        remote_storage_plugin.redis.url: redis://a
        hf3fs_base_path: /mnt/3fs/a
        weka_path: /mnt/weka
        gds_path: /mnt/gds
        gds_buffer_size: 64
        local_disk: /a
        max_local_disk_size: 2
        shared_memory_path: /dev/shm/kv
        max_shared_memory_size: 1
    """
    tiers = explain(load_text(text)).to_dict()["tiers"]
    assert [tier["name"] for tier in tiers] == ["cpu", "shared_memory", "disk", "gds", "weka", "hf3fs", "redis", "lm"]
    assert [tier["state"] for tier in tiers] == ["on"] * 7 + ["not available in this version"]
    assert tiers[2] == {
        "name": "disk", "kind": "disk", "place": "/a", "cap_bytes": 2 * 2**30, "tenant_bytes": 0, "state": "on",
        "note": "",
    }  # fmt: skip


def test_a_disk_without_a_size_is_shown_as_off_with_the_reason(load_text) -> None:
    config = load_text("local_disk: /a")
    (disk,) = (tier for tier in explain(config).tiers if tier.kind == "disk")
    assert (disk.state, disk.cap_bytes) == ("off", 0)
    assert "max_local_disk_size is 0" in disk.note
    assert "max_local_disk_size is 0" in rendered(config)


def test_every_key_is_explained_with_its_source(load_text, tmp_path: Path) -> None:
    config = load_text("chunk_size: 16\ngds_path: /g\ncufile_buffer_size: 64", {"LMCACHE_LOCAL_CPU": "1"})
    values = explain(config).to_dict()["values"]
    file = str(tmp_path / "tiercache.yaml")
    assert values.keys() == KEYS.keys()
    assert values["chunk_size"] == {"value": 16, "source": "file", "name": file, "line": 1}
    assert values["gds_buffer_size"] == {
        "value": 64, "source": "file", "name": file, "line": 3, "alias": "cufile_buffer_size",
    }  # fmt: skip
    assert values["local_cpu"] == {"value": True, "source": "environment", "name": "LMCACHE_LOCAL_CPU"}
    assert values["cache_policy"] == {"value": "LRU", "source": "default"}


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("LMCACHE_", "TIERCACHE_")):
            monkeypatch.delenv(name)


def test_values_settings_and_sources_in_words(load_text, tmp_path: Path) -> None:
    text = """
        local_cpu: false
        local_disk: [/a, /b]
        remote_url:
        remote_storage_plugins: [redis.a, redis.b]
        extra_config:
          remote_storage_plugin.redis.b.password: hush
          remote_storage_plugin.redis.a.url: redis://u:hush@a
          redis_url: redis://b
          valkey_password: hush
    """
    lines = rendered(load_text(text, {"TIERCACHE_TENANT_SALT": "hush"})).split("What was set\n")[1].splitlines()
    pairs = list(zip(lines[::2], lines[1::2], strict=False))
    file = tmp_path / "tiercache.yaml"
    assert pairs[0] == (
        "  tenant_salt: *** (environment variable TIERCACHE_TENANT_SALT)", f"{' ' * 8}{KEYS['tenant_salt'].meaning}"
    )  # fmt: skip
    assert [key for key, _ in pairs[1:5]] == [
        f"  local_cpu: false ({file}, line 2)",
        f"  local_disk: /a, /b ({file}, line 3)",
        f"  remote_url: - ({file}, line 4)",
        f"  remote_storage_plugins: redis.a, redis.b ({file}, line 5)",
    ]
    assert [(key.strip(), meaning.strip()) for key, meaning in pairs[5:9]] == [
        (f"redis_url: redis://b ({file}, line 9)", "a setting of all remote tiers of a type"),
        (f"remote_storage_plugin.redis.a.url: redis://***@a ({file}, line 8)", "a setting of that remote tier"),
        (f"remote_storage_plugin.redis.b.password: *** ({file}, line 7)", "a setting of that remote tier"),
        (f"valkey_password: *** ({file}, line 10)", "a setting of all remote tiers of a type"),
    ]


def test_the_command_prints_json_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("chunk_size: 16\nenable_p2p: true\n")
    assert explain_command(path, as_json=True) == 0
    explained = json.loads(capsys.readouterr().out)
    assert explained["values"]["chunk_size"]["value"] == 16
    assert "enable_p2p" in explained["warnings"][0]
    assert explained["tiers"][0]["cap_bytes"] == 5 * 2**30


def test_the_command_prints_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("chunk_size: 16\n")
    assert explain_command(path, as_json=False) == 0
    shown = capsys.readouterr().out
    assert "chunk_size: 16" in shown and "cache_policy" not in shown
    assert explain_command(path, as_json=False, defaults=True) == 0
    assert "cache_policy: LRU (default)" in capsys.readouterr().out


def test_the_command_fails_with_the_problem_on_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain_command(tmp_path / "missing.yaml", as_json=True) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert "there is no such file" in printed.err


@pytest.mark.parametrize(
    ("text", "about"),
    [
        ("remote_url: redis://host:notaport\n", "remote_url: "),
        ("remote_storage_plugins: [fs]\n", "remote_storage_plugin.fs.base_path: "),
        ("remote_storage_plugins: [fs]\nremote_storage_plugin.fs.base_path: here\n", "remote_storage_plugin.fs.base_path: "),
        ("remote_url: s3://\nremote_storage_plugins: [redis]\n", "remote_url: "),
        ("remote_storage_plugins: [redis]\n", "remote_storage_plugin.redis.url: "),
    ],
)
def test_a_remote_tier_that_cannot_be_made_is_said_to_be_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, about: str
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    assert explain_command(path, as_json=True) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith(f"error: {about}")
    if printed.out:  # what is wrong by itself is found before there are tiers
        *_, tier = json.loads(printed.out)["tiers"]
        assert tier["state"] == "refused" and tier["note"].startswith(about)


def test_the_reference_page_is_up_to_date() -> None:
    assert (REPOSITORY / "docs" / "configuration.md").read_text() == reference()


@pytest.mark.parametrize(
    "name", ["cpu_ram", "shared_memory", "local_disk", "gds", "weka", "hf3fs", "redis", "remotes", "mooncake"]
)
def test_the_examples_load(name: str) -> None:
    config = Config.load(REPOSITORY / "examples" / "configs" / f"{name}.yaml", environ={})
    assert config.origins


def test_policies_and_admissions_are_those_that_there_are() -> None:
    """The table names them itself: `core` imports numpy, which reading a configuration does without."""
    for key, made in (("cache_policy", POLICIES), ("flash_admission", ADMISSIONS)):
        kind = KEYS[key].kind
        assert isinstance(kind, Choice) and kind.words == tuple(made)


def test_loading_needs_neither_yaml_nor_rich_nor_numpy() -> None:
    code = "import sys, tiercache.config as c; c.Config.load(environ={}); print({'yaml','rich','numpy'} & {*sys.modules})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert result.stdout.strip() == "set()"
