"""The daemon of the emulator: a file system, and the rings that go past it."""
