# SPDX-License-Identifier: Apache-2.0
"""How much RAM, disk or Redis memory prompts take, from the model's config alone."""

import dataclasses
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from lmcache_hybrid.core.errors import ConfigError
from lmcache_hybrid.core.prefill import boundaries
from lmcache_hybrid.tools.cli.terminal import check_model
from lmcache_hybrid.tools.cli.to_write import ToWrite, gib, to_write
from lmcache_hybrid.tools.cli.units import HEAD, RATES, Unit, units
from lmcache_hybrid.tools.sizing import catalogue, storage
from lmcache_hybrid.tools.sizing.blocks import PLATFORMS, Platform, Sizes, compute
from lmcache_hybrid.tools.sizing.shape import ATTENTION, STATE, ModelShape
from lmcache_hybrid.tools.sizing.storage import BACKENDS, CHUNK_ENDS, Workload

INTERVALS = (16, 8, 4, 2, 1)  # T in blocks, as in docs/reuse.md


class PlatformName(StrEnum):
    """Of PLATFORMS."""

    gpu = "gpu"
    cpu = "cpu"


class GdnPrefill(StrEnum):
    """Of GDN_PREFILLS."""

    triton = "triton"
    flashinfer = "flashinfer"


class BackendName(StrEnum):
    """Of BACKENDS."""

    ram = "ram"
    disk = "disk"
    fs = "fs"
    redis = "redis"


def tokens(text: str | int) -> int:
    """``100k`` or ``1.5M`` as a whole number of tokens."""
    found = re.fullmatch(r"([\d_.]+)([kKmM]?)", str(text))
    try:
        if found is None:
            raise ValueError
        number = float(found[1]) * {"": 1, "k": 1_000, "m": 1_000_000}[found[2].lower()]
        if not number.is_integer():
            raise ValueError
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no number of tokens; write 100000 or 100k") from None
    return int(number)


def some_tokens(text: str | int) -> int:
    """:func:`tokens`, at least one."""
    number = tokens(text)
    if not number:
        raise typer.BadParameter(f"{text!r} is no token at all; write 1 or more")
    return number


def checkpoints(text: str | int) -> str | int:
    """CHUNK_ENDS, or :func:`tokens`."""
    try:
        return text if text == CHUNK_ENDS else tokens(text)
    except typer.BadParameter as error:
        raise typer.BadParameter(f"{error.message}, or {CHUNK_ENDS}") from None


def _tokens(what: str, parser: Callable[[str | int], str | int] = tokens) -> Any:
    return typer.Option(help=what, parser=parser, metavar="TOKENS")


ModelArgument = Annotated[
    str | None,
    typer.Argument(help="Model folder, config.json, or a name of --list.", metavar="MODEL"),
]
BackendOption = Annotated[
    list[BackendName] | None, typer.Option(help="Where they are kept; all by default.")
]
KernelBlockOption = Annotated[
    int,
    typer.Option(help="Tokens of the attention backend's smallest kernel block; 0: 16, CPU 32."),
]
GdnPrefillOption = Annotated[
    GdnPrefill, typer.Option(help="For Qwen, vLLM's; 0.33 takes flashinfer on Hopper and newer.")
]
CheckpointOption = Annotated[
    Any,
    _tokens(
        "lmcache.hybrid_checkpoint_tokens: chunk, T, or 0 for the last boundary only.", checkpoints
    ),
]
UnitOption = Annotated[int, _tokens("vLLM's --prefix-match-unit; 0: not set.")]
RateOption = Annotated[
    int, typer.Option(help="Prompt tokens that your engine computes a second.", min=1)
]
MarkdownOption = Annotated[
    bool, typer.Option("--markdown", help="With --list: as a Markdown table.")
]


