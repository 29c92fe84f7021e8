# SPDX-License-Identifier: Apache-2.0
"""How much RAM, disk or Redis memory prompts take, from the model's config alone."""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from lmcache_hybrid.config.drafts import planned
from lmcache_hybrid.core.errors import ConfigError
from lmcache_hybrid.core.sizes import GIB, MIB
from lmcache_hybrid.tools.cli.terminal import check_model
from lmcache_hybrid.tools.sizing import catalogue
from lmcache_hybrid.tools.sizing.blocks import PLATFORMS, Platform, Sizes, compute
from lmcache_hybrid.tools.sizing.plan import NETWORK_RATE, RAM_RATE, plan_of
from lmcache_hybrid.tools.sizing.shape import ModelShape
from lmcache_hybrid.tools.sizing.sharing import MAX_CLIENTS, SHARE, Sharing
from lmcache_hybrid.tools.sizing.storage import BACKENDS, CHUNK_ENDS, Workload
from lmcache_hybrid.tools.sizing.to_write import as_typed

# Of PLATFORMS, GDN_PREFILLS and BACKENDS.
PlatformName = StrEnum("PlatformName", ["gpu", "cpu"])
GdnPrefill = StrEnum("GdnPrefill", ["triton", "flashinfer"])
BackendName = StrEnum("BackendName", ["ram", "disk", "fs", "redis"])


def tokens(text: str | int) -> int:
    """Parse ``100k`` or ``1.5M`` as a whole number of tokens."""
    found = re.fullmatch(r"([\d_.]+)([kKmM]?)", str(text))
    try:
        if found is None:
            raise ValueError
        number = float(found[1]) * {"": 1, "k": 1_000, "m": 1_000_000}[found[2].lower()]
        if not number.is_integer():
            raise ValueError
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not a number of tokens; write 100000 or 100k"
        ) from None
    return int(number)


def some_tokens(text: str | int) -> int:
    """Parse :func:`tokens`, at least one."""
    number = tokens(text)
    if not number:
        raise typer.BadParameter(f"{text!r} is not a number of tokens; write 1 or more")
    return number


def checkpoints(text: str | int) -> str | int:
    """Parse CHUNK_ENDS, or :func:`tokens`."""
    try:
        return text if text == CHUNK_ENDS else tokens(text)
    except typer.BadParameter as error:
        raise typer.BadParameter(f"{error.message}, or {CHUNK_ENDS}") from None


def drafts_in(drafter: Mapping[str, Any] | None) -> int:
    """Return the speculative tokens of ``--speculative-config``; vLLM's default is one module's."""
    number = (drafter or {}).get("num_speculative_tokens", 1 if drafter else 0)
    return number if isinstance(number, int) and number > 0 else 0


def drafter(text: str | dict) -> dict[str, Any]:
    """Parse ``--speculative-config``."""
    try:
        found = text if isinstance(text, dict) else json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise typer.BadParameter(f"{text!r} is not a JSON object; write it as for vllm serve")
    return found


def _tokens(what: str, parser: Callable[[str | int], str | int] = tokens) -> Any:
    return typer.Option(help=what, parser=parser, metavar="TOKENS")


ModelArgument = Annotated[
    str | None,
    typer.Argument(help="Model folder, config.json, or a name of --list.", metavar="MODEL"),
]
BackendOption = Annotated[
    list[BackendName] | None, typer.Option(help="Where they are kept; all by default.")
]
PlatformOption = Annotated[PlatformName, typer.Option(help="Where the engine runs.")]
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
SharedOption = Annotated[
    int,
    typer.Option(
        "--decode-context-parallel-size",
        help="vLLM's: ranks that share each attention block's tokens, with --tp beyond the "
        "key/value heads.",
        min=1,
    ),
]
UnitOption = Annotated[int, _tokens("vLLM's --prefix-match-unit; 0: not set.")]
NodesOption = Annotated[
    int, typer.Option(help="vLLM's: hosts of one engine, with equally many ranks.", min=1)
]
DrafterOption = Annotated[
    dict | None,
    typer.Option(
        help="vLLM's --speculative-config, to see what its drafter costs each hit.",
        parser=drafter,
        metavar="JSON",
    ),
]
RateOption = Annotated[
    int, typer.Option(help="Prompt tokens that your engine computes a second.", min=1)
]
RamRateOption = Annotated[
    float,
    typer.Option(
        help="GiB a second from RAM to all GPUs together; by default as one H100 loaded "
        "(docs/gpu.md).",
        min=0.001,
        max=1e6,
    ),
]
NetworkRateOption = Annotated[
    float, typer.Option(help="The same from a store on the network.", min=0.001, max=1e6)
]
EnginesOption = Annotated[
    int, typer.Option(help="Engines on one store: adds a table of what they ask of it.", min=0)
]
RequestsOption = Annotated[
    float, typer.Option(help="With --engines: prompts a second, of each.", min=0.001, max=1e6)
]
HitShareOption = Annotated[
    float, typer.Option(help="With --engines: share of them that hit.", min=0, max=1)
]
StoreRateOption = Annotated[
    float,
    typer.Option(
        help="With --engines: GiB a second that a server of the store sends, or takes.",
        min=0.001,
        max=1e6,
    ),
]
MarkdownOption = Annotated[
    bool, typer.Option("--markdown", help="With --list: as a Markdown table.")
]


