# SPDX-License-Identifier: Apache-2.0
"""Formats the result: one screen, and the JSON to send.

The JSON has versions, hardware, sizes, times and differences. It has no path, no name of a host,
user or model, no flag as typed, and only digests of prompts.
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from lmcache_hybrid.core.sizes import size_text
from lmcache_hybrid.tools.accept.compare import BAD, GOOD, Check, Outcome, Verdict
from lmcache_hybrid.tools.accept.result import Result
from lmcache_hybrid.tools.accept.run import SAVING

FORMAT = 1
COLOURS = {Verdict.PASS: "bold green", Verdict.FAIL: "bold red", Verdict.UNDECIDED: "bold yellow"}
# The worst first.
SEVERITY = (*BAD, Outcome.ONCE, Outcome.UNCOMPARED, *GOOD)
SHOWN_TIMES = 4
# Failures other than wrong answers.
KINDS = {Outcome.MISSED: "missed hits", Outcome.BOUNDARY: "hits at other boundaries"}


def as_json(result: Result) -> dict[str, Any]:
    """Return all measurements, as plain JSON without infinities."""
    noise = result.noise
    report = {
        "format": FORMAT,
        "verdict": result.verdict.value,
        "problems": result.all_problems,
        "doubts": result.doubts,
        "facts": result.facts,
        "limits": asdict(result.limits),
        "left_out": result.plan.left_out,
        "drafts": result.drafts and asdict(result.drafts),
        "noise": {**asdict(noise), "allowed": noise.allowed, "decidable": noise.decidable},
        "checks": [{**asdict(each), "outcome": noise.judge(each).value} for each in result.checks],
        "prompts": [
            {
                "case": told.case.name,
                "tokens": list(map(len, told.prompts)),
                "digests": [_digest(prompt) for prompt in told.prompts],
                "own_hits": [answer.cached for answer in told.own],
            }
            for told in result.told
        ],
        "first_token_seconds": result.first_token,
        "metrics": result.metrics,
        "copies": result.copies,
        "seconds": {name: round(value, 3) for name, value in result.seconds.items()},
    }
    return _finite(report)


def _finite(value: Any) -> Any:
    """Replace infinities, which JSON lacks, with None."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return list(map(_finite, value))
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _digest(prompt: tuple[int, ...]) -> str:
    return hashlib.blake2b(repr(prompt).encode(), digest_size=8).hexdigest()


def print_verdict(console: Console, result: Result) -> None:
    """Print one screen: at most 40 lines of 100 columns."""
    parts: list[Any] = [*_heading(result), Text()]
    if result.checks:
        parts += [Text("Restored, against vLLM's own hit at the same boundary", "bold")]
        parts += [_compared(result), *_noise(result), Text()]
        parts += [Text("First token, ms (the best of a few)", "bold"), _times(result)]
        parts += _rates(result)
    parts += _left_out(result)
    parts += [Text(f"! {problem}", "bold red") for problem in result.all_problems]
    parts.append(_last_line(result))
    console.print(Group(*parts), highlight=False)


def _heading(result: Result) -> Iterator[Text]:
    facts, versions = result.facts, result.facts["versions"]
    ranks = f", {facts['ranks']} ranks" if facts["ranks"] > 1 else ""
    unit = f", U = {facts['unit']}" if facts["unit"] else ""
    yield Text(
        f"{facts['architecture']}, {facts['dtype']}, N = {facts['block_size']} tokens{unit}{ranks}"
    )
    device = facts["device"] + (f" (CUDA {facts['cuda']})" if facts["cuda"] else "")
    yield Text(
        f"{device}, {facts['runner']} model runner, "
        f"attention {', '.join(facts['attention_backends'])}, "
        f"{'eager' if facts['enforce_eager'] else 'compiled'}"
    )
    layout = " | ".join(facts["layout"]["attention"])
    yield Text(f"Attention block: {layout}", no_wrap=True, overflow="ellipsis")
    yield Text(", ".join(f"{name} {version}" for name, version in versions.items()))
    if facts["device_type"] == "cpu":
        yield Text("No GPU was used: this verdict is about vLLM's CPU build.", "yellow")


def _compared(result: Result) -> Table:
    table = _table()
    columns = list(dict.fromkeys(map(_column, result.checks)))
    for name in ("tokens", "hit", *columns):
        table.add_column(name, justify="right")
    rows: dict[str, list[Check]] = {}
    for each in result.checks:
        how = each.where.partition(", ")[2]
        name = f"{each.case}, {how}" if how else each.case
        # One row for the first prompts of all cases.
        rows.setdefault(f"new, {how}" if how == SAVING else name, []).append(each)
    for name, checks in rows.items():
        longest = max(checks, key=lambda check: (check.tokens, check.boundary))
        cells = [_cell(result, [c for c in checks if _column(c) == column]) for column in columns]
        table.add_row(name, f"{longest.tokens:,}", f"{longest.boundary:,}", *cells)
    return table


def _column(check: Check) -> str:
    return check.where.partition(",")[0]


def _cell(result: Result, checks: list[Check]) -> Text:
    """Show the worst outcome of some comparisons, with its difference."""
    if not checks:
        return Text("")
    judge = result.noise.judge
    outcome = min(map(judge, checks), key=SEVERITY.index)
    if outcome is Outcome.EQUAL:
        return Text("equal", "green")
    worst = max(each.difference for each in checks if judge(each) is outcome)
    said = f" by {worst:.3g}" if outcome in (Outcome.DIFFERS, Outcome.NOISE) else ""
    return Text(outcome.value + said, "bold red" if outcome in BAD else "yellow")


