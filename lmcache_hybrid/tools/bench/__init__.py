# SPDX-License-Identifier: Apache-2.0
"""What ``lmcache-hybrid bench MODEL`` measures: servers with and without LMCache, side by side.

:mod:`.workload` says what is asked, :mod:`.run` asks it of :mod:`.server` through vLLM's own
client (:mod:`.client`), and :mod:`.report` says what came out.
"""
