# SPDX-License-Identifier: Apache-2.0
"""Tables of the figures; all of them come from the JSON file."""

from benchmarks.figures import markdown

# Stores: with room for everything, for a third, and of an engine that is restarted.
UNLIMITED, THIRD, RESTARTED = "unlimited", "a third", "restarted"


def tables(figures: dict) -> str:
    """Markdown: shares by arm and trace, then each arm's cost, then the labels."""
    tables = _traces, _shares, _restarted, _finest, _costs, _bytes, _labels
    return "\n\n".join(table(figures) for table in tables)


def checkpoints(figures: dict) -> str:
    """Markdown: what a state at each chunk's end, none and each T cost a prefill."""
    head = ["T", "Time of a cold prefill", "Steps", "States", "MB stored"]
    rows = [
        [
            _interval(row["interval"]),
            f"{row['time_ratio']:.2f}x",
            str(row["steps"]),
            str(row["states"]),
            f"{row['bytes'] / 1e6:.1f}",
        ]
        for row in figures["rows"]
    ]
    return markdown(head, rows)


def _interval(blocks: int | str) -> str:
    if isinstance(blocks, str):
        return "chunk ends"
    return f"{blocks} N" if blocks else "none"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


def _scenarios(figures: dict) -> list[tuple[str, str]]:
    """Trace and store of each column; restarted engines have a table of their own."""
    all_of_them = ((run["trace"], run["store"]) for run in figures["runs"])
    return [each for each in dict.fromkeys(all_of_them) if each[1] != RESTARTED]


def _scenario(trace: str, store: str) -> str:
    return trace if store == UNLIMITED else f"{trace}, {store}"


def _arms(figures: dict) -> dict[str, str]:
    return {run["arm"]: run["title"] for run in figures["runs"]}


def _run(figures: dict, arm: str, scenario: tuple[str, str]) -> dict | None:
    return next(
        (r for r in figures["runs"] if r["arm"] == arm and (r["trace"], r["store"]) == scenario),
        None,
    )


def _traces(figures: dict) -> str:
    rows = [
        [
            name,
            str(trace["requests"]),
            f"{trace['prompt_tokens'] / 1e6:.2f} M",
            f"{trace['shortest']:,} to {trace['longest']:,}",
            _percent(trace["oracle_tokens"] / trace["prompt_tokens"]),
            _percent(trace["finest_tokens"] / trace["prompt_tokens"]),
        ]
        for name, trace in figures["traces"].items()
    ]
    return markdown(
        [
            "Trace",
            "Requests",
            "Prompt tokens",
            "Tokens per prompt",
            "Reusable at multiples of N (oracle)",
            "of 16",
        ],
        rows,
    )


def _restarted(figures: dict) -> str:
    runs = [run for run in figures["runs"] if run["store"] == RESTARTED]
    traces = list(dict.fromkeys(run["trace"] for run in runs))
    rows = []
    for arm, title in _arms({"runs": runs}).items():
        found = [_run(figures, arm, (trace, RESTARTED)) for trace in traces]
        rows.append([title, *(_percent(run and run["share"]) for run in found)])
    return (
        "The same where vLLM's own cache has room for a tenth of it, and the engine restarts once:"
        "\n\n" + markdown(["", *traces], rows)
    )


def _shares(figures: dict) -> str:
    scenarios = _scenarios(figures)
    rows = []
    for arm, title in _arms(figures).items():
        runs = [_run(figures, arm, scenario) for scenario in scenarios]
        rows.append([title, *(_percent(run and run["share"]) for run in runs)])
    return (
        "Hit tokens, as a share of the oracle's at multiples of N (inside blocks are more):\n\n"
        + markdown(["", *(_scenario(*scenario) for scenario in scenarios)], rows)
    )


def _finest(figures: dict) -> str:
    """What is lost to the size of blocks: all stores unlimited."""
    traces = [scenario for scenario in _scenarios(figures) if scenario[1] == UNLIMITED]
    rows = []
    for arm, title in _arms(figures).items():
        runs = [_run(figures, arm, scenario) for scenario in traces]
        if any(runs):
            rows.append([title, *(_percent(run and run["finest_share"]) for run in runs)])
    return "Hit tokens, as a share of the oracle's at multiples of 16 tokens:\n\n" + markdown(
        ["", *(trace for trace, _ in traces)], rows
    )


def _costs(figures: dict) -> str:
    scenarios = _scenarios(figures)
    rows = []
    for arm, title in _arms(figures).items():
        runs = [_run(figures, arm, scenario) for scenario in scenarios]
        if any(run and "extra_steps_per_request" in run for run in runs):
            rows.append([title, *(_cost(run) for run in runs)])
    return (
        "KB stored per prompt token; prefill steps per request beyond the fewest that "
        f"{figures['batch_tokens']:,} tokens a step allow:\n\n"
        + markdown(["", *(_scenario(*scenario) for scenario in scenarios)], rows)
    )


def _cost(run: dict | None) -> str:
    if run is None or "extra_steps_per_request" not in run:
        return ""
    steps = f"{run['extra_steps_per_request']:.2f}"
    if "bytes_per_prompt_token" not in run:
        return f"-; {steps}"
    return f"{run['bytes_per_prompt_token'] / 1e3:.0f}; {steps}"


def _bytes(figures: dict) -> str:
    """What was written, and what is held at the end."""
    scenarios, rows = _scenarios(figures), []
    for arm, title in _arms(figures).items():
        runs = [_run(figures, arm, scenario) for scenario in scenarios]
        if any(run and run["saved_pages"] for run in runs):
            rows.append([title, *(_written(run, figures["page_bytes"]) for run in runs)])
    return "GB written; GB kept at the end:\n\n" + markdown(
        ["", *(_scenario(*scenario) for scenario in scenarios)], rows
    )


def _written(run: dict | None, page: int) -> str:
    if run is None or not run["saved_pages"]:
        return ""
    written, kept = (run[name] * page / 1e9 for name in ("saved_pages", "held_pages"))
    return f"{written:.0f}; {kept:.0f}"


def _labels(figures: dict) -> str:
    """The requests of one kind by themselves, where a trace tells kinds apart."""
    runs = [run for run in figures["runs"] if run["by_label"]]
    columns = list(dict.fromkeys((r["trace"], label) for r in runs for label in r["by_label"]))
    # The oracle reuses nothing of the very first ones: no share to speak of.
    columns = [
        (trace, label)
        for trace, label in columns
        if any(r["trace"] == trace and r["by_label"][label]["oracle"] for r in runs)
    ]
    rows = []
    for arm, title in _arms(figures).items():
        cells = []
        for trace, label in columns:
            run = _run(figures, arm, (trace, UNLIMITED))
            cells.append(_percent(run and run["by_label"][label]["share"]))
        if any(cells):
            rows.append([title, *cells])
    return "By kind of request, as a share of the oracle's:\n\n" + markdown(
        ["", *(f"{trace}: {label}" for trace, label in columns)], rows
    )