def plan(
    model: ModelArgument = None,
    context: Annotated[int, _tokens("Tokens of a prompt.", some_tokens)] = 32_000,
    prompts: Annotated[int, typer.Option(help="Prompts to keep.", min=1)] = 100,
    shared: Annotated[int, _tokens("Leading tokens that all prompts share.")] = 0,
    backend: BackendOption = None,
    checkpoint_tokens: CheckpointOption = CHUNK_ENDS,
    tp: Annotated[int, typer.Option(help="Tensor parallel size.", min=1)] = 1,
    nnodes: NodesOption = 1,
    dcp: SharedOption = 1,
    dtype: Annotated[str, typer.Option(help="vLLM's --dtype.")] = "auto",
    kv_cache_dtype: Annotated[str, typer.Option(help="vLLM's --kv-cache-dtype.")] = "auto",
    ssm_dtype: Annotated[str, typer.Option(help="vLLM's --mamba-ssm-cache-dtype.")] = "auto",
    block_size: Annotated[int, typer.Option(help="vLLM's --block-size, if you set it.")] = 0,
    prefix_match_unit: UnitOption = 0,
    speculative_config: DrafterOption = None,
    prefill_rate: RateOption = 10_000,
    ram_rate: RamRateOption = RAM_RATE,
    network_rate: NetworkRateOption = NETWORK_RATE,
    engines: EnginesOption = 0,
    requests_per_second: RequestsOption = 1.0,
    hit_share: HitShareOption = 0.5,
    store_rate: StoreRateOption = NETWORK_RATE,
    step_tokens: Annotated[int, _tokens("vLLM's --max-num-batched-tokens.", some_tokens)] = 8192,
    platform: PlatformOption = PlatformName["gpu"],
    kernel_block: KernelBlockOption = 0,
    gdn_prefill_backend: GdnPrefillOption = GdnPrefill["triton"],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    list_models: Annotated[bool, typer.Option("--list", help="Print the known models.")] = False,
    markdown: MarkdownOption = False,
) -> None:
    """Compute what MODEL's blocks and states take, and the storage that prompts need.

    Computed from config.json alone: no weights, no GPU, no network.
    """
    where, drafts = _platform(platform, kernel_block, gdn_prefill_backend), speculative_config
    if list_models:
        return _list_models(Console(), where, markdown, as_json)
    flags: dict[str, Any] = {"tp": tp, "kv_dtype": kv_cache_dtype, "ssm_dtype": ssm_dtype}
    flags |= {"block_size": block_size, "dcp": dcp, "drafts": drafts_in(drafts)}
    try:
        name, shape, hub_name = _find(model, dtype, tp, nnodes)
        sizes = compute(shape, where, **flags)
        newer = where if platform == "cpu" else where.with_gdn_prefill("flashinfer")
        hopper = compute(shape, newer, **flags)
        work = Workload(context, prompts, shared, checkpoint_tokens, prefix_match_unit, step_tokens)
        work, lost = _checked(work, sizes, drafts)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    made = plan_of(
        name,
        shape,
        where,
        sizes,
        work,
        raised=sizes.state_tokens > (block_size or where.block_size),
        hopper=hopper.state_tokens,
        prefill_rate=prefill_rate,
        load_rates={"ram": ram_rate * GIB, "network": network_rate * GIB},
        backends=[each.value for each in backend or BackendName],
        hosts=nnodes,
        lost=lost,
        flags=_flags(
            {
                "--tensor-parallel-size": (tp, 1),
                "--nnodes": (nnodes, 1),
                "--decode-context-parallel-size": (dcp, 1),
                "--dtype": (dtype, "auto"),
                "--kv-cache-dtype": (kv_cache_dtype, "auto"),
                "--mamba-ssm-cache-dtype": (ssm_dtype, "auto"),
                "--block-size": (block_size, 0),
                "--prefix-match-unit": (prefix_match_unit, 0),
                "--max-num-batched-tokens": (step_tokens, 8192),
                "--gdn-prefill-backend": (_gdn_prefill(shape, where, platform), "triton"),
                "--speculative-config": (json.dumps(drafts) if drafts else "", ""),
            }
        ),
        shared_by=Sharing(engines, requests_per_second, hit_share, store_rate * GIB),
    )
    _show(made, as_json, shape.model_type, hub_name)


