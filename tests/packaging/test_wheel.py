"""The wheel: what is in it, and that it is enough, installed where there is no compiler and nothing of this repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import pytest

import tiercache
from tests.readme.blocks import REPOSITORY, block_of

pytestmark = pytest.mark.xdist_group("wheel")

Run = Callable[..., str]


def finished(command: list[str], place: Path, path: str, **more: str) -> str:
    ours = ("TIERCACHE_", "LMCACHE_", "PYTHON")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    environ |= {"PATH": path, "PIP_NO_INDEX": "1", **more}
    done = subprocess.run(command, cwd=place, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: setuptools leaves its work beside the sources."""
    place = tmp_path_factory.mktemp("wheel")
    shutil.copytree(REPOSITORY / "tiercache", place / "tiercache", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, place)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", "wheels", "."]
    finished(build, place, os.environ["PATH"])
    (built,) = (place / "wheels").iterdir()
    return built


@pytest.fixture(scope="module")
def run(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a command of a new environment: the wheel, and this one's libraries behind it; no other program is found."""
    place = tmp_path_factory.mktemp("clean")
    finished([sys.executable, "-m", "venv", "--without-pip", "env"], place, os.environ["PATH"])
    python = place / "env" / "bin" / "python"
    install = ["install", "-q", "--no-deps", "--no-compile", str(wheel)]
    finished([sys.executable, "-m", "pip", "--python", str(python), *install], place, os.environ["PATH"])
    (installed,) = (place / "env").glob("lib/*/site-packages")
    (installed / "libraries.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))

    def run(name: str, *arguments: str, **more: str) -> str:
        return finished([str(place / "env" / "bin" / name), *arguments], place, str(place / "env" / "bin"), **more)

    return run


def test_it_is_for_every_platform_and_has_sources_only(wheel: Path) -> None:
    names = [PurePosixPath(name) for name in zipfile.ZipFile(wheel).namelist()]
    assert wheel.name == f"tiercache-{tiercache.__version__}-py3-none-any.whl"
    assert {name.parts[0] for name in names} == {"tiercache", f"tiercache-{tiercache.__version__}.dist-info"}
    kinds = {name.suffix for name in names if name.parts[0] == "tiercache"}
    assert kinds == {".py", ".typed"}
    assert wheel.stat().st_size < 650_000


def test_the_installed_package_is_the_one_that_is_used(run: Run) -> None:
    assert "/env/lib/" in run("python", "-c", "import tiercache; print(tiercache.__file__)")


def test_the_first_program_of_the_readme_runs(run: Run, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(block_of("README.md", "Embedding", "python").text)
    assert run("python", str(tmp_path / "program.py")) == "512 2097152\n"


def test_the_command_is_there(run: Run) -> None:
    assert tiercache.__version__ in run("tiercache", "--version")


def test_the_connector_is_there(run: Run) -> None:
    """Without vLLM, which takes seconds: that it can be imported with vLLM is what the tests in tests/vllm do."""
    program = "import tiercache.integrations.vllm as v, importlib.util as u; print(v.__all__)\n"
    program += "print(u.find_spec('tiercache.integrations.vllm.connector'))"
    said = run("python", "-c", program)
    assert "TierCacheConnector" in said and "/env/lib/" in said


def test_a_users_program_is_typed_strictly_and_runs(run: Run, tmp_path: Path) -> None:
    program = tmp_path / "a_user.py"
    shutil.copy(Path(__file__).with_name("a_user.py"), program)
    said = run("python", "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), str(program))
    assert said.startswith("Success")
    assert run("python", str(program)) == "['cpu']\n"


def test_all_names_of_the_package_are_exported() -> None:
    assert sorted(tiercache.__all__) == sorted({*tiercache._HOME, "__version__"})
    assert all(getattr(tiercache, name) for name in tiercache.__all__)
