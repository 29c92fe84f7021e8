# SPDX-License-Identifier: Apache-2.0
"""Faults of the file system under ``local_disk``: small, full, read-only, or kept by links."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[bool]:
    """Mount a small file system on ``folder``; yields False where this user may not mount."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", str(folder)]
    try:
        mounted = subprocess.run(mount, capture_output=True).returncode == 0
    except OSError:
        mounted = False
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


@contextlib.contextmanager
def disk_full(folder: Path) -> Iterator[None]:
    """Not a byte is left on the file system of ``folder``, which should be a small one."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 12))
    try:
        yield
    finally:
        ballast.unlink()


@contextlib.contextmanager
def kept_by_links(folder: Path) -> Iterator[None]:
    """A backup of ``folder`` made of links: deleting a file there gives no room back."""
    backup = folder.with_name("backup")
    backup.mkdir()
    for file in folder.glob("*.pt"):
        os.link(file, backup / file.name)
    try:
        yield
    finally:
        shutil.rmtree(backup)


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """The file system mounted on ``folder`` takes no writes, not even from root."""
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)
