# SPDX-License-Identifier: Apache-2.0
"""Errors from outside: what becomes of them, and what ranks say to each other."""

from tests.mutants.defect import each_of, gone, never, passes

MISTAKES = {
    "lmcache_hybrid/worker/worker.py": {
        "a worker that cannot start leaves its loading thread": gone(
            "            on_error.callback(self.loads.close)\n"
        ),
        "a load that cannot be queued is reported never": (
            "                self._give_back(claim)\n                self.loads.refuse(load)\n",
            "                self._give_back(claim)\n",
        ),
        "a load that cannot be queued keeps its claim": (
            "                self._give_back(claim)\n                self.loads.refuse(load)\n",
            "                self.loads.refuse(load)\n",
        ),
        "a drop that fails keeps loads from being queued": (
            '                caught("give_up_claim", error, "its records may stay pinned", '
            "self.ledger)\n",
            "                raise\n",
        ),
        "the claim of a load that could not be planned stays": passes(
            "            self._give_back(self._lookup.take_claim(request_id))\n"
        ),
        "errors of adapters are in no metric": gone("        ADAPTERS.ledger = self.ledger\n"),
    },
    "lmcache_hybrid/connector.py": {
        "a step that failed is stored": (
            "        if sys.exc_info()[1] not in (None, self._handled):\n",
            "        if False:\n",
        ),
        "an engine that LMCache could not close stays open": (
            "            ends += (self._manager.stop_services, close)\n",
            "            ends.append(self._manager.stop_services)\n",
        ),
        "a rank that refuses to start leaves the others waiting": (
            "            refusal = error if isinstance(error, ConfigError) else None\n",
            "            raise\n",
        ),
        "a rank that refuses in its constructor leaves the others waiting": (
            '                tell_ranks(vllm_config, f"it does not start: {error}")\n',
            "                raise\n",
        ),
        "a rank that refuses to start only says so": gone(
            "        if refusal is not None:\n            raise refusal\n"
        ),
        "nobody hears of a load that could not be planned": (
            "        failed = set(self._metadata.unloadable)\n",
            "        failed: set[str] = set()\n",
        ),
        "a rank that is off keeps loads waiting": passes(
            "            failed.update(load.request_id for load in self._metadata.loads)\n"
        ),
        "a load that cannot be planned waits for ever": (
            "give_up(request.request_id, waits=num_external_tokens > 0)",
            "give_up(request.request_id)",
        ),
        "a step that cannot be planned sends no loads": (
            "        return self.scheduler.send(scheduler_output, [])\n",
            "        return NOTHING\n",
        ),
        "a load goes on for ever where an answer cannot be read": passes(
            "            self.scheduler.end_loads(output)\n"
        ),
        "a save that breaks ends the engine": gone(
            '    @guarded("what the step computed is not stored", _skip_saves)\n'
        ),
        "a reset that breaks is taken for done": (
            '    @guarded("the reset fails", _stay_closed)\n',
            '    @guarded("the reset fails", lambda self: True)\n',
        ),
    },
    "lmcache_hybrid/storage/disk/backend.py": {
        "a disk that cannot start all threads leaves some": gone(
            "            stack.callback(self._writers.shutdown)\n"
        ),
        "a write that ends with an odd error takes room for ever": (
            "        except Exception as error:\n            self._fail(error)\n            with",
            "        except OSError as error:\n            self._fail(error)\n            with",
        ),
        "a failed write gives its buffer back twice": (
            "            self._fail(error)\n            with",
            "            memory.ref_count_down()\n            self._fail(error)\n            with",
        ),
        "what a failed write left is deleted after another write of the record may have begun": (
            "            self.others.discard(path)\n",
            "            self._arrive(key)\n            self.others.discard(path)\n",
        ),
    },
    "lmcache_hybrid/storage/eviction_order.py": {
        "a hit fails where LMCache cannot count it": (
            "            with only_logged():  # a read that raised here would keep its "
            "memory\n                self.update_chunk_hash_dict(key)\n",
            "            self.update_chunk_hash_dict(key)\n",
        ),
    },
    "lmcache_hybrid/worker/fingerprint.py": {
        "a rank with a file that it cannot read leaves the others waiting": (
            "        except UnknownContentError as error:\n            problem = str(error)\n",
            "        except ZeroDivisionError as error:\n            problem = str(error)\n"
            "        except UnknownContentError:\n            raise\n",
        ),
    },
    "lmcache_hybrid/identity/weights.py": {
        "a rank does not hear that another one has a problem": never(
            "        if said.get(_PROBLEM) is not None:\n"
        ),
    },
    "lmcache_hybrid/identity/adapters.py": {
        "an adapter that one rank cannot identify leaves the others waiting": (
            '        except Exception as error:\n            what = "requests of',
            '        except ZeroDivisionError as error:\n            what = "requests of',
        ),
        "a broken link beside an adapter is an error that nobody foresaw": (
            "    except (OSError, RuntimeError, ValueError) as error:  # no home",
            "    except ZeroDivisionError as error:  # no home",
        ),
        "an adapter whose tensors cannot be read ends vLLM's load": (
            "        except (RuntimeError, TypeError, ValueError, NotImplementedError, "
            "MemoryError)",
            "        except (ZeroDivisionError,)",
        ),
    },
    "lmcache_hybrid/identity/hub_cache.py": {
        "nobody learns which file beside the weights cannot be read": (
            "        raise OSError(error.errno, error.strerror, str(file)) from error\n",
            "        raise error\n",
        ),
    },
    "lmcache_hybrid/worker/loads.py": {
        "a load whose end cannot be told is reported never": (
            '                caught("end_load", error, "its prompt is computed", self._ledger)\n',
            "                raise\n",
        ),
    },
    "lmcache_hybrid/storage/claims.py": {
        "a pin that cannot be released keeps the others": (
            "                each.callback(unpin)\n",
            "                unpin()\n",
        ),
    },
    "lmcache_hybrid/scheduler/scheduler.py": {
        "a request that is given up keeps its claim": gone(
            "        if not isinstance(tracker.phase, Loading):\n"
            "            self._lookups.admit(tracker)\n"
        ),
        "a request that cannot be planned keeps others from being stored": (
            '                caught("plan_save", error, "nothing more of a request is '
            'stored", self.ledger)\n',
            "                raise\n",
        ),
        "no lookup of a step that cannot be planned is reported": (
            "        self._reports.send()\n        released =",
            "        if saves:\n            self._reports.send()\n        released =",
        ),
        "errors of the scheduler's lookups are in no metric": (
            "self.ledger = queue.ledger = Ledger(",
            "self.ledger = Ledger(",
        ),
    },
    "lmcache_hybrid/scheduler/lookup_reports.py": {
        "a lookup that cannot be reported ends the step's planning": (
            '"report_lookup", error, "metrics or events lack it", self._ledger)\n',
            '"report_lookup", error, "metrics or events lack it", self._ledger)\n'
            "                raise\n",
        ),
        "a lookup is reported in each step": (
            "        answered, self._answered = self._answered, []\n",
            "        answered = [*self._answered]\n",
        ),
    },
    "lmcache_hybrid/storage/rpc.py": {
        "a socket that fails once ends all lookups of a rank": (
            '        except Exception as error:\n            lost = "a lookup may',
            '        except ZeroDivisionError as error:\n            lost = "a lookup may',
        ),
        "errors of lookups on a rank are in no metric": passes(
            "            self._ledger = ledger\n"
        ),
    },
    "lmcache_hybrid/scheduler/lookup_queue.py": {
        "an error of one lookup is logged each time and counted nowhere": gone(
            '            caught("ask_ranks", error, "it is a miss and its prompt is '
            'computed", self.ledger)\n'
        ),
    },
    "lmcache_hybrid/core/faults.py": {
        "an error that nothing counts is said to be counted": (
            '            "not logged" if ledger is None else COUNTED,\n',
            "            COUNTED,\n",
        ),
        "an error is kept from vLLM in silence": never("    if first:\n"),
        "errors that go no further are not counted": passes(
            "            counts.caught_errors[place] += 1\n"
        ),
        "tests do not see errors that go no further": never("    if os.environ.get(STRICT):\n"),
    },
    "lmcache_hybrid/worker/saver.py": {
        "a full pool hides why a save failed": (
            "                warned = full in self._warned\n",
            "                warned = bool(self._warned)\n",
        ),
        "a save that fails is logged without its traceback": gone(
            "                    exc_info=None if full else error,\n"
        ),
    },
}
DEFECTS = each_of(MISTAKES)
