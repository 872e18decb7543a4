"""File, then LMCACHE_*, then TIERCACHE_*, then overrides; aliases; and a record of where each value came from."""

import pickle
import re
from pathlib import Path

import pytest

from tiercache.config import Config
from tiercache.config.remotes import remotes_of
from tiercache.config.sources import Origin


def test_nothing_given_means_the_defaults() -> None:
    config = Config.load(environ={})
    assert config == Config()
    assert config.origins == {}
    assert (config.chunk_size, config.use_odirect, config.disk_durability) == (256, None, "fdatasync")


def test_each_source_wins_over_the_one_before(load_text) -> None:
    lmcache, ours = {"LMCACHE_CHUNK_SIZE": "32"}, {"TIERCACHE_CHUNK_SIZE": "64"}
    assert load_text("chunk_size: 16").chunk_size == 16
    assert load_text("chunk_size: 16", lmcache).chunk_size == 32
    assert load_text("chunk_size: 16", lmcache | ours).chunk_size == 64
    assert load_text("chunk_size: 16", lmcache | ours, {"chunk_size": 128}).chunk_size == 128


def test_each_source_wins_whatever_name_it_has_for_a_setting_of_remote_tiers(load_text) -> None:
    text = "remote_url: mooncakestore://host:1\nextra_config: {device_name: from the file}"
    environ = {"LMCACHE_MOONCAKE_DEVICE_NAME": "from LMCache", "TIERCACHE_DEVICE_NAME": "from tiercache"}
    (remote,) = remotes_of(load_text(text, environ))
    assert remote.options["device_name"] == "from tiercache"
    (remote,) = remotes_of(load_text(text, environ).changed({"mooncake_device_name": "changed"}))
    assert remote.options["device_name"] == "changed"


@pytest.mark.parametrize("prefix", ["", "tiercache.", "lmcache."])
def test_overrides_may_be_prefixed(prefix: str) -> None:
    assert Config.load(environ={}, overrides={f"{prefix}chunk_size": 64}).chunk_size == 64


