# SPDX-License-Identifier: Apache-2.0
"""LMCache's internal API server in front of a hybrid model."""

from tests.mutants.defect import Defect, one

API = "lmcache_hybrid/storage/api_server.py"

DEFECTS: tuple[Defect, ...] = (
    one(
        "LMCache's API server changes what it likes",
        "lmcache_hybrid/storage/service_factory.py",
        "            api_server.guard(server, lmcache_manager)\n",
        "            pass\n",
    ),
    one(
        "an API server that is off ends the start",
        API,
        "    if server.enable:\n",
        "    if True:\n",
    ),
    one(
        "LMCache makes a backend anew that knows no record",
        API,
        "    if request.method in READS or call in _WORK:\n",
        '    if request.method in READS or call in _WORK or "recreate" in call[1]:\n',
    ),
    one(
        "LMCache closes a backend or adds one",
        API,
        "    if request.method in READS or call in _WORK:\n",
        '    if request.method in READS or call in _WORK or call[1].count("/") == 2:\n',
    ),
    one(
        "an option is said to have changed",
        API,
        "    if request.method in READS or call in _WORK:\n",
        '    if request.method in READS or call in _WORK or call[1] == "/conf":\n',
    ),
    one(
        "what nobody knows is done",
        API,
        '.get(request.url.path.split("/")[1], _UNKNOWN)\n',
        '.get(request.url.path.split("/")[1])\n',
    ),
    one(
        "a store is said to be cleared that is not",
        API,
        "    if set(asked) <= {RAM}:\n",
        "    if RAM in asked:\n",
    ),
    one(
        "RAM alone is not cleared",
        API,
        "    if set(asked) <= {RAM}:\n",
        "    if set(asked) < {RAM}:\n",
    ),
    one(
        "the scheduler's API server fails to clear",
        API,
        "    if engine is None:  # as of the scheduler: LMCache says so\n        return None\n",
        "",
    ),
    one(
        "freeze mode cannot be left",
        API,
        '    ("PUT", "/freeze/disable"),\n',
        "",
    ),
    one(
        "RAM cannot be turned on again",
        API,
        '    ("PUT", "/hot_cache/enable"),\n',
        "",
    ),
    one(
        "a bypassed backend stays so",
        API,
        '    ("PUT", "/bypass/remove"),\n',
        "",
    ),
)