def _checked(
    work: Workload, sizes: Sizes, drafts: dict[str, Any] | None
) -> tuple[Workload, dict[str, str]]:
    """Return the workload with vLLM's U, and what hits lose to a drafter, by release.

    Raises:
        ConfigError: what was asked for does not fit the sizes.
    """
    if sizes.dcp > 1 and drafts:
        raise ConfigError(f"--decode-context-parallel-size {sizes.dcp} is refused with a drafter.")
    if sizes.dcp > 1 and not work.unit:
        work = dataclasses.replace(work, unit=sizes.state_tokens)
    work.check(sizes.block_size, sizes.dcp)
    return work, planned(drafts, work.unit or sizes.block_size) if drafts else {}


def _find(model: str | None, dtype: str, tp: int, hosts: int) -> tuple[str, ModelShape, str]:
    """Return MODEL's name, shape, and name on Hugging Face.

    Raises:
        BadParameter: there is none, no such folder, or the hosts would have unequally many ranks.
        ConfigError: its files say too little.
    """
    if model is None:
        raise typer.BadParameter("name a MODEL, or use --list")
    check_model(model)
    if tp % hosts:
        raise typer.BadParameter(f"--nnodes {hosts} does not divide --tp {tp}")
    name, shape = catalogue.find_shape(model)
    hub_name = catalogue.hub_name(model)
    return name, shape if dtype == "auto" else shape.with_dtype(dtype), hub_name


def _show(made: dict[str, Any], as_json: bool, model_type: str, hub_name: str) -> None:
    if as_json:
        print(json.dumps(made, indent=1))
    else:
        _print(Console(highlight=False), made, model_type, hub_name)


def _flags(given: dict[str, tuple[int | str, int | str]]) -> list[str]:
    """List the flags whose (value, default) differ, name and value in turn."""
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


def _gdn_prefill(shape: ModelShape, where: Platform, platform: PlatformName) -> str:
    return where.gdn_prefill if shape.has_delta_nets and platform == "gpu" else "triton"


def _list_models(console: Console, platform: Platform, markdown: bool, as_json: bool) -> None:
    if as_json:
        print(json.dumps(catalogue.figures(platform), indent=1))
        return
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


