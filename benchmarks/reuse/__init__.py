# SPDX-License-Identifier: Apache-2.0
"""How much of what could be reused is reused: traces of prompts, replayed without a model.

python -m benchmarks.reuse --out docs/generated/reuse.json
"""
