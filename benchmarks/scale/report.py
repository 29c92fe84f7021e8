# SPDX-License-Identifier: Apache-2.0
"""Tables of docs/scale.md, all out of docs/generated/scale.json."""

from pathlib import Path

from benchmarks.figures import markdown, replace
from benchmarks.scale.model import ENGINES, NIC_BYTES, Sizes, Stream, demand, hot_key_bytes


def fill(page: Path, figures: dict) -> None:
    sizes = Sizes(**figures["sizes"])
    streams = [Stream(**stream) for stream in figures["streams"]]
    command = f"`{figures['command']}`; {figures['date']}, {figures['machine']}."
    tables = {
        "events": f"{_events(figures)}\n\n{command}",
        "stored": _stored(figures),
        "streams": _streams(streams),
        "demand": _demand(figures, sizes, streams),
        "hot": _hot(sizes, streams),
        "spread": _spread(figures),
    }
    for marker, table in tables.items():
        replace(page, marker, table)


def size(count: float) -> str:
    """Bytes with three digits that count."""
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if count < 999.5 or unit == "PB":
            break
        count /= 1000
    return f"{count:.3g} {unit}" if count < 999.5 else f"{count:,.0f} {unit}"


def _events(figures: dict) -> str:
    rows = []
    for name, seen in figures["events"].items():
        commands = ", ".join(
            f"{count} {command.upper()}" for command, count in sorted(seen["commands"].items())
        )
        seconds = seen["cpu_seconds"]  # Linux counts in ticks
        cpu = f"{seconds * 1e3:.3g} ms" if seconds >= 0.001 else "under 1 ms"
        rows.append(
            [name, commands or "none", size(seen["bytes_in"]), size(seen["bytes_out"]), cpu]
        )
    head = ["Event", "Commands", "To the server", "From the server", "Its CPU time"]
    return markdown(head, rows)


def _stored(figures: dict) -> str:
    stored = figures["stored"]
    more = stored["used_memory"] / stored["payload"] - 1
    return (
        f"A stored prompt has {size(stored['payload'])} of pages and takes "
        f"{size(stored['used_memory'])} of the server's memory ({100 * more:+.2f} %), in "
        f"{stored['keys']} keys. An idle rank keeps {figures['connections']} connections open."
    )


def _streams(streams: list[Stream]) -> str:
    head = ["Stream", "requests/s", "blocks", "hits", "blocks read", "blocks stored", "states"]
    return markdown(
        head,
        [
            [s.name, f"{s.requests:g}", str(s.blocks), f"{100 * s.hits:.0f} %"]
            + [str(s.read), f"{s.stored:g}", f"{s.boundaries:g}"]
            for s in streams
        ],
    )


def _demand(figures: dict, sizes: Sizes, streams: list[Stream]) -> str:
    rows = []
    for stream in streams:
        for engines in ENGINES:
            asked = demand(sizes, stream, engines)
            cpu = figures["cpu_per_byte"]
            needed = [asked.nodes(nic, cpu["out"], cpu["in"]) for nic in NIC_BYTES.values()]
            rows.append(
                [
                    stream.name,
                    f"{engines:,}",
                    f"{asked.commands:,.0f}",
                    f"{size(asked.bytes_out)}/s",
                    f"{size(asked.bytes_in)}/s",
                    size(asked.memory_per_hour),
                    *(f"{nodes['network']:,}" for nodes in needed),
                    f"{needed[0]['core']:,}",
                    f"{needed[0]['memory']:,}",
                ]
            )
    head = ["Stream", "Engines", "commands/s", "read", "written", "kept for an hour"]
    head += [f"servers by {nic}" for nic in NIC_BYTES]
    return markdown([*head, "by one core each", "by 512 GiB each"], rows)


def _hot(sizes: Sizes, streams: list[Stream]) -> str:
    rows = [
        [s.name, *(f"{size(hot_key_bytes(sizes, s, engines))}/s" for engines in ENGINES)]
        for s in streams
    ]
    return markdown(
        ["Stream", "1 engine", *(f"{engines:,} engines" for engines in ENGINES[1:])], rows
    )


def _spread(figures: dict) -> str:
    rows = [
        [nodes, f"{found['largest']:.3f}", f"{100 * found['whole']:.2f} %"]
        for nodes, found in figures["spread"].items()
    ]
    head = ["Nodes", "records on the fullest, of the mean", "prompts that lose nothing with a node"]
    return markdown(head, rows)
