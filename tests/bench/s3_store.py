"""An S3 store on this machine for measurements."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.servers.s3 import KEY, SECRET, S3Server
from tiercache.bench.workload import Plan
from tiercache.errors import TierUnavailable


@contextmanager
def s3_server(plan: Plan) -> Iterator[S3Server]:
    """Run a server whose files lie in memory. Raises TierUnavailable if it does not start."""
    plan.progress("starting the S3 server")
    where = {"prefix": "tiercache-bench-s3-", "dir": "/dev/shm"}
    try:
        with tempfile.TemporaryDirectory(**where, ignore_cleanup_errors=True) as place, S3Server(Path(place)) as server:
            yield server
    except RuntimeError as error:
        raise TierUnavailable(str(error)) from error


def s3_options(endpoint: str) -> dict[str, object]:
    """Return the settings of a tier on that server."""
    login = {"access_key_id": KEY, "secret_access_key": SECRET}
    return {"endpoint": endpoint, "allow_http": True, "region": "us-east-1", **login}
