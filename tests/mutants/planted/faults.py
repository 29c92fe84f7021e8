# SPDX-License-Identifier: Apache-2.0
"""Errors from outside: what becomes of them, and what ranks say to each other."""

from tests.mutants.defect import one

ADAPTERS = "lmcache_hybrid/identity/adapters.py"
CONNECTOR = "lmcache_hybrid/connector.py"
FAULTS = "lmcache_hybrid/core/faults.py"
LOADS = "lmcache_hybrid/worker/loads.py"
SCHEDULER = "lmcache_hybrid/scheduler/scheduler.py"
WORKER = "lmcache_hybrid/worker/worker.py"

DEFECTS = (
    one(
        "a worker that cannot start leaves its loading thread",
        "lmcache_hybrid/worker/worker.py",
        "            on_error.callback(self.loads.close)\n",
        "",
    ),
    one(
        "an engine that LMCache could not close stays open",
        "lmcache_hybrid/connector.py",
        "            ends += (self._manager.stop_services, close)\n",
        "            ends.append(self._manager.stop_services)\n",
    ),
    one(
        "a disk that cannot start all threads leaves some",
        "lmcache_hybrid/storage/disk/backend.py",
        "            stack.callback(self._writers.shutdown)\n",
        "",
    ),
    one(
        "a hit fails where LMCache cannot count it",
        "lmcache_hybrid/storage/eviction_order.py",
        "            with only_logged():  # a read that raised here would keep its memory\n"
        "                self.update_chunk_hash_dict(key)\n",
        "            self.update_chunk_hash_dict(key)\n",
    ),
    # Ranks
    one(
        "a rank with a file that it cannot read leaves the others waiting",
        "lmcache_hybrid/worker/fingerprint.py",
        "        except UnknownContentError as error:\n            problem = str(error)\n",
        "        except ZeroDivisionError as error:\n            problem = str(error)\n"
        "        except UnknownContentError:\n            raise\n",
    ),
    one(
        "a rank that refuses to start leaves the others waiting",
        CONNECTOR,
        "            refusal = error if isinstance(error, ConfigError) else None\n",
        "            raise\n",
    ),
    one(
        "a rank that refuses in its constructor leaves the others waiting",
        CONNECTOR,
        '                tell_ranks(vllm_config, f"it does not start: {error}")\n',
        "                raise\n",
    ),
    one(
        "a rank that refuses to start only says so",
        CONNECTOR,
        "        if refusal is not None:\n            raise refusal\n",
        "",
    ),
    one(
        "a rank does not hear that another one has a problem",
        "lmcache_hybrid/identity/weights.py",
        "        if said.get(_PROBLEM) is not None:\n",
        "        if False:\n",
    ),
    one(
        "an adapter that one rank cannot identify leaves the others waiting",
        ADAPTERS,
        '        except Exception as error:\n            what = "requests of',
        '        except ZeroDivisionError as error:\n            what = "requests of',
    ),
    # Files
    one(
        "a broken link beside an adapter is an error that nobody foresaw",
        ADAPTERS,
        "    except (OSError, RuntimeError, ValueError) as error:  # no home",
        "    except ZeroDivisionError as error:  # no home",
    ),
    one(
        "an adapter whose tensors cannot be read ends vLLM's load",
        ADAPTERS,
        "        except (RuntimeError, TypeError, ValueError, NotImplementedError, MemoryError)",
        "        except (ZeroDivisionError,)",
    ),
    one(
        "nobody learns which file beside the weights cannot be read",
        "lmcache_hybrid/identity/hub_cache.py",
        "        raise OSError(error.errno, error.strerror, str(file)) from error\n",
        "        raise error\n",
    ),
    one(
        "a write that ends with an odd error takes room for ever",
        "lmcache_hybrid/storage/disk/backend.py",
        "        except Exception as error:\n            self._fail(error)\n            with",
        "        except OSError as error:\n            self._fail(error)\n            with",
    ),
    one(
        "a failed write gives its buffer back twice",
        "lmcache_hybrid/storage/disk/backend.py",
        "            self._fail(error)\n            with",
        "            memory.ref_count_down()\n            self._fail(error)\n            with",
    ),
    one(
        "what a failed write left is deleted after another write of the record may have begun",
        "lmcache_hybrid/storage/disk/backend.py",
        "            self.others.discard(path)\n",
        "            self._arrive(key)\n            self.others.discard(path)\n",
    ),
    # Loads and claims
    one(
        "a load that cannot be queued is reported never",
        WORKER,
        "                self._give_back(claim)\n                self.loads.refuse(load)\n",
        "                self._give_back(claim)\n",
    ),
    one(
        "a load that cannot be queued keeps its claim",
        WORKER,
        "                self._give_back(claim)\n                self.loads.refuse(load)\n",
        "                self.loads.refuse(load)\n",
    ),
    one(
        "a drop that fails keeps loads from being queued",
        WORKER,
        '                caught("give_up_claim", error, '
        '"its records may stay pinned", self.ledger)\n',
        "                raise\n",
    ),
    one(
        "a load whose end cannot be told is reported never",
        LOADS,
        '                caught("end_load", error, "its prompt is computed", self._ledger)\n',
        "                raise\n",
    ),
    one(
        "a pin that cannot be released keeps the others",
        "lmcache_hybrid/storage/claims.py",
        "                each.callback(unpin)\n",
        "                unpin()\n",
    ),
    one(
        "nobody hears of a load that could not be planned",
        CONNECTOR,
        "        failed = set(self._metadata.unloadable)\n",
        "        failed: set[str] = set()\n",
    ),
    one(
        "the claim of a load that could not be planned stays",
        WORKER,
        "            self._give_back(self._lookup.take_claim(request_id))\n",
        "            pass\n",
    ),
    one(
        "a rank that is off keeps loads waiting",
        CONNECTOR,
        "            failed.update(load.request_id for load in self._metadata.loads)\n",
        "            pass\n",
    ),
    # Steps
    one(
        "a load that cannot be planned waits for ever",
        CONNECTOR,
        "give_up(request.request_id, waits=num_external_tokens > 0)",
        "give_up(request.request_id)",
    ),
    one(
        "a request that is given up keeps its claim",
        SCHEDULER,
        "        if not isinstance(tracker.phase, Loading):\n"
        "            self._lookups.admit(tracker)\n",
        "",
    ),
    one(
        "a request that cannot be planned keeps others from being stored",
        SCHEDULER,
        '                caught("plan_save", error, "nothing more of a request is stored", '
        "self.ledger)\n",
        "                raise\n",
    ),
    one(
        "a lookup that cannot be reported ends the step's planning",
        "lmcache_hybrid/scheduler/lookup_reports.py",
        '"report_lookup", error, "metrics or events lack it", self._ledger)\n',
        '"report_lookup", error, "metrics or events lack it", self._ledger)\n'
        "                raise\n",
    ),
    one(
        "a lookup is reported in each step",
        "lmcache_hybrid/scheduler/lookup_reports.py",
        "        answered, self._answered = self._answered, []\n",
        "        answered = [*self._answered]\n",
    ),
    one(
        "no lookup of a step that cannot be planned is reported",
        SCHEDULER,
        "        self._reports.send()\n        released =",
        "        if saves:\n            self._reports.send()\n        released =",
    ),
    one(
        "a step that cannot be planned sends no loads",
        CONNECTOR,
        "        return self.scheduler.send(scheduler_output, [])\n",
        "        return NOTHING\n",
    ),
    one(
        "a load goes on for ever where an answer cannot be read",
        CONNECTOR,
        "            self.scheduler.end_loads(output)\n",
        "            pass\n",
    ),
    one(
        "a save that breaks ends the engine",
        CONNECTOR,
        '    @guarded("what the step computed is not stored", _skip_saves)\n',
        "",
    ),
    one(
        "a reset that breaks is taken for done",
        CONNECTOR,
        '    @guarded("the reset fails", _stay_closed)\n',
        '    @guarded("the reset fails", lambda self: True)\n',
    ),
    # Lookups
    one(
        "a socket that fails once ends all lookups of a rank",
        "lmcache_hybrid/storage/rpc.py",
        '        except Exception as error:\n            lost = "a lookup may',
        '        except ZeroDivisionError as error:\n            lost = "a lookup may',
    ),
    one(
        "an error of one lookup is logged each time and counted nowhere",
        "lmcache_hybrid/scheduler/lookup_queue.py",
        '            caught("ask_ranks", error, "it is a miss and its prompt is computed", '
        "self.ledger)\n",
        "",
    ),
    one(
        "errors of lookups on a rank are in no metric",
        "lmcache_hybrid/storage/rpc.py",
        "            self._ledger = ledger\n",
        "            pass\n",
    ),
    one(
        "errors of adapters are in no metric",
        WORKER,
        "        adapters.ledger = self.ledger\n",
        "",
    ),
    one(
        "errors of the scheduler's lookups are in no metric",
        SCHEDULER,
        "self.ledger = queue.ledger = Ledger(",
        "self.ledger = Ledger(",
    ),
    one(
        "an error that nothing counts is said to be counted",
        FAULTS,
        '            "not logged" if ledger is None else COUNTED,\n',
        "            COUNTED,\n",
    ),
    # Saves
    one(
        "a full pool hides why a save failed",
        "lmcache_hybrid/worker/saver.py",
        "                warned = full in self._warned\n",
        "                warned = bool(self._warned)\n",
    ),
    one(
        "a save that fails is logged without its traceback",
        "lmcache_hybrid/worker/saver.py",
        "                    exc_info=None if full else error,\n",
        "",
    ),
    # Never silent
    one("an error is kept from vLLM in silence", FAULTS, "    if first:\n", "    if False:\n"),
    one(
        "errors that go no further are not counted",
        FAULTS,
        "            counts.caught_errors[place] += 1\n",
        "            pass\n",
    ),
    one(
        "tests do not see errors that go no further",
        FAULTS,
        "    if os.environ.get(STRICT):\n",
        "    if False:\n",
    ),
)
