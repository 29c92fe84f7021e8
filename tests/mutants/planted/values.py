# SPDX-License-Identifier: Apache-2.0
"""Whether options that are written in another way than LMCache reads them are told."""

from tests.mutants.defect import each_of, gone, never

MISTAKES = {
    "lmcache_hybrid/config/lmcache_values.py": {
        "a variable with an older prefix of LMCache's is ignored without a word": (
            "_OTHER_PREFIX.sub(PREFIX, name)\n",
            "name\n",
        ),
        "a variable of an option that is gone is ignored without a word": (
            "        if why := _GONE.get(meant.removeprefix(PREFIX).lower()):\n",
            '        if why := "":\n',
        ),
        "a server of settings that is never asked is no word worth": (
            "    if url and _number(values.get(limit",
            "    if False and _number(values.get(limit",
        ),
        "a file named where nobody reads it is ignored without a word": never(
            '        if _CONFIG_NAME.fullmatch(re.sub("[-.]", "_", key)):\n'
        ),
        "an option's name as a variable is ignored without a word": gone(
            'f"{PREFIX}{name}" if alone else '
        ),
        "another name of LMCACHE_CONFIG_FILE is ignored without a word": never(
            "        if _CONFIG_NAME.fullmatch(meant):\n"
        ),
        "a URL with one slash is a folder": never(
            '    if option == "local_disk" and _ONE_SLASH.search(str(value)):\n'
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
            "    for name, why in _MOOT_EXTRA.items():\n",
            "    for name, why in ():\n",
        ),
        "memory that is not kept back is no word worth": (
            "    for name, why in _MOOT.items():\n",
            "    for name, why in ():\n",
        ),
        "a store that is written and never read is no word worth": never(
            "        if place.backend not in read:\n"
        ),
        "loads that may not be as long as they must are no word worth": never(
            "    if most and whole < config.min_retrieve_tokens:\n"
        ),
    },
    "lmcache_hybrid/config/lmcache_options.py": {
        "ranks of one shm_name write into each other's pool": (
            '    "shm_name": _refused(\n',
            '    "no_shm_name": _refused(\n',
        ),
        "a fallback that LMCache does not know turns it off": (
            '        lambda v: v not in ("recompute", "local_cpu"),\n',
            "        lambda v: False,\n",
        ),
        "what is left of a plugin leaves room for whole chunks alone": gone(
            '    "rust_raw_block.use_uring": _PAGED,\n'
        ),
    },
    "lmcache_hybrid/config/lmcache_config.py": {
        "LMCache's API server gets a port that does not exist": never(
            "    if config.internal_api_server_enabled and by_port and not 0 < first <= last:\n"
        ),
        "a threshold of 0 switches LMCache off at once": gone(
            "        and (option.above is None or value > option.above)\n"
        ),
        "a number in quotes ends LMCache's health check": (
            "        type(value) in (int, float)\n        and (option.above is",
            "        (type(value) in (int, float) or value)\n        and (option.above is",
        ),
        "a lookup's timeout that no socket takes turns LMCache off": never(
            "    if option.most is not None and value > option.most:\n"
        ),
        "a table of NUMA nodes that names no GPU turns LMCache off": never(
            '    if mode == "manual" and not (nodes and known):\n'
        ),
        "LMCache finds no GPU in JSON": (
            "= {int(gpu): node for gpu, node in nodes.items()}\n",
            "= nodes\n",
        ),
        "what a server of settings answers is called LMCache's file": (
            "        if url:\n            raise",
            "        if False:\n            raise",
        ),
        "ranks of a controller that is off turn LMCache off": gone(
            "    config.lmcache_worker_ids = None\n"
        ),
    },
    "lmcache_hybrid/storage/open_store.py": {
        "LMCache warns of a full pool": (
            'not str(record.msg).startswith("Failed to allocate memory block")',
            "True",
        ),
        "why LMCache opened no store is somewhere in the log": (
            'reason[-1] if reason else "see above"',
            '"see above"',
        ),
    },
    "lmcache_hybrid/storage/service_factory.py": {
        "an API server that does not start turns LMCache off": (
            "        except Exception as error:  # LMCache would",
            "        except ZeroDivisionError as error:  # LMCache would",
        ),
    },
    "lmcache_hybrid/config/options.py": {
        "events that nobody asks for are no word worth": (
            "    elif config.enable_kv_events and inside:\n",
            "    elif False:\n",
        ),
    },
    "lmcache_hybrid/config/store_sizes.py": {
        "a folder's limit too small for any hit has every record deleted": never(
            "    if limit is not None and limit < taken:\n"
        ),
    },
    "lmcache_hybrid/config/stores/fs.py": {
        "a shared folder is called $POD": never(
            "        if _EXPANDED.search(folder) and not os.path.isdir(folder):\n"
        ),
    },
    "lmcache_hybrid/config/stores/s3.py": {
        "a switch in quotes turns TLS off": never(
            "        if isinstance(value, str) and value.strip().lower() in _FALSE:\n"
        ),
    },
    "lmcache_hybrid/scheduler/request_options.py": {
        "a request's table of settings is ignored without a word": gone(
            "        self._tell_unread(request.kv_transfer_params)\n"
        ),
    },
}
DEFECTS = each_of(MISTAKES)
