# SPDX-License-Identifier: Apache-2.0
"""python -m benchmarks.folders: records in files, read through LMCache and plainly, in turns."""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Annotated

os.environ.setdefault("LMCACHE_LOG_LEVEL", "CRITICAL")
os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")

import torch  # noqa: E402
import typer  # noqa: E402
from lmcache.v1.config import LMCacheEngineConfig  # noqa: E402

from benchmarks.figures import header, markdown, page_of, read, replace, write
from lmcache_hybrid.core.keys import ATTENTION, RecordKey  # noqa: E402
from lmcache_hybrid.storage.lmcache_store import LMCacheStore  # noqa: E402
from lmcache_hybrid.storage.record_format import digests_of, record_bytes  # noqa: E402
from lmcache_hybrid.storage.remote.record_connector import unwrapped  # noqa: E402
from lmcache_hybrid.storage.remote.silent_reads import READERS  # noqa: E402
from lmcache_hybrid.tools.standalone import make_engine  # noqa: E402
from lmcache_hybrid.upstream.lmcache_home import LMCacheEngineBuilder  # noqa: E402

COUNT, PAYLOAD, BLOCK = 48, 16_000_000, 16
PAGE = "performance.md"
# Where the files are when they are read, and what part of the plain rate is wanted.
PLACES = {"not in the page cache": 0.9, "in the page cache": 0.7}
KEYS = [RecordKey(ATTENTION, 0, bytes([at]) * 32, (at + 1) * BLOCK) for at in range(COUNT)]


def main(
    out: Annotated[Path, typer.Option(help="JSON file; its table is in the page above.")] = Path(
        "docs/generated/folders.json"
    ),
    folder: Annotated[Path | None, typer.Option(help="Where to make the files; /tmp if not.")] = (
        None
    ),
    rounds: Annotated[int, typer.Option(help="Measurements of each, taken in turns.")] = 5,
    render_only: Annotated[
        bool, typer.Option("--render-only", help="The table anew from the JSON file.")
    ] = False,
) -> None:
    """Read 48 records of 16 MB, as a load does up to the check of their bytes."""
    if not render_only:
        figures = {
            **header("benchmarks.folders"),
            "rounds": rounds,
            "bytes": COUNT * record_bytes(PAYLOAD),
            "threads": READERS,
            "seconds": measure(folder, rounds),
        }
        write(out, figures)
    page = page_of(out, PAGE)
    if page.exists():
        replace(page, "folders", table(read(out)))


def measure(folder: Path | None, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds by place and way."""
    seconds: dict[str, dict[str, list[float]]] = {
        place: {"plain": [], "connector": []} for place in PLACES
    }
    with tempfile.TemporaryDirectory(dir=folder) as made, opened(Path(made)) as store:
        files = sorted(Path(made).glob("*.data"))
        buffers = [bytearray(file.stat().st_size) for file in files]
        ways: dict[str, Callable[[], None]] = {
            "plain": lambda: read_plainly(files, buffers),
            "connector": lambda: read_through(store),
        }
        for place, times in seconds.items():
            for round_ in range(rounds + 1):
                for way, read in ways.items():
                    if "not" in place:
                        evict(files)
                    began = time.perf_counter()
                    read()
                    if round_:  # the first one touches new memory
                        times[way].append(time.perf_counter() - began)
    return seconds


@contextmanager
def opened(folder: Path) -> Iterator[LMCacheStore]:
    """A store that holds the records."""
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=BLOCK, local_cpu=False, max_local_cpu_size=1.5 * COUNT * PAYLOAD / (1 << 30)
    )
    config.remote_url = f"fs://localhost:0{folder}"
    engine = make_engine("benchmark", config, "benchmark", 0, 1)
    engine.post_init()
    try:
        store = LMCacheStore(engine, "benchmark", bytes(16), PAYLOAD)
        payload = torch.randint(0, 256, (PAYLOAD,), dtype=torch.uint8)
        digests = digests_of(memoryview(payload.numpy()))
        (backend,) = (b for n, b in store.manager.storage_backends.items() if n == "RemoteBackend")
        for key in KEYS:
            buffer = store.reserve(PAYLOAD)
            assert buffer is not None
            buffer.payload.copy_(payload)
            buffer.digests = digests
            store.put([(key, buffer)])
        while len(store.locate(KEYS)) < COUNT or unwrapped(backend.connection).writing:
            time.sleep(0.05)
        assert not store.failed_writes
        os.sync()
        yield store
    finally:
        LMCacheEngineBuilder.destroy("benchmark")


def read_through(store: LMCacheStore) -> None:
    claim = store.claim(dict.fromkeys(KEYS, "RemoteBackend"))
    assert claim is not None
    for buffer in store.fetch(claim, KEYS):
        buffer.release()
    claim.release()


def read_plainly(files: list[Path], buffers: list[bytearray]) -> None:
    """As many threads as loads have, each with one ``readinto`` for a file."""

    def read(file: Path, buffer: bytearray) -> None:
        with file.open("rb", buffering=0) as data:
            view, at = memoryview(buffer), 0
            while at < len(buffer):
                at += data.readinto(view[at:]) or 0

    with ThreadPoolExecutor(READERS) as threads:
        list(threads.map(read, files, buffers))


def evict(files: list[Path]) -> None:
    """Have the system forget what it holds of the files."""
    for file in files:
        with file.open("rb") as data:
            os.posix_fadvise(data.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def table(figures: dict) -> str:
    head = ["Files are", "plain reads, GB/s", "through the connector, GB/s", "of plain", "goal"]
    rows = []
    for place, goal in PLACES.items():
        plain, connector = (median(figures["seconds"][place][w]) for w in ("plain", "connector"))
        rows.append(
            [
                place,
                *(f"{figures['bytes'] / seconds / 1e9:.2f}" for seconds in (plain, connector)),
                *(f"{100 * share:.0f} %" for share in (plain / connector, goal)),
            ]
        )
    said = (
        f"`{figures['command']}`, {COUNT} records of {PAYLOAD / 1e6:.0f} MB, {figures['threads']} "
        f"threads, medians of {figures['rounds']}; {figures['machine']}, {figures['date']}."
    )
    return f"{markdown(head, rows)}\n\n{said}"


if __name__ == "__main__":
    typer.run(main)
