"""A complete tier of your own: chunks in an SQLite file. Third-party tiers look like this one.

Put it where Python finds it, and name it in the configuration:

    remote_storage_plugins: ["sqlite.a"]
    extra_config:
      remote_storage_plugin.sqlite.a.module_path: sqlite_tier
      remote_storage_plugin.sqlite.a.class_name: SqliteTier
      remote_storage_plugin.sqlite.a.file: /var/cache/kv.sqlite

`tiercache.testing.TierContract` tests such a tier; see tests/remote/test_example_tier.py.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

import numpy as np

from tiercache.core.header import PACKED_BYTES
from tiercache.core.keys import ChunkKey
from tiercache.errors import TierUnavailable
from tiercache.memory.workers import Workers
from tiercache.tiers.remote.base import RemoteSettings, RemoteTier


class SqliteTier(RemoteTier):
    def __init__(self, settings: RemoteSettings) -> None:
        super().__init__(settings)
        if not settings.options.get("file"):
            raise settings.error("file", "expected the path of a file")
        # One thread: it owns the connection, and nothing of SQLite ever runs on the event loop.
        self._thread = Workers(settings.name, 1)
        self._database: sqlite3.Connection | None = None

    async def _connect(self) -> None:
        await self._thread.submit(self._open_file)

    async def _disconnect(self) -> None:
        if self._database is not None:
            await self._thread.submit(self._database.close)
        self._thread.close()

    async def _get(self, key: ChunkKey, into: np.ndarray) -> int | None:
        return await self._thread.submit(self._load, key, into)

    async def _put(self, key: ChunkKey, payload: np.ndarray) -> bool:
        return await self._thread.submit(self._store, key, payload)

    async def _exist(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        return await self._thread.submit(self._which, list(keys))

    async def _delete(self, key: ChunkKey) -> bool:
        return await self._thread.submit(self._remove, key)

    # These run in the thread

    def _open_file(self) -> None:
        self._database = sqlite3.connect(
            self.settings.options["file"], timeout=self.settings.timeout_s, check_same_thread=False, isolation_level=None
        )
        self._run("PRAGMA journal_mode = WAL")
        self._run("CREATE TABLE IF NOT EXISTS chunks (key BLOB PRIMARY KEY, value BLOB) WITHOUT ROWID")

    def _load(self, key: ChunkKey, into: np.ndarray) -> int | None:
        row = self._run("SELECT value FROM chunks WHERE key = ?", key).fetchone()
        if row is None:
            return None
        value = memoryview(row[0])
        payload = np.frombuffer(value[PACKED_BYTES:], dtype=np.uint8)[: into.nbytes]
        np.copyto(into[: payload.nbytes], payload)
        return self.verified(key, value[:PACKED_BYTES], into, payload.nbytes)

    def _store(self, key: ChunkKey, payload: np.ndarray) -> bool:
        value = self.packed_header(key, payload) + payload.tobytes()
        self._run("INSERT OR IGNORE INTO chunks VALUES (?, ?)", key, value)  # one statement, so no reader sees a part
        return True

    def _which(self, keys: list[ChunkKey]) -> list[bool]:
        marks = ", ".join("?" * len(keys))
        there = {row[0] for row in self._run(f"SELECT key FROM chunks WHERE key IN ({marks})", *keys)}
        return [key in there for key in keys]

    def _remove(self, key: ChunkKey) -> bool:
        return self._run("DELETE FROM chunks WHERE key = ?", key).rowcount > 0

    def _run(self, statement: str, *values: Any) -> sqlite3.Cursor:
        assert self._database is not None
        try:
            return self._database.execute(statement, values)
        except sqlite3.DatabaseError as error:  # locked, full, gone or damaged: the breaker counts it
            raise TierUnavailable(f"{self.name}: {error}") from error
