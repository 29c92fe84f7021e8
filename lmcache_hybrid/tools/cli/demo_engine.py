# SPDX-License-Identifier: Apache-2.0
"""One engine of the demo, in a process of its own.

Reads ``{"model": ..., "prompts": [...]}`` from standard input and writes one JSON
line per prompt, and one when it is ready, to the file descriptor it is given.
"""

import json
import os
import sys

MAX_TOKENS = 16


def main() -> None:
    task = json.load(sys.stdin)
    replies = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=task["model"],
        max_model_len=16384,
        enforce_eager=True,
        disable_log_stats=False,
        kv_transfer_config={"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"},
    )
    sampling = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    # The first request of an engine pays for start-up work that is not prefill.
    llm.generate(["warm-up"], sampling, use_tqdm=False)
    replies.write(json.dumps({"ready": True}) + "\n")
    for prompt in task["prompts"]:
        (output,) = llm.generate([prompt], sampling, use_tqdm=False)
        reply = {
            "tokens": len(output.prompt_token_ids),
            "hit": output.num_cached_tokens or 0,
            "first_token_seconds": output.metrics.first_token_latency,
            "output": list(output.outputs[0].token_ids),
        }
        replies.write(json.dumps(reply) + "\n")


if __name__ == "__main__":
    main()
