# SPDX-License-Identifier: Apache-2.0
"""``lmcache-hybrid bench``: what LMCache gains on this machine, with the user's own model."""

import json
import os
import secrets
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lmcache_hybrid.tools.cli.terminal import (
    ModelArgument,
    VllmFlags,
    check_model,
    check_out,
    need_host,
    progress,
    write_out,
)

EXIT_FAILED, EXIT_NOT_WRITTEN = 1, 3
BINDING = "VLLM_CPU_OMP_THREADS_BIND"
OTHER_CORES = (
    "On a CPU, vLLM computes on other cores beside a connector than without one: to compare both "
    f"on the same, set {BINDING} to cores, such as 0-7."
)
# Default stores of servers with LMCache: RAM, and a disk that survives the restart.
POOL_GB, DISK_GB = 4.0, 16.0


def bench(
    model: ModelArgument,
    vllm_flags: VllmFlags = None,
    lmcache_config: Annotated[
        Path | None,
        typer.Option(
            "--lmcache-config",
            help="LMCache's YAML; by default LMCACHE_CONFIG_FILE, else RAM and a temporary folder.",
        ),
    ] = None,
    documents: Annotated[int, typer.Option(min=1, help="Documents in a round.")] = 8,
    tokens: Annotated[
        int, typer.Option(min=0, help="Tokens of a prompt; 0: half of max_model_len, at most 8192.")
    ] = 0,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 32,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight at most.")] = 4,
    out: Annotated[Path | None, typer.Option(help="Write all figures to this JSON file.")] = None,
) -> None:
    """Measure what LMCache gains on this machine.

    Starts vllm serve MODEL without and with LMCache, and asks both the same
    prompts through vLLM's own client: new documents, the same again, other
    questions to them, conversations, and all after a restart. Between rounds
    vLLM's own cache is emptied, as other prompts do that need its room.
    It takes three starts of the server, and 5 to 15 minutes for the prompts.

    Exit code 0: measured, 1: a server or a request failed, 3: measured, but
    --out could not be written.
    """
    check_model(model)
    if lmcache_config is not None and not lmcache_config.exists():
        raise typer.BadParameter(f"--lmcache-config {str(lmcache_config)!r} does not exist")
    check_out(out)
    _check_flags(vllm_flags or [])
    need_host(EXIT_FAILED)
    from lmcache_hybrid.tools.accept.engine import reason_in
    from lmcache_hybrid.tools.bench.report import as_json, print_table
    from lmcache_hybrid.tools.bench.run import Load, measure
    from lmcache_hybrid.tools.bench.server import ServerError

    load = Load(documents, tokens, output_tokens, concurrency, seed=secrets.randbits(32))
    errors = Console(stderr=True, highlight=False)
    handle, name = tempfile.mkstemp(prefix="lmcache-hybrid-bench-", suffix=".log")
    os.close(handle)
    log = Path(name)
    with tempfile.TemporaryDirectory(prefix="lmcache-hybrid-bench-") as folder:
        named = lmcache_config or os.environ.get("LMCACHE_CONFIG_FILE")
        environment = {"LMCACHE_CONFIG_FILE": str(named or _written(Path(folder)))}
        try:
            with progress(errors) as say:
                found = list(measure(model, vllm_flags or [], load, environment, log, say))
        except (ServerError, KeyboardInterrupt) as error:
            if isinstance(error, ServerError) and (
                why := reason_in(log.read_text(errors="replace"))
            ):
                errors.print(why, style="red", soft_wrap=True, markup=False)
            errors.print(f"{error or 'Stopped'}. The log is {log}.", soft_wrap=True, markup=False)
            raise typer.Exit(EXIT_FAILED) from None
    print_table(Console(highlight=False), found)
    if BINDING not in os.environ and _on_cpu():
        errors.print(OTHER_CORES, soft_wrap=True)
    log.unlink()
    if out is not None and not write_out(out, as_json(model, vllm_flags or [], load, found)):
        raise typer.Exit(EXIT_NOT_WRITTEN)


def _check_flags(flags: list[str]) -> None:
    """Raise BadParameter for flags with which the two servers cannot be compared, or asked."""
    for flag in flags:
        name = flag.partition("=")[0].replace("_", "-")
        if name.startswith("--kv-transfer-config."):
            raise typer.BadParameter(f"{flag}: write --kv-transfer-config and its JSON instead")
        if name == "--config":
            raise typer.BadParameter(f"{flag}: write its flags instead, so that they can be told")
        if name in ("--api-key", "--middleware") or name.startswith("--ssl-"):
            raise typer.BadParameter(f"{flag}: leave it out, the servers listen on loopback alone")
        if name in ("--uds", "--grpc"):
            raise typer.BadParameter(f"{flag}: leave it out, the servers are asked over HTTP")


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


def _written(folder: Path) -> Path:
    """Write an LMCache YAML with RAM and a disk in ``folder``; JSON is YAML."""
    file = folder / "lmcache.yaml"
    disk = {"local_disk": str(folder / "records"), "max_local_disk_size": DISK_GB}
    file.write_text(json.dumps({"max_local_cpu_size": POOL_GB, **disk}))
    return file
