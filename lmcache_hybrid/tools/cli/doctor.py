# SPDX-License-Identifier: Apache-2.0
"""``lmcache-hybrid doctor``: finds in one run problems that would otherwise take a restart each."""

import contextlib
import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Generator, Sequence
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lmcache_hybrid.storage.key_names import printable
from lmcache_hybrid.tools.cli.terminal import ConfigFile, VllmFlags, check_model
from lmcache_hybrid.tools.doctor.finding import Finding, Status, error
from lmcache_hybrid.tools.subprocesses import kill_group, send, start_module

CHECKS = "lmcache_hybrid.tools.doctor"
# Max seconds for all checks: vLLM loads within a minute, only a hang takes longer.
SECONDS = 600
# Seconds that stopped checks have to delete their test record.
GRACE_SECONDS = 60
COLOURS = {
    Status.OK: "green",
    Status.WARNING: "yellow",
    Status.ERROR: "red",
    Status.SKIPPED: "dim",
}


def doctor(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Name or folder; no weights are read.")
    ] = None,
    vllm_flags: VllmFlags = None,
    lmcache_config: ConfigFile = None,
    kv_transfer_config: Annotated[
        str | None,
        typer.Option("--kv-transfer-config", help="As for vllm serve, in JSON."),
    ] = None,
    prefix_match_unit: Annotated[
        int, typer.Option("--prefix-match-unit", help="As for vllm serve; 0: not set.", min=0)
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")] = False,
) -> None:
    """Check installation, settings, stores and a model, each finding with its fix.

    Run it in the engine's environment. Exit code 0 when nothing is wrong
    (warnings included), 1 for errors, 2 for wrong arguments.
    """
    if model is not None:
        check_model(model)
    flags = [*(vllm_flags or ())]
    if kv_transfer_config is not None:
        flags += ["--kv-transfer-config", kv_transfer_config]
    if prefix_match_unit:
        flags += ["--prefix-match-unit", str(prefix_match_unit)]
    if lmcache_config is not None:
        os.environ["LMCACHE_CONFIG_FILE"] = str(lmcache_config)
    found = []
    with (
        Console(stderr=True).status("Loading vLLM and LMCache") as status,
        contextlib.closing(diagnose(model, flags)) as findings,
    ):
        for finding in findings:
            found.append(finding)
            status.update(f"Checked: {finding.check}")
    if as_json:
        print(json.dumps([asdict(finding) for finding in found], indent=1))
    else:
        _print(found)
    raise typer.Exit(1 if any(finding.status == Status.ERROR for finding in found) else 0)


def diagnose(model: str | None, flags: Sequence[str] = ()) -> Generator[Finding, None, None]:
    """Run the checks in a process of their own, see :mod:`lmcache_hybrid.tools.doctor.__main__`.

    Closed early, it stops them and waits until they have cleaned up.
    """
    environment = {"LMCACHE_TRACK_USAGE": "false", **os.environ}
    with tempfile.TemporaryFile("w+") as log:
        process, lines = start_module(CHECKS, log, environment)
        watchdog = threading.Timer(SECONDS, _stop, (process,))
        watchdog.start()
        try:
            send(process, {"model": model, "flags": flags})
            with lines:
                for line in lines:
                    fields = json.loads(line)
                    yield Finding(**fields | {"status": Status(fields["status"])})
            code = process.wait()
        finally:
            watchdog.cancel()
            _stop(process)
        if code != 0:
            log.seek(0)
            last = " ".join(log.read().split()[-40:])
            yield error("doctor", f"The checks ended with exit code {code}: ... {last}")


def _stop(process: subprocess.Popen) -> None:
    """Let the checks clean up, then end them and their children."""
    try:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
    finally:  # a second Ctrl-C
        kill_group(process)


def _print(found: list[Finding]) -> None:
    table = Table(show_lines=False, box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("check", no_wrap=True)
    table.add_column("finding", overflow="fold")
    for finding in found:
        # They quote what servers and libraries said.
        text = Text(printable(finding.message))
        if finding.fix:
            text.append(
                f"\n{printable(finding.fix)}", "bold" if finding.status == Status.ERROR else ""
            )
        table.add_row(Text(finding.status.value, COLOURS[finding.status]), finding.check, text)
    console = Console()
    console.print(table)
    errors, warnings, skipped = (
        sum(f.status == status for f in found)
        for status in (Status.ERROR, Status.WARNING, Status.SKIPPED)
    )
    console.print(
        f"{errors} error{'s' * (errors != 1)}, {warnings} warning{'s' * (warnings != 1)}, "
        f"{skipped} skipped."
    )
