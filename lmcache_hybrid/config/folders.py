# SPDX-License-Identifier: Apache-2.0
"""Says which folders an engine writes into, checks them first, and reads their limits."""

import contextlib
import os
import re
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil
from vllm.logger import init_logger

from lmcache_hybrid.config.own_options import MAX_AGE_KEY, MAX_SIZE_KEY, TRUSTED_OWNER_KEY
from lmcache_hybrid.config.redis_credentials import without_password
from lmcache_hybrid.config.stores import shared_folders
from lmcache_hybrid.core.errors import FULL_DISK, ConfigError

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig

logger = init_logger("vllm.lmcache_hybrid.config.folders")


# File systems of a server, as /proc/mounts names them, and some in user space.
_NETWORK = re.compile(
    r"(nfs|cifs|smb|lustre|ceph|gpfs|beegfs|wekafs|afs|glusterfs|ocfs2"
    r"|fuse\.(sshfs|s3fs|juicefs|glusterfs|ceph|rclone|gcsfuse|goofys|mountpoint|lustre|weed)).*"
)


@dataclass(frozen=True)
class FolderLimits:
    """Limits of the folders of ``fs://``, for all engines together; None for no limit.

    Attributes:
        max_bytes: of all records.
        max_seconds: since a record was written or last hit.
    """

    max_bytes: int | None = None
    max_seconds: float | None = None

    def __bool__(self) -> bool:
        return self != FolderLimits()


def read_limits(
    own: Mapping[str, Any], names: Mapping[str, str], config: "LMCacheEngineConfig"
) -> FolderLimits:
    """Return the limits among this package's options.

    Args:
        own: the options, see :func:`.own_options.read_own_options`.
        names: see :func:`.own_options.names_of`.

    Raises:
        ConfigError: there is a limit and no store in folders.
    """
    limits = [key for key in (MAX_SIZE_KEY, MAX_AGE_KEY) if own[key] is not None]
    if limits and not shared_folders(config):
        url = config.remote_url and without_password(config.remote_url)
        raise ConfigError(
            *(
                f"{names[key]}={own[key]:g} limits folders of fs:// and file:/// only, and "
                f"remote_url is {url!r}; remove it, or set remote_url to "
                "fs://localhost:0/absolute/path."
                for key in limits
            )
        )
    size, hours = own[MAX_SIZE_KEY], own[MAX_AGE_KEY]
    return FolderLimits(
        None if size is None else max(1, int(size * (1 << 30))),
        None if hours is None else hours * 3600,
    )


def trusted_owner(config: "LMCacheEngineConfig") -> int | None:
    """Return the user whose folders are accepted beside this user's and root's; None for none.

    It was read when the configuration was loaded.
    """
    return getattr(config, "_hybrid_trusted_owner", None)


def settle_disk_folder(config: "LMCacheEngineConfig", parallel: Any) -> None:
    """Give each data-parallel engine a folder of its own. Mutates ``config``. Idempotent.

    A shared one would have two indexes, each without the other's files. The first engine uses the
    folder itself, as an engine without data parallelism does; the others ``dp1``, ``dp2`` and so
    on in it.

    Args:
        parallel: vLLM's ParallelConfig of the engine.

    Raises:
        ConfigError: the folder cannot be written.
    """
    engine = parallel.data_parallel_index
    if not config.local_disk or not engine:
        return
    # The two roles may share one config, in one process.
    if getattr(config, "_hybrid_folders", None) == config.local_disk:
        return
    folders = [
        os.path.join(folder.strip(), f"dp{engine}") for folder in config.local_disk.split(",")
    ]
    for folder in folders:
        check_folder("local_disk", folder, trusted_owner(config))
    config.local_disk = config._hybrid_folders = ",".join(folders)


