"""A tier for another file system is made from two parts: here, for a BeeGFS mount that many hosts share.

Put this file where Python finds it, and name it in the configuration:

    remote_storage_plugins: ["beegfs.a"]
    extra_config:
      remote_storage_plugin.beegfs.a.module_path: beegfs_tier
      remote_storage_plugin.beegfs.a.class_name: make_tier
      remote_storage_plugin.beegfs.a.path: /mnt/beegfs/kv
      remote_storage_plugin.beegfs.a.max_size: "500"
"""

from pathlib import Path

from tiercache.tiers.files.directories import FileSettings
from tiercache.tiers.files.index import RelistingLookup
from tiercache.tiers.files.io_posix import PosixIO
from tiercache.tiers.files.tier import FileTier
from tiercache.tiers.remote.base import RemoteSettings


def make_tier(settings: RemoteSettings) -> FileTier:
    options = settings.options
    if not options.get("path"):
        raise settings.error("path", "expected a directory on the mount")
    return FileTier(
        settings.name,
        settings.key("path"),
        FileSettings(
            (Path(options["path"]),),
            int(float(options.get("max_size", 0)) * 2**30),  # 0: nine tenths of the free space
            threads=16,
            many_hosts=True,  # hosts see the reservations of processes on other hosts
            beside=False,  # else each chunk would change its directory twice, and it would be listed twice
            file_access=options.get("file_access", "owner"),
        ),
        settings.fingerprint,
        PosixIO,  # moves bytes in threads; reads a bad chunk again before it is deleted
        RelistingLookup,  # also finds chunks that others store
        metadata_threads=8,  # metadata calls are round trips to a server
    )
