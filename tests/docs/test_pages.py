"""Pages that say what others say: the same figures, names and programs. The site itself is built by tests/readme."""

import re
from pathlib import Path

import tiercache
from tests.readme.blocks import REPOSITORY
from tiercache.config.schema import KEYS

DOCS = REPOSITORY / "docs"
CHOOSING = (DOCS / "choosing.md").read_text()
_FIGURE = re.compile(r"\d+\.\d+")
_LINK = re.compile(r"\]\(([^)#]+\.md)")


def test_every_figure_of_the_table_of_tiers_is_in_the_page_that_it_names() -> None:
    rows = [line for line in CHOOSING.splitlines() if line.startswith("| ") and _LINK.search(line)]
    assert len(rows) >= 7
    for row in rows:
        measured = row.split(" | ")[3]
        source = "".join((DOCS / page).read_text() for page in _LINK.findall(measured))
        assert {figure for figure in _FIGURE.findall(measured) if figure not in source} == set(), row


def test_hits_by_size_are_those_of_the_policies() -> None:
    (line,) = re.findall(r"On a public trace.*?\(\[policies\]", CHOOSING, re.DOTALL)
    policies = (DOCS / "policies.md").read_text()
    assert {figure for figure in _FIGURE.findall(line) if figure not in policies} == set()


def test_keys_that_are_recommended_exist() -> None:
    named = set(re.findall(r"`([a-z0-9]+(?:_[a-z0-9]+)+)(?::[^`]*)?`", CHOOSING))
    assert named <= {*KEYS, "ttl_s"}


def test_every_exported_name_is_on_the_page_of_the_api() -> None:
    page = (DOCS / "api.md").read_text()
    assert {name for name in tiercache.__all__ if f"`tiercache.{name}`" not in page} == set()


def test_the_readme_is_short() -> None:
    assert (REPOSITORY / "README.md").stat().st_size <= 8192


def test_every_figure_of_the_readme_is_in_the_benchmarks() -> None:
    readme, benchmarks = (REPOSITORY / "README.md").read_text(), (DOCS / "benchmarks.md").read_text()
    (picture,) = re.findall(r"!\[(.*?)\]", readme)
    (compared,) = re.findall(r"^## Beside others$(.*?)^## ", readme, re.MULTILINE | re.DOTALL)
    number = re.compile(r"\d[\d.,]*\d|\d")
    figures = {*number.findall(picture), *number.findall(compared)}
    assert len(figures) >= 25
    assert figures - {*number.findall(benchmarks)} == set()


def test_links_to_files_of_the_repository_lead_somewhere() -> None:
    pages = [*DOCS.rglob("*.md"), *REPOSITORY.glob("*.md")]
    broken = [(page.name, target) for page in pages for target in _targets(page) if not (page.parent / target).exists()]
    assert broken == []


def _targets(page: Path) -> list[str]:
    return [target for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()) if "://" not in target]
