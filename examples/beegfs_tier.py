"""Another file system is a choice of two parts: here, chunks on a BeeGFS mount that many hosts share.

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
            int(float(options.get("max_size", 0)) * 2**30),  # 0: nine tenths of what is free
            threads=16,
            many_hosts=True,  # they see what a process had reserved when its host is gone
            beside=False,  # who lists directories that changed would list each of them twice a chunk
            file_access=options.get("file_access", "owner"),
        ),
        settings.fingerprint,
        PosixIO,  # who moves bytes: threads; what is bad is read again before it is put aside
        RelistingLookup,  # what is known: what all others store, too
        metadata_threads=8,  # calls that are as many round trips
    )
