# SPDX-License-Identifier: Apache-2.0
"""Lists well-known hybrid models by name, with the source of their figures."""

import difflib
import functools
import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from lmcache_hybrid.core.errors import ConfigError
from lmcache_hybrid.core.sizes import MIB
from lmcache_hybrid.tools.sizing.blocks import Platform, compute
from lmcache_hybrid.tools.sizing.shape import ATTENTION, STATE, ModelShape, load_shape, read_shape


@dataclass(frozen=True)
class Known:
    """One row of the table.

    Attributes:
        name: short, as in ``lmcache-hybrid plan NAME``.
        hub: names of checkpoints with these sizes.
        source: where the config was found.
        config: those of its fields that sizes depend on.
    """

    name: str
    hub: tuple[str, ...]
    source: str
    config: dict

    @property
    def shape(self) -> ModelShape:
        return read_shape(self.config)


@functools.cache
def models() -> tuple[Known, ...]:
    text = resources.files(__package__).joinpath("models.json").read_text()
    return tuple(Known(**{**row, "hub": tuple(row["hub"])}) for row in json.loads(text))


def find_shape(model: str) -> tuple[str, ModelShape]:
    """Return (name, shape) of a folder, a ``config.json`` or a model of the table.

    Raises:
        ConfigError: it is none of these, or cannot be sized.
    """
    path = Path(model)
    if path.exists():
        return (path.parent if path.is_file() else path).resolve().name, load_shape(path)
    for known in models():
        if model.lower() in (known.name.lower(), *map(str.lower, known.hub)):
            return known.name, known.shape
    raise ConfigError(
        f"MODEL={model!r} is neither a folder with a config.json nor a model of the table; "
        f"{_meant(model)}download its config.json, or choose from `lmcache-hybrid plan --list`. "
        "A model without recurrent layers needs no plan: LMCache serves it by itself."
    )


def _meant(model: str) -> str:
    """Suggest the models whose names begin so, or the one nearest to a mistyped name."""
    begun = [
        known.name
        for known in models()
        for name in (known.name, *known.hub, *(each.partition("/")[2] for each in known.hub))
        if name.lower().startswith(model.lower())
    ]
    if begun:
        return f"did you mean {' or '.join(dict.fromkeys(begun))}? Otherwise "
    names = {name.lower(): name for known in models() for name in (known.name, *known.hub)}
    near = difflib.get_close_matches(model.lower(), names, n=1, cutoff=0.8)
    return f"did you mean {names[near[0]]}? Otherwise " if near else ""


def hub_name(model: str) -> str:
    """Return the name of a model of the table for ``vllm serve``; a folder, or a file's, stays."""
    path = Path(model)
    if path.exists():
        return str(path.parent if path.is_file() else path)
    for known in models():
        if model.lower() == known.name.lower():
            return known.hub[0]
    return model


# "State in tokens": how many tokens of attention take as much as one boundary's states.
HEAD = (
    "Model",
    "Layers",
    "Groups",
    "N",
    "MiB per block",
    "MiB per state",
    "State in tokens",
    "From",
)


def figures(platform: Platform) -> list[dict[str, Any]]:
    """Compute the table: every model on one rank, in the dtypes that vLLM chooses."""
    found = []
    for known in models():
        shape = known.shape
        sizes = compute(shape, platform)
        counts = [shape.kinds.count(kind) for kind in (ATTENTION, STATE)]
        groups = [sum(g.kind == kind for g in sizes.groups) for kind in (ATTENTION, STATE)]
        block, state = sizes.in_all(ATTENTION), sizes.in_all(STATE)
        found.append(
            {
                "model": known.name,
                "hub": list(known.hub),
                "attention_layers": counts[0],
                "state_layers": counts[1],
                "attention_groups": groups[0],
                "state_groups": groups[1],
                "block_size": sizes.block_size,
                "attention_bytes_per_block": block,
                "state_bytes_per_boundary": state,
                "state_in_tokens": state * sizes.block_size / block,
                "source": known.source,
            }
        )
    return found


def table(platform: Platform) -> list[list[str]]:
    """Make the rows below HEAD."""
    return [
        [
            row["model"],
            f"{row['attention_layers']}, {row['state_layers']}",
            f"{row['attention_groups']}, {row['state_groups']}",
            f"{row['block_size']:,}",
            f"{row['attention_bytes_per_block'] / MIB:.2f}",
            f"{row['state_bytes_per_boundary'] / MIB:.2f}",
            f"{row['state_in_tokens']:,.0f}",
            row["source"],
        ]
        for row in figures(platform)
    ]


def markdown(platform: Platform) -> str:
    """Make the Markdown table of docs/sizing.md."""
    rule = ["---", *["---:"] * (len(HEAD) - 2), "---"]
    return "\n".join("| " + " | ".join(line) + " |" for line in [HEAD, rule, *table(platform)])
