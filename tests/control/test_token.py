"""Who starts a server says a token, or that it needs none; and its file is a secret, or it is refused."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.cli.conftest import tiercache
from tests.control.conftest import TOKEN, token_file
from tiercache.control.command import read_token

GUIDE = Path(__file__).parents[2] / "docs" / "control.md"


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o660, 0o604, 0o602])
def test_file_that_others_can_use_is_refused_with_what_to_do(tmp_path: Path, mode: int) -> None:
    file = token_file(tmp_path, mode)
    with pytest.raises(ValueError, match=f"has mode {mode:04o}.*`chmod 600 {re.escape(str(file))}`") as caught:
        read_token("127.0.0.1", file, no_token=False)
    assert TOKEN not in str(caught.value)


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_private_file_is_read(tmp_path: Path, mode: int) -> None:
    assert read_token("127.0.0.1", token_file(tmp_path, mode), no_token=False) == TOKEN


@pytest.mark.needs("openssl")
def test_the_guides_recipe_makes_a_file_that_is_accepted(tmp_path: Path) -> None:
    (recipe,) = re.findall(r"^.*openssl rand.*$", GUIDE.read_text(), re.MULTILINE)
    subprocess.run(["sh", "-c", f"umask 022\n{recipe}"], cwd=tmp_path, check=True)
    assert len(read_token("127.0.0.1", tmp_path / "token", no_token=False) or "") == 64


def test_link_to_a_private_file_is_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(token_file(tmp_path))
    assert read_token("127.0.0.1", tmp_path / "link", no_token=False) == TOKEN


def test_server_refuses_to_start_open(tmp_path: Path) -> None:
    run = tiercache("serve-control", "--socket", tmp_path / "c.sock")
    assert run.returncode == 2 and "there is no token in TIERCACHE_CONTROL_TOKEN" in run.stderr


@pytest.mark.parametrize(
    ("content", "host", "no_token", "says"),
    [
        ("\n", "127.0.0.1", False, "there is no token in"),
        ("hunter2", "127.0.0.1", False, "16 or more"),
        ("two words that are long enough", "::1", False, "no spaces"),
        (None, "127.0.0.1", False, "cannot be read"),
        ("a directory", "127.0.0.1", False, "cannot be read"),
        ("hunter2", "127.0.0.1", True, "exclude each other"),
        ("", "0.0.0.0", True, "for loopback only"),
        ("", "cache.example", True, "for loopback only"),
    ],
)
def test_wrong_token_stops_the_start(tmp_path: Path, content: str | None, host: str, no_token: bool, says: str) -> None:
    file = tmp_path / "token"
    if content == "a directory":
        file.mkdir()
    elif content is not None:
        file.write_text(content)
        file.chmod(0o600)
    with pytest.raises(ValueError, match=says) as caught:
        read_token(host, None if no_token and not content else file, no_token)
    assert "hunter2" not in str(caught.value)
