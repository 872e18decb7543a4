"""How fast a cluster is, for an emulator that otherwise answers as fast as memory is copied."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pace:
    """Transfers of one direction share a link of `bytes_per_s` in the order of their arrival, and each takes `latency_s`
    more; calls on the mount that only look take `look_s`, those that change something `change_s`.

    The values are those of one of eight processes on a node: a 200 Gb/s network card is 25 GB/s, 3.1 for each. 0.3 ms are a
    round trip over RDMA and a read of NVMe behind it. 3FS keeps its metadata in FoundationDB, whose documentation gives
    0.1 to 1 ms for a read and 1.5 to 2.5 ms for a commit. What nobody of us has measured on a cluster, can be set.
    """

    bytes_per_s: float = 3.1e9
    latency_s: float = 0.0003
    look_s: float = 0.0005
    change_s: float = 0.002
