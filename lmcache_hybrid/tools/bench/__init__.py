# SPDX-License-Identifier: Apache-2.0
"""``lmcache-hybrid bench MODEL``: measures servers with and without LMCache, side by side.

:mod:`.workload` makes the prompts, :mod:`.run` sends them to :mod:`.server` through vLLM's own
client (:mod:`.client`), and :mod:`.report` shows the results.
"""
