"""What the tree looks like: which way its imports point, and how long its files and functions are."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import tiercache

ROOT = Path(tiercache.__file__).parent
FILES = {
    ".".join(("tiercache", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}
MOST_OF_A_FUNCTION = 60

FUNCTIONS_TOO_LONG = {"measure_disk", "_measure_size"}
"""Of the benchmarks: one table each. Of a command, its options do not count."""


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text())


def imports(node: ast.AST, *, when_called: bool, for_types: bool) -> Iterator[str]:
    """Modules of ours that are imported below `node`, also in functions and for types only, if wanted."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test) and not for_types:
            continue
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and not when_called:
            continue
        names: list[str] = []
        if isinstance(child, ast.ImportFrom) and child.module:
            assert not child.level, "imports are absolute"
            names = [f"{child.module}.{alias.name}" for alias in child.names]
        elif isinstance(child, ast.Import):
            names = [alias.name for alias in child.names]
        for name in names:
            while name and name not in FILES:
                name = name.rpartition(".")[0]
            if name and name != "tiercache":
                yield name
        yield from imports(child, when_called=when_called, for_types=for_types)


def room_of(module: str) -> str:
    return module.split(".")[1]


def circle(arrows: Mapping[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def arrows_of(modules: list[str], *, when_called: bool, for_types: bool) -> dict[str, set[str]]:
    return {
        module: set(imports(tree_of(module), when_called=when_called, for_types=for_types)) - {module}
        for module in modules
        if module != "tiercache"
    }


def test_rooms_do_not_import_each_other_in_a_circle() -> None:
    rooms: dict[str, set[str]] = defaultdict(set)
    for module, found in arrows_of(list(FILES), when_called=True, for_types=True).items():
        rooms[room_of(module)] |= {room_of(target) for target in found} - {room_of(module)}
    assert {"core", "tiers", "scheduler", "cache"} <= rooms.keys()
    assert "tiers" in rooms["scheduler"]
    assert circle(rooms) == []


def test_modules_do_not_import_each_other_in_a_circle_not_even_late_or_for_types() -> None:
    assert circle(arrows_of(list(FILES), when_called=True, for_types=True)) == []


def test_the_package_does_not_import_its_tests() -> None:
    for module, path in FILES.items():
        assert not re.search(r"^\s*(from|import) tests\b", path.read_text(), re.MULTILINE), module


def test_decisions_import_nothing_that_moves_bytes() -> None:
    core = [module for module in FILES if room_of(f"{module}.") == "core"]
    assert len(core) > 10
    for module, found in arrows_of(core, when_called=True, for_types=True).items():
        assert all(room_of(target) in ("core", "errors") for target in found), module
        assert "import asyncio" not in FILES[module].read_text(), module


def test_no_function_is_longer_than_a_screen() -> None:
    for module in FILES:
        for node in ast.walk(tree_of(module)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name not in FUNCTIONS_TOO_LONG:
                lines = (node.end_lineno or 0) - node.body[0].lineno + 1
                assert lines <= MOST_OF_A_FUNCTION, f"{module}.{node.name}"


def test_a_circle_is_found() -> None:
    assert set(circle({"a": {"b"}, "b": {"c"}, "c": {"a"}})) == {"a", "b", "c"}
    late = ast.parse("if TYPE_CHECKING:\n    import tiercache.cache\ndef f():\n    import tiercache.payloads")
    assert set(imports(late, when_called=True, for_types=True)) == {"tiercache.cache", "tiercache.payloads"}
    assert list(imports(late, when_called=False, for_types=False)) == []
