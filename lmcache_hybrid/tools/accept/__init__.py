# SPDX-License-Identifier: Apache-2.0
"""``lmcache-hybrid accept``: are restored prompts answered as vLLM itself answers them?

On the user's own device and weights, with real engines. ``prompts`` makes the prompts, ``run``
asks them in order, ``compare`` judges the answers, ``report`` shows the result. ``child`` is an
engine in a process of its own, ``engine`` drives it, ``worker`` runs on its ranks.
"""
