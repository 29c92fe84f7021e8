# SPDX-License-Identifier: Apache-2.0
"""Whether a hit is loaded or computed."""

from tests.mutants.defect import Defect, one

POLICY = "lmcache_hybrid/scheduler/load_policy.py"
ADMISSION = "lmcache_hybrid/scheduler/admission.py"
SPEEDS = "lmcache_hybrid/scheduler/speeds.py"

DEFECTS: tuple[Defect, ...] = (
    one(
        "an engine that has computed nothing loads without a deadline",
        POLICY,
        "            computing = (end - start) / ASSUMED_SPEED\n",
        "            return math.inf\n",
    ),
    one(
        "what was assumed counts more than what was computed",
        POLICY,
        "        if computing is None:\n",
        "        if True:\n",
    ),
    one(
        "loads under way are not waited for",
        POLICY,
        "max(0.0, self._free_at - self._clock()) + own",
        "own",
    ),
    one(
        "loads are waited for as long as was expected when they began",
        POLICY,
        "        self._free_at = now + sum(waiting)\n",
        "        if not self._sent:\n            self._free_at = now\n",
    ),
    one(
        "a slow backend comes back as soon as it is as fast",
        POLICY,
        "BACK_AT = 0.8",
        "BACK_AT = 1.0",
    ),
    one(
        "what is slow is never measured again",
        POLICY,
        " if self._left[source] % TRY_EVERY == 0 else None",
        " if self._left[source] < 0 else None",
    ),
    one(
        "what was measured just now is forgotten",
        POLICY,
        "in self._left.items() if left >= TRY_EVERY}",
        "in self._left.items() if left}",
    ),
    one(
        "a backend is slow because others are waited for",
        POLICY,
        "        slow = own > computing * ",
        "        slow = loading > computing * ",
    ),
    one(
        "each change of mind is logged",
        POLICY,
        "        if now - self._logged.get(source, -math.inf) < LOG_SECONDS:\n",
        "        if now < 0:\n",
    ),
    one(
        "a first load that broke off counts as a fast one",
        POLICY,
        "(self._speeds.load_seconds(load[1]) or MOMENT_SECONDS)",
        "(self._speeds.load_seconds(load[1]) or 0.0)",
    ),
    one(
        "a load that broke off counts as a fast one",
        POLICY,
        "                if seconds > (self",
        "                if True or seconds > (self",
    ),
    one(
        "a hit that is not loaded is stored again",
        "lmcache_hybrid/scheduler/tracker.py",
        "        if result.hit:\n            self.states",
        "        if False:\n            self.states",
    ),
    one(
        "a hit that is computed instead keeps its claim",
        ADMISSION,
        "        if not gain:\n            self._lookups.withdraw(",
        "        if False:\n            self._lookups.withdraw(",
    ),
    one(
        "estimates can be negative",
        SPEEDS,
        "            if a >= 0 <= b:\n",
        "            if True:\n",
    ),
    one(
        "a load waits for the forward of its step",
        "lmcache_hybrid/connector.py",
        "            self.worker.start_loads(metadata)\n\n"
        "    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:\n",
        "            pass\n\n"
        "    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:\n"
        "        self.worker.start_loads(self._metadata)\n",
    ),
)