def _print(console: Console, made: dict[str, Any], model_type: str, served: str) -> None:
    """Print :func:`plan_of`.

    Args:
        served: the model's name for ``vllm serve``.
    """
    n, tp, work = made["block_size"], made["tensor_parallel"], made["workload"]
    hopper, copies = made["block_size_with_flashinfer_prefill"], made["ranks_per_kv_head"]
    # vLLM logs nothing where its own default is large enough.
    logged = f': vLLM logs "Setting attention block size to {n} tokens"'
    console.print(
        f"[bold]{made['model']}[/] ({model_type})\n{made['platform']}\n"
        f"N = {n} tokens{logged if made['block_size_is_logged'] else ''}"
    )
    if hopper != n:
        console.print(
            f"vLLM 0.33 on Hopper or newer makes it {hopper}: --gdn-prefill-backend flashinfer"
        )
    _print_shared(console, made)
    rows = [
        [str(index), group["kind"], str(group["layers"]), _mib(group["bytes"])]
        for index, group in enumerate(made["groups_per_rank"])
    ]
    title = f"Groups on each of {tp} ranks" if tp > 1 else "Groups"
    console.print(_table(title, ("Group", "Kind", "Layers", "MiB per block or state"), rows))
    console.print(
        f"A block's attention takes {_mib(made['attention_bytes_per_block'])} MiB in all, "
        f"a boundary's states {_mib(made['state_bytes_per_boundary'])} MiB.\n"
        f"A prompt of {work['context']:,} tokens takes {made['bytes_per_prompt'] / GIB:.3f} GiB."
    )
    if copies > 1:
        console.print(
            f"Each KV head is held, and stored, by {copies} ranks: there are {tp} ranks and "
            f"{tp // copies} heads."
        )
    elif tp > 1 and any(group["replicated"] for group in made["groups_per_rank"]):
        console.print(
            "Its attention is equal on all ranks: stores that they share keep it once,\n"
            f"{_mib(made['attention_bytes_per_block'] // tp)} MiB a block."
        )
    console.print()
    if lost := made["lost_to_drafts"]:
        for release, said in lost.items():
            console.print(f"vLLM {release}: {said}")
        console.print("The sizes are those without the drafter's own layers.\n")
    if not made["hits"]:
        console.print(
            f"[yellow]A prompt of {work['context']} tokens never hits: it is no longer than "
            f"{work['unit'] or n}.[/]"
        )
        # From the largest, which stores the least.
        units = [row["tokens"] for row in made["units"] if row["shortest"] <= work["context"]]
        if units:
            console.print(
                f"It hits with --prefix-match-unit {units[0]}: add it here and to vllm serve."
            )
        console.print()
    console.print(_backends(made))
    if made["hosts"] > 1:
        _print_hosts(console, made)
    console.print(_checkpoints(made))
    if len(made["units"]) > 1:  # else N has no divisor that is worth a look
        rate, rates = made["rates"]["prefill_tokens"], made["rates"]["load_bytes"]
        console.print(_units(made))
        console.print(
            "Faster from: the shortest hit that is quicker to load than to compute, assuming\n"
            f"{rate:,} prefill tokens/s (--prefill-rate), {rates['ram'] / GIB:g} GiB/s from RAM\n"
            f"(--ram-rate) and {rates['network'] / GIB:g} GiB/s from the network (--network-rate)."
        )
        if rates["ram"] == RAM_RATE * GIB:
            console.print(
                f"{RAM_RATE:g} GiB/s is the fastest that one H100 loaded; the code that copies\n"
                "has changed since. `lmcache-hybrid accept` measures your GPU."
            )
    if made["one_store"]:
        _print_one_store(console, made)
    _print_what_to_write(console, made, served)


def _print_what_to_write(console: Console, made: dict[str, Any], served: str) -> None:
    """Print the settings of the first backend."""
    first, *others = made["backends"]
    console.print(
        f"\n[bold]What to write[/] for {made['workload']['prompts']:,} prompts (--prompts) in "
        f"{BACKENDS[first].title}"
    )
    if others:
        console.print(f"For another store: --backend {'|'.join(others)}")
    console.print()
    print(as_typed(made["backends"][first]["write"], served))


def _print_shared(console: Console, made: dict[str, Any]) -> None:
    if (dcp := made["decode_context_parallel"]) > 1:
        console.print(
            f"{dcp} ranks share each attention block: it has {dcp} N = {dcp * made['block_size']} "
            f"tokens, and prompts hit at\nmultiples of {made['workload']['unit']}."
        )
    console.print()


def _backends(made: dict[str, Any]) -> Table:
    rows = []
    for name, stored in made["backends"].items():
        limit, settings = stored["limit"], stored["write"]["lmcache_yaml"]
        rows.append(
            [
                BACKENDS[name].title,
                f"{stored['records']:,}",
                f"{stored['taken'] / GIB:,.2f}",
                _more(stored["taken"], stored["payload"], 2),
                f"{limit}: {settings[limit]}" if limit else "",
            ]
        )
    work = made["workload"]
    title = f"{work['prompts']:,} prompts of {work['context']:,} tokens"
    if work["shared"]:
        title += f", the first {work['shared']:,} shared"
    if isinstance(work["checkpoint"], int):
        title += f", T = {work['checkpoint']:,}"
    head = ("Backend", "Records", "GiB in all", "Overhead", "Setting (GiB a rank)")
    return _table(title, head, rows)


