"""Asking whether GPUDirect Storage works here never hangs, whatever the driver does."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from tiercache.tiers import gds


async def test_probe_that_hangs_is_killed(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    program = f"import os; open({str(mark)!r}, 'w').write(str(os.getpid()))\nwhile True: pass"
    reason = await gds._ask([sys.executable, "-c", program], timeout_s=1.0)
    assert reason == "cuFile's driver did not answer within 1 s"
    if mark.exists():
        with pytest.raises(ProcessLookupError):
            os.kill(int(mark.read_text()), 0)


async def test_probe_that_crashes_is_a_reason() -> None:
    reason = await gds._ask([sys.executable, "-c", "import os; print('{', flush=True); os.abort()"], timeout_s=20.0)
    assert reason.startswith("the probe ended with status -6")


async def test_cancelled_probe_leaves_no_process(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pid")
    program = f"import os; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\nwhile True: pass"
    asking = asyncio.create_task(gds._ask([sys.executable, "-c", program], timeout_s=60.0))
    number = int(await asyncio.to_thread((tmp_path / "pid").read_text))
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)


@pytest.mark.needs("no GPU")
def test_probe_itself_says_why_not(tmp_path: Path) -> None:
    reason = gds.try_gds(tmp_path, 0)
    assert "no NVIDIA driver" in reason or "cannot do it" in reason or "DeviceError" in reason
    assert not list(tmp_path.iterdir())
