# SPDX-License-Identifier: Apache-2.0
"""Stores that ``remote_storage_plugins`` names, in operators' commands."""

from tests.mutants.defect import each_of, never

MISTAKES = {
    "lmcache_hybrid/config/stores/file.py": {
        "a host in file:/// is taken for a folder": (' or not re.match("/+[^/]", paths):\n', ":\n"),
        "signs of file:/// that other readers take for no part of a path are taken for one": (
            r"[?#%\x00-\x1f]",
            r"[?#\x00-\x1f]",
        ),
        "a login in a URL of folders is shown": (
            "{given_for}={shown(url)} is",
            "{given_for}={url!r} is",
        ),
    },
    "lmcache_hybrid/tools/stored/folder_store.py": {
        "operators' commands look into folders of a URL that the engine refuses": (
            'open_folders(kind.folders_of_url(store, "STORE"))',
            'open_folders(store.partition("://")[2].split(","))',
        ),
    },
    "lmcache_hybrid/config/stores/fs.py": {
        "a folder that engines share is sought where each was started": never(
            '        if not folder.startswith("/"):\n'
        ),
    },
    "lmcache_hybrid/config/stores/redis.py": {
        "a plugin of Redis takes any URL": never("            if place.scheme not in _SCHEMES:\n"),
    },
    "lmcache_hybrid/config/stores/base.py": {
        "what stands for a plugin's URL is named with its password": (
            "self.scheme if self.scheme in self.kind.schemes else self.kind.plugin",
            "self.scheme",
        ),
        "a plugin's backend is named without the plugin": (
            'f"{self.kind.backend}-{self.plugin}" if self.plugin else self.kind.backend',
            "self.kind.backend",
        ),
    },
    "lmcache_hybrid/config/stores/__init__.py": {
        "RAM that keeps nothing counts as a place of records": (
            '[Place(MEMORY, "")] if config.local_cpu else []',
            '[Place(MEMORY, "")]',
        ),
        "accept knows no store of a plugin": (
            "    for name in config.remote_storage_plugins or ():\n        if kind := BY",
            "    for name in ():\n        if kind := BY",
        ),
    },
    "lmcache_hybrid/tools/doctor/redis_memory.py": {
        "the doctor looks at the memory of remote_url's server alone": (
            "for place in named if place.kind is REDIS",
            "for place in named if place.kind is REDIS and not place.plugin",
        ),
        "the doctor says the same of one server twice": (
            "list(dict.fromkeys(place.url for place in named if place.kind is REDIS))",
            "[place.url for place in named if place.kind is REDIS]",
        ),
        "the doctor does not say of which server it speaks": (
            'f"{without_password(url)}: " if servers[1:] else "")',
            'f"{without_password(url)}: " if servers[2:] else "")',
        ),
    },
}
DEFECTS = each_of(MISTAKES)
