# SPDX-License-Identifier: Apache-2.0
"""python -m benchmarks.lossless: compressed pages and states beside plain ones.

What real engines have stored in files, compressed and restored in memory by two libraries, which
``make bench-lossless`` installs. Needs the checkout: the engine is that of ``tests/e2e``.
"""

import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.progress import Progress

from benchmarks.figures import header, markdown, page_of, read, replace, versions, write
from benchmarks.progress import shown
from lmcache_hybrid.core.keys import ATTENTION
from lmcache_hybrid.storage.record_format import HEADER_BYTES, MAGIC, read_header

SHOWN = ("qwen3_next", "granite4", "falcon_h1", "lfm2")
# vLLM's kernel of Qwen3-Next on CPU takes bfloat16 alone.
CASES = (
    ("qwen3_next", "bfloat16"),
    *((family, dtype) for family in SHOWN[1:] for dtype in ("bfloat16", "float32")),
)
LIBRARIES = ("blosc2", "zipnn")
THREADS = 2
ROUNDS = 5
PROMPTS = 8
# Blocks of a prompt, at least, and its tokens at least.
BLOCKS, TOKENS = 2, 600
HEAD = ("family", "dtype", "what", "by", "bytes", "compressed to", "compress", "restore")

# (compress, restore)
Codec = tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]


def main(
    out: Annotated[Path, typer.Option(help="JSON file.")] = Path("docs/generated/lossless.json"),
    families: Annotated[str, typer.Option(help="Which, separated by commas.")] = ",".join(SHOWN),
    render_only: Annotated[bool, typer.Option(help="Only write the page's table.")] = False,
) -> None:
    """Compress what eight prompts leave in a store, and restore it."""
    if not render_only:
        with shown() as progress:
            cases = [case for case in CASES if case[0] in families.split(",")]
            task = progress.add_task("families", total=len(cases))
            rows = [row for case in cases for row in measure(*case, progress, task)]
        made = {"threads": THREADS, "rounds": ROUNDS, "libraries": versions(LIBRARIES)}
        write(out, {**header("benchmarks.lossless"), **made, "rows": rows})
    figures = read(out)
    page = page_of(out, "design.md")
    if page.exists():
        replace(page, "lossless", table(figures))
    print(table(figures))


def measure(family: str, dtype: str, progress: Progress, task: Any) -> list[dict[str, Any]]:
    """A row for each kind of record and library."""
    rows = []
    for what, payloads in stored(family, dtype).items():
        for name in LIBRARIES:
            made = compressed(codec(name, dtype), payloads)
            rows.append({"family": family, "dtype": dtype, "what": what, "by": name, **made})
    progress.advance(task)
    return rows


def stored(family: str, dtype: str) -> dict[str, list[bytes]]:
    """Payloads of the records of some prompts: those of attention, and of states."""
    import benchmarks.quiet  # noqa: F401  # for the engines only: a test imports this file
    from lmcache_hybrid.tools.tiny_models import make_model
    from tests.e2e.engine import Engine

    found: dict[str, list[bytes]] = {"attention": [], "state": []}
    with tempfile.TemporaryDirectory() as folder:
        (records := Path(folder, "records")).mkdir()
        model = make_model(family, Path(folder, "model"))
        lmcache = {"local_cpu": False, "remote_url": f"fs://localhost:0{records}"}
        with Engine(model, lmcache, dtype=dtype, max_model_len=8192) as engine:
            size = max(TOKENS, BLOCKS * engine.info["block_size"] + 16)
            for number in range(PROMPTS):
                rng = random.Random(f"{family} {number}")
                engine.ask([rng.randrange(32, 127) for _ in range(size)], 1)
            engine.settle()
        for file in sorted(records.rglob("*")):
            record = file.read_bytes() if file.is_file() else b""
            if MAGIC not in record[:4096]:  # a lock, or a list
                continue
            record = record[record.index(MAGIC) :]  # LMCache's own head is before it
            head = read_header(record)
            kind = "attention" if head.kind == ATTENTION else "state"
            found[kind].append(record[HEADER_BYTES : HEADER_BYTES + head.length])
    assert all(found.values()), {what: len(payloads) for what, payloads in found.items()}
    return found


def codec(name: str, dtype: str) -> Codec:
    """A library with the settings that it has for numbers of this type."""
    if name == "zipnn":
        from zipnn import ZipNN

        zipped = ZipNN(input_format="byte", bytearray_dtype=dtype, threads=THREADS)
        # It changes what it is given, even where that is bytes.
        return lambda data: zipped.compress(bytearray(data)), zipped.decompress
    import blosc2

    blosc2.set_nthreads(THREADS)
    settings = {
        "codec": blosc2.Codec.ZSTD,
        "clevel": 1,
        "typesize": 2 if dtype == "bfloat16" else 4,
        "filters": [blosc2.Filter.BITSHUFFLE],
        "nthreads": THREADS,
    }
    return lambda data: blosc2.compress2(data, **settings), blosc2.decompress2


def compressed(codec: Codec, payloads: Sequence[bytes]) -> dict[str, Any]:
    """Bytes before and after; GB of the bytes before that each direction takes in a second."""
    compress, restore = codec
    times: dict[str, list[float]] = {"compress": [], "restore": []}
    for round_ in range(ROUNDS + 1):
        began = time.perf_counter()
        small = [compress(payload) for payload in payloads]
        middle = time.perf_counter()
        again = [restore(each) for each in small]
        ended = time.perf_counter()
        assert all(bytes(a) == b for a, b in zip(again, payloads, strict=True)), "not lossless"
        if round_:
            times["compress"].append(middle - began)
            times["restore"].append(ended - middle)
    size = sum(map(len, payloads))
    rates = {way: size / median(seconds) / 1e9 for way, seconds in times.items()}
    return {"bytes": size, "compressed": sum(map(len, small)), **rates}


def table(figures: dict[str, Any]) -> str:
    """A row for each family, kind of record and library."""
    rows = [
        [
            *(row[name] for name in HEAD[:4]),
            f"{row['bytes']:,}",
            f"{100 * row['compressed'] / row['bytes']:.0f} %",
            *(f"{row[way]:.2f} GB/s" for way in HEAD[6:]),
        ]
        for row in figures["rows"]
    ]
    made = f"`{figures['command']}`, {figures['threads']} threads, medians of {figures['rounds']}"
    return f"{markdown(HEAD, rows, left=4)}\n\n{made}; {figures['date']}; {figures['machine']}."


if __name__ == "__main__":
    typer.run(main)
