# SPDX-License-Identifier: Apache-2.0
"""Tests, and the parts that benchmarks share with them."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
