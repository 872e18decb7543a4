"""Which way imports point, as docs/architecture.md has it: in one direction, and never in a circle."""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import tiercache

ROOT = Path(tiercache.__file__).parent
FILES = {
    ".".join(("tiercache", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}
LEVELS = (
    ("integrations",), ("bridge",), ("cache",), ("lifecycle", "control"), ("scheduler",), ("tiers",), ("memory", "device"),
    ("core",),
)  # fmt: skip
"""Folders and modules in the order of their imports: each one imports from its own level and those after it."""
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}
MAY_IMPORT_CONFIG = LEVEL["tiers"]
"""`config` is imported from this level and those before it."""
TOOLS = {"cli", "commands", "bench", "demo", "replay", "testing"}
"""Programs around the cache, which no part of it imports."""


@cache
def imported_names(module: str) -> tuple[str, ...]:
    """All names that a module imports, also inside functions and for types."""
    return tuple(names_in(ast.parse(FILES[module].read_text())))


def names_in(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@cache
def modules_of_ours(module: str) -> frozenset[str]:
    found = set()
    for name in imported_names(module):
        while name and name not in FILES:
            name = name.rpartition(".")[0]
        found.add(name)
    return frozenset(found - {"", "tiercache", module})


def folder_of(module: str) -> str:
    """The folder of a module, or the module itself if it lies beside the folders."""
    return module.split(".")[1]


def modules_in(folder: str) -> list[str]:
    return [module for module in FILES if module != "tiercache" and folder_of(module) == folder]


def imports_of(folder: str) -> dict[str, str]:
    """The folders that a folder imports from, each with one of the modules that does so."""
    return {
        folder_of(target): module
        for module in modules_in(folder)
        for target in modules_of_ours(module)
        if folder_of(target) != folder
    }


def circle(arrows: Mapping[str, frozenset[str]]) -> list[str]:
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.parametrize("folder", LEVEL)
def test_imports_go_in_one_direction(folder: str) -> None:
    assert modules_in(folder)
    for target, module in imports_of(folder).items():
        assert LEVEL.get(target, LEVEL[folder]) >= LEVEL[folder], module
        assert target not in TOOLS, module
        assert target != "config" or LEVEL[folder] <= MAY_IMPORT_CONFIG, module


def test_the_configuration_imports_only_the_core() -> None:
    assert imports_of("config").keys() <= {"core", "errors"}


def test_the_core_imports_nothing_that_moves_bytes() -> None:
    assert imports_of("core").keys() <= {"errors"}
    for module in modules_in("core"):
        assert not [name for name in imported_names(module) if name.split(".")[0] == "asyncio"], module


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    assert circle({module: modules_of_ours(module) for module in FILES if module != "tiercache"}) == []


def test_folders_do_not_import_each_other_in_a_circle() -> None:
    folders = {folder_of(module) for module in FILES if module != "tiercache"}
    assert circle({folder: frozenset(imports_of(folder)) for folder in folders}) == []


def test_the_package_does_not_import_its_tests() -> None:
    for module in FILES:
        assert not [name for name in imported_names(module) if name.split(".")[0] == "tests"], module


def test_a_circle_is_found() -> None:
    arrows = {name: frozenset(target) for name, target in {"a": "b", "b": "c", "c": "a"}.items()}
    assert set(circle(arrows)) == {"a", "b", "c"}
    late = ast.parse("if TYPE_CHECKING:\n    import tiercache.cache\ndef f():\n    from tiercache import payloads")
    assert list(names_in(late)) == ["tiercache.cache", "tiercache.payloads"]
