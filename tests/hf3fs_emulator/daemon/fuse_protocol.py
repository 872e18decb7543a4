"""The kernel's side of FUSE, as `linux/fuse.h` has it: the parts of protocol 7.31 that a file system of ours needs."""

from __future__ import annotations

import os
import struct
from enum import IntEnum

PROTOCOL = (7, 31)


class Opcode(IntEnum):
    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    READLINK = 5
    SYMLINK = 6
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    CREATE = 35
    INTERRUPT = 36
    DESTROY = 38
    IOCTL = 39
    BATCH_FORGET = 42
    RENAME2 = 45


REQUEST = struct.Struct("<IIQQIIII")
"""length, opcode, unique, node, uid, gid, pid, unused"""
REPLY = struct.Struct("<IiQ")
"""length, -errno, unique"""
NOTIFY_INVALID_INODE = 2
INVALID_INODE = struct.Struct("<Qqq")
"""node, offset (negative: attributes only), length"""

INIT_IN = struct.Struct("<IIII")
"""major, minor, read-ahead, flags"""
INIT_OUT = struct.Struct("<IIIIHHIIHHI28x")
"""major, minor, read-ahead, flags, background requests, congestion, most bytes of a write, ns of a time stamp,
most pages of a request, alignment of mappings, more flags"""
ASYNC_READ, ATOMIC_TRUNCATE, BIG_WRITES, AUTO_INVALID_DATA, PARALLEL_DIRECTORIES, MAX_PAGES = (
    1 << bit for bit in (0, 3, 5, 12, 18, 22)
)

ATTRIBUTES = struct.Struct("<QQQQQQIIIIIIIIII")
"""inode, size, blocks, three times in s, the same times' ns, mode, links, uid, gid, device, block size, flags"""
ATTRIBUTES_OUT = struct.Struct("<QII")
"""seconds for which attributes are valid, ns, unused; ATTRIBUTES follow"""
ENTRY_OUT = struct.Struct("<QQQQII")
"""node, generation, seconds for which the name is valid, and the attributes, ns of both; ATTRIBUTES follow"""
GETATTR_IN = struct.Struct("<IIQ")
"""flags, unused, handle"""
GETATTR_HANDLE = 1
SETATTR_IN = struct.Struct("<IIQQQQQQIIIIIIII")
"""which, unused, handle, size, lock owner, three times in s, the same times' ns, mode, unused, uid, gid, unused"""
SET_MODE, SET_UID, SET_GID, SET_SIZE, SET_ATIME, SET_MTIME, SET_HANDLE, SET_ATIME_NOW, SET_MTIME_NOW = (
    1 << bit for bit in range(9)
)
MKDIR_IN = struct.Struct("<II")
"""mode, umask"""
NODE_IN = struct.Struct("<Q")
"""of `rename` the new directory, of `link` the old node, of `forget` the lookups"""
RENAME2_IN = struct.Struct("<QII")
"""new directory, flags, unused"""
OPEN_IN = struct.Struct("<II")
"""flags, unused"""
CREATE_IN = struct.Struct("<IIII")
"""flags, mode, umask, unused"""
OPEN_OUT = struct.Struct("<QII")
"""handle, flags, unused"""
READ_IN = struct.Struct("<QQIIQII")
"""handle, offset, bytes, flags, lock owner, flags of the file, unused; of `write` the same"""
WRITE_OUT = struct.Struct("<II")
HANDLE_IN = struct.Struct("<Q")
"""How `release` and `fsync` begin."""
IOCTL_IN = struct.Struct("<QIIQII")
"""handle, flags, command, argument, bytes in, bytes out"""
IOCTL_OUT = struct.Struct("<iIII")
"""result, flags, pieces in, pieces out"""
STATFS_OUT = struct.Struct("<QQQQQIIII24x")
"""blocks, free, available, files, free files, block size, longest name, fragment size, unused"""
FORGET_BATCH_IN = struct.Struct("<II")
FORGET_ONE = struct.Struct("<QQ")
"""node, lookups"""
ENTRY = struct.Struct("<QQII")
"""inode, offset of the next, length of the name, type; the name follows, padded to 8 bytes"""


def attributes(status: os.stat_result, size_bytes: int) -> bytes:
    return ATTRIBUTES.pack(
        status.st_ino, size_bytes, status.st_blocks,
        *(divmod(ns, 10**9)[0] for ns in (status.st_atime_ns, status.st_mtime_ns, status.st_ctime_ns)),
        *(divmod(ns, 10**9)[1] for ns in (status.st_atime_ns, status.st_mtime_ns, status.st_ctime_ns)),
        status.st_mode, status.st_nlink, status.st_uid, status.st_gid, 0, status.st_blksize, 0,
    )  # fmt: skip


def virtual_attributes(inode: int, mode: int, size_bytes: int) -> bytes:
    return ATTRIBUTES.pack(inode, size_bytes, *[0] * 7, mode, 1, 0, 0, 0, 4096, 0)


def directory_entries(names: list[tuple[str, int, int]], offset: int, room_bytes: int) -> bytes:
    """As many of (name, inode, mode) from the one at `offset` on as there is room for."""
    found = bytearray()
    for position in range(offset, len(names)):
        name, inode, mode = names[position]
        raw = os.fsencode(name)
        padding = -(ENTRY.size + len(raw)) % 8
        if len(found) + ENTRY.size + len(raw) + padding > room_bytes:
            break
        found += ENTRY.pack(inode, position + 1, len(raw), mode >> 12) + raw + bytes(padding)
    return bytes(found)
