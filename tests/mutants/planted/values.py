# SPDX-License-Identifier: Apache-2.0
"""Whether options that are written in another way than LMCache reads them are told."""

from tests.mutants.defect import each_of

MISTAKES = {
    "lmcache_hybrid/config/values.py": {
        "a variable with an older prefix of LMCache's is ignored without a word": (
            "_OTHER_PREFIX.sub(PREFIX, name)\n",
            "name\n",
        ),
        "an option's name as a variable is ignored without a word": (
            'f"{PREFIX}{name}" if alone else ',
            "",
        ),
        "another name of LMCACHE_CONFIG_FILE is ignored without a word": (
            "        if _CONFIG_NAME.fullmatch(meant):\n",
            "        if False:\n",
        ),
        "a URL with one slash is a folder": (
            '    if option == "local_disk" and _ONE_SLASH.search(str(value)):\n',
            "    if False:\n",
        ),
        "LMCache fails on a blank number with a traceback": (
            "            failing = blank and value and ",
            "            failing = False and ",
        ),
    },
    "lmcache_hybrid/config/lmcache_file.py": {
        "an option that is twice in LMCache's file has its last value": (
            "    if twice:  #",
            "    if False:  #",
        ),
    },
    "lmcache_hybrid/config/no_hits.py": {
        "O_DIRECT is asked for and not used, without a word": (
            "    for name in _OF_FILES:\n",
            "    for name in ():\n",
        ),
    },
    "lmcache_hybrid/scheduler/request_configs.py": {
        "a request's table of settings is ignored without a word": (
            "        self._tell_unread(request.kv_transfer_params)\n",
            "",
        ),
    },
}
DEFECTS = each_of(MISTAKES)
