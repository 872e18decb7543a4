"""In a shared directory, a process that binds the path of a control socket is not trusted to be the cache."""

import asyncio
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.control.conftest import LAYOUT, TOKENS, config_of
from tests.tiers.others import Other, running
from tiercache import TierCache
from tiercache.control.client import Fleet, ask, find_sockets
from tiercache.control.messages import ControlError, Prefetch, Statistics
from tiercache.errors import ConfigError

NOBODY = 65534
pytestmark = pytest.mark.needs("root")

# A process of another user that listens at a path and says ok to everything.
IMPOSTOR = """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
listening = socket.socket(socket.AF_UNIX)
listening.bind(sys.argv[1]); os.chmod(sys.argv[1], 0o666); listening.listen()
print("ready", flush=True)
answer = bytes.fromhex("81a26f6b80")  # {"ok": {}}
while True:
    line, _ = listening.accept()
    print("got", len(line.recv(1 << 16)), flush=True)
    line.sendall(len(answer).to_bytes(4, "big") + answer)
    line.close()
"""


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory as /tmp: everybody may write to it, and the way to it is open."""
    directory = Path(tempfile.mkdtemp(prefix="tiercache-test-", dir="/tmp"))
    directory.chmod(0o1777)
    yield directory
    shutil.rmtree(directory)


async def was_told(other: Other) -> bool:
    """Whether it got a single byte; it is over then."""
    await other.kill()
    while said := await other.line():
        if re.fullmatch("got [1-9].*", said):
            return True
    return False


async def test_another_users_socket_gets_no_prompt(shared: Path) -> None:
    async with running("-c", IMPOSTOR, shared / "c.sock") as process:
        with pytest.raises(ControlError, match=f"user {NOBODY} answers there, and not user 0") as caught:
            await ask(shared / "c.sock", Prefetch(tokens=TOKENS))
        assert caught.value.kind == "refused"
        with pytest.raises(ControlError, match="no cache has a socket open"):
            await Fleet([shared / "c.sock"]).ask(Prefetch(tokens=TOKENS))
        assert not await was_told(process)


async def test_server_asks_the_cache_and_not_whom_others_put_beside_it(shared: Path) -> None:
    async with TierCache.open(config_of(shared), LAYOUT):
        (shared / "c.sock.8").symlink_to(shared / "c.sock")
        os.chown(shared / "c.sock.8", NOBODY, NOBODY, follow_symlinks=False)
        async with running("-c", IMPOSTOR, shared / "c.sock.7") as process:
            assert find_sockets(shared / "c.sock") == [shared / "c.sock"]
            answer = await Fleet([shared / "c.sock"]).ask(Prefetch(tokens=TOKENS))
            assert "failed" not in answer and answer["handle"]
            assert not await was_told(process)


async def test_socket_of_ours_that_another_listens_on_is_not_believed(shared: Path) -> None:
    """The file's owner is not who answers."""
    async with running("-c", IMPOSTOR, shared / "c.sock") as process:
        os.chown(shared / "c.sock", 0, 0)
        assert find_sockets(shared / "c.sock") == [shared / "c.sock"]
        with pytest.raises(ControlError, match=f"user {NOBODY} answers there"):
            await Fleet([shared / "c.sock"]).ask(Statistics())
        assert not await was_told(process)


async def test_engine_of_another_user_is_believed_in_a_directory_of_its_own(shared: Path) -> None:
    own = shared / "own"
    own.mkdir(mode=0o755)
    os.chown(own, NOBODY, NOBODY)
    async with running("-c", IMPOSTOR, own / "c.sock"):
        assert await asyncio.wait_for(ask(own / "c.sock", Statistics()), 10) == {}
    own.chmod(0o775)
    async with running("-c", IMPOSTOR, own / "d.sock"):
        with pytest.raises(ControlError, match="answers there"):
            await ask(own / "d.sock", Statistics())


async def test_lock_file_is_not_followed_to_where_others_point(shared: Path) -> None:
    (shared / "c.sock.lock").symlink_to(shared / "made-by-the-engine")
    with pytest.raises(ConfigError, match="no socket can be made"):
        await TierCache(config_of(shared), LAYOUT).start()
    assert not (shared / "made-by-the-engine").exists()
