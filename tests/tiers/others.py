"""An instance in another process, which does what it is told line by line and can be killed."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


class Other:
    """Its program answers each line on its standard input with at least one line."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def do(self, command: str, *numbers: int) -> str:
        self.say(command, *numbers)
        return await self.line()

    def say(self, command: str, *numbers: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command} {' '.join(map(str, numbers))}\n".encode())

    async def line(self) -> str:
        assert self.process.stdout is not None
        return (await self.process.stdout.readline()).decode().strip()

    async def kill(self) -> None:
        """With SIGKILL."""
        self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def running(*arguments: object, **environment: str) -> AsyncIterator[Other]:
    """Run Python with these arguments. The program says that it is ready."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *map(str, arguments)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=REPOSITORY,
        env=os.environ | environment,
    )
    other = Other(process)
    assert await other.line() == "ready"
    try:
        yield other
    finally:
        if process.returncode is None:
            await other.kill()
