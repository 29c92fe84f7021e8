# SPDX-License-Identifier: Apache-2.0
"""Stores that ``remote_storage_plugins`` names, in operators' commands."""

from tests.mutants.defect import Defect, one

CAPACITY = "lmcache_hybrid/tools/doctor/capacity.py"

DEFECTS: tuple[Defect, ...] = (
    one(
        "accept knows no store of a plugin",
        "lmcache_hybrid/config/backends.py",
        "        for plugin in config.remote_storage_plugins or ()\n    }\n",
        "        for plugin in ()\n    }\n",
    ),
    one(
        "the doctor looks at the memory of remote_url's server alone",
        CAPACITY,
        "    urls = redis_urls(context.config) if context.config else []\n",
        '    urls = [context.config.remote_url or ""] if context.config else []\n',
    ),
    one(
        "the doctor says the same of one server twice",
        CAPACITY,
        "for url in dict.fromkeys(urls) if",
        "for url in urls if",
    ),
    one(
        "the doctor does not say of which server it speaks",
        CAPACITY,
        'f"{without_password(url)}: " if servers[1:] else "")',
        'f"{without_password(url)}: " if servers[2:] else "")',
    ),
)
