# SPDX-License-Identifier: Apache-2.0
import os
import threading

import pytest

from lmcache_hybrid.copies import WORTH_A_THREAD, Threads


@pytest.fixture
def threads():
    made = Threads("test")
    yield made
    made.close()


def test_little_is_done_by_the_caller(threads):
    seen = []
    threads.each(lambda i: seen.append((i, threading.get_ident())), range(3), WORTH_A_THREAD - 1)
    assert seen == [(i, threading.get_ident()) for i in range(3)]


def test_much_is_done_by_others(threads):
    seen = []
    threads.each(lambda i: seen.append((i, threading.get_ident())), range(30), WORTH_A_THREAD)
    assert sorted(i for i, _ in seen) == list(range(30))
    assert threading.get_ident() not in {ident for _, ident in seen}


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one thread only")
def test_nothing_goes_on_after_a_failure_is_raised(threads):
    """Memory that it writes to may belong to somebody else by then."""
    second, running = threading.Event(), set()

    def work(i):
        if i == 0:
            second.wait(10)
            raise ValueError("first")
        running.add(i)
        second.set()
        threading.Event().wait(0.05)
        running.discard(i)

    with pytest.raises(ValueError, match="first"):
        threads.each(work, range(30), WORTH_A_THREAD)
    assert not running


def test_threads_may_run_on_all_cores_of_the_process(threads):
    """vLLM binds its main thread to one core, and a thread inherits that of its parent."""
    everywhere = os.sched_getaffinity(0)
    made = []

    def bound():
        os.sched_setaffinity(0, {min(everywhere)})
        one = Threads("bound")
        one.each(lambda i: made.append(os.sched_getaffinity(0)), range(2), WORTH_A_THREAD)
        one.close()

    thread = threading.Thread(target=bound)
    thread.start()
    thread.join()
    assert made == [everywhere] * 2
