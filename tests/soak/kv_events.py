# SPDX-License-Identifier: Apache-2.0
"""How often a router foresees an engine's hits from its events alone: ``--help`` lists options.

    PYTHONPATH=. .venv/bin/python tests/soak/kv_events.py --asks 1000 --starts 3

RAM and disk are too small for the prompts, so both evict all the time; the engine is started
several times on one disk. Every tenth ask waits until no event has come for a second.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import typer

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

from router import Asks, free_ports, publishing, room_for  # noqa: E402
from subscriber import Subscriber  # noqa: E402

from lmcache_hybrid.tools.tiny_models import make_model  # noqa: E402

SETTLED, HURRIED = 1.0, 0.05  # seconds without an event


def main(asks: int = 1000, starts: int = 3, seed: int = 1, trunks: int = 12) -> None:
    """Print one JSON object: asks, those foreseen rightly, and those that promised too much."""
    counts = dict.fromkeys(("asks", "right", "hits", "too_much", "too_little"), 0)
    counts |= {"settled": 0, "settled_too_much": 0}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        model = make_model("qwen3_next", Path(folder, "model"))
        config = {"local_cpu": True, "max_local_cpu_size": room_for(model, trunks // 3)}
        config |= {"local_disk": str(Path(folder, "disk"))}
        config |= {"max_local_disk_size": room_for(model, trunks * 2 // 3)}
        ports = free_ports()
        router = Subscriber(*ports)
        stream = Asks(router, model, seed, trunks)
        for _ in range(starts):
            with publishing(ports, model, config) as engine:
                for at in range(asks // starts):
                    settled = at % 10 == 0
                    foreseen, hit = stream.ask(engine, quiet=SETTLED if settled else HURRIED)
                    counts["asks"] += 1
                    counts["right"] += foreseen == hit
                    counts["hits"] += hit > 0
                    counts["too_much"] += foreseen > hit
                    counts["too_little"] += foreseen < hit
                    counts["settled"] += settled
                    counts["settled_too_much"] += settled and foreseen > hit
            print(json.dumps(counts), file=sys.stderr, flush=True)
        router.close()
    seconds = round(time.monotonic() - began)
    print(json.dumps(counts | {"starts": starts, "seconds": seconds, "seed": seed}))


if __name__ == "__main__":  # the engine's process imports this file
    typer.run(main)
