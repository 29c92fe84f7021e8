# SPDX-License-Identifier: Apache-2.0
"""Measured times of this engine to compute tokens and to load bytes."""

from collections.abc import Iterable, Mapping

# Weight of a measurement after the next one.
KEEP_COMPUTED, KEEP_LOADED = 0.9, 0.7
# Sizes below which fixed costs are most of the time.
SMALL_TOKENS, SMALL_BYTES = 256, 1 << 20


class Line:
    """Fits seconds = a * x + b * y with a, b >= 0, by least squares relative to a size."""

    def __init__(self, keep: float) -> None:
        self._keep = keep
        self._xx = self._xy = self._yy = self._xs = self._ys = 0.0

    def add(self, x: float, y: float, seconds: float, size: float) -> None:
        """Add a measurement; ``x`` must be above 0."""
        x, y, seconds = x / size, y / size, seconds / size
        self._xx = self._keep * self._xx + x * x
        self._xy = self._keep * self._xy + x * y
        self._yy = self._keep * self._yy + y * y
        self._xs = self._keep * self._xs + x * seconds
        self._ys = self._keep * self._ys + y * seconds

    def at(self, x: float, y: float) -> float | None:
        """Estimate the seconds for ``x`` and ``y``; None before the first measurement."""
        if not self._xx:
            return None
        determinant = self._xx * self._yy - self._xy * self._xy
        # Measurements of one size cannot tell ``a`` from ``b``.
        if determinant > 1e-3 * self._xx * self._yy:
            a = (self._xs * self._yy - self._ys * self._xy) / determinant
            b = (self._ys * self._xx - self._xs * self._xy) / determinant
            if a >= 0 <= b:
                return a * x + b * y
            if a < 0:
                return self._ys / self._yy * y
        return self._xs / self._xx * x


class Speeds:
    """Measurements of one engine. Used by the scheduler's thread only."""

    def __init__(self) -> None:
        self._compute = Line(KEEP_COMPUTED)
        self._tiers: dict[str, Line] = {}

    def computed(self, start: int, end: int, seconds: float) -> None:
        """Add a prefill of tokens [start, end), ``seconds`` with all that ran beside it."""
        tokens = end - start
        self._compute.add(tokens, tokens * (start + end) / 2, seconds, SMALL_TOKENS + tokens)

    def compute_seconds(self, start: int, end: int) -> float | None:
        """Estimate for tokens [start, end); None before the first prefill."""
        tokens = end - start
        return self._compute.at(tokens, tokens * (start + end) / 2)

    def loaded(self, loads: Iterable[Mapping[str, int]], seconds: float) -> None:
        """Add loads (bytes by backend) that took ``seconds`` together, split as expected."""
        count, sizes = 0, dict[str, int]()
        for load in loads:
            count += 1
            for tier, size in load.items():
                sizes[tier] = sizes.get(tier, 0) + size
        expected = {tier: self._expected({tier: size}) for tier, size in sizes.items()}
        whole = sum(expected.values())
        for tier, size in sizes.items():
            line = self._tiers.setdefault(tier, Line(KEEP_LOADED))
            line.add(size, count, seconds * expected[tier] / whole, SMALL_BYTES + size)

    def load_seconds(self, load: Mapping[str, int]) -> float | None:
        """Estimate for bytes by backend; None where one of these was never measured."""
        return self._expected(load) if load.keys() <= self._tiers.keys() else None

    def forget(self, tiers: Iterable[str]) -> None:
        """Drop the measurements of these backends."""
        for tier in tiers:
            self._tiers.pop(tier, None)

    def _expected(self, load: Mapping[str, int]) -> float:
        """Estimate as :meth:`load_seconds`, with 1 GB/s for unmeasured backends."""
        seconds = 1e-9
        for tier, size in load.items():
            known = self._tiers[tier].at(size, 1) if tier in self._tiers else None
            seconds += size / 1e9 if known is None else known
        return seconds
