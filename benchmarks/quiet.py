# SPDX-License-Identifier: Apache-2.0
"""Import it before vLLM and LMCache: a line for each request would bury a benchmark's progress."""

import os

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "CRITICAL")
os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