def test_tiercache_config_file_wins_over_lmcache_config_file(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours.yaml", tmp_path / "theirs.yaml"
    ours.write_text("chunk_size: 16")
    theirs.write_text("chunk_size: 32")
    environ = {"LMCACHE_CONFIG_FILE": str(theirs)}
    assert Config.load(environ=environ).chunk_size == 32
    environ["TIERCACHE_CONFIG_FILE"] = str(ours)
    assert Config.load(environ=environ).chunk_size == 16
    assert Config.load(theirs, environ=environ).chunk_size == 32


def test_extra_keys_are_taken_inside_extra_config_and_at_the_top(load_text) -> None:
    inside = load_text("extra_config:\n  use_odirect: true\n  disk_io_threads: 8\n")
    top = load_text("use_odirect: true\ndisk_io_threads: 8\n")
    assert inside == top
    assert (top.use_odirect, top.disk_io_threads) == (True, 8)


def test_extra_config_of_the_environment_is_laid_over_the_file_key_by_key(load_text) -> None:
    environ = {"LMCACHE_EXTRA_CONFIG": '{"disk_io_threads": 2}', "TIERCACHE_EXTRA_CONFIG": '{"disk_io_threads": 3}'}
    config = load_text("extra_config: {use_odirect: false, disk_io_threads: 8}", environ)
    assert (config.use_odirect, config.disk_io_threads) == (False, 3)


def test_an_old_name_means_the_new_key(load_text) -> None:
    config = load_text("gds_path: /g\ncufile_buffer_size: 64\nextra_config: {use_cufile: false}")
    assert (config.gds_buffer_size, config.use_gds) == (64, False)
    assert config.origins["gds_buffer_size"].alias == "cufile_buffer_size"


def test_an_old_and_a_new_name_that_differ_are_refused(problem_of) -> None:
    problem = problem_of("gds_path: /g\ncufile_buffer_size: 64\ngds_buffer_size: 65")
    assert "cufile_buffer_size and gds_buffer_size are the same key with different values: 64 (" in problem
    assert "line 2) and 65 (" in problem


def test_origins_name_file_and_line_variable_and_override(load_text, tmp_path: Path) -> None:
    config = load_text(
        "# a comment\nchunk_size: 16\nextra_config:\n  disk_io_threads: 8\n",
        {"TIERCACHE_LOCAL_DISK": "/a", "LMCACHE_EXTRA_CONFIG": '{"use_odirect": true}'},
        {"tiercache.tenant_salt": "x"},
    )
    file = str(tmp_path / "tiercache.yaml")
    assert config.origins == {
        "chunk_size": Origin("file", file, 2),
        "disk_io_threads": Origin("file", file, 4),
        "local_disk": Origin("environment", "TIERCACHE_LOCAL_DISK"),
        "use_odirect": Origin("environment", "LMCACHE_EXTRA_CONFIG"),
        "tenant_salt": Origin("override", "tiercache.tenant_salt"),
    }


@pytest.mark.parametrize(
    ("text", "directories"),
    [
        ("local_disk: /a", ("/a",)),
        ("local_disk: file:///a/b/", ("/a/b/",)),
        ("local_disk: 'file:///a, /b ,'", ("/a", "/b")),
        ("local_disk: [file:///a, /b]", ("/a", "/b")),
        ("local_disk: relative/path", ("relative/path",)),
        ("local_disk: null", ()),
        ("local_disk: ''", ()),
    ],
)
def test_local_disk_is_one_path_or_several(load_text, text: str, directories: tuple[str, ...]) -> None:
    assert load_text(text).local_disk == directories


def test_an_empty_variable_switches_a_path_off_and_is_no_number(load_text) -> None:
    config = load_text("local_disk: /a\nchunk_size: 16", {"TIERCACHE_LOCAL_DISK": "", "TIERCACHE_CHUNK_SIZE": ""})
    assert (config.local_disk, config.chunk_size) == ((), 16)


def test_an_empty_variable_is_no_number_for_a_remote_tier_and_no_password(load_text) -> None:
    text = "remote_url: redis://host\nextra_config: {request_timeout: 3, valkey_mode: cluster, password: old}"
    environ = {"LMCACHE_REQUEST_TIMEOUT": "", "LMCACHE_VALKEY_MODE": "", "LMCACHE_PASSWORD": ""}
    (remote,) = remotes_of(load_text(text, environ))
    assert (remote.options["timeout_s"], remote.options["mode"], remote.options["password"]) == (3.0, "cluster", None)


@pytest.mark.parametrize("word", ["true", "True", "TRUE", "1", '"true"'])
def test_switches_of_the_environment_as_lmcache_reads_them(word: str) -> None:
    assert Config.load(environ={"LMCACHE_SAVE_UNFULL_CHUNK": word}).save_unfull_chunk is True


def test_manual_numa_mapping_is_accepted_with_a_warning(load_text) -> None:
    config = load_text("numa_mode: manual\nextra_config: {gpu_to_numa_mapping: {0: 1}}")
    assert config.numa_mode is None
    assert any("numa_mode: manual" in warning for warning in config.warnings)


OFF = "local_cpu: false\nlocal_disk: /other\nmax_local_disk_size: 0\n"
WEKA = "weka_path: /w\ngds_buffer_size: 64\n"


@pytest.mark.parametrize(
    ("without", "setting", "tier"),
    [
        (OFF, "max_gds_size: 1", "gds_path: /g\ngds_buffer_size: 64"),
        (OFF, "max_hf3fs_size: 1", "hf3fs_base_path: /3fs/kv"),
        (OFF, "tenant_max_local_cpu_size: 1", ""),
        (OFF, "tenant_max_shared_memory_size: 1", "shared_memory_path: /dev/shm/kv\nmax_shared_memory_size: 2"),
        (OFF, "tenant_max_local_disk_size: 1", "local_disk: /d\nmax_local_disk_size: 2"),
        (OFF, "disk_compression: zstd", "local_disk: /d\nmax_local_disk_size: 2"),
        (OFF, "tenant_max_gds_size: 1", WEKA),
        (OFF, "tenant_max_hf3fs_size: 1", "hf3fs_base_path: /3fs/kv"),
        ("", "max_local_disk_size: 1", "local_disk: /d"),
        (WEKA, "flash_admission: second_touch", "gds_path: /g\ngds_buffer_size: 64"),
        (WEKA, "flash_bytes_per_day: 1e9", "local_disk: /d\nmax_local_disk_size: 1"),
    ],
)
def test_caps_quotas_compression_and_admission_without_their_tier_get_a_warning(
    load_text, without: str, setting: str, tier: str
) -> None:
    warnings = load_text(f"{without}{setting}\n").warnings
    expected = f"accepted but not honoured: {setting.partition(':')[0]} (of tiers that are off or not configured)"
    assert [warning for warning in warnings if "the disk tier is off" not in warning] == [expected]
    assert load_text(f"{tier}\n{setting}\n").warnings == ()


def test_memory_to_leave_free_lowers_the_arena_and_says_so(load_text) -> None:
    config = load_text("max_local_cpu_size: 1000000\nreserve_local_cpu_size: 0.001")
    assert 0 < config.max_local_cpu_size < 1000000
    assert "max_local_cpu_size lowered from 1e+06" in config.warnings[0]


def test_a_configuration_travels_to_another_process(load_text) -> None:
    config = load_text("chunk_size: 16\nlocal_disk: /a")
    copy = pickle.loads(pickle.dumps(config))
    assert (copy, copy.origins, hash(copy)) == (config, config.origins, hash(config))


def test_every_variable_that_the_documents_name_may_be_in_the_engines_environment(tmp_path: Path) -> None:
    """What `serve-control` reads is no key, and no reason not to start."""
    repository = Path(__file__).parents[2]
    pages = [repository / "README.md", repository / "tiercache" / "cli.py", *(repository / "docs").rglob("*.md")]
    pages += (repository / "tiercache" / "control").glob("*.py")
    named = {name for page in pages for name in re.findall(r"\b(?:TIERCACHE|LMCACHE)_[A-Z0-9_]+\b", page.read_text())}
    assert {"TIERCACHE_CONTROL_TOKEN", "TIERCACHE_CONFIG_FILE", "LMCACHE_CONFIG_FILE"} <= named
    file = tmp_path / "c.yaml"
    file.write_text("chunk_size: 16")
    fitting = {"CONFIG_FILE": str(file), "EXTRA_CONFIG": "{}", "CONTROL_TOKEN": "correct-horse-battery-staple"}
    environ = {name: fitting.get(name.partition("_")[2], "1") for name in named}
    assert Config.load(environ=environ).chunk_size == 16
