"""The campaign of real faults: true processes on true files, killed at random instants, and whatever they stored verified.

`run_campaign` plans rounds by a seed (`plan.py`). In each, two to four processes (`worker.py`) embed a `TierCache` on one
place (`places/`: a directory, a small device, a Redis server, a 3FS mount) while faults strike: kill -9, a device that fills
up, a server or a mount that freezes, dies and comes back, a byte that flips in a file. One process of each place lives
from the first round to the last: what it leaks adds up. The referee (`referee.py`) hears from all of them what they put,
forgot and found, and knows what must be found (`promises.py`).

What must hold:

- every byte of every get is the one that belongs to its key, and a chunk of which a byte has flipped is a miss;
- a chunk that a process put and flushed is found by every other process if nothing had to be evicted, also after kills;
  what it forgot is found by none that begins later;
- the files of a place never occupy more than its cap, at an instant at which all its processes stand still;
- within `places.base.RECOVERY_S` after a fault the place works again, for who lived through it and for who comes new;
- a process that is told to end ends by itself, with the status 0, and none writes anything to stderr;
- processes that live long hold no more memory, descriptors and threads at the end than at the beginning, and nothing is left
  of the dead: no file, no shared memory, no mount.

The seed decides what is done and in which order; the operating system decides when. So a seed gives the same campaign again,
not the same run.
"""
