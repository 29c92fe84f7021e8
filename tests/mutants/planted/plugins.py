# SPDX-License-Identifier: Apache-2.0
"""Stores that ``remote_storage_plugins`` names, in operators' commands."""

from tests.mutants.defect import Defect, one

FILE = "lmcache_hybrid/config/stores/file.py"
CAPACITY = "lmcache_hybrid/tools/doctor/capacity.py"

DEFECTS: tuple[Defect, ...] = (
    one(
        "a host in file:/// is taken for a folder",
        FILE,
        ' or not re.match("/+[^/]", paths):\n',
        ":\n",
    ),
    one(
        "signs of file:/// that other readers take for no part of a path are taken for one",
        FILE,
        r"[?#%\x00-\x1f]",
        r"[?#\x00-\x1f]",
    ),
    one(
        "operators' commands look into folders of a URL that the engine refuses",
        "lmcache_hybrid/tools/stored/folder_store.py",
        'open_folders(kind.folders_of_url(store, "STORE"))',
        'open_folders(store.partition("://")[2].split(","))',
    ),
    one(
        "a login in a URL of folders is shown",
        FILE,
        "{given_for}={shown(url)} is",
        "{given_for}={url!r} is",
    ),
    one(
        "a folder that engines share is sought where each was started",
        "lmcache_hybrid/config/stores/fs.py",
        '        if not folder.startswith("/"):\n',
        "        if False:\n",
    ),
    one(
        "a plugin of Redis takes any URL",
        "lmcache_hybrid/config/stores/redis.py",
        "            if place.scheme not in _SCHEMES:\n",
        "            if False:\n",
    ),
    one(
        "what stands for a plugin's URL is named with its password",
        "lmcache_hybrid/config/stores/base.py",
        "self.scheme if self.scheme in self.kind.schemes else self.kind.plugin",
        "self.scheme",
    ),
    one(
        "a plugin's backend is named without the plugin",
        "lmcache_hybrid/config/stores/base.py",
        'f"{self.kind.backend}-{self.plugin}" if self.plugin else self.kind.backend',
        "self.kind.backend",
    ),
    one(
        "RAM that keeps nothing counts as a place of records",
        "lmcache_hybrid/config/stores/__init__.py",
        '[Place(MEMORY, "")] if config.local_cpu else []',
        '[Place(MEMORY, "")]',
    ),
    one(
        "accept knows no store of a plugin",
        "lmcache_hybrid/config/stores/__init__.py",
        "    for name in config.remote_storage_plugins or ():\n        if kind := BY",
        "    for name in ():\n        if kind := BY",
    ),
    one(
        "the doctor looks at the memory of remote_url's server alone",
        CAPACITY,
        "for place in named if place.kind is REDIS",
        "for place in named if place.kind is REDIS and not place.plugin",
    ),
    one(
        "the doctor says the same of one server twice",
        CAPACITY,
        "list(dict.fromkeys(place.url for place in named if place.kind is REDIS))",
        "[place.url for place in named if place.kind is REDIS]",
    ),
    one(
        "the doctor does not say of which server it speaks",
        CAPACITY,
        'f"{without_password(url)}: " if servers[1:] else "")',
        'f"{without_password(url)}: " if servers[2:] else "")',
    ),
)