def _print_hosts(console: Console, made: dict[str, Any]) -> None:
    hosts = made["hosts"]
    console.print(f"Each of {hosts} hosts has {made['tensor_parallel'] // hosts} ranks:")
    for name, stored in made["backends"].items():
        sizes = stored["gib_per_host"]
        needs = f"{sizes['max_local_cpu_size']:,.1f} GiB of RAM"
        if "max_local_disk_size" in sizes:
            needs += f", {sizes['max_local_disk_size']:,.1f} GiB of disk"
        console.print(f"  {BACKENDS[name].title}: {needs}")
    console.print("Its command also needs --node-rank and --master-addr: see docs/hosts.md.\n")


def _checkpoints(made: dict[str, Any]) -> Table:
    rows = []
    (none,) = (row["bytes_per_prompt"] for row in made["checkpoints"] if row["tokens"] == 0)
    for row in made["checkpoints"]:
        name = f"{row['interval']:,} ({row['interval'] // made['block_size']} N)"
        name = f"{CHUNK_ENDS}: {name}" if row["tokens"] == CHUNK_ENDS else name
        rows.append(
            [
                name if row["interval"] else "0: none",
                str(row["states"]),
                f"{row['bytes_per_prompt'] / GIB:.3f}",
                _more(row["bytes_per_prompt"], none, 0),
                f"{row['recomputed_at_most']:,}",
                f"{row['recomputed_expected']:,}",
                str(row["prefill_steps"]),
            ]
        )
    head = ("T", "States", "GiB per prompt", "More", "Recomputed: at most", "expected", "Steps")
    title = "T (lmcache.hybrid_checkpoint_tokens), and the first prompt to branch off"
    return _table(title, head, rows)


def _units(made: dict[str, Any]) -> Table:
    rows = [
        [
            f"{row['tokens']} (N)" if row["tokens"] == made["block_size"] else str(row["tokens"]),
            f"{row['shortest']:,}",
            f"{row['computed_again']:,}",
            f"{row['bytes_per_prompt'] / GIB:.3f}",
            str(row["prefill_steps"]),
            *("never" if found is None else f"{found:,}" for found in row["faster_from"].values()),
        ]
        for row in made["units"]
    ]
    head = ("U", "Hits from", "Computed again", "GiB per prompt", "Steps")
    title = "U (--prefix-match-unit), in tokens: shorter prompts hit"
    return _table(title, (*head, "Faster from: RAM", "network"), rows)


def _print_one_store(console: Console, made: dict[str, Any]) -> None:
    shared_by, work = made["one_store"], made["workload"]
    rows = [
        [
            f"{row['engines']:,}",
            f"{row['connections']:,}",
            _rounded(row["commands"]),
            _rounded(row["read"] / GIB),
            _rounded(row["written"] / GIB),
            _rounded(8e-9 * max(row["read"], row["written"])),
            _rounded(row["stored_in_an_hour"] / (GIB << 10)),
            f"{row['servers']:,}",
        ]
        for row in shared_by["rows"]
    ]
    head = ("Engines", "Connections", "Commands", "GiB read", "written", "Gbit", "TiB/hour")
    console.print(_table("Engines on one store, each second", (*head, "Servers"), rows))
    console.print(
        f"An engine has {shared_by['requests']:g} requests/s (--requests-per-second) of "
        f"{work['context']:,} tokens.\n{100 * shared_by['hit_share']:g} % of them hit at the last "
        "boundary (--hit-share), the others are new and\nstored: TiB/hour. "
        f"Gbit: in the direction that has more. Servers: for {100 * SHARE:g} % of\n"
        f"{shared_by['store_rate'] / GIB:g} GiB/s each (--store-rate). Nothing is taken off for "
        "what prompts share, or\nengines find in their own memory. Connections: to each Redis."
    )
    if shared_by["rows"][-1]["connections"] > MAX_CLIENTS:
        console.print(f"A Redis takes {MAX_CLIENTS:,} of them: set its maxclients higher.")


def _rounded(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


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
    return f"{size / MIB:,.2f}"
