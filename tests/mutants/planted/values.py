# SPDX-License-Identifier: Apache-2.0
"""Whether options that are written in another way than LMCache reads them are told."""

from tests.mutants.defect import Defect, one

VALUES = "lmcache_hybrid/config/values.py"

DEFECTS: tuple[Defect, ...] = (
    one(
        "a variable with an older prefix of LMCache's is ignored without a word",
        VALUES,
        "_OTHER_PREFIX.sub(PREFIX, name)\n",
        "name\n",
    ),
    one(
        "an option's name as a variable is ignored without a word",
        VALUES,
        'f"{PREFIX}{name}" if name in options else ',
        "",
    ),
    one(
        "another name of LMCACHE_CONFIG_FILE is ignored without a word",
        VALUES,
        "        if _CONFIG_NAME.fullmatch(meant):\n",
        "        if False:\n",
    ),
    one(
        "an option that is twice in LMCache's file has its last value",
        "lmcache_hybrid/config/lmcache_file.py",
        "    if twice:  #",
        "    if False:  #",
    ),
    one(
        "O_DIRECT is asked for and not used, without a word",
        "lmcache_hybrid/config/no_hits.py",
        "    for name in _OF_FILES:\n",
        "    for name in ():\n",
    ),
    one(
        "a URL with one slash is a folder",
        VALUES,
        '    if option == "local_disk" and _ONE_SLASH.search(str(value)):\n',
        "    if False:\n",
    ),
)
