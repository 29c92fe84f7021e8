# SPDX-License-Identifier: Apache-2.0
"""Tables out of the figures."""

from pathlib import Path
from statistics import fmean, median

from benchmarks.figures import markdown, replace

# Which arm the others are divided by, and what the ratio is called.
BASES = {
    "repeats": ("cold", "of the time without a cache"),
    "whole_blocks": ("cold", "of the time without a cache"),
    "short_prompts": ("cold", "of the time without a cache"),
    "colds": ("none", "of the time without a connector"),
    "decodes": ("none", "of the time without a connector"),
    "beside_restores": ("none", "of the time with hits in vLLM's own cache"),
    "mixed": ("none", "of the time without a connector"),
    "slow_lookups": ("fast", "of the time with a Redis that answers at once"),
}
# Questions that engines answer; the answers in one file are of one model.
NEED_MODEL = (*BASES, "throttled", "bytes")
EARLIER = "**an earlier model: Qwen3-Next in bfloat16**"
MISSING = "Not measured yet with the model of the other tables."

# (question, arms, what is wanted of their medians over the base's; a time to be below).
GOALS: tuple[tuple[str, str, tuple[str, ...], str, float], ...] = (
    ("first token of a repeat, times as fast as cold", "repeats", ("ram",), "cold", 35),
    ("first token of a repeat, times as fast as cold", "repeats", ("disk", "redis"), "cold", 34),
    ("the same over vLLM's own hit", "repeats", ("ram",), "vllm", 1.05),
    ("the same over vLLM's own hit", "repeats", ("disk", "redis"), "vllm", 1.10),
    ("with the last block to compute, over vLLM's own", "whole_blocks", ("ram",), "vllm", 1.05),
    (
        "with the last block to compute, over vLLM's own",
        "whole_blocks",
        ("disk", "redis"),
        "vllm",
        1.10,
    ),
    ("restore bandwidth over a plain read", "restore", ("ram", "disk"), "plain", 0.70),
    ("restore bandwidth over a plain read", "restore", ("disk, not cached",), "plain", 0.90),
    ("restore bandwidth over a plain read", "restore", ("redis",), "plain", 0.80),
    ("save bandwidth over a plain copy", "save", ("disk, full",), "plain", 0.80),
    ("first token of a new prompt", "colds", ("ram", "disk", "redis"), "none", 1.01),
    ("time between tokens, nothing to do", "decodes", ("ram", "disk", "redis"), "none", 1.01),
    ("decoding beside restores", "beside_restores", ("ram", "disk", "redis"), "none", 1.05),
    ("steps beside a Redis that answers after 50 ms", "slow_lookups", ("slow",), "fast", 1.01),
)
MORE_IS_BETTER = {"cold", "plain"}
LOOKUP_MS = {"128000 tokens, 1 ranks": 3.0, "128000 tokens, 4 ranks": 5.0}


def _goals(answers: dict) -> str:
    rows = []
    for what, question, arms, base, goal in GOALS:
        if question not in answers:
            continue
        seconds = answers[question]["seconds"]
        for arm in (arm for arm in arms if arm in seconds):
            if base == "plain":
                ratio = median(seconds[arm]["plain"]) / median(seconds[arm][question])
            elif base == "cold":
                ratio = median(seconds[base]) / median(seconds[arm])
            else:
                ratio = median(seconds[arm]) / median(seconds[base])
            more = base in MORE_IS_BETTER
            reached = ratio >= goal if more else ratio <= goal
            wanted = f"{'at least' if more else 'at most'} {goal:g}"
            plain = seconds.get(f"plain {arm}") if base == "vllm" else None
            bound = f"{median(plain) / median(seconds[base]):.3g}" if plain else ""
            told = [f"{what}: {arm}", wanted, f"{ratio:.3g}", "yes" if reached else "**no**"]
            rows.append([*told, bound])
    if "lookup" in answers:
        for arm, goal in LOOKUP_MS.items():
            ms = median(answers["lookup"]["transport"][arm]["all"]) * 1e3
            reached = "yes" if ms <= goal else "**no**"
            rows.append([f"lookup, ms: {arm}", f"at most {goal:g}", f"{ms:.3g}", reached, ""])
    return markdown(["", "goal", "measured", "reached", "with a plain read"], rows)


def _limit(answers: dict) -> str:
    """What the store itself needs for one hit of ``repeats``, without us."""
    size, restore = answers["bytes"]["loaded_bytes"], answers["restore"]
    needs = ", ".join(
        f"{arm} {size / restore['bytes'] * median(seconds['plain']) * 1e3:.1f} ms"
        for arm, seconds in restore["seconds"].items()
    )
    return (
        f"A hit loads {size / 1e6:.1f} MB. At the rates of plain reads below that takes: {needs}."
    )


