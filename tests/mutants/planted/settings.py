# SPDX-License-Identifier: Apache-2.0
"""Whether each configuration ends in hits, or in a sentence."""

from tests.mutants.defect import Defect, one

CONFIGURATION = "vllm_patch/configuration.py"
OPTIONS = "lmcache_hybrid/config/options.py"
VALUES = "lmcache_hybrid/config/values.py"
WATCH = "lmcache_hybrid/scheduler/store_watch.py"
REQUESTS = "lmcache_hybrid/scheduler/request_configs.py"

DEFECTS: tuple[Defect, ...] = (
    one(
        "vLLM's own offloading replaces the connector without a word",
        CONFIGURATION,
        "    if asked and not is_ours(config):\n",
        "    if False:\n",
    ),
    one(
        "other users of vLLM's own offloading are refused",
        CONFIGURATION,
        "        asked = is_ours(self)\n",
        "        asked = True\n",
    ),
    one(
        "a connector that runs ours inside it is found by its own children only",
        CONFIGURATION,
        "            or _names_ours((each.get",
        "            or False and _names_ours((each.get",
    ),
    one(
        "another class of the connector's name runs",
        CONFIGURATION,
        "    if name == CONNECTOR and path and path != MODULE:\n",
        "    if False:\n",
    ),
    one(
        "a switched off hybrid manager ends after the weights are loaded",
        CONFIGURATION,
        "    if config.scheduler_config.disable_hybrid_kv_cache_manager is True",
        "    if False",
    ),
    one(
        "a second model of a process gets the first one's settings",
        OPTIONS,
        "        config = copy.deepcopy(lmcache_get_or_create_config())\n",
        "        config = lmcache_get_or_create_config()\n",
    ),
    one(
        "only the first refused option is told",
        OPTIONS,
        '        raise ConfigError(" ".join(refused))\n    _settle',
        "        raise ConfigError(refused[0])\n    _settle",
    ),
    one(
        "what LMCache asserts ends the start without a word",
        OPTIONS,
        "    except (AssertionError, ValueError) as error:\n        # Of options",
        "    except ZeroDivisionError as error:\n        # Of options",
    ),
    one(
        "values of the connector's extra config are not looked at",
        OPTIONS,
        "[*problems(written), *problems(extra)]",
        "[*problems(written)]",
    ),
    one(
        "a remote store without a serde never opens",
        OPTIONS,
        " and config.remote_serde is None:\n",
        " and False:\n",
    ),
    one(
        "an unknown eviction policy never opens",
        OPTIONS,
        "    yield partial(_check_policy, config)\n",
        "",
    ),
    one(
        "a location that is no backend stores nothing",
        OPTIONS,
        "    yield partial(_check_locations, config)\n",
        "",
    ),
    one(
        "nobody learns that no prompt is long enough",
        OPTIONS,
        "    if longest <= unit:\n",
        "    if False:\n",
    ),
    one(
        "yes counts as false",
        VALUES,
        "        said = isinstance(value, bool) or str(value).strip().lower() in _TRUE + _FALSE\n",
        "        said = True\n",
    ),
    one(
        "the number to write for a size with a unit is that of bytes",
        VALUES,
        'return f"; write {size / (1 << 30):.4g}." if option in SIZES',
        'return f"; write {size:.4g}." if option in SIZES',
    ),
    one(
        "the environment does not win over the file",
        VALUES,
        "        if variable not in environment:\n",
        "        if variable not in environment or option in found:\n",
    ),
    one(
        "an empty variable by which nothing changes ends the start",
        VALUES,
        "        if value or _changes(",
        "        if True or _changes(",
    ),
    one(
        "an empty variable switches off what the file has on",
        VALUES,
        "        return _is_on(before)\n",
        "        return False\n",
    ),
    one(
        "a number that LMCache cannot read passes for whole",
        VALUES,
        "        if kind is float or _is_whole(value):\n",
        "        if kind is float or number.is_integer():\n",
    ),
    one(
        "a file that is no YAML shows its words",
        VALUES,
        'correct it.") from None\n',
        'correct it {error}.") from None\n',
    ),
    one(
        "a location that is not asked ends the start",
        OPTIONS,
        "and not any(map(is_there, config.retrieve_locations)):\n",
        "and not all(map(is_there, config.retrieve_locations)):\n",
    ),
    one(
        "a file system without locks turns LMCache off",
        "lmcache_hybrid/storage/rpc.py",
        "        except OSError:  # a file system without locks\n",
        "        except ZeroDivisionError:  # a file system without locks\n",
    ),
    one(
        "a child of the user's script closes the engine's stores",
        "lmcache_hybrid/core/threads.py",
        "        if os.getpid() == process:\n",
        "        if True:\n",
    ),
    one(
        "doctor reads a request for help out of vLLM's short flags",
        "lmcache_hybrid/tools/cli/terminal.py",
        ', "help_option_names": ["--help"]}',
        "}",
    ),
    one(
        "the commands do not see folders of a plugin",
        "lmcache_hybrid/tools/stored/opening.py",
        "            stores += folders\n",
        "            pass\n",
    ),
    one(
        "an engine takes the lookups of another one with its engine_id",
        "lmcache_hybrid/storage/rpc.py",
        "            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
        "            pass\n",
    ),
    one(
        "a request that must not read stores states again",
        "lmcache_hybrid/scheduler/admission.py",
        "            self._know(tracker, result)\n",
        "            pass\n",
    ),
    one(
        "states that are missing behind those found are not stored by who must not read",
        "lmcache_hybrid/scheduler/admission.py",
        "        tracker.stored.states.update(range(size, end, size), [end])\n",
        "        tracker.stored.states.update(range(size, 1 << 20, size), [end])\n",
    ),
    one(
        "what must not be read is loaded",
        "lmcache_hybrid/scheduler/admission.py",
        "        if not reads:  # it was asked",
        "        if False:  # it was asked",
    ),
    one(
        "an empty remote_url turns LMCache off without a word",
        VALUES,
        '        if definition["default"] is None and getattr(config, name, None) == "":\n',
        "        if False:\n",
    ),
    one(
        "another engine's KV cache takes the place of the one that is served",
        "lmcache_hybrid/connector.py",
        "        if self._registered:\n",
        "        if False:\n",
    ),
    one(
        "a request that says false as a string is not stored",
        REQUESTS,
        "            return _SWITCH[known]\n",
        "            return bool(value)\n",
    ),
    one(
        "a request is stored that does not say whether it may be",
        REQUESTS,
        "                _shown(value),\n            )\n        return True\n",
        "                _shown(value),\n            )\n        return False\n",
    ),
    one(
        "true and 1 are one tag",
        REQUESTS,
        "        if type(value) is int:\n",
        "        if isinstance(value, int):\n",
    ),
    one(
        "a request whose tag is none shares with those that have no tags",
        REQUESTS,
        "                    tags = None\n",
        "                    pass\n",
    ),
    one(
        "each wrong name of a client is in the log",
        REQUESTS,
        "        if name in warned or len(warned) > MOST_NAMES:\n",
        "        if name in warned:\n",
    ),
    one(
        "a misspelt setting of a request is ignored without a word",
        REQUESTS,
        '            elif self._is_first("unknown", name):\n',
        "            elif False:\n",
    ),
    one(
        "a setting of LMCache's other connector is ignored without a word",
        REQUESTS,
        '                if self._is_first("unserved", name):\n',
        "                if False:\n",
    ),
    one(
        "prompts that are stored already are taken for unstored",
        WATCH,
        "        if tracker.found or request",
        "        if request",
    ),
    one(
        "an engine that stores warns of prompts that are too short",
        WATCH,
        "or self._holds and tracker.unstored:",
        "or False:",
    ),
    one(
        "a consumer is told each hour that it stores nothing",
        WATCH,
        "        if not self._options.save or",
        "        if",
    ),
    one(
        "requests that end early count as not stored",
        WATCH,
        " or request.num_computed_tokens < request.num_prompt_tokens",
        "",
    ),
    one(
        "saves that are reported after a burst has ended come too late",
        WATCH,
        "seconds < SETTLE_SECONDS or ",
        "",
    ),
    one(
        "a warning is said again with every ten prompts",
        WATCH,
        "        if now < spell.silent_until:\n            return False\n",
        "",
    ),
    one(
        "what every backend failed to write counts as stored",
        WATCH,
        " and (self.in_ram or not failed)",
        "",
    ),
    one(
        "a failed write to a disk below RAM counts as not stored",
        WATCH,
        "(self.in_ram or not failed)",
        "not failed",
    ),
    one(
        "lookups of what the own cache holds count as missed",
        WATCH,
        "could_hit = not asked.floor and (asked",
        "could_hit = (asked",
    ),
    one(
        "an empty store is blamed for missed lookups",
        WATCH,
        "        look = self._holds and could_hit",
        "        look = could_hit",
    ),
    one(
        "what a reset cleared is still held",
        WATCH,
        "        self._holds = False\n        self._unstored",
        "        self._unstored",
    ),
    one(
        "nobody hears that prompts are stored again",
        WATCH,
        '                self._end(self._unstored, "LMCache stores prompts again.")\n',
        "                self._unstored.count = 0\n",
    ),
    one(
        "what ranks count does not reach the watch",
        "lmcache_hybrid/connector.py",
        "                self.scheduler.store_watch.reported(counts)\n",
        "                pass\n",
    ),
    one(
        "ranks beside another connector seem to store nothing",
        "lmcache_hybrid/metrics.py",
        "isinstance(each, HybridStats)), {})",
        "isinstance(each, HybridStats) and not each.data), {})",
    ),
    one(
        "the start-up line gives each rank the whole of a folder",
        "lmcache_hybrid/config/tiers.py",
        "taken * ranks if tier.shared else taken",
        "taken",
    ),
)
