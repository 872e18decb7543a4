"""Stands in for 3FS's native module of this name. See tiercache.testing.hf3fs."""

from tiercache.testing.hf3fs.client.buffers import iovec
from tiercache.testing.hf3fs.client.descriptors import deregister_fd, register_fd
from tiercache.testing.hf3fs.client.mounts import extract_mount_point, force_fsync
from tiercache.testing.hf3fs.client.rings import ioring

__all__ = ["deregister_fd", "extract_mount_point", "force_fsync", "ioring", "iovec", "register_fd"]