def _probe(option: str, path: str) -> None:
    """Write a file into a folder; a full disk is only warned of, for its records are still hit.

    Raises:
        OSError: nothing can be written there.
    """
    try:
        # A unique name: engines that share the folder probe it at the same time.
        with tempfile.NamedTemporaryFile(dir=path, prefix=".lmcache-hybrid-") as probe:
            probe.write(b"probe")
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        disk = os.statvfs(path)
        why = "no inode is free" if disk.f_files and not disk.f_favail else error.strerror
        logger.warning_once(
            "LMCache option %s=%r has no room for another file (%s), so what is new is stored only "
            "where older records make room; make room there, or choose another folder.",
            option,
            path,
            why,
        )


def file_system_of(path: str) -> str:
    """Return the kind of file system that a path lies on, as /proc/mounts says; "" if unknown."""
    try:
        real = os.path.realpath(path)
        above = [
            each
            for each in psutil.disk_partitions(all=True)
            if os.path.commonpath([real, each.mountpoint]) == each.mountpoint
        ]
    except (OSError, ValueError):  # no path, or a /proc without some of it
        return ""
    # Of two mounts at one place the later one is seen.
    mount = max(reversed(above), key=lambda each: len(each.mountpoint), default=None)
    return mount.fstype if mount else ""


def _warn_of_network(path: str) -> None:
    """Warn where a server has the disk: LMCache's threads and the model's wait for it together."""
    if _NETWORK.fullmatch(kind := file_system_of(path)):
        logger.warning_once(
            "LMCache option local_disk=%r is on a network file system (%s): while its server does "
            "not answer, this engine answers nobody. Choose a disk of this machine, or "
            "remote_url: fs://localhost:0%s, which such times turn into misses.",
            path,
            kind,
            path,
        )


def check_folder(option: str, path: str, trusted: int | None = None) -> None:
    """Create the folder if it is missing, readable by this user only, and write a probe into it.

    Creates only the last part of the path: the rest may be a disk that is not mounted yet, and
    records must not fill the disk below the mount point.

    Args:
        option: the LMCache option that names the folder.
        trusted: see :func:`trusted_owner`.

    Raises:
        ConfigError: it belongs to another user (root is fine), or to the trusted one and others
            may write to it, or it cannot be written although its disk is not full.
    """
    path = os.path.abspath(path)
    above = os.path.dirname(path)
    if not os.path.lexists(above):
        raise ConfigError(
            f"LMCache option {option}={path!r} is in no folder that exists; mount what belongs at "
            f"{above!r}, or make that folder."
        )
    try:
        # Ranks and engines that start together all create it.
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        status = os.stat(path)
        _probe(option, path)
    except (OSError, ValueError) as error:  # a path with a NUL is a ValueError
        full = getattr(error, "errno", None) in FULL_DISK
        raise ConfigError(
            f"LMCache option {option}={path!r} cannot be written "
            f"({getattr(error, 'strerror', error)}); "
            f"make {'room there' if full else 'it a writable directory'} or choose another."
        ) from error
    if option == "local_disk":
        _warn_of_network(path)
    if status.st_uid not in (os.geteuid(), 0):
        if status.st_uid != trusted:
            raise ConfigError(
                f"LMCache option {option}={path!r} belongs to user {status.st_uid}, who could "
                f"change what this engine (user {os.geteuid()}) reads there; chown it to this "
                "user, or to root with a group for the engines that share it (chmod 2770), or, "
                "where the mount shows all files as that user's (NFS with root_squash, CIFS, "
                f"s3fs), set {TRUSTED_OWNER_KEY} to {status.st_uid}."
            )
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ConfigError(
                f"LMCache option {option}={path!r} belongs to user {status.st_uid}, whom "
                f"{TRUSTED_OWNER_KEY} names, and its mode {stat.S_IMODE(status.st_mode):04o} lets "
                "others write there, too; run chmod go-w on it, or mount it with that mode (CIFS: "
                "dir_mode=0700, s3fs: umask=0077)."
            )
    if status.st_mode & stat.S_IWOTH:
        logger.warning_once(
            "LMCache option %s=%r: every user of this machine can write there, and so change what "
            "engines read; run chmod o-w on it, unless nobody else reaches it.",
            option,
            path,
        )