def _noise(result: Result) -> Iterator[Text]:
    noise = result.noise
    yield Text(
        f"Log-probabilities of vLLM's own answers differ by {noise.own:.3g} from one time to the "
        f"next" + (f", by {noise.restart:.3g} over a restart" if result.restart_pairs else "") + "."
    )
    yield Text(
        f"A lost block changes them by {noise.least:.3g} or more, another prefix by "
        f"{noise.wrong:.3g} or more."
    )
    if result.drafts is not None:
        yield Text(f"{result.drafts.text}.")
    for doubt in result.doubts:
        yield Text(doubt, "bold yellow")


def _times(result: Result) -> Table:
    """Make the table of the shortest and longest prompts that were asked twice."""
    table = _table()
    names = [name for name in result.first_token if result.first_token[name].get("own")]
    length = {told.case.name: len(told.prompts[-1]) for told in result.told}
    hits = {told.case.name: told.own[-1].cached for told in result.told}
    names = sorted((name for name in names if hits[name]), key=length.__getitem__)
    places = list(dict.fromkeys(place for name in names for place in result.first_token[name]))
    for place in ("tokens", *places):
        table.add_column("vLLM's own hit" if place == "own" else place, justify="right")
    for name in names[: SHOWN_TIMES - 1] + names[SHOWN_TIMES - 1 :][-1:]:
        times = result.first_token[name]
        cells = [f"{1e3 * min(times[place]):.1f}" if times.get(place) else "" for place in places]
        table.add_row(name, f"{length[name]:,}", *cells)
    return table


def rates(result: Result) -> dict[str, float]:
    """Return GB/s of rank 0; ``to_host`` and ``to_device`` are one large copy of the same bytes.

    ``load TIER`` is the rate that requests saw: reading, checking and copying.
    """
    found: dict[str, float] = {}
    for where, counts in result.metrics.items():
        if counts.get("load_seconds_sum"):
            found[f"load {where}"] = counts["loaded_bytes"] / counts["load_seconds_sum"] / 1e9
    copies = result.copies[0] if result.copies else {}
    for name in ("gather", "scatter", "to_host", "to_device"):
        if copies.get(name):
            found[name] = copies["bytes"] / copies[name] / 1e9
    return found


def _rates(result: Result) -> Iterator[Text]:
    found = rates(result)
    on_device = "gather" in found and result.facts["device_type"] != "cpu"
    if "to_device" in found:
        for title, ours, plain in (("Load", "scatter", "to_device"), ("Save", "gather", "to_host")):
            yield Text(
                f"{title}: copies {found[ours]:.2f} GB/s, {found[ours] / found[plain]:.0%} of one "
                f"plain copy ({found[plain]:.2f} GB/s)"
            )
        for name, rate in found.items():
            if name.startswith("load "):
                share = rate / found["to_device"]
                yield Text(
                    f"A request's load from {name[5:]}: {rate:.2f} GB/s ({share:.0%}), "
                    "with reading and checking"
                )
    saving = next(iter(result.metrics.values()), {})
    if saving.get("save_seconds_count"):
        mean = 1e3 * saving["save_seconds_sum"] / saving["save_seconds_count"]
        size = saving["saved_bytes"] / saving["save_seconds_count"]
        there = f", and the device for {size / found['gather'] / 1e6:.2f} ms" if on_device else ""
        yield Text(
            f"A save of {size_text(size)}, the average, holds up its step for {mean:.2f} ms{there}."
        )
    if on_device and not result.copies[0]["pinned"]:
        yield Text("LMCache's pool is not pinned memory, so copies are slow.", "yellow")


def _left_out(result: Result) -> Iterator[Text]:
    names = ", ".join(result.plan.left_out)
    if names:
        yield Text(
            f"Not asked, too long for context, KV cache or LMCache's pool: {names}", "yellow"
        )


def _last_line(result: Result) -> Text:
    verdict = result.verdict
    outcomes = list(map(result.noise.judge, result.checks))
    compared = [outcome for outcome in outcomes if outcome is not Outcome.UNCOMPARED]
    good = sum(outcome in GOOD for outcome in outcomes)
    text = f"{_title(result, set(outcomes))}: "
    if not outcomes:
        text += "nothing was compared"
    else:
        text += f"{good} of {len(compared)} answers are those of vLLM's own cache"
    if outcomes and good == len(compared):
        exact = set(compared) <= {Outcome.EQUAL}
        text += ", to the last bit" if exact else ", within its own noise"
    bad = dict.fromkeys(
        f"{each.case} ({each.where})"
        for each, outcome in zip(result.checks, outcomes, strict=True)
        if outcome in BAD
    )
    if bad:
        named = ", ".join(list(bad)[:6]) + (f" and {len(bad) - 6} more" if len(bad) > 6 else "")
        text += f"; not {named}"
    if len(compared) < len(outcomes):
        text += f"; {len(outcomes) - len(compared)} not compared"
    if result.plan.left_out:
        text += f"; {len(result.plan.left_out)} prompts not asked"
    seconds = sum(result.seconds.get(part, 0.0) for part in ("first engine", "second engine"))
    return Text(f"{text}. {seconds:.0f} s.", COLOURS[verdict])


def _title(result: Result, outcomes: set[Outcome]) -> str:
    """Return the verdict and the kind of failure: a wrong answer is worse than a miss."""
    if result.verdict is not Verdict.FAIL:
        return result.verdict.value
    kinds = []
    if Outcome.DIFFERS in outcomes:
        kinds.append("wrong answers")
    elif result.checks:
        kinds.append("no wrong answer")
    kinds += [text for outcome, text in KINDS.items() if outcome in outcomes]
    kinds += ["a problem above"] if result.all_problems else []
    return f"FAIL, {', '.join(kinds)}"


def _table() -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("prompt", no_wrap=True)
    return table
