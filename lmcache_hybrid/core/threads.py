# SPDX-License-Identifier: Apache-2.0
"""Thread pools whose threads all run from the start."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


def started(
    threads: int, name: str, initializer: Callable[[], object] | None = None
) -> ThreadPoolExecutor:
    """Make a pool and start its threads, so that ``submit`` starts none later.

    A pool queues work before it starts a thread for it. Where the process may not have
    another one, ``submit`` raises, and the work is done all the same by a thread that nobody
    waits for, perhaps in blocks that vLLM has given to another request.

    Args:
        threads: how many.
        initializer: called once by each of them; must not raise.

    Raises:
        RuntimeError: not all of them could be started; none is left.
    """
    pool = ThreadPoolExecutor(threads, name, initializer)
    go_on = threading.Event()
    try:
        for _ in range(threads):
            pool.submit(go_on.wait)
    except RuntimeError:
        pool.shutdown(wait=False)
        raise
    finally:
        go_on.set()
    return pool
