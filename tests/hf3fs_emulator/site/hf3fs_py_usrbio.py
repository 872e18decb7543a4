"""Stands in for 3FS's native module of this name. See tests.hf3fs_emulator."""

from tests.hf3fs_emulator.client.buffers import iovec
from tests.hf3fs_emulator.client.descriptors import deregister_fd, register_fd
from tests.hf3fs_emulator.client.mounts import extract_mount_point, force_fsync
from tests.hf3fs_emulator.client.rings import ioring

__all__ = ["deregister_fd", "extract_mount_point", "force_fsync", "ioring", "iovec", "register_fd"]
