"""Stands in for 3FS's package of this name. See tests.hf3fs_emulator."""
