# SPDX-License-Identifier: Apache-2.0
"""Computes the size of a hybrid model's blocks and states from its ``config.json`` alone.

:mod:`shape` reads the config, :mod:`blocks` computes N, groups and bytes as vLLM does,
:mod:`storage` the size of prompts in LMCache's backends, :mod:`to_write` the settings for them,
:mod:`plan` all of it together; :mod:`catalogue` has some models by name. No torch, no vLLM: plain
integers that a test compares with vLLM's.
"""
