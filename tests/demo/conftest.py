"""The demo's real model, made once in the place where `make demo` keeps it."""

from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def model() -> Path:
    from tiercache.demo.model import prepare_model

    return prepare_model(REPOSITORY / "demo" / "model")


@pytest.fixture
def workplace(tmp_path: Path, model: Path) -> Path:
    """An empty directory to run the demo in, except that the model is there."""
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "model").symlink_to(model)
    return tmp_path
