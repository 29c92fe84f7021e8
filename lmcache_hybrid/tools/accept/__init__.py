# SPDX-License-Identifier: Apache-2.0
"""``lmcache-hybrid accept``: are restored prompts answered as vLLM itself answers them?

On the user's own device and weights, with real engines. ``prompts`` says what is asked,
``run`` in which order, ``compare`` what is equal, ``report`` what is shown. ``child`` is
an engine in a process of its own, ``engine`` drives it, ``worker`` runs on its ranks.
"""
