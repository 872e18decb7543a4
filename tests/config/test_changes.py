"""What differs between two configurations, and which of it a running cache can change."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tiercache import Config, ConfigError
from tiercache.cli import app
from tiercache.config.changes import changes, merged
from tiercache.config.machine import available_memory_bytes


def test_config_diff_says_what_is_live(tmp_path: Path) -> None:
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    old.write_text(
        "max_local_disk_size: 10\nlocal_disk: /a\nremote_url: redis://:one@h\ntenant_salt: two\nmax_gds_size: 1\n"
        "extra_config: {remote_storage_plugin.redis.timeout_s: 1, remote_storage_plugin.redis.username: u}"
    )
    new.write_text(
        "max_local_disk_size: 20\nlocal_disk: [/a, /b]\nremote_url: redis://:three@h\ntenant_salt: four\n"
        "extra_config: {remote_storage_plugin.redis.timeout_s: 2, remote_storage_plugin.redis.username: v}"
    )
    shown = CliRunner().invoke(app, ["config", "diff", str(old), str(new)])
    assert shown.exit_code == 0 and shown.stdout.splitlines() == [
        "tenant_salt: *** -> *** (needs a restart)",
        "local_disk: /a -> /a, /b (needs a restart)",
        "max_local_disk_size: 10.0 -> 20.0 (live)",
        "max_gds_size: 1.0 -> 0.0 (needs a restart)",
        "remote_url: redis://***@h -> redis://***@h (live)",
        "remote_storage_plugin.redis.timeout_s: 1 -> 2 (needs a restart)",
        "remote_storage_plugin.redis.username: u -> v (live)",
    ]
    assert CliRunner().invoke(app, ["config", "diff", str(old), str(old)]).stdout == ""
    new.write_text(old.read_text() + "\nmax_local_cpu_size: 6")
    assert CliRunner().invoke(app, ["config", "diff", str(old), str(new)]).stdout == (
        "max_local_cpu_size: 5.0 -> 6.0 (needs a restart, unless the cache was started with as much)\n"
    )
    assert CliRunner().invoke(app, ["config", "diff", str(new), str(old)]).stdout == (
        "max_local_cpu_size: 6.0 -> 5.0 (live)\n"
    )
    new.write_text("max_local_disk_size: much")
    assert CliRunner().invoke(app, ["config", "diff", str(old), str(new)]).exit_code == 1


def test_only_an_address_of_redis_has_credentials_that_can_change() -> None:
    for old, new in (("redis://:a@h", "redis://:b@h"), ("valkeys://a:b@h:1/2", "valkeys://c:d@h:1/2")):
        assert [change.live for change in changes(Config(remote_url=old), Config(remote_url=new))] == [True]
    for old, new in (("fs:///srv/a@b", "fs:///srv/c@b"), ("redis://:a@h", "redis://:a@k"), ("redis://:a@h", None)):
        assert [change.live for change in changes(Config(remote_url=old), Config(remote_url=new))] == [False]


def test_memory_that_was_left_free_at_the_start_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    file = tmp_path / "tiercache.yaml"
    file.write_text("max_local_cpu_size: 8\nreserve_local_cpu_size: 2")
    available_memory_bytes.cache_clear()
    request.addfinalizer(available_memory_bytes.cache_clear)
    monkeypatch.setattr("tiercache.config.machine.meminfo", lambda: {"MemAvailable": 5 << 20})
    config = Config.load(file, environ={})
    assert config.max_local_cpu_size == 3
    monkeypatch.setattr("tiercache.config.machine.meminfo", lambda: {"MemAvailable": 2 << 20})  # the cache has the rest
    assert changes(config, config.reloaded()) == []
    assert config.changed({"queue_wait_s": 2}).max_local_cpu_size == 3
    file.write_text("max_local_cpu_size: 2.5\nreserve_local_cpu_size: 2")
    assert [str(change) for change in changes(config, config.reloaded())] == ["max_local_cpu_size: 3.0 -> 2.5"]


def test_keys_that_an_engine_has_completed_stay_when_the_file_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "tiercache.yaml"
    file.write_text("control_socket: /run/c\nmax_local_cpu_size: 8")
    loaded = Config.load(file, environ={})
    running = loaded.changed({"control_socket": "/run/c.1", "max_local_cpu_size": 4})
    assert changes(running, merged(running, loaded.reloaded()))[0].key == "max_local_cpu_size"
    file.write_text("control_socket: /run/d\nmax_local_cpu_size: 4")
    (change,) = changes(running, merged(running, loaded.reloaded()))
    assert str(change) == "control_socket: /run/c.1 -> /run/d" and not change.live


def test_all_problems_of_a_change_are_named_without_secrets() -> None:
    config = Config(remote_url="redis://:one-5d@h", tenant_salt="two-5d")
    with pytest.raises(ConfigError) as refused:
        config.changed({"max_local_cpu_size": 0, "remote_url": ["redis://:three-5d@h"], "chunk_siz": 1})
    told = str(refused.value)
    assert "max_local_cpu_size: expected" in told and "chunk_siz: there is no such key" in told and "remote_url" in told
    assert "-5d" not in told + repr(config) + "".join(map(str, changes(config, Config())))
