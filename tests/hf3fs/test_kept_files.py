"""Files that stay open for the next read: never a file that has lost its name, or is going to."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tiercache.tiers.hf3fs.files import RegisteredFiles


@pytest.mark.parametrize("how", ["forget", "forget_all"])
def test_a_file_that_is_forgotten_while_it_is_opened_is_not_kept(tmp_path: Path, how: str) -> None:
    path = tmp_path / "chunk"
    path.write_bytes(b"old")
    library = SimpleNamespace(register_fd=lambda descriptor: None, deregister_fd=lambda descriptor: None)
    files = RegisteredFiles(library)

    def deleted(descriptor: int) -> None:
        library.register_fd = lambda descriptor: None
        path.unlink()
        files.forget(str(path)) if how == "forget" else files.forget_all()

    library.register_fd = deleted
    file = files.open_to_read(str(path))
    assert files.kept(str(path)) is None
    files.release(file)
    path.write_bytes(b"new")
    again = files.open_to_read(str(path))
    assert files.kept(str(path)) is again
    files.release(again)
    files.release(again)
    files.close()