@dataclass(frozen=True)
class Plan:
    """All that is printed.

    Attributes:
        raised: whether N is more than the block size that vLLM starts from.
        hopper: N with FlashInfer's prefill of gated delta nets, which is for GPUs only.
        prefill_rate: tokens a second.
        backends: names in BACKENDS.
        served: what ``vllm serve`` calls the model.
        flags: vLLM's that it was made with, name and value in turn.
    """

    model: str
    shape: ModelShape
    platform: Platform
    sizes: Sizes
    raised: bool
    hopper: int
    work: Workload
    prefill_rate: int
    backends: tuple[str, ...]
    served: str
    flags: list[str]

    def stored(self, backend: str) -> storage.Stored:
        return storage.stored(self.sizes, self.work, BACKENDS[backend])

    @property
    def per_prompt(self) -> int:
        """Payload bytes of one prompt alone, over all ranks, each with pages of its own."""
        alone = dataclasses.replace(self.work, prompts=1, shared=0)
        return storage.stored(self.sizes, alone, BACKENDS["ram"]).payload

    def checkpoints(self) -> list[int | str]:
        """``lmcache.hybrid_checkpoint_tokens`` in each row of its table."""
        n, own = self.sizes.block_size, self.work.checkpoint
        chosen = {blocks * n for blocks in INTERVALS if blocks * n < self.work.context}
        if isinstance(own, int) and own:
            chosen.add(own)
        return [CHUNK_ENDS, 0, *sorted(chosen, reverse=True)]

    def units(self) -> list[Unit]:
        return units(self.sizes, self.work, self.prefill_rate)

    @property
    def head_copies(self) -> int:
        """Ranks that hold the same KV head, and store it; latent attention is another matter."""
        attention = self.shape.attention
        return 1 if attention.latent else max(1, self.sizes.tp // attention.heads)

    def to_write(self, backend: str) -> ToWrite:
        own: dict[str, float | str] = {}
        chosen = self.work.checkpoint
        if chosen != CHUNK_ENDS:
            own["lmcache.hybrid_checkpoint_tokens"] = chosen
        return to_write(backend, self.sizes, self.stored(backend), own, self.flags)

    def with_checkpoint(self, tokens: int | str) -> "Plan":
        return dataclasses.replace(self, work=dataclasses.replace(self.work, checkpoint=tokens))


def plan(
    model: ModelArgument = None,
    context: Annotated[int, _tokens("Tokens of a prompt.", some_tokens)] = 32_000,
    prompts: Annotated[int, typer.Option(help="Prompts to keep.", min=1)] = 100,
    shared: Annotated[int, _tokens("Leading tokens that all prompts share.")] = 0,
    backend: BackendOption = None,
    checkpoint_tokens: CheckpointOption = CHUNK_ENDS,
    tp: Annotated[int, typer.Option(help="Tensor parallel size.", min=1)] = 1,
    dtype: Annotated[str, typer.Option(help="vLLM's --dtype.")] = "auto",
    kv_cache_dtype: Annotated[str, typer.Option(help="vLLM's --kv-cache-dtype.")] = "auto",
    ssm_dtype: Annotated[str, typer.Option(help="vLLM's --mamba-ssm-cache-dtype.")] = "auto",
    block_size: Annotated[int, typer.Option(help="vLLM's --block-size, if you set it.")] = 0,
    prefix_match_unit: UnitOption = 0,
    prefill_rate: RateOption = 10_000,
    step_tokens: Annotated[int, _tokens("vLLM's --max-num-batched-tokens.", some_tokens)] = 8192,
    platform: Annotated[PlatformName, typer.Option(help="Where the engine runs.")] = PlatformName[
        "gpu"
    ],
    kernel_block: KernelBlockOption = 0,
    gdn_prefill_backend: GdnPrefillOption = GdnPrefill["triton"],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    list_models: Annotated[bool, typer.Option("--list", help="Print the known models.")] = False,
    markdown: MarkdownOption = False,
) -> None:
    """Compute what MODEL's blocks and states take, and the storage that prompts need.

    Computed from config.json alone: no weights, no GPU, no network.
    """
    where = _platform(platform, kernel_block, gdn_prefill_backend)
    if list_models:
        _list_models(Console(), where, markdown)
        return
    if model is None:
        raise typer.BadParameter("name a MODEL, or use --list")
    check_model(model)
    sized = partial(
        compute, tp=tp, kv_dtype=kv_cache_dtype, ssm_dtype=ssm_dtype, block_size=block_size
    )
    try:
        name, shape = catalogue.find_shape(model)
        if dtype != "auto":
            shape = shape.with_dtype(dtype)
        sizes = sized(shape, where)
        rounding = where.with_gdn_prefill(GdnPrefill.flashinfer.value)
        hopper = sizes if platform is PlatformName.cpu else sized(shape, rounding)
        work = Workload(context, prompts, shared, checkpoint_tokens, prefix_match_unit, step_tokens)
        work.check(sizes.block_size)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    raised = sizes.block_size > (block_size or where.block_size)
    names = tuple(each.value for each in backend or BackendName)
    nets = shape.has_delta_nets and platform is PlatformName.gpu
    kernels = where.gdn_prefill if nets else "triton"
    flags = _flags(
        {
            "--tensor-parallel-size": (tp, 1),
            "--dtype": (dtype, "auto"),
            "--kv-cache-dtype": (kv_cache_dtype, "auto"),
            "--mamba-ssm-cache-dtype": (ssm_dtype, "auto"),
            "--block-size": (block_size, 0),
            "--prefix-match-unit": (prefix_match_unit, 0),
            "--max-num-batched-tokens": (step_tokens, 8192),
            "--gdn-prefill-backend": (kernels, "triton"),
        }
    )
    served = catalogue.hub_name(model)
    made = Plan(
        *(name, shape, where, sizes, raised, hopper.block_size, work, prefill_rate, names),
        *(served, flags),
    )
    if as_json:
        print(json.dumps(as_dict(made), indent=1))
    else:
        _print(Console(), made)


def _flags(given: dict[str, tuple[int | str, int | str]]) -> list[str]:
    """Those of (value, default) that differ, name and value in turn."""
    return [
        word
        for flag, (value, default) in given.items()
        if value != default
        for word in (flag, str(value))
    ]


def _platform(name: PlatformName, kernel_block: int, gdn_prefill: GdnPrefill) -> Platform:
    where = PLATFORMS[name.value].with_gdn_prefill(gdn_prefill.value)
    if not kernel_block:
        return where
    return dataclasses.replace(
        where,
        name=f"{name.value.upper()}, kernel blocks of {kernel_block} tokens",
        block_size=max(where.block_size, kernel_block),
        kernel_block=kernel_block,
    )


def as_dict(plan: Plan) -> dict:
    """Everything that is printed, as JSON has it; bytes over all ranks unless named so."""
    sizes = plan.sizes
    return {
        "model": plan.model,
        "platform": plan.platform.name,
        "dtypes": {"weights": plan.shape.dtype},
        "block_size": sizes.block_size,
        "block_size_is_logged": plan.raised,
        "block_size_with_flashinfer_prefill": plan.hopper,
        "ranks_per_kv_head": plan.head_copies,
        "hits": _hits(plan),
        "tensor_parallel": sizes.tp,
        "groups_per_rank": [dataclasses.asdict(group) for group in sizes.groups],
        "attention_bytes_per_block": sizes.in_all(ATTENTION),
        "state_bytes_per_boundary": sizes.in_all(STATE),
        "workload": dataclasses.asdict(plan.work),
        "bytes_per_prompt": plan.per_prompt,
        "backends": {
            name: {
                **dataclasses.asdict(plan.stored(name)),
                "gib_per_rank": plan.stored(name).taken / sizes.tp / 2**30,
                "limit": BACKENDS[name].limit,
                "write": dataclasses.asdict(plan.to_write(name)),
            }
            for name in plan.backends
        },
        "checkpoints": [_checkpoint(plan, tokens) for tokens in plan.checkpoints()],
        "units": [dataclasses.asdict(unit) for unit in plan.units()],
        "rates": {"prefill_tokens": plan.prefill_rate, "load_bytes": RATES},
    }


def _hits(plan: Plan) -> bool:
    """Whether a prompt of this length can hit at all."""
    return bool(boundaries(plan.work.context, plan.sizes.block_size, 0, plan.work.unit))


def _checkpoint(plan: Plan, tokens: int | str) -> dict:
    plan = plan.with_checkpoint(tokens)
    context, n, unit = plan.work.context, plan.sizes.block_size, plan.work.unit
    interval = plan.work.interval(n)
    branch = storage.after_branch(context, n, interval)
    return {
        "tokens": tokens,
        "interval": interval,
        "states": len(boundaries(context, n, interval, unit)),
        "bytes_per_prompt": plan.per_prompt,
        "recomputed_at_most": branch.at_most,
        "recomputed_expected": round(branch.expected),
        "prefill_steps": storage.prefill_steps(context, n, interval, plan.work.step_tokens, unit),
    }


def _list_models(console: Console, platform: Platform, markdown: bool) -> None:
    if markdown:
        print(catalogue.markdown(platform))
        return
    title = f"Hybrid models that plan knows\n{platform.name}"
    rows = [row[:-1] for row in catalogue.table(platform)]
    console.print(_table(title, catalogue.HEAD[:-1], rows))
    console.print(
        "Layers and groups: of attention, of states. In dtypes that vLLM chooses, 1 rank."
    )
    console.print("Where each row's figures come from: --markdown, or docs/sizing.md.")


def _print(console: Console, plan: Plan) -> None:
    sizes, work = plan.sizes, plan.work
    n, ranks = sizes.block_size, f" on each of {sizes.tp} ranks" if sizes.tp > 1 else ""
    # vLLM logs nothing where its own default is large enough.
    logged = f': vLLM logs "Setting attention block size to {n} tokens"' if plan.raised else ""
    hopper = (
        f"vLLM 0.33 on Hopper or newer makes it {plan.hopper}: --gdn-prefill-backend flashinfer\n"
        if plan.hopper != n
        else ""
    )
    console.print(
        f"[bold]{plan.model}[/] ({plan.shape.model_type})\n{plan.platform.name}\n"
        f"N = {n} tokens{logged}\n{hopper}",
        highlight=False,
    )
    latent = sizes.tp > 1 and any(group.replicated for group in sizes.groups)
    once = (
        f"Its attention is equal on all ranks: stores that they share keep it once,\n"
        f"{_mib(sizes.per_rank(ATTENTION))} MiB a block.\n"
        if latent
        else ""
    )
    if plan.head_copies > 1:
        once = (
            f"Each KV head is held, and stored, by {plan.head_copies} ranks: there are "
            f"{sizes.tp} ranks and {plan.shape.attention.heads} heads.\n"
        )
    rows = [
        [str(index), group.kind, str(group.layers), _mib(group.bytes)]
        for index, group in enumerate(sizes.groups)
    ]
    console.print(
        _table(f"Groups{ranks}", ("Group", "Kind", "Layers", "MiB per block or state"), rows)
    )
    console.print(
        f"A block's attention takes {_mib(sizes.in_all(ATTENTION))} MiB in all, a boundary's "
        f"states {_mib(sizes.in_all(STATE))} MiB.\n"
        f"A prompt of {work.context:,} tokens takes {plan.per_prompt / 2**30:.3f} GiB.\n{once}",
        highlight=False,
    )
    if not _hits(plan):
        console.print(
            f"[yellow]A prompt of {work.context} tokens never hits: it is no longer than "
            f"{work.unit or n}.[/]\n"
        )
    _print_backends(console, plan)
    _print_checkpoints(console, plan)
    _print_units(console, plan)
    _print_to_write(console, plan)


def _print_to_write(console: Console, plan: Plan) -> None:
    first, *others = plan.backends
    also = f"; --backend {'|'.join(others)}: another" if others else ""
    console.print(f"\n[bold]What to write[/] for {BACKENDS[first].title}{also}\n", highlight=False)
    print(plan.to_write(first).text(plan.served))


def _print_checkpoints(console: Console, plan: Plan) -> None:
    n, rows = plan.sizes.block_size, []
    for row in (_checkpoint(plan, tokens) for tokens in plan.checkpoints()):
        name = f"{row['interval']:,} ({row['interval'] // n} N)"
        name = f"{CHUNK_ENDS}: {name}" if row["tokens"] == CHUNK_ENDS else name
        rows.append(
            [
                name if row["interval"] else "0: none",
                str(row["states"]),
                f"{row['bytes_per_prompt'] / 2**30:.3f}",
                _more(row["bytes_per_prompt"], plan.with_checkpoint(0).per_prompt, 0),
                f"{row['recomputed_at_most']:,}",
                f"{row['recomputed_expected']:,}",
                str(row["prefill_steps"]),
            ]
        )
    head = ("T", "States", "GiB per prompt", "More", "Recomputed: at most", "expected", "Steps")
    title = "T (lmcache.hybrid_checkpoint_tokens), and the first prompt to branch off"
    console.print(_table(title, head, rows))


def _print_units(console: Console, plan: Plan) -> None:
    found = plan.units()
    if len(found) < 2:
        return  # N has no divisor that is worth a look
    console.print(
        _table(
            "U (--prefix-match-unit), in tokens: shorter prompts hit",
            HEAD,
            [unit.row(plan.sizes.block_size) for unit in found],
        )
    )
    ram, network = (rate / 2**30 for rate in RATES.values())
    console.print(
        "Faster from: the shortest hit that loads in less time than it computes, at\n"
        f"{plan.prefill_rate:,} tokens a second (--prefill-rate), {ram:g} GiB/s from RAM\n"
        f"and {network:g} GiB/s over a network.",
        highlight=False,
    )


def _print_backends(console: Console, plan: Plan) -> None:
    rows = []
    for name in plan.backends:
        backend, stored = BACKENDS[name], plan.stored(name)
        limit = f"{backend.limit}: {gib(stored.taken / plan.sizes.tp)}" if backend.limit else ""
        rows.append(
            [
                backend.title,
                f"{stored.records:,}",
                f"{stored.taken / 2**30:,.2f}",
                _more(stored.taken, stored.payload, 2),
                limit,
            ]
        )
    work = plan.work
    title = f"{work.prompts:,} prompts of {work.context:,} tokens"
    if work.shared:
        title += f", the first {work.shared:,} shared"
    if isinstance(work.checkpoint, int):
        title += f", T = {work.checkpoint:,}"
    head = ("Backend", "Records", "GiB in all", "Overhead", "Setting (GiB a rank)")
    console.print(_table(title, head, rows))


def _table(title: str, head: tuple[str, ...], rows: list[list[str]]) -> Table:
    made = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for index, name in enumerate(head):
        made.add_column(name, justify="left" if index == 0 else "right", no_wrap=index == 0)
    for row in rows:
        made.add_row(*row)
    return made


def _more(size: int, base: int, digits: int) -> str:
    return f"{100 * (size / base - 1):.{digits}f} %" if base else ""


def _mib(size: int) -> str:
    return f"{size / 2**20:,.2f}"
