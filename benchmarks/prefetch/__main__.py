# SPDX-License-Identifier: Apache-2.0
"""python -m benchmarks.prefetch: the first token of a prompt that was prefetched.

Real engines with LMCache's RAM before a disk or Redis, restarted after the store was filled, so
that RAM is empty. Needs the checkout: the engine is that of ``tests/e2e``.
"""

import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.figures import origin, page_of, read, replace, write
from benchmarks.progress import shown

STORES = ("disk", "redis")
ARMS = ("prefetched", "from RAM", "from the store")
# Tokens. A prompt may hit to its last whole block.
PROMPT = 5_488
# Times that a round asks each of its prompts that RAM holds: one time alone varies by a tenth.
REPEATS = 4
PREFETCH = {"extra_args": {"kv_transfer_params": {"lmcache.prefetch": True}}}
HEAD = ("store", "first token", "ms", "lowest to highest", "of a hit in RAM")
Times = dict[str, list[float]]


def main(
    out: Annotated[Path, typer.Option(help="JSON file.")] = Path("docs/generated/prefetch.json"),
    rounds: Annotated[int, typer.Option(help="Timed, after one that is not.")] = 9,
    render_only: Annotated[bool, typer.Option(help="Only write the page's table.")] = False,
) -> None:
    """Ask for each prompt's first token, prefetched or not, and write how long it took.

    A round has two new prompts. One is asked: it comes from the store, and is in RAM from then on.
    The other one is prefetched. Then both are asked, four times in turn, with vLLM's own cache
    empty, and the median counts.
    """
    if not render_only:
        figures = {
            **origin(),
            **measure(rounds),
        }
        write(out, figures)
    times = read(out)["seconds"]
    page = page_of(out, "steering.md")
    if page.exists():
        replace(page, "prefetch", table(times))
    print(table(times))


def measure(rounds: int) -> dict[str, Any]:
    """The model's record, tokens of a hit, and seconds by store and arm."""
    import benchmarks.quiet  # noqa: F401  # for the engines only: a test imports this file
    from benchmarks.performance.model import make_model

    with tempfile.TemporaryDirectory() as folder, shown() as progress:
        model = make_model(Path(folder))
        hit = (PROMPT - 1) // model.block_size * model.block_size
        task = progress.add_task("rounds", total=len(STORES) * (rounds + 1))
        seconds = {}
        for store in STORES:
            with ExitStack() as stack:
                seconds[store] = times(
                    stack, model, Path(folder), store, rounds, hit, lambda: progress.advance(task)
                )
    return {"model": model.record, "prompt": PROMPT, "hit": hit, "seconds": seconds}


def times(stack: ExitStack, model, folder: Path, store: str, rounds: int, hit: int, done) -> Times:
    """Seconds to the first token, of each arm."""
    from benchmarks.performance.engines import Arms, first_token, prompt_of

    arms = Arms(stack, model, folder, lmcache={"local_cpu": True, "max_local_cpu_size": 4})
    prompts = [prompt_of(PROMPT, 900 + number) for number in range(2 * (rounds + 1))]
    for ids in prompts:
        arms[store].ask(ids, 1)
    engine = arms.restart(store)
    found: Times = {arm: [] for arm in ARMS}
    for round_, pair in enumerate(zip(prompts[::2], prompts[1::2], strict=True)):
        asked, prefetched = pair
        engine.forget()
        before = slow_reads(engine)
        answer = engine.ask(prefetched, 1, **PREFETCH)
        assert answer.external == hit, answer
        took = {"from the store": [first_token(engine, asked)], "prefetched": [], "from RAM": []}
        between = slow_reads(engine)
        order = [("prefetched", prefetched), ("from RAM", asked)]
        for repeat in range(REPEATS):
            for arm, ids in order if (round_ + repeat) % 2 else reversed(order):
                took[arm].append(first_token(engine, ids))
        assert before < between == slow_reads(engine), "RAM did not hold them"
        for arm, answers in took.items():
            assert all(each[1:] == (hit, hit) for each in answers), (arm, answers)
            if round_:
                found[arm].append(statistics.median(seconds for seconds, _, _ in answers))
        done()
    return found


def slow_reads(engine) -> int:
    """Records that came from the disk or from Redis."""
    return sum(count for name, count in engine.reads().items() if name != "LocalCPUBackend")


def table(times: dict[str, Times]) -> str:
    """Markdown of medians; the quotient is the median of each round's."""
    lines = [" | ".join(HEAD), "--- | --- | ---: | ---: | ---:"]
    for store, arms in times.items():
        for arm, seconds in arms.items():
            of_ram = statistics.median(map(lambda a, b: a / b, seconds, arms["from RAM"]))
            middle = 1e3 * statistics.median(seconds)
            low, high = 1e3 * min(seconds), 1e3 * max(seconds)
            lines.append(f"{store} | {arm} | {middle:.1f} | {low:.1f} to {high:.1f} | {of_ram:.2f}")
    return "\n".join(f"| {line} |" for line in lines)


if __name__ == "__main__":
    typer.run(main)
