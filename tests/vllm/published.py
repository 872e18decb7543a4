"""What vLLM publishes about its KV cache and ours, as a router hears it: by ZMQ."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import zmq
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch


class Subscriber:
    """Listens from the start; engines connect to `endpoint`."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._socket.subscribe("")
        self._socket.rcvtimeo = 200
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self.batches: list[tuple[float, list[Any]]] = []
        """When they were published, by time.time(), and the events."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    @property
    def config(self) -> dict[str, Any]:
        """An engine's `kv_events_config`."""
        return {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": self.endpoint}

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self._socket.close(0)
        self._context.term()

    def until(self, time_s: float = float("inf")) -> list[Any]:
        """What was published before that time."""
        return [event for published_s, events in self.batches if published_s < time_s for event in events]

    def _listen(self) -> None:
        decoder = msgspec.msgpack.Decoder(KVEventBatch)
        while not self._ended.is_set():
            try:
                _, _, payload = self._socket.recv_multipart()
            except zmq.Again:
                continue
            batch = decoder.decode(payload)
            self.batches.append((batch.ts, batch.events))


def there(events: list[Any]) -> dict[str, dict[Any, BlockStored]]:
    """By medium: blocks that are there, and the event that said so last. A block is stored before it is removed."""
    found: dict[str, dict[Any, BlockStored]] = {}
    for event in events:
        if isinstance(event, AllBlocksCleared):
            found.clear()
        elif isinstance(event, BlockStored):
            found.setdefault(str(event.medium), {}).update(dict.fromkeys(event.block_hashes, event))
        elif isinstance(event, BlockRemoved):
            for block in event.block_hashes:
                del found[str(event.medium)][block]
    return found
