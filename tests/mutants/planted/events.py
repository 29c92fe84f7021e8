# SPDX-License-Identifier: Apache-2.0
"""Events that promise what does not hit, or hide what does."""

from tests.mutants.defect import Defect, one

BOUNDARIES = "lmcache_hybrid/scheduler/boundaries.py"
EVENTS = "lmcache_hybrid/scheduler/events.py"
NOTES = "lmcache_hybrid/storage/notes.py"
STORE = "lmcache_hybrid/storage/lmcache_store.py"
SCHEDULER = "lmcache_hybrid/scheduler/scheduler.py"
CONNECTOR = "lmcache_hybrid/connector.py"
CHANGES = "lmcache_hybrid/protocol/changes.py"
PROMPTS = "lmcache_hybrid/storage/disk/prompts_file.py"
ENTRIES = "lmcache_hybrid/storage/disk/prompt_entries.py"

DEFECTS: tuple[Defect, ...] = (
    one(
        "a boundary is announced without its states",
        BOUNDARIES,
        "            and self._holds(node, self._plan.states)\n",
        "",
    ),
    one(
        "a boundary is announced with one of its states",
        BOUNDARIES,
        "            and self._holds(node, self._plan.states)\n",
        "            and self._holds(node, self._plan.states[:1])\n",
    ),
    one(
        "a boundary is announced once one rank holds it",
        BOUNDARIES,
        "        return all(len(node.tiers.get(group, ())) == self._ranks for group in groups)\n",
        "        return all(node.tiers.get(group) for group in groups)\n",
    ),
    one(
        "a boundary is announced without the pages before it",
        BOUNDARIES,
        "        return before and self._holds(node, self._plan.attention)\n",
        "        return self._holds(node, self._plan.attention)\n",
    ),
    one(
        "boundaries behind an evicted page stay announced",
        BOUNDARIES,
        "                if not (moved or reach > 1):\n",
        "                if not reach > 1:\n",
    ),
    one(
        "an evicted window page withdraws no boundary behind it",
        BOUNDARIES,
        "                if not (moved or reach > 1):\n",
        "                if not moved:\n",
    ),
    one(
        "each boundary is counted in all blocks before it",
        BOUNDARIES,
        "            if before and current.below:\n",
        "            if before and current.below and change > 1:\n",
    ),
    one(
        "a window counts pages in front of one that is missing",
        BOUNDARIES,
        "            return 0\n        return min(most",
        "            pass\n        return min(most",
    ),
    one(
        "pages are announced that no boundary needs",
        BOUNDARIES,
        "self._refusing or not node.below:",
        "self._refusing:",
    ),
    one(
        "states are announced at boundaries that cannot be restored",
        BOUNDARIES,
        "        groups = self._groups if node.ready else self._pages\n",
        "        groups = self._groups\n",
    ),
    one(
        "the fastest rank decides where a record lies",
        BOUNDARIES,
        "return max(tiers.values()) if",
        "return min(tiers.values()) if",
    ),
    one(
        "a rank that loads nothing is not heeded",
        BOUNDARIES,
        "        if node.block is None or self._refusing or",
        "        if node.block is None or",
    ),
    one(
        "blocks that nobody holds are remembered for ever",
        BOUNDARIES,
        "        while len(self._unheld) > KEPT_UNHELD:\n",
        "        while len(self._unheld) > 1 << 40:\n",
    ),
    one(
        "a block is forgotten while what follows it is learned",
        BOUNDARIES,
        "            self._unheld[node] = None\n",
        "            self._unheld[node] = None\n"
        "            if len(self._unheld) > KEPT_UNHELD:\n"
        "                self._prune(self._unheld.popitem(last=False)[0])\n",
    ),
    one(
        "a block is announced by the hash of the one before",
        EVENTS,
        "block_hashes=[maybe_convert_block_hash(BlockHash(block.block_hash))],",
        "block_hashes=[maybe_convert_block_hash(BlockHash(parent or block.block_hash))],",
    ),
    one(
        "a block is announced with the tokens of the next one",
        EVENTS,
        "        start, lora = at * self._size, request.lora_request\n",
        "        start, lora = (at + 1) * self._size, request.lora_request\n",
    ),
    one(
        "what is gone from one medium is withdrawn from another",
        EVENTS,
        "            medium, locality, ownership = WHERE[tier]\n",
        "            medium, locality, ownership = WHERE[RAM]\n",
    ),
    one(
        "reports from before a reset count",
        EVENTS,
        "            if report.epoch != self._epoch:\n",
        "            if report.epoch > self._epoch:\n",
    ),
    one(
        "records of tagged requests are announced to all",
        EVENTS,
        "        if prefix.tags != own:\n",
        "        if prefix.tags != own and not prefix.tags:\n",
    ),
    one(
        "a store that hangs keeps an idle engine busy",
        EVENTS,
        "return bool(self._writing) and time.monotonic() < self._until",
        "return bool(self._writing)",
    ),
    one(
        "the end of an idle engine's writes is not published",
        EVENTS,
        "return bool(self._writing) and time.monotonic() < self._until",
        "return False",
    ),
    one(
        "what a lookup found is not announced",
        "lmcache_hybrid/scheduler/admission.py",
        "        self._events.learn(tracker.request, prefix, result.attention, inner)\n",
        "        self._events.learn(tracker.request, prefix, 0, inner)\n",
    ),
    one(
        "a reset withdraws nothing",
        SCHEDULER,
        "            self.events.reset(self._epoch)\n",
        "            pass\n",
    ),
    one(
        "what a pool evicts is not withdrawn",
        NOTES,
        "            value = super().pop(key, *default)\n            touched.append(key)\n",
        "            value = super().pop(key, *default)\n",
    ),
    one(
        "a damaged record stays announced where it cannot be removed",
        NOTES,
        "            self._unconfirmed.pop(key, None)\n            self._lose_remotely(key)\n",
        "            self._unconfirmed.pop(key, None)\n",
    ),
    one(
        "what a shared store has lost stays announced",
        NOTES,
        "                    self._lose_remotely(key)\n",
        "                    pass\n",
    ),
    one(
        "a record is announced before a shared store holds it",
        NOTES,
        "                    if key in held:\n                        self._hold_remotely(key)\n",
        "                    self._hold_remotely(key)\n",
    ),
    one(
        "a record that a shared store did not take is asked for for ever",
        NOTES,
        "                    if key in held or self._unconfirmed[key] < time.monotonic():\n",
        "                    if key in held:\n",
    ),
    one(
        "an older tier hides the nearer one",
        NOTES,
        "            if key in index:\n                return tier\n",
        "            if key in index and tier is self._indexes[-1][0]:\n"
        "                return tier\n",
    ),
    one(
        "a slower write of an evicted record is not noticed",
        NOTES,
        "                self._expect(key, name)  # a slower write of it may be under way\n",
        "",
    ),
    one(
        "what a rank stores after a reset is never announced",
        NOTES,
        "            self._epoch = epoch\n",
        "",
    ),
    one(
        "backends that are not read from count",
        STORE,
        "                if name in (engine.retrieve_locations or (name,)):\n",
        "                if name:\n",
    ),
    one(
        "what lies on disk at the start is not reported",
        STORE,
        "            notes.restored if notes is not None else lambda key, header: None,\n",
        "            lambda key, header: None,\n",
    ),
    one(
        "what ranks report does not reach the scheduler",
        CONNECTOR,
        "        return RankReports([report]) if report else None\n",
        "        return None\n",
    ),
    one(
        "of the ranks' reports only the first one's reaches the scheduler",
        CHANGES,
        "        self.reports.extend(events)\n",
        "        pass\n",
    ),
    one(
        "the scheduler takes no report of its ranks",
        SCHEDULER,
        "            self.events.receive(output.kv_cache_events)\n",
        "            pass\n",
    ),
    one(
        "what is stored is not made known to the events",
        SCHEDULER,
        "        if save is not None and self.events is not None:\n",
        "        if False:\n",
    ),
    one(
        "a rank that is off empties the file of prompts",
        "lmcache_hybrid/scheduler/events.py",
        "            if report.serving:  # one that is off has not looked",
        "            if True:  # one that is off has not looked",
    ),
    one(
        "an idle engine makes steps for a rank whose store did not open",
        "lmcache_hybrid/connector.py",
        "            self._report_off()\n            return\n",
        "            return\n",
    ),
    one(
        "an idle engine makes steps for a rank that is off",
        "lmcache_hybrid/connector.py",
        "            self._last_report = RankReport(rank, 0, (), serving=False, writing=False)\n",
        "            self._last_report = None\n",
    ),
    one(
        "vLLM gets no events of the store",
        CONNECTOR,
        "        return self._events.take() if self._events else []\n",
        "        return []\n",
    ),
    one(
        "an idle engine publishes nothing more",
        CONNECTOR,
        "        return self._events is not None and self._events.pending\n",
        "        return False\n",
    ),
    one(
        "a reset of vLLM's own cache hides what the store holds",
        CONNECTOR,
        "            self._events.cleared()\n",
        "            pass\n",
    ),
    one(
        "what lies on disk at a restart is announced once it is asked for",
        EVENTS,
        "                self._known.recall(self._boundaries.held(NO_TAGS))\n",
        "                pass\n",
    ),
    one(
        "an idle engine announces of its disk what its first steps learn",
        EVENTS,
        "        if self._known is not None and self._known.recalling:\n            return True\n",
        "",
    ),
    one(
        "blocks that were evicted since the start push others out of memory",
        EVENTS,
        "            if self._boundaries.holds(key) and (not parent",
        "            if (not parent",
    ),
    one(
        "new prompts are not known after a restart",
        EVENTS,
        "            self._known.add(new)\n",
        "            pass\n",
    ),
    one(
        "prompts stay on disk after a reset",
        EVENTS,
        "            self._known.erase()\n",
        "            pass\n",
    ),
    one(
        "prompts outlive a reset on a disk that is full",
        PROMPTS,
        "            _delete(self._folder)\n        except OSError as error:\n",
        "            pass\n        except OSError as error:\n",
    ),
    one(
        "prompts outlive the engine that announced them",
        PROMPTS,
        "                _delete(folder)\n        return None\n",
        "                pass\n        return None\n",
    ),
    one(
        "an engine ends once it has read whatever others wrote",
        PROMPTS,
        "lambda: self._closing or",
        "lambda: False or",
    ),
    one(
        "a hole in the file of prompts is read to its end",
        ENTRIES,
        "            if not 0 < length <= MAX_ENTRY_BYTES:",
        "            if not 0 <= length <= MAX_ENTRY_BYTES:",
    ),
    one(
        "the prompts on disk grow for ever",
        PROMPTS,
        "        return self._count > 2 * known + SLACK\n",
        "        return False\n",
    ),
    one(
        "prompts that others may write count",
        PROMPTS,
        "        if mode != (GROUP_FILE if shared else PRIVATE_FILE):\n",
        "        if mode == 0:\n",
    ),
    one(
        "prompts of another layout count",
        PROMPTS,
        "        if data.read(len(self._entries.header)) != self._entries.header:\n",
        "        if not data.read(len(self._entries.header)):\n",
    ),
    one(
        "prompts are written to a file that was deleted",
        PROMPTS,
        "            if not os.fstat(self._file).st_nlink:\n",
        "            if not os.fstat(self._file):\n",
    ),
    one(
        "tokens that somebody wrote beside the records are announced under any hash",
        ENTRIES,
        "            block_hash = hash_block_tokens(self._hash, parent, part, hashed)\n",
        "            block_hash = entry.block_hash\n",
    ),
    one(
        "a block of no tokens hides the right one",
        ENTRIES,
        "        if not 0 < len(tokens) <= self._size or",
        "        if len(tokens) > self._size or",
    ),
    one(
        "damaged prompts count",
        ENTRIES,
        "            if self._digester.chunk(payload) == digest:\n",
        "            if digest:\n",
    ),
    one(
        "blocks with two images are not known after a restart",
        ENTRIES,
        "        copied.append((sys.intern(tag), *rest))\n",
        "        copied.append((tag, *rest))\n",
    ),
    one(
        "an adapter's prompts are announced after a restart, whatever the adapter is then",
        ENTRIES,
        '{"mm": (str, int), "cache_salt": (str,)}',
        '{"mm": (str, int), "cache_salt": (str,), "lora": (str, str)}',
    ),
    one(
        "a restart reports a part of what a large disk holds",
        NOTES,
        "self._expected[key] = RecordName(header.group, header.block_hash, header.tags)\n",
        "self._expect(key, RecordName(header.group, header.block_hash, header.tags))\n",
    ),
    one(
        "a purge leaves the prompts of the records",
        "lmcache_hybrid/tools/stored/folder_store.py",
        "        (folder / name).unlink(missing_ok=True)\n",
        "        pass\n",
    ),
    one(
        "a purge takes the prompts of the records that it leaves",
        "lmcache_hybrid/tools/stored/folder_store.py",
        "        if any(key_of(file.name, DATA, TEMPORARY, LOCAL_DISK) for file in files):\n",
        "        if not files:\n",
    ),
)
