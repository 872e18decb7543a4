"""docs/migrating.md: nothing of LMCache's is missing. LMCache's source is read where it is installed, and not imported."""

import ast
import importlib.util
from pathlib import Path
from typing import Any

from tests.docs.generated import DIFFERS, feature_of, with_tables
from tiercache.config import Config, explain
from tiercache.config.foreign import FOREIGN, FOREIGN_PREFIXES, IGNORED
from tiercache.config.remote_options import FLAT
from tiercache.config.schema import ALIASES, KEYS

PAGE = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text()


def source_of(path: str) -> str:
    found = importlib.util.find_spec("lmcache")
    assert found is not None and found.submodule_search_locations
    return (Path(found.submodule_search_locations[0]) / path).read_text()


def defaults_of_lmcache() -> dict[str, Any]:
    """Its table of keys, with those defaults that are written out."""
    for node in ast.parse(source_of("v1/config.py")).body:
        target = node.target if isinstance(node, ast.AnnAssign) else None
        if isinstance(target, ast.Name) and target.id == "_CONFIG_DEFINITIONS" and isinstance(node, ast.AnnAssign):
            assert isinstance(node.value, ast.Dict)
            rows = zip(node.value.keys, node.value.values, strict=True)
            return {ast.literal_eval(key): _default(row) for key, row in rows if key is not None}
    raise AssertionError("lmcache has no table of keys where it was")


def _default(row: ast.expr) -> Any:
    assert isinstance(row, ast.Dict)
    fields = {ast.unparse(key): value for key, value in zip(row.keys, row.values, strict=True) if key is not None}
    try:
        return ast.literal_eval(fields["'default'"])
    except (KeyError, ValueError):
        return ...


def test_its_tables_are_up_to_date() -> None:
    assert with_tables(PAGE) == PAGE


def test_every_key_that_is_read_is_on_the_page() -> None:
    known = {*(name for name, key in KEYS.items() if not key.ours), *ALIASES, *FOREIGN, *FOREIGN_PREFIXES}
    known |= {name for names in FLAT.values() for name in names}
    known = {name for name in known if not name.startswith(FOREIGN_PREFIXES) or name in FOREIGN_PREFIXES}
    assert {name for name in known if f"`{name}`" not in PAGE} == set()


def test_every_absent_key_belongs_to_a_feature() -> None:
    assert [name for name in (*FOREIGN, *FOREIGN_PREFIXES) if feature_of(name) is None] == []


def test_every_key_of_lmcache_is_known() -> None:
    keys = defaults_of_lmcache().keys() - {"extra_config"}
    assert len(keys) > 100
    assert {name for name in keys if name not in {*KEYS, *ALIASES, *FOREIGN, *IGNORED}} == set()


def test_a_default_that_is_not_lmcaches_is_explained() -> None:
    different = {
        name
        for name, default in defaults_of_lmcache().items()
        if name in KEYS and default is not ... and (KEYS[name].default or None) != (default or None)
    }
    assert different <= DIFFERS.keys()


def test_every_flag_of_its_server_is_on_the_page() -> None:
    flags = set()
    for room in ("multiprocess", "distributed", "distributed/l2_adapters", "mp_observability"):
        for call in ast.walk(ast.parse(source_of(f"v1/{room}/config.py"))):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument":
                flags |= {name.value for name in call.args if isinstance(name, ast.Constant)}
    assert len(flags) > 70
    assert {flag for flag in flags if f"`{flag}`" not in PAGE} == set()


def test_keys_of_its_servers_connector_are_named_and_have_no_effect() -> None:
    config = Config.load(environ={}, overrides={"lmcache.mp.host": "tcp://a", "lmcache.chunk_size": 512})
    assert config.chunk_size == 512
    assert "mp.host" in config.warnings[0] and len(explain(config).tiers) == 1
