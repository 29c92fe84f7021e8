# SPDX-License-Identifier: Apache-2.0
"""Locks the address at which a rank answers lookups against other engines.

ZMQ takes over an address from another listener, so lookups of two engines would go to one.
"""

import contextlib
import fcntl
import os

from lmcache_hybrid.core.errors import ConfigError


def hold(path: str, engine_id: str | None) -> int | None:
    """Lock the address of a socket at ``path``.

    Returns:
        A file descriptor that holds the lock until :func:`release` or the end of the process; None
        if no file can be locked there.

    Raises:
        ConfigError: another engine holds it.
    """
    flags = os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    # An ending engine may have deleted the locked file meanwhile.
    for _ in range(10):
        try:
            held = os.open(f"{path}.lock", flags, 0o600)
        except OSError:
            return None
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(held)
            raise ConfigError(
                f"engine_id={engine_id!r} of --kv-transfer-config is held by a process on this "
                "host, another engine or what one has left; remove it, or choose another."
            ) from None
        except OSError:  # a file system without locks
            os.close(held)
            return None
        if _lies_at(path, held):
            return held
        os.close(held)
    return None


def release(path: str, held: int | None) -> None:
    """Release the lock that :func:`hold` returned."""
    if held is None:
        return
    with contextlib.suppress(OSError):
        if _lies_at(path, held):
            os.unlink(f"{path}.lock")
    os.close(held)


def _lies_at(path: str, held: int) -> bool:
    """Whether the descriptor's file is still the one at the path."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(held), os.stat(f"{path}.lock", follow_symlinks=False))
    return False
