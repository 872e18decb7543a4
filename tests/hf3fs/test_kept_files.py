"""Files that stay open for the next read: never a file that has lost its name, or is going to."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tiercache.tiers.hf3fs.files import RegisteredFiles


class Library:
    """3FS's, for files of any kind. `on_register` is called in the middle of an opening."""

    def __init__(self) -> None:
        self.on_register: Callable[[], None] = lambda: None

    def register_fd(self, descriptor: int) -> None:
        self.on_register()

    def deregister_fd(self, descriptor: int) -> None:
        """Nothing is known of it."""


@pytest.mark.parametrize("how", ["forget", "forget_all"])
def test_a_file_that_is_forgotten_while_it_is_opened_is_not_kept(tmp_path: Path, how: str) -> None:
    path = tmp_path / "chunk"
    path.write_bytes(b"old")
    library = Library()
    files = RegisteredFiles(library)

    def deleted() -> None:
        path.unlink()
        if how == "forget":
            files.forget(str(path))
        else:
            files.forget_all()

    library.on_register = deleted
    file = files.open_to_read(str(path))
    library.on_register = lambda: None

    assert files.kept(str(path)) is None
    files.release(file)
    path.write_bytes(b"new")
    again = files.open_to_read(str(path))
    assert files.kept(str(path)) is again
    files.release(again)
    files.release(again)
    files.close()
