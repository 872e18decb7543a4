"""Stands in for 3FS's module of this name. See tests.hf3fs_emulator."""

from tests.hf3fs_emulator.client.fuse_io import (
    deregister_fd,
    extract_mount_point,
    force_fsync,
    ioring,
    iovec,
    make_ioring,
    make_iovec,
    register_fd,
)

__all__ = [
    "deregister_fd",
    "extract_mount_point",
    "force_fsync",
    "ioring",
    "iovec",
    "make_ioring",
    "make_iovec",
    "register_fd",
]
