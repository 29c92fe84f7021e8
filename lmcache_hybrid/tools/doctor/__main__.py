# SPDX-License-Identifier: Apache-2.0
"""Runs the checks in a process of their own: ``python -m lmcache_hybrid.tools.doctor FD``.

Reads a line ``{"model": ..., "flags": [...]}`` from standard input and writes one JSON line per
finding to the file descriptor. So vLLM's and LMCache's output stays apart, findings survive a
check that hangs or dies, and nothing is left running.
"""

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Any

from lmcache_hybrid.tools.doctor.finding import Finding, error, one_line
from lmcache_hybrid.tools.doctor.installation import (
    check_allocator,
    check_compiled,
    check_plugin,
    check_sockets,
    check_versions,
)


def findings(model: str | None, flags: Sequence[str] = ()) -> Generator[Finding, None, None]:
    """Run all checks, those that explain others first."""
    yield from check_versions()
    from lmcache_hybrid.upstream import versions

    if None in versions.found():
        return  # nothing else can be imported
    from lmcache_hybrid.config.lmcache_config import STABLE_HASH
    from lmcache_hybrid.tools.doctor.hashing import in_another_process

    other_hash = in_another_process(STABLE_HASH)
    yield from guarded(check_plugin)
    yield from guarded(check_compiled)
    yield from guarded(check_allocator)
    yield from guarded(check_sockets)
    from lmcache_hybrid.tools.doctor.backends import check_backends
    from lmcache_hybrid.tools.doctor.capacity import (
        check_disks,
        check_memory,
        check_prompts,
    )
    from lmcache_hybrid.tools.doctor.context import read_context
    from lmcache_hybrid.tools.doctor.folders import check_folders
    from lmcache_hybrid.tools.doctor.hashing import check_hash
    from lmcache_hybrid.tools.doctor.options import (
        check_chunk_size,
        check_hosts,
        check_model,
        check_options,
    )
    from lmcache_hybrid.tools.doctor.redis_memory import check_redis

    yield from guarded(check_hash, other_hash)
    context = read_context(model, flags)
    for check in (
        check_model,
        check_hosts,
        check_options,
        check_chunk_size,
        check_memory,
        check_prompts,
        check_folders,
        check_disks,
        check_redis,
        check_backends,
    ):
        yield from guarded(check, context)


def guarded(check: Callable[..., Iterator[Finding]], *arguments: Any) -> Iterator[Finding]:
    """Run a check; its failure becomes a finding, and the others go on."""
    try:
        yield from check(*arguments)
    except Exception as failure:
        yield error(
            check.__name__.removeprefix("check_"),
            f"The check itself failed: {type(failure).__name__}: {one_line(failure)}.",
            "Report this with the command and its output.",
        )


def main() -> None:
    signal.signal(signal.SIGTERM, _stop)
    code = 1
    try:
        task = json.loads(sys.stdin.readline())
        with (
            os.fdopen(int(sys.argv[1]), "w", buffering=1) as out,
            # If nobody reads on, a check that has begun still cleans up.
            closing(findings(**task)) as found,
        ):
            for finding in found:
                out.write(json.dumps(asdict(finding)) + "\n")
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(code)  # LMCache's threads would hold this process


def _stop(*_: Any) -> None:
    """End by an exception, so that the test record is deleted; only once, to let that finish."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit


if __name__ == "__main__":
    main()
