# SPDX-License-Identifier: Apache-2.0
"""``lmcache-hybrid accept``: the acceptance test on the user's own device and weights."""

import os
import subprocess
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lmcache_hybrid.tools.accept.compare import Verdict
from lmcache_hybrid.tools.accept.engine import Engine, EngineError, tail
from lmcache_hybrid.tools.accept.report import as_json, print_verdict
from lmcache_hybrid.tools.accept.run import Run
from lmcache_hybrid.tools.cli.terminal import (
    ConfigFile,
    ModelArgument,
    VllmFlags,
    check_model,
    check_out,
    need_host,
    progress,
    write_out,
)

EXIT_CODES = {Verdict.PASS: 0, Verdict.FAIL: 1, Verdict.UNDECIDED: 3}
NO_RESULT = 2


def accept(
    model: ModelArgument,
    vllm_flags: VllmFlags = None,
    lmcache_config: ConfigFile = None,
    out: Annotated[Path | None, typer.Option(help="Write the report to this JSON file.")] = None,
    longest: Annotated[
        int, typer.Option(help="Tokens of the longest prompt; 0: 16384, 4096 on CPU.", min=0)
    ] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="Two short prompts only, to try the command.")
    ] = False,
) -> None:
    """Test on this machine that prompts restored by LMCache are answered as by vLLM alone.

    Starts MODEL with your flags and LMCache file. Sends prompts cold, then
    from vLLM's own prefix cache and from each tier of LMCache, also after a
    restart if the tier survives it, and compares log-probabilities.

    Exit code 0: passed, 1: failed, 2: no verdict, 3: too much noise to tell.
    Each run has its own cache salt: it shares no records with other requests.
    Its records stay in the store until they are evicted.
    """
    check_model(model)
    check_out(out)
    need_host(NO_RESULT)
    environment = {"LMCACHE_TRACK_USAGE": "false", **os.environ}
    if lmcache_config is not None:
        environment["LMCACHE_CONFIG_FILE"] = str(lmcache_config)
    handle, name = tempfile.mkstemp(prefix="lmcache-hybrid-accept-", suffix=".log")
    os.close(handle)
    log = Path(name)
    errors = Console(stderr=True, highlight=False)
    try:
        with progress(errors) as say:
            result = Run(say, longest, quick).ask_engines(
                lambda: Engine(model, vllm_flags or [], log, environment)
            )
    except EngineError as error:
        if not error.refused:
            errors.print(tail(log), markup=False, soft_wrap=True)
        errors.print(f"No verdict, the engine ended: {error}", style="red", markup=False)
        errors.print(f"The engine's log is {log}.", soft_wrap=True)
        raise typer.Exit(NO_RESULT) from error
    except KeyboardInterrupt:
        errors.print(f"Stopped. The engine's log is {log}.", soft_wrap=True)
        raise typer.Exit(130) from None
    result.facts["driver"] = _driver()
    print_verdict(Console(), result)
    if out is not None:
        write_out(out, as_json(result))
    if result.verdict is Verdict.PASS:
        log.unlink()
    else:
        errors.print(f"The engine's log is {log}.", soft_wrap=True)
    raise typer.Exit(EXIT_CODES[result.verdict])


def _driver() -> str:
    """Return the version of NVIDIA's driver; "" if there is none."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.partition("\n")[0].strip()