def keep(answers: dict, name: str, answer: dict) -> None:
    """Put an answer among ``answers``, without those of engines with another model."""
    if "model" in answer:
        others = [n for n in NEED_MODEL if answers.get(n, {}).get("model") != answer["model"]]
        for other in others:
            answers.pop(other, None)
    answers[name] = answer


def fill(page: Path, figures: dict) -> None:
    """Put a table for every question into ``page``."""
    answers = figures["answers"]
    replace(page, "plot", _plot(answers["repeats"]) if "repeats" in answers else MISSING)
    replace(page, "gain", _gain(answers) if "repeats" in answers else MISSING)
    replace(page, "limit", _limit(answers) if {"bytes", "restore"} <= answers.keys() else "")
    for name in [*NEED_MODEL, *(name for name in answers if name not in NEED_MODEL)]:
        if name not in answers:
            replace(page, name, MISSING)
            continue
        table = _TABLES.get(name, _ratios)(name, answers[name])
        replace(page, name, f"{table}\n\n{_made(name, answers[name], figures)}")


def fill_goals(page: Path, figures: dict) -> None:
    """Put the table of goals into the developers' ``page``."""
    replace(page, "goals", _goals(figures["answers"]))


def _made(name: str, answer: dict, figures: dict) -> str:
    """The command behind a table, its day, its machine, and the model where there is one."""
    what = "means" if name == "throttled" else "medians"
    day, machine = (answer.get(key) or figures[key] for key in ("date", "machine"))
    parts = [f"`{answer['command']}`, {what} of {answer['rounds']}", day, machine]
    if name in NEED_MODEL:
        parts.append(named(answer.get("model")))
    return "; ".join(parts) + "."


def named(model: dict | None) -> str:
    """A model's record in words; None is of figures that were made before there were any."""
    if model is None:
        return EARLIER
    return (
        f"{model['family']} of {model['layers']} layers, {model['parameters'] / 1e6:.0f} million "
        f"parameters, {model['dtype']}, N = {model['block_size']}"
    )


def _plot(answer: dict) -> str:
    """The picture with its words."""
    seconds = {arm: median(values) for arm, values in answer["seconds"].items()}
    hits = [seconds[arm] for arm in ("ram", "disk", "redis")]
    over = [f"{hit / seconds['vllm']:.2f}" for hit in (min(hits), max(hits))]
    return (
        f"![The first token of a prompt asked before comes after {seconds['cold']:.1f} s if all is "
        f"computed, and after {min(hits):.2f} to {max(hits):.2f} s on a hit in LMCache's RAM, on "
        f"disk or in Redis; the limit is a hit in vLLM's own cache, {seconds['vllm']:.2f} s]"
        f"(generated/performance.svg)\n\n"
        f"*A hit in a store answers {seconds['cold'] / max(hits):.0f} to "
        f"{seconds['cold'] / min(hits):.0f} times as fast as no hit. It takes {over[0]} to "
        f"{over[1]} times as long as a hit in vLLM's own cache, which is the limit.*"
    )


def _gain(answers: dict) -> str:
    """What a user gains and what it costs, in sentences."""
    seconds = {arm: median(values) for arm, values in answers["repeats"]["seconds"].items()}
    hits = [seconds[arm] for arm in ("ram", "disk", "redis")]
    told = [
        f"**A prompt asked before is answered {seconds['cold'] / max(hits):.0f} to "
        f"{seconds['cold'] / min(hits):.0f} times as fast as without a cache**: its first token "
        f"comes after {min(hits):.2f} to {max(hits):.2f} s instead of {seconds['cold']:.1f} s. "
        f"A hit in vLLM's own cache, which is the limit, takes {seconds['vllm']:.2f} s."
    ]
    for question, what in (
        ("colds", "A new prompt's first token takes"),
        ("decodes", "A token of a running answer, with nothing to load or store, takes"),
        ("beside_restores", "Beside loads for other requests, an answer takes"),
    ):
        if question in answers:
            times = answers[question]["seconds"]
            ratios = [
                median(times[arm]) / median(times["none"]) for arm in ("ram", "disk", "redis")
            ]
            told.append(f"{what} {min(ratios):.2f} to {max(ratios):.2f} times as long.")
    told.append(f"Measured on a CPU ({answers['repeats']['machine']}), on no GPU.")
    return " ".join(told)


def _spread(values: list[float], scale: float = 1e3) -> str:
    return f"{min(values) * scale:.4g} to {max(values) * scale:.4g}"


