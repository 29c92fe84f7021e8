# SPDX-License-Identifier: Apache-2.0
"""What a hybrid model's blocks and states take, from its ``config.json`` alone.

:mod:`shape` reads the config, :mod:`blocks` computes what vLLM makes of it (N, groups,
bytes), :mod:`storage` what prompts take in LMCache's backends, :mod:`to_write` the settings
that hold them, :mod:`plan` all of it together; :mod:`catalogue` knows some models by name.
No torch, no vLLM: plain integers that a test compares with vLLM's.
"""
