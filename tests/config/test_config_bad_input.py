"""Bad configuration fails at load: the key, the value, what is accepted, and where it was written."""

import contextlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercache.config import Config
from tiercache.config.schema import ALIASES, KEYS
from tiercache.errors import ConfigError


@pytest.mark.parametrize(
    ("written", "guess"),
    [
        ("CHUNK_SIZE", "; the nearest is chunk_size"),
        ("hf3fs_iovsize", "; the nearest is hf3fs_iov_size"),
        ("cufile_bufer_size", "; the nearest is cufile_buffer_size"),
        ("zzzzqqqq", ""),
    ],
)
def test_an_unknown_key_fails_with_the_nearest(problem_of, written: str, guess: str) -> None:
    assert f"{written}: there is no such key{guess} (" in problem_of(f"{written}: 1")


@pytest.mark.parametrize("prefix", ["LMCACHE", "TIERCACHE"])
@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("CHUNK_SIZEE", "1", "the nearest is chunk_size"),
        ("MODEL_ID", "", "model_id: expected a name .* found ''"),
        ("MAX_LOCAL_CPU_SIZE", "1e300", r"size: expected a number of GB .* and below 8.59e\+09, found '1e300'"),
        *(("EXTRA_CONFIG", text, "extra_config: expected .*") for text in ("{", "[1]", "3")),
    ],
)
def test_a_mistake_in_the_environment_is_named_with_its_variable(prefix: str, name: str, value: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"{problem} .environment variable {prefix}_{name}"):
        Config.load(environ={f"{prefix}_{name}": value})


@pytest.mark.parametrize("name", ["shm_name", "tenant_salt", "control_socket", "local_disk"])
@pytest.mark.parametrize("text", ["/a\0b", "/a\ud800b"])
def test_what_no_name_can_hold_is_refused(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: expected a?.*(UTF-8|NUL|path that a file can have)"):
        Config.load(overrides={name: text})


@pytest.mark.parametrize("variable", ["LMCACHE_MODEL_ID", "TIERCACHE_MODEL_ID"])
def test_spaces_around_the_name_of_a_model_are_no_part_of_it(variable: str) -> None:
    assert Config.load(environ={variable: " ours "}).model_id == "ours"


def test_an_unknown_extra_key_and_an_unknown_override_fail(problem_of) -> None:
    assert "the nearest is use_odirect" in problem_of("extra_config: {use_odirekt: true}")
    assert "(override lmcache.chunk_sizee)" in problem_of(overrides={"lmcache.chunk_sizee": 1})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # out of range
        ("chunk_size: 0", "chunk_size: expected a whole number of tokens in 1 .. 65536, found 0"),
        ("max_local_cpu_size: 0", "max_local_cpu_size: expected a number of GB > 0, found 0"),
        ("max_local_cpu_size: .nan", "max_local_cpu_size: expected a number of GB > 0, found nan"),
        ("max_local_cpu_size: 1e300", "max_local_cpu_size: expected a number of GB > 0 and below 8.59e+09, found '1e300'"),
        ("write_queue_bytes: 9223372036854775808", "write_queue_bytes: expected a whole number of bytes >= 0 and below"),
        ("close_timeout_s: 1.0e+10", "close_timeout_s: expected a number of seconds >= 0 and below 9.22e+09"),
        ("lookup_timeout_ms: 1.0e+20", "lookup_timeout_ms: expected a whole number of milliseconds >= 1 and below 9.22e+12"),
        ("hf3fs_io_depth: -129", "hf3fs_io_depth: expected a whole number in -128 .. 128, found -129"),
        ("hf3fs_numa_id: -2", "hf3fs_numa_id: expected a whole number >= -1, found -2"),
        ("hf3fs_numa_id: 9999", "hf3fs_numa_id: expected a NUMA node of this machine in -1 .. "),
        ("cache_policy: ARC", "cache_policy: expected one of LRU, FIFO, LFU, MRU, COST, S3FIFO, SLRU, found 'ARC'"),
        ("remote_serde: cachegen", "compression of a remote tier loses none), found 'cachegen'"),
        ("numa_mode: near", "numa_mode: expected auto or the number of a NUMA node, found 'near'"),
        ("shm_name: a/b", "shm_name: expected a name without / inside, found 'a/b'"),
        # a wrong type or unit
        ("max_local_cpu_size: 5GB", "expected a number of GB > 0, found '5GB'"),
        ("chunk_size: 1.5", "expected a whole number of tokens in 1 .. 65536, found 1.5"),
        ("local_cpu: maybe", "local_cpu: expected true or false, found 'maybe'"),
        ("model_id: '  '", "model_id: expected a name for the model, not empty, found '  '"),
        ("local_disk: true", "local_disk: expected a path, or a list of paths, found True"),
        ("chunk_size: " + "9" * 200, "9999..."),
        ("local_disk: s3://bucket", "local_disk: expected a path or file://"),
        ("remote_url: redishost:6379", "remote_url: expected one of redis://"),
        ("remote_url: 'redis://'", "remote_url: expected a host or a path after the scheme"),
        ("extra_config: [1]", "extra_config: expected a mapping of keys to values, found list"),
        ("extra_config: '{'", "extra_config: expected a JSON object"),
        # keys that contradict each other
        ("local_cpu_use_hugepages: true\nshm_name: a", "local_cpu_use_hugepages and shm_name exclude each other"),
        ("local_cpu_use_hugepages: true\nenable_p2p: true", "local_cpu_use_hugepages and enable_p2p exclude each other"),
        ("gds_path: /g", "gds_path needs gds_buffer_size"),
        ("remote_storage_plugins: hf3fs", "hf3fs needs remote_storage_plugin.hf3fs.base_path or hf3fs_base_path"),
        ("remote_storage_plugin.fs.a.base_path: /x", "remote_storage_plugins does not list 'fs.a'"),
        (
            "hf3fs_base_path: /mnt/3fs/a,/elsewhere\nhf3fs_mount_point: /mnt/3fs",
            "hf3fs_base_path: '/elsewhere' does not lie under hf3fs_mount_point '/mnt/3fs'",
        ),
        ("remote_url: 'hf3fs:///m/3x'\nhf3fs_mount_point: /m/3", "remote_url: '/m/3x' does not lie under hf3fs_mount_point"),
        ("hf3fs_base_path: /mnt/3fs/../a\nhf3fs_mount_point: /mnt/3fs", "expected absolute paths without .."),
        (
            "remote_storage_plugins: [hf3fs.a]\nremote_storage_plugin.hf3fs.a.base_path: ' , '",
            "remote_storage_plugin.hf3fs.a.base_path: expected at least one path, found ' , '",
        ),
        ("hf3fs_base_path: /mnt/3fs/3fs-virt/a", "hf3fs_base_path: expected a directory for files"),
        ("chunk_size: 16\nchunk_size: 32", "chunk_size and chunk_size are the same key with different values: 16 ("),
        ("extra_config: {use_odirect: true, use_odirect: false}", "are the same key with different values: True ("),
        ("reserve_local_cpu_size: 1000000000", "reserve_local_cpu_size: expected less than the "),
    ],
)
def test_what_cannot_be_meant_is_one_clear_sentence(problem_of, text: str, expected: str) -> None:
    problem = problem_of(text)
    assert expected in problem
    assert len(problem.splitlines()) == 1