def _ratios(name: str, answer: dict) -> str:
    base, what = BASES[name]
    seconds = answer["seconds"]
    by = median(seconds[base])
    head = ["", "ms", "lowest to highest", what]
    repeated = "vllm" in seconds
    if repeated:
        head += ["times as fast as cold", "of vLLM's own hit"]
    rows = []
    for arm, values in seconds.items():
        row = [arm, f"{median(values) * 1e3:.4g}", _spread(values), f"{median(values) / by:.3f}"]
        if repeated:
            row += [f"{by / median(values):.1f}", f"{median(values) / median(seconds['vllm']):.3f}"]
        rows.append(row)
    return markdown(head, rows)


def _short_prompts(name: str, answer: dict) -> str:
    table = _ratios(name, answer)
    if "hit" not in answer:  # of an earlier version
        return table
    return (
        f"{answer['tokens']} tokens with `--prefix-match-unit {answer['unit']}`: they hit at "
        f"{answer['hit']}.\n\n{table}"
    )


def _restore(name: str, answer: dict) -> str:
    rows = []
    for backend, seconds in answer["seconds"].items():
        ours, plain = median(seconds[name]), median(seconds["plain"])
        rows.append(
            [
                backend,
                f"{answer['bytes'] / ours / 1e9:.2f}",
                f"{answer['bytes'] / plain / 1e9:.2f}",
                f"{100 * plain / ours:.0f} %",
                _spread([p / o * 0.1 for p, o in zip(seconds["plain"], seconds[name])]) + " %",
            ]
        )
    what = "plain read" if name == "restore" else "plain copy"
    head = ["", f"{name} GB/s", f"{what} GB/s", "share", "lowest to highest"]
    size = f"{answer['tokens']:,} tokens of {answer['shape']}, {answer['bytes'] / 1e6:,.0f} MB.\n\n"
    table = size + markdown(head, rows)
    for backend, seconds in answer["seconds"].items():
        if "plain_writes" in seconds:
            limit = answer["bytes"] / median(seconds["plain_writes"]) / 1e9
            table += (
                f"\n\n{backend}: a plain copy whose pieces are written to files meanwhile, each in "
                f"place of an older one, reaches {limit:.2f} GB/s."
            )
    return table


def _throttled(name: str, answer: dict) -> str:
    rows = []
    for speed, found in answer["seconds"].items():
        seconds = found["seconds"]
        computed = fmean(seconds["none"])
        rows.append(
            [
                speed,
                f"{computed * 1e3:.4g}",
                *(f"{fmean(seconds[arm]) / computed:.2f}" for arm in ("always", "faster")),
                f"{max(seconds['faster']) / computed:.2f}",
                f"{found['hits']} of {len(seconds['faster'])}",
            ]
        )
    head = ["link", "computed, ms", "`always`", "`faster`", "its slowest", "of these loaded"]
    return markdown(head, rows)


def _memory(name: str, answer: dict) -> str:
    rows = [
        [backend, *(f"{median(grown[when]) / 1e6:.1f}" for when in ("peak", "after"))]
        for backend, grown in answer["grown"].items()
    ]
    size = f"A restore of {answer['bytes'] / 1e6:,.0f} MB.\n\n"
    return size + markdown(["", "MB more at the peak", "MB more after it"], rows)


def _profile(name: str, answer: dict) -> str:
    rows = []
    for backend, halves in answer["seconds"].items():
        for half, parts in halves.items():
            rows.append([f"**{backend}, {half}**", f"**{parts['wall'] * 1e3:.1f}**"])
            rows += [[k, f"{v * 1e3:.1f}"] for k, v in parts.items() if k != "wall" and v > 5e-5]
    return "Milliseconds; bold: on the clock, else added up over threads.\n\n" + markdown(
        ["", "ms"], rows
    )


def _lookup(name: str, answer: dict) -> str:
    rows = [
        [
            arm,
            str(found["blocks"]),
            f"{found['round_trips']:.0f}",
            f"{median(found['one_rank']) * 1e3:.2f}",
            f"{median(found['all']) * 1e3:.2f}",
        ]
        for arm, found in answer["transport"].items()
    ]
    return markdown(["", "blocks", "round trips", "one rank, ms", "all, with transport, ms"], rows)


def _bytes(name: str, answer: dict) -> str:
    rows = [
        [key.replace("_", " "), f"{value:,}"]
        for key, value in answer.items()
        if isinstance(value, int) and key != "rounds"
    ]
    return markdown(["", ""], rows)


_TABLES = {
    "restore": _restore,
    "save": _restore,
    "memory": _memory,
    "profile": _profile,
    "lookup": _lookup,
    "bytes": _bytes,
    "short_prompts": _short_prompts,
    "throttled": _throttled,
}
