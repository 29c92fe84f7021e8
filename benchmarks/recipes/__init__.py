# SPDX-License-Identifier: Apache-2.0
"""The figures of docs/recipes.md, from ``lmcache-hybrid plan``."""
