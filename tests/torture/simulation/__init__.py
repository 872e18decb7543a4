"""Run whole caches, unmodified, in one thread and in virtual time: docs/decisions/0030-simulate-the-operating-system.md.

What tiercache asks of the operating system (time, threads and locks, files, randomness) is answered by the simulation
while it is installed. Everything that runs is a greenlet, and the seed chooses the next one. The clock moves to the
next timer when none can run, so a deadline is exact, and a run that takes too many steps at one instant fails.

- `world.py` is the scheduler; `loop.py` and `threads.py` are the event loop and the threads of a simulated process;
  `system.py` installs them, and `process.py` has what dies together.
- `disk.py`, `files.py`, `descriptors.py` and `inodes.py` are a file system in memory, which a property test compares
  with a real tmpfs. Each call is a point at which other greenlets may run and a fault may strike. `remote.py` is a
  server in memory.
- `fittings.py` and `machine.py` are an accelerator, a Weka mount, a 3FS mount with its daemon, and shared memory that
  processes map (`mappings.py`).
- `plan.py` chooses operations by seed, `happenings.py` and `weather.py` are faults, `calls.py` and `node.py` are
  callers.
- `oracle.py` and `expected.py` know what may be true after each operation; `works_again.py`, `settling.py` and
  `aftermath.py` check what must hold when all faults are over.
- `stage.py` and `run.py` are one run, `seeds.py` many, `shrink.py` shortens a failing one, `command.py` is the
  command.
"""
