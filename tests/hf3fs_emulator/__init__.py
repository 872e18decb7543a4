"""An emulator of 3FS's user-space I/O (USRBIO): a daemon with a mount, and the Python modules that clients import.

```python
with Hf3fsEmulator() as emulator:
    install()
    from hf3fs_fuse.io import make_ioring, make_iovec, register_fd
    ring = make_ioring(str(emulator.mount), 64)
```

It is strict: what the real thing forbids fails here, where the real thing would corrupt, leak or wait for ever. What it
cannot prove, since it is not 3FS:

- that it is right. It was written from 3FS's source and has never met a cluster; where the source was misread, it is wrong.
- speed. The bytes come from a page cache next door: no network, no RDMA, no chains of replicas, no storage targets.
- what 3FS promises of durability, of consistency between clients, of files' lengths seen from other machines.
- the real library's crashes and races. It raises where that one breaks a rule silently, and locks where that one does not.
- GPU buffers, priorities (the real one's workers prefer some rings), NUMA, quotas, other users' permissions; `hardlink`,
  `punch_hole` and `read_file` are not there.
"""

from tests.hf3fs_emulator.control import Control
from tests.hf3fs_emulator.emulator import Hf3fsEmulator, why_no_fuse
from tests.hf3fs_emulator.install import SITE, install
from tests.hf3fs_emulator.pace import Pace
from tests.hf3fs_emulator.statistics import Statistics

__all__ = ["SITE", "Control", "Hf3fsEmulator", "Pace", "Statistics", "install", "why_no_fuse"]
