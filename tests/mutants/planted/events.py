# SPDX-License-Identifier: Apache-2.0
"""Events that promise what does not hit, or hide what does."""

from tests.mutants.defect import Defect, one

PREFIXES = "lmcache_hybrid/scheduler/announced_prefixes.py"
EVENTS = "lmcache_hybrid/scheduler/events.py"
NOTES = "lmcache_hybrid/storage/residency.py"
STORE = "lmcache_hybrid/storage/lmcache_store.py"
SCHEDULER = "lmcache_hybrid/scheduler/scheduler.py"
CONNECTOR = "lmcache_hybrid/connector.py"
REPORTS = "lmcache_hybrid/protocol/record_reports.py"
FILES = "lmcache_hybrid/storage/disk/files.py"

DEFECTS: tuple[Defect, ...] = (
    one(
        "a boundary is announced without its states",
        PREFIXES,
        "            and self._holds(node, self._plan.states)\n",
        "",
    ),
    one(
        "a boundary is announced with one of its states",
        PREFIXES,
        "            and self._holds(node, self._plan.states)\n",
        "            and self._holds(node, self._plan.states[:1])\n",
    ),
    one(
        "a boundary is announced once one rank holds it",
        PREFIXES,
        "        return all(len(node.tiers.get(group, ())) == self._ranks for group in groups)\n",
        "        return all(node.tiers.get(group) for group in groups)\n",
    ),
    one(
        "a boundary is announced without the pages before it",
        PREFIXES,
        "        return before and self._holds(node, self._plan.attention)\n",
        "        return self._holds(node, self._plan.attention)\n",
    ),
    one(
        "boundaries behind an evicted page stay announced",
        PREFIXES,
        "                if not (moved or reach > 1):\n",
        "                if not reach > 1:\n",
    ),
    one(
        "an evicted window page withdraws no boundary behind it",
        PREFIXES,
        "                if not (moved or reach > 1):\n",
        "                if not moved:\n",
    ),
    one(
        "each boundary is counted in all blocks before it",
        PREFIXES,
        "            if before and current.below:\n",
        "            if before and current.below and change > 1:\n",
    ),
    one(
        "a window counts pages in front of one that is missing",
        PREFIXES,
        "            return 0\n        return min(most",
        "            pass\n        return min(most",
    ),
    one(
        "pages are announced that no boundary needs",
        PREFIXES,
        "self._refusing or not node.below:",
        "self._refusing:",
    ),
    one(
        "states are announced at boundaries that cannot be restored",
        PREFIXES,
        "        groups = self._groups if node.ready else self._pages\n",
        "        groups = self._groups\n",
    ),
    one(
        "the fastest rank decides where a record lies",
        PREFIXES,
        "return max(tiers.values()) if",
        "return min(tiers.values()) if",
    ),
    one(
        "a rank that loads nothing is not heeded",
        PREFIXES,
        "        if self._refusing or",
        "        if",
    ),
    one(
        "blocks that nobody holds are remembered for ever",
        PREFIXES,
        "        while len(self._unheld) > KEPT_UNHELD:\n",
        "        while len(self._unheld) > 1 << 40:\n",
    ),
    one(
        "a block is forgotten while what follows it is learned",
        PREFIXES,
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
        "        start, lora, ahead = at * self._size, request.lora_request, None\n",
        "        start, lora, ahead = (at + 1) * self._size, request.lora_request, None\n",
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
        EVENTS,
        "        self.learn(request, prefix, result.attention, inner)\n",
        "        self.learn(request, prefix, 0, inner)\n",
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
        "            residency.restored if residency is not None else lambda key, header: None,\n",
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
        REPORTS,
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
        "vLLM gets no events of the store",
        CONNECTOR,
        "        return self._events.drain() if self._events else []\n",
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
        "a restart reports a part of what a large disk holds",
        NOTES,
        "self._expected[key] = RecordName(header.group, header.block_hash, header.tags)\n",
        "self._expect(key, RecordName(header.group, header.block_hash, header.tags))\n",
    ),
    one(
        "an idle engine waits for what ranks find at the start",
        EVENTS,
        "        self._writing: set[int] = set()\n        self._until = 0.0\n",
        "        self._writing: set[int] = {0}\n        self._until = time.monotonic() + 1\n",
    ),
    one(
        "prompts that earlier versions kept stay on disk",
        "lmcache_hybrid/scheduler_side.py",
        '        delete_old_prompts(folders_in("LMCache option local_disk", config.local_disk))\n',
        "        pass\n",
    ),
    one(
        "prompts that earlier versions kept stay in the second folder",
        "lmcache_hybrid/scheduler_side.py",
        'delete_old_prompts(folders_in("LMCache option local_disk", config.local_disk))',
        'delete_old_prompts(folders_in("LMCache option local_disk", config.local_disk)[:1])',
    ),
    one(
        "prompts that cannot be deleted end a start",
        FILES,
        "            except OSError as error:\n",
        "            except FileExistsError as error:\n",
    ),
    one(
        "a link that has the name of prompts has somebody's file deleted",
        FILES,
        "                os.unlink(path)\n            except FileNotFoundError",
        "                os.unlink(os.path.realpath(path))\n            except FileNotFoundError",
    ),
    one(
        "a purge leaves prompts that earlier versions kept",
        "lmcache_hybrid/tools/stored/folder_store.py",
        "        delete_old_prompts(map(str, self._folders))\n",
        "        pass\n",
    ),
)