def test_several_problems_are_reported_together(problem_of) -> None:
    problem = problem_of("chunk_size: 0\nchunk_sise: 1\ngds_path: /g", environ={"LMCACHE_LOCAL_CPU": "maybe"})
    assert problem.startswith("4 problems in the configuration:")
    for part in ("chunk_size: expected", "chunk_sise: there is", "gds_path needs", "local_cpu"):
        assert part in problem


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("- a\n- b\n", "line 1: expected a mapping of keys to values"),
        ("a: 1\n b: 2\n", "line 2: not valid YAML: mapping values are not allowed here"),
        ("chunk_size: [1\n", "not valid YAML"),
        ("a: 1\n\tb: 2\n", "line 2: not valid YAML: found character '\\t' that cannot start any token"),
        (b"chunk_size: 16\nlocal_disk: /\xff\n", "line 2: expected UTF-8 text, found byte 0xff"),
        ("chunk_size: \x01", "not valid YAML"),
        ("a: 1\n---\nb: 2\n", "not valid YAML"),
        ("chunk_size: !!python/object:os.system {}", "not valid YAML"),
        ("local_cpu: true\nchunk_size: 2020-99-99", "line 2: the value of chunk_size cannot be read"),
        ("chunk_size: " + "9" * 5000, "line 1: the value of chunk_size cannot be read"),
        ("local_cpu: !!bool maybe", "line 1: the value of local_cpu cannot be read"),
        ("local_disk: &a [*a]", "line 1: not valid YAML: found unconstructable recursive node"),
        ("a: " + "{a: " * 100_000, "not valid YAML: its values are nested too deep"),
        ("a: " + "x" * (4 << 20), "expected at most 4194304 bytes"),
    ],
)
def test_a_bad_file_is_one_sentence_with_file_and_line(problem_of, tmp_path: Path, content, expected: str) -> None:
    problem = problem_of(content)
    assert problem.startswith(str(tmp_path / "tiercache.yaml"))
    assert expected in problem
    assert len(problem.splitlines()) == 1


def test_a_missing_file_and_a_directory_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        Config.load(tmp_path / "missing.yaml", environ={})
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        Config.load(environ={"LMCACHE_CONFIG_FILE": str(tmp_path)})


@pytest.mark.parametrize("content", ["", "# nothing\n", "---\n", "\ufeff"])
def test_an_empty_file_means_the_defaults(load_text, content: str) -> None:
    assert load_text(content) == Config()


def test_a_number_too_long_to_print_is_refused_like_any_other() -> None:
    with pytest.raises(ConfigError, match="2 problems"):
        Config.load(environ={}, overrides={"chunk_size": 10**5000, "local_cpu": 10**5000})


def test_built_directly_it_is_checked_too() -> None:
    with pytest.raises(ConfigError, match="2 problems"):
        Config(chunk_size=0, max_local_cpu_size=-1)
    with pytest.raises(ConfigError, match="gds_path needs"):
        Config(gds_path=("/g",))


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from([*KEYS, *ALIASES, "extra_config", "enable_p2p"]), anything, max_size=4))
def test_any_values_load_or_are_a_configuration_error(overrides: dict[str, object]) -> None:
    try:
        config = Config.load(environ={}, overrides=overrides)
    except ConfigError:
        return
    assert config.arena_bytes >= 0
    assert repr(config).startswith("Config(")


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_load_or_are_a_configuration_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(content)
    with contextlib.suppress(ConfigError):
        Config.load(path, environ={})


def test_names_of_models_that_yaml_reads_as_one_number_differ(load_text) -> None:
    """Engines with one model_id share KV."""
    assert load_text("model_id: 1.10").model_id == "1.10"
    assert load_text("model_id: 0x10").model_id == "0x10"
    assert load_text("tenant_salt: 0123").tenant_salt == "0123"
    assert load_text("chunk_size: 0400").chunk_size == 256
