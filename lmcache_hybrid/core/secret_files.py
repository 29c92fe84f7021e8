# SPDX-License-Identifier: Apache-2.0
"""Reads the file with the key of records, and says who else may read it.

Also tells the path of a file with a secret from a secret that stands in its place.
"""

import os
import stat

from lmcache_hybrid.core.errors import ConfigError

# Size limits of a key file, in bytes.
MIN_KEY, MAX_KEY = 32, 1 << 16


def is_path(text: str) -> bool:
    """Whether ``text`` is in a folder that exists, so that it may be shown.

    Base64 and passwords may begin with "/".
    """
    folder = os.path.dirname(text)
    return bool(folder.strip("/")) and os.path.isdir(folder)


def read_key(setting: str, path: str) -> bytes:
    """Return the key in a file. Every byte counts, even a final newline.

    Args:
        setting: name of the setting, for errors.

    Raises:
        ConfigError: the file does not exist, is too short or long, or others can read it.
    """
    try:
        # Follow links: Kubernetes mounts secrets as links. open() refuses a folder.
        opened = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    except OSError as error:
        if not is_path(path):  # it may be the key itself, which belongs in no log
            raise ConfigError(
                f"{setting} names no file that can be read ({error.strerror}); write the path of "
                "one, from / on, made with `(umask 077; openssl rand 32 > FILE)`."
            ) from None
        raise ConfigError(
            f"{setting}={path!r} cannot be read ({error.strerror}); make it with "
            f"`(umask 077; openssl rand 32 > {path})` and give every engine the same file."
        ) from error
    with opened as data:
        status = os.fstat(data.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{setting}={path!r} is not a file; name the file with the key.")
        # A group may read: Kubernetes gives a pod's secrets to its fsGroup.
        if status.st_mode & (stat.S_IRWXO | stat.S_IWGRP):
            raise ConfigError(
                f"{setting}={path!r} can be read or written by others (mode "
                f"{stat.S_IMODE(status.st_mode):04o}); run `chmod 600 {path}`, or mount the secret "
                "with defaultMode 0400, and if the key was seen, make another."
            )
        secret = data.read(MAX_KEY + 1)
    if not MIN_KEY <= len(secret) <= MAX_KEY:
        size = f"more than {MAX_KEY}" if len(secret) > MAX_KEY else len(secret)
        raise ConfigError(
            f"{setting}={path!r} has {size} bytes, a key has {MIN_KEY} to {MAX_KEY}; make one "
            "with `openssl rand 32`."
        )
    return secret
