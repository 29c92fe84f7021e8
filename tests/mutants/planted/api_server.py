# SPDX-License-Identifier: Apache-2.0
"""LMCache's internal API server in front of a hybrid model."""

from tests.mutants.defect import always, each_of, gone, passes

API = "lmcache_hybrid/storage/api_server.py"

MISTAKES = {
    "lmcache_hybrid/storage/service_factory.py": {
        "LMCache's API server changes what it likes": passes(
            "            api_server.guard(server, lmcache_manager)\n"
        ),
    },
    "lmcache_hybrid/storage/api_server.py": {
        "an API server that is off ends the start": always("    if server.enable:\n"),
        "LMCache makes a backend anew that knows no record": (
            "    if request.method in READS or call in _WORK:\n",
            '    if request.method in READS or call in _WORK or "recreate" in call[1]:\n',
        ),
        "LMCache closes a backend or adds one": (
            "    if request.method in READS or call in _WORK:\n",
            '    if request.method in READS or call in _WORK or call[1].count("/") == 2:\n',
        ),
        "an option is said to have changed": (
            "    if request.method in READS or call in _WORK:\n",
            '    if request.method in READS or call in _WORK or call[1] == "/conf":\n',
        ),
        "what nobody knows is done": (
            '.get(request.url.path.split("/")[1], _UNKNOWN)\n',
            '.get(request.url.path.split("/")[1])\n',
        ),
        "a store is said to be cleared that is not": (
            "    if set(asked) <= {RAM}:\n",
            "    if RAM in asked:\n",
        ),
        "RAM alone is not cleared": (
            "    if set(asked) <= {RAM}:\n",
            "    if set(asked) < {RAM}:\n",
        ),
        "the scheduler's API server fails to clear": gone(
            "    if engine is None:  # as of the scheduler: LMCache says so\n        return None\n"
        ),
        "freeze mode cannot be left": gone('    ("PUT", "/freeze/disable"),\n'),
        "RAM cannot be turned on again": gone('    ("PUT", "/hot_cache/enable"),\n'),
        "a bypassed backend stays so": gone('    ("PUT", "/bypass/remove"),\n'),
    },
}
DEFECTS = each_of(MISTAKES)
