# SPDX-License-Identifier: Apache-2.0
"""vLLM's own client: ``python -m lmcache_hybrid.tools.bench.client FD``.

Reads one JSON object per line from standard input: ``url``, ``model``, ``served`` (its name there),
``tokenizer`` (flags), ``prompts`` as token IDs, ``output_tokens`` and ``concurrency``. Runs
``vllm bench serve`` with it, and writes the result to the file descriptor. One process for all, as
importing it takes ten seconds.
"""

import json
import os
import sys
from typing import Any


def main() -> None:
    from vllm.benchmarks import serve
    from vllm.benchmarks.datasets import SampleRequest
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="vllm bench serve")
    serve.add_cli_args(parser)

    def run(task: dict[str, Any]) -> dict[str, Any]:
        prompts, output = task["prompts"], task["output_tokens"]
        # Its datasets have neither conversations nor second questions to one document.
        vars(serve).update(
            get_samples=lambda arguments, tokenizer: [
                SampleRequest(prompt=ids, prompt_len=len(ids), expected_output_len=output)
                for ids in prompts
            ]
        )
        words = ["--base-url", task["url"], "--model", task["model"], *task["tokenizer"]]
        words += ["--served-model-name", task["served"]]
        words += ["--max-concurrency", str(task["concurrency"]), "--num-warmups", "0"]
        words += "--temperature 0 --ignore-eos --disable-tqdm --dataset-name custom".split()
        return serve.main(parser.parse_args(words))

    with os.fdopen(int(sys.argv[1]), "w", buffering=1) as out:
        for line in sys.stdin:
            found = run(json.loads(line))
            kept = ("completed", "request_throughput", "median_ttft_ms")
            out.write(json.dumps({name: found.get(name) for name in kept}) + "\n")


if __name__ == "__main__":
    main()
