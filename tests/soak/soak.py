# SPDX-License-Identifier: Apache-2.0
"""A long run: a real engine under a mixed stream while its stores break.

    python -m tests.soak.soak --minutes 30 --out soak.json

Every answer is compared with that of a vLLM without a connector. See ``make soak``.
"""

import json
import tempfile
import time
import traceback
from pathlib import Path
from typing import Annotated

import typer

from lmcache_hybrid.tools.tiny_models import make_model
from tests.soak import reference
from tests.soak.reference import MODES, Reference, header
from tests.soak.stream import Failed, Soak

PHASES = (
    ("ram", "granular"),
    ("disk", "default"),
    ("redis", "granular"),
    ("ram", "default"),
    ("ram+disk", "granular"),
    ("redis", "default"),
)
# How long an engine without a connector is watched: as long as most lives take.
SHARE_OF_A_PHASE = 0.6
# Hits that a run of 30 minutes must have compared.
HITS_IN_30_MINUTES = 1000


def run(soak: Soak, phases: list[tuple[str, str]], minutes: float) -> str | None:
    """All phases, as long each; the reason why the soak failed, None where it did not."""
    try:
        for number, (kind, mode) in enumerate(phases):
            soak.phase(number, kind, mode, minutes * 60 / len(phases))
    except Failed as error:
        return str(error)
    except Exception:
        return traceback.format_exc()
    if soak.grown:
        return f"memory grew: {soak.grown}"
    needed = int(HITS_IN_30_MINUTES * minutes / 30)
    if soak.counts["compared: hit"] < needed:
        return f"only {soak.counts['compared: hit']} of {needed} hits were compared"
    return None


def describe(known: Reference) -> dict:
    return {
        "family": known.mode.family,
        "prompts": len(known.prompts),
        "boundaries_equal_to_cold": known.boundaries,
        "noise_of_batches": known.noise,
        "memory": known.memory,
    }


def main(
    minutes: Annotated[float, typer.Option(help="Length of the stream, engine starts included.")],
    seed: Annotated[int, typer.Option(help="Of prompts, stream and faults.")] = 0,
    only: Annotated[
        list[str] | None, typer.Option(help="A phase, as ram/default; again for more.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the figures go.")] = Path("soak.json"),
) -> None:
    """Stream prompts through engines whose stores break, and compare every answer.

    First an engine without a connector gives the right answers (10 more minutes). Then RAM,
    local_disk and Redis take turns. Ends with 1 at the first wrong answer, dead engine,
    leftover pin or claim, or growing memory, and says what had been done until then.
    """
    phases = [phase for phase in PHASES if not only or "/".join(phase) in only]
    if not phases:
        raise typer.BadParameter(f"choose from {', '.join(map('/'.join, PHASES))}")
    started = time.monotonic()
    figures = {
        **header("soak"),
        "minutes": minutes,
        "seed": seed,
    }
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        models = {name: make_model(m.family, Path(folder, m.family)) for name, m in MODES.items()}
        count = 30 if minutes >= 10 else 15
        references = {}
        for mode in sorted({mode for _, mode in phases}):
            typer.echo(f"Asking a vLLM without a connector ({mode}).")
            seconds = minutes * 60 / len(phases) * SHARE_OF_A_PHASE
            references[mode] = reference.record(models[mode], mode, count, seed, seconds)
        soak = Soak(models, Path(folder), seed, references)
        failure = run(soak, phases, minutes)
    figures |= {
        "reference": {mode: describe(known) for mode, known in references.items()},
        "wall_minutes": round((time.monotonic() - started) / 60, 1),
        "wrong_answers": soak.counts["wrong answers"],
        "counts": dict(sorted(soak.counts.items())),
        "largest_difference_in_bursts": soak.worst_in_bursts,
        "faults": {"total": soak.injected.total(), **dict(sorted(soak.injected.items()))},
        "phases": soak.phases,
        "failure": failure,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(figures, indent=1) + "\n")
    if failure is not None:
        typer.echo("\n".join(soak.history))
        out.with_suffix(".log").write_text(soak.last_log)
        typer.echo(f"FAILED in {soak.where}, seed {seed}: {failure}")
        raise typer.Exit(1)
    typer.echo(json.dumps({k: figures[k] for k in ("counts", "faults", "wrong_answers")}, indent=1))


if __name__ == "__main__":
    typer.run(main)
