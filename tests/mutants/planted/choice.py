# SPDX-License-Identifier: Apache-2.0
"""Whether a hit is loaded or computed."""

from tests.mutants.defect import always, each_of

MISTAKES = {
    "lmcache_hybrid/scheduler/load_policy.py": {
        "an engine that has computed nothing loads without a deadline": (
            "            computing = (end - start) / ASSUMED_SPEED\n",
            "            return math.inf\n",
        ),
        "what was assumed counts more than what was computed": always(
            "        if computing is None:\n"
        ),
        "loads under way are not waited for": (
            "max(0.0, self._free_at - self._clock()) + own",
            "own",
        ),
        "loads are waited for as long as was expected when they began": (
            "        self._free_at = now + sum(waiting)\n",
            "        if not self._sent:\n            self._free_at = now\n",
        ),
        "a slow backend comes back as soon as it is as fast": ("BACK_AT = 0.8", "BACK_AT = 1.0"),
        "what is slow is never measured again": (
            " if self._left[source] % TRY_EVERY == 0 else None",
            " if self._left[source] < 0 else None",
        ),
        "what was measured just now is forgotten": (
            "in self._left.items() if left >= TRY_EVERY}",
            "in self._left.items() if left}",
        ),
        "a backend is slow because others are waited for": (
            "        slow = own > computing * ",
            "        slow = loading > computing * ",
        ),
        "each change of mind is logged": (
            "        if now - self._logged.get(source, -math.inf) < LOG_SECONDS:\n",
            "        if now < 0:\n",
        ),
        "a first load that broke off counts as a fast one": (
            "(self._speeds.load_seconds(load[1]) or MOMENT_SECONDS)",
            "(self._speeds.load_seconds(load[1]) or 0.0)",
        ),
        "a load that broke off counts as a fast one": (
            "                if seconds > (self",
            "                if True or seconds > (self",
        ),
    },
    "lmcache_hybrid/scheduler/tracker.py": {
        "a hit that is not loaded is stored again": (
            "        if result.hit:\n            self.states",
            "        if False:\n            self.states",
        ),
    },
    "lmcache_hybrid/scheduler/admission.py": {
        "a hit that is computed instead keeps its claim": (
            "        if not gain:\n            self._lookups.withdraw(",
            "        if False:\n            self._lookups.withdraw(",
        ),
    },
    "lmcache_hybrid/scheduler/speeds.py": {
        "estimates can be negative": always("            if a >= 0 <= b:\n"),
    },
    "lmcache_hybrid/connector.py": {
        "a load waits for the forward of its step": (
            "            self.worker.start_loads(metadata)\n\n"
            "    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:\n",
            "            pass\n\n"
            "    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:\n"
            "        self.worker.start_loads(self._metadata)\n",
        ),
    },
}
DEFECTS = each_of(MISTAKES)
