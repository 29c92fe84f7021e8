# SPDX-License-Identifier: Apache-2.0
"""Whether each configuration ends in hits, or in a sentence."""

from tests.mutants.defect import always, each_of, gone, never, passes

MISTAKES = {
    "vllm_patch/configuration.py": {
        "vLLM's own offloading replaces the connector without a word": never(
            "    if asked and not is_ours(config):\n"
        ),
        "other users of vLLM's own offloading are refused": (
            "        asked = is_ours(self)\n",
            "        asked = True\n",
        ),
        "connectors that are no list end in vLLM's traceback": always(
            "        if is_list and all(isinstance(each, dict) for each in children):\n"
        ),
        "a MultiConnector without connectors ends in vLLM's words on another thing": never(
            '    if name == "MultiConnector" and not children:\n'
        ),
        "a folder too long for sockets ends in a traceback": never("    if taken > most:\n"),
        "a connector that runs ours inside it is found by its own children only": (
            "            or _names_ours((each.get",
            "            or False and _names_ours((each.get",
        ),
        "another class of the connector's name runs": (
            "and path != MODULE:\n",
            "and path == 0:\n",
        ),
        "a switched off hybrid manager ends after the weights are loaded": (
            "    if config.scheduler_config.disable_hybrid_kv_cache_manager is True",
            "    if False",
        ),
        "what this package notes of others is taken from the user": never(
            "        if BESIDE_KEY in transfer.kv_connector_extra_config:\n"
        ),
        "options of ours on a MultiConnector itself are not used, without a word": (
            "    if beside := [key for key in transfer.kv_connector_extra_config if",
            "    if beside := [key for key in () if",
        ),
    },
    "lmcache_hybrid/config/own_options.py": {
        "an option that does not fit is not called as the user wrote it": (
            "    return {key: where for key, (where, _) in written(extra).items()}\n",
            "    return {key: key for key in written(extra)}\n",
        ),
        "options of ours in LMCache's file are not read": (
            "    for name, value in in_file.items():\n        if is_own(",
            "    for name, value in ():\n        if is_own(",
        ),
        "options of ours in LMCache's extra_config are not read": (
            "        for name, value in table.items():\n            if is_own(",
            "        for name, value in ():\n            if is_own(",
        ),
        "variables of our options are not read": (
            "        value = _unquoted(environment.get(option.variable))\n",
            "        value = None\n",
        ),
        "a misspelt variable of ours does nothing without a word": (
            "        if meant.startswith(VARIABLES) and",
            "        if False and",
        ),
        "a switch of the environment is on whatever it says": (
            "    known = _SWITCH.get(str(value).strip().lower())",
            "    known = bool(value)",
        ),
        "an empty variable for the key file leaves records unsealed": (
            "        if value or (value is not None and key == KEY_FILE_KEY):\n",
            "        if value:\n",
        ),
        "an empty key file in LMCache's file leaves records unsealed": never(
            '        if is_own(name.removeprefix("extra_config.")):\n'
        ),
        "a quoted extra_config of the environment hides our options": (
            "        read = json.loads(_unquoted(value)) if",
            "        read = json.loads(value) if",
        ),
        "our options in another spelling are not used, without a word": (
            "    for key, value in options.items():\n        if key ==",
            "    for key, value in ():\n        if key ==",
        ),
        "of two spellings of an option one wins without a word": (
            "        if is_own(name) and name != _key(name) and",
            "        if False and name != _key(name) and",
        ),
        "null beside an option hides the same one farther away": (
            "        if value is not None and (key in OWN_OPTIONS",
            "        if (key in OWN_OPTIONS",
        ),
    },
    "lmcache_hybrid/config/options.py": {
        "a key file that cannot be used hides a limit without a folder": (
            "        wrong += error.args\n    try:\n        limits",
            "        raise error\n    try:\n        limits",
        ),
        "a bad option of ours hides what another one does not fit": (
            "    own, names = sound_own_options(extra), names_of(extra)\n",
            "    own, names = read_own_options(extra), names_of(extra)\n",
        ),
    },
    "lmcache_hybrid/config/folders.py": {
        "one limit without a folder hides the other": (
            "                for key in limits\n",
            "                for key in limits[:1]\n",
        ),
    },
    "lmcache_hybrid/config/lmcache_config.py": {
        "a bad value hides a key file that cannot be used": (
            ", *_unusable_key(transfer_extra))\n",
            ")\n",
        ),
        "a second model of a process gets the first one's settings": (
            "        config = copy.deepcopy(lmcache_get_or_create_config())\n",
            "        config = lmcache_get_or_create_config()\n",
        ),
        "only the first refused option is told": (
            "        raise ConfigError(*refused)\n    _settle",
            "        raise ConfigError(refused[0])\n    _settle",
        ),
        "what LMCache asserts ends the start without a word": (
            "    except (AssertionError, ValueError) as error:\n        # LMCache may fail first",
            "    except ZeroDivisionError as error:\n        # LMCache may fail first",
        ),
        "values of the connector's extra config are not looked at": (
            "[*_problems({**written, **extra}, bool(own)),",
            "[*_problems(written, bool(own)),",
        ),
        "a remote store without a serde never opens": (
            " and config.remote_serde is None:\n",
            " and False:\n",
        ),
        "an unknown eviction policy never opens": gone(
            "    yield partial(_check_policy, config)\n"
        ),
        "a location that is no backend stores nothing": gone(
            "    yield partial(_check_locations, config)\n"
        ),
        "a location that is not asked ends the start": (
            "and not any(n in backends for n in config.retrieve_locations):\n",
            "and not all(n in backends for n in config.retrieve_locations):\n",
        ),
        "values that another place overrides are refused": (
            "for option, value in written.items() if option not in extra}\n",
            "for option, value in written.items()}\n",
        ),
        "an empty variable takes a store out of the file without a word": (
            '        logger.warning("%s", sentence)\n    try:\n        with _as_lmcache',
            "        pass\n    try:\n        with _as_lmcache",
        ),
        "an engine without /proc does not start": (
            "    except (OSError, KeyError):  # no file descriptor",
            "    except KeyError:  # no file descriptor",
        ),
        "a pool larger than the machine ends without a store": never(
            "    if ranks * taken > whole:\n"
        ),
        "the pool of one rank alone must fit the machine": (
            "    if ranks * taken > whole:",
            "    if taken > whole:",
        ),
        "LMCache warns of our options in its file": (
            "    filters = is_not_ours, without_passwords\n",
            "    filters = (without_passwords,)\n",
        ),
        "LMCache's warning of an unknown option is lost with ours": (
            "        return not (isinstance(unknown, tuple) and "
            "own_options.is_own(str(unknown[0])))\n",
            "        return not isinstance(unknown, tuple)\n",
        ),
        "the user is blamed for what LMCache sets": passes(
            "        config.save_unfull_chunk = False\n"
        ),
        "what is wrong beside a bad value is told at the next start": passes(
            "        yield from _refused(as_lmcache_reads(sound))\n"
        ),
        "a mistake of ours hides an option that is refused": (
            "    if others or len(sound) < len(values):\n",
            "    if len(sound) < len(values):\n",
        ),
    },
    "lmcache_hybrid/config/store_sizes.py": {
        "a disk too small for any hit is found out by a save": (
            "    if config.local_disk and 0 < ",
            "    if config.local_disk and taken < ",
        ),
    },
    "lmcache_hybrid/config/redis_credentials.py": {
        "a database of Redis that is no number is the first one": (
            '        if parts.scheme != "unix" and parts.path.strip("/") and "db" not in read:\n',
            "        if False and read:\n",
        ),
        "a password in the wrong option is shown": (
            'return _LOGIN.sub("//", repr(value))\n',
            "return repr(value)\n",
        ),
        "a password in place of its file is shown": (" if is_path(path) else ", " if True else "),
    },
    "lmcache_hybrid/storage/remote/redis.py": {
        "a Redis that refuses records is not named": (
            "self.shown = printable(without_password(url))",
            'self.shown = "Redis"',
        ),
    },
    "lmcache_hybrid/config/no_hits.py": {
        "a prompt may be as long as the model allows": (
            "(longest - 1 - generates) // unit",
            "(longest - 1) // unit",
        ),
        "nobody learns that no prompt is long enough": never("    if unit and not deepest:\n"),
        "what is stored is looked for elsewhere, without a word": never(
            "    if written and read and written not in read:\n"
        ),
        "a size of a disk that is not named is no word worth": (
            "    if not config.local_disk and (config",
            "    if False and (config",
        ),
        "a consumer's RAM stays empty without a word": (
            '    elif role == "kv_consumer" and not (shared',
            "    elif False and not (shared",
        ),
        "hits that are never long enough are no word worth": never(
            "    if 0 < deepest < config.min_retrieve_tokens:\n"
        ),
        "a priority limit that stores few requests is no word worth": never(
            "    if config.priority_limit is not None and config.priority_limit < 0:\n"
        ),
    },
    "lmcache_hybrid/config/lmcache_values.py": {
        "yes counts as false": (
            "        said = isinstance(value, bool) or text in _TRUE or",
            "        said = True or",
        ),
        "the number to write for a size with a unit is that of bytes": (
            "else 1000) ** power / (1 << 30)",
            "else 1000) ** power",
        ),
        "the environment does not win over the file": (
            "        if variable not in environment:\n",
            "        if variable not in environment or option in found:\n",
        ),
        "an empty variable by which nothing changes ends the start": (
            "        if value or _changes(",
            "        if True or _changes(",
        ),
        "an empty variable switches off what the file has on": (
            "        return _is_on(before)\n",
            "        return False\n",
        ),
        "a number that LMCache cannot read passes for whole": (
            "        if kind is float or _is_whole(value):\n",
            "        if kind is float or number.is_integer():\n",
        ),
        "an empty remote_url turns LMCache off without a word": never(
            '        if no_number or (value == "" and definition["type"] is not bool):\n'
        ),
        "minutes are read as millions": (
            "fullmatch(str(value)) if unit in (GIGABYTES, TOKENS) else None\n",
            "fullmatch(str(value))\n",
        ),
        "an extra_config that is no table ends in an error of LMCache's": always(
            '        if option != "extra_config" or isinstance(read, dict | None):\n'
        ),
        "options without their prefix are ignored without a word": (
            "        if option in definitions:\n            yield key, option\n",
            "        if False:\n            yield key, option\n",
        ),
        "a misspelt variable of LMCache's is ignored without a word": (
            "            near = difflib.get_close_matches(meant, known, 1, 0.86)\n",
            "            near = []\n",
        ),
        "a folder is called ~": never(
            '    if option == "local_disk" and _EXPANDED.search(str(value)):\n'
        ),
    },
    "lmcache_hybrid/config/lmcache_file.py": {
        "a file that is no YAML shows its words": (
            'correct it.") from None\n',
            'correct it {error}.") from None\n',
        ),
        "a file of options that may not be read is called malformed": (
            "    except OSError as error:\n",
            "    except ArithmeticError as error:\n",
        ),
    },
    "lmcache_hybrid/storage/engine_address.py": {
        "a file system without locks turns LMCache off": (
            "        except OSError:  # a file system without locks\n",
            "        except ZeroDivisionError:  # a file system without locks\n",
        ),
        "an engine takes the lookups of another one with its engine_id": passes(
            "            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        ),
        "an engine gives back the address that another one holds": (
            "        if _lies_at(path, held):\n            os.unlink",
            "        if True:\n            os.unlink",
        ),
    },
    "lmcache_hybrid/core/threads.py": {
        "a child of the user's script closes the engine's stores": always(
            "        if os.getpid() == process:\n"
        ),
    },
    "lmcache_hybrid/tools/cli/terminal.py": {
        "doctor reads a request for help out of vLLM's short flags": (
            ', "help_option_names": ["--help"]}',
            "}",
        ),
    },
    "lmcache_hybrid/tools/stored/opening.py": {
        "the commands do not see folders of a plugin": (
            "            stores += found[1] if found else [place.url]\n",
            "            stores += [] if found else [place.url]\n",
        ),
    },
    "lmcache_hybrid/scheduler/load_planner.py": {
        "a request that must not read stores states again": (
            "last if tracker.request.skip_reading_prefix_cache else floor",
            "floor",
        ),
        "a hit that is too short to load is stored again": ("floor + (least - 1) // size", "0"),
        "who must not read claims what it does not load": gone(
            "        claims=not request.skip_reading_prefix_cache,\n"
        ),
    },
    "lmcache_hybrid/scheduler/tracker.py": {
        "states that are missing behind those found are not stored by who must not read": (
            "        self.states.update(boundary * plan.block_size for boundary in "
            "result.states)\n",
            "        self.states.update(range(plan.block_size, 1 << 20, plan.block_size))\n",
        ),
        "states that are missing before those found are not stored": (
            "            self.states.add(result.tokens(plan.block_size))\n",
            "            self.states.update(range(result.end[0] * plan.block_size + 1))\n",
        ),
        "windows that were found are stored again": (
            "        for window in plan.windows:\n            first = window.first(floor",
            "        for window in ():\n            first = window.first(floor",
        ),
    },
    "lmcache_hybrid/scheduler/lookups.py": {
        "who must not read gives up a lookup that is late, and stores all again": (
            "            tracker.ask_in_background(lookup)\n",
            "            if nothing:\n                tracker.ask_in_background(lookup)\n",
        ),
        "what must not be read is loaded": (
            "        if unread or (nothing and",
            "        if (nothing and",
        ),
    },
    "lmcache_hybrid/scheduler/scheduler.py": {
        "who must not read and ends before its lookup stores nothing": (
            "computed >= request.num_prompt_tokens:\n",
            "computed > request.num_tokens:\n",
        ),
        "who must not read is never stored where the ranks name its adapter late": (
            "(tracker.saving or tracker.background is not None)",
            "tracker.saving",
        ),
    },
    "lmcache_hybrid/scheduler/drops.py": {
        "a drop that can never be done is begun": passes(
            "            self._refuse(drop, NEVER_WAITS)\n            return False\n"
        ),
    },
    "lmcache_hybrid/scheduler/shared_prefills.py": {
        "who has waited believes a leader that does not know yet what it stores": (
            "leader.saving and leader.background is None\n",
            "leader.saving\n",
        ),
    },
    "lmcache_hybrid/connector.py": {
        "another engine's KV cache takes the place of the one that is served": never(
            "        if self._registered:\n"
        ),
    },
    "lmcache_hybrid/scheduler/request_options.py": {
        "a request that says false as a string is not stored": (
            "    return _SWITCH.get(known) if isinstance(known, (int, str)) else None\n",
            "    return bool(known)\n",
        ),
        "a request is stored that does not say whether it may be": (
            "                _shown(value),\n            )\n        return True\n",
            "                _shown(value),\n            )\n        return False\n",
        ),
        "true and 1 are one tag": (
            "        if type(value) is int:\n",
            "        if isinstance(value, int):\n",
        ),
        "a request whose tag is none shares with those that have no tags": passes(
            "                    tags = None\n"
        ),
        "each wrong name of a client is in the log": (
            "        if name in warned or len(warned) > MOST_NAMES:\n",
            "        if name in warned:\n",
        ),
        "a misspelt setting of a request is ignored without a word": (
            "            else:\n                self._tell_unknown(name)\n",
            "            else:\n                pass\n",
        ),
        "a setting of LMCache's other connector is ignored without a word": never(
            '                if self._is_first("unserved", name):\n'
        ),
    },
    "lmcache_hybrid/metrics.py": {
        "ranks beside another connector seem to store nothing": (
            "isinstance(each, HybridStats)), {})",
            "isinstance(each, HybridStats) and not each.data), {})",
        ),
    },
    "lmcache_hybrid/config/tiers.py": {
        "the start-up line gives each rank the whole of a folder": (
            "taken * ranks if tier.shared else taken",
            "taken",
        ),
    },
    "lmcache_hybrid/storage/rpc.py": {
        "an address without a socket is held for ever": (
            "                engine_address.release(self._path, self._address)\n"
            "                raise\n",
            "                raise\n",
        ),
    },
    "lmcache_hybrid/config/check.py": {
        "what else is refused beside a malformed value is told at the second start": (
            "    wrong = list(dict.fromkeys((*told, *beside(wrong, left))))\n",
            "    wrong = list(told or wrong)\n",
        ),
        "a default that stands for a malformed value is refused, too": (
            ' if not any(f" {name}=" in each for name in left)]',
            "]",
        ),
        "a store that cannot be read counts as one that is not named": never(
            '    if any(name in left for name in (*STORES, "extra_config")):\n'
        ),
        "an option without its prefix counts as not written": (
            "    left = {option for _, option in unprefixed(extra)}\n",
            "    left: set[str] = set()\n",
        ),
        "warnings of the configuration come twice": (
            "load_lmcache_config(vllm_config, quiet=True)",
            "load_lmcache_config(vllm_config)",
        ),
    },
    "lmcache_hybrid/tools/doctor/options.py": {
        "the doctor tells what else is refused at its second run": gone(
            "        yield from _beside_others(context)\n"
        ),
        "the doctor says nothing of options that do nothing": (
            "(*remarks(own, environment), *chain(*moot), *misspelt(environment)):\n",
            "():\n",
        ),
    },
    "lmcache_hybrid/config/container.py": {
        "what a container may use is not looked at": passes(
            "                found.append(float(text))\n"
        ),
    },
    "vllm_patch/loaders.py": {
        "options are refused only after the weights are loaded": gone(
            "    if model_config is vllm_config.model_config:\n"
            "        _check_settings(vllm_config)\n"
        ),
        "options of a model that is not hybrid are refused": never(
            "    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:\n"
        ),
        "options beside other connectors are refused only after the weights are loaded": (
            "    if transfer.kv_connector != CONNECTOR:  # it reads",
            "    if transfer.kv_connector != CONNECTOR:\n        return\n    if False:  # it reads",
        ),
    },
    "lmcache_hybrid/core/secret_files.py": {
        "a key in place of its file is shown": (
            "        if not is_path(path):",
            "        if False:",
        ),
    },
}
DEFECTS = each_of(MISTAKES)
