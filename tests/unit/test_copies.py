# SPDX-License-Identifier: Apache-2.0
import os
import threading

import pytest

from lmcache_hybrid.worker import copy_threads
from lmcache_hybrid.worker.copy_threads import WORTH_A_THREAD, CopyThreads


@pytest.fixture
def threads():
    made = CopyThreads("test")
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


@pytest.mark.parametrize("cores, expected", [(1, 1), (3, 3), (64, 4)])
def test_no_more_than_four_threads_copy(threads, monkeypatch, cores, expected):
    """And no more than there are cores; docs/security.md says so of digests, too."""
    counts, start = [], copy_threads.started
    monkeypatch.setattr(
        copy_threads, "started", lambda count, *rest: (counts.append(count), start(1, *rest))[1]
    )
    threads._cores = set(range(cores))
    monkeypatch.setattr(copy_threads, "anywhere", lambda cores: None)
    threads.each(lambda i: None, range(9), WORTH_A_THREAD)
    assert counts == [expected]


def test_threads_may_run_on_all_cores_of_the_process(threads):
    """vLLM binds its main thread to one core, and a thread inherits that of its parent."""
    everywhere = os.sched_getaffinity(0)
    made = []

    def bound():
        os.sched_setaffinity(0, {min(everywhere)})
        one = CopyThreads("bound")
        one.each(lambda i: made.append(os.sched_getaffinity(0)), range(2), WORTH_A_THREAD)
        one.close()

    thread = threading.Thread(target=bound)
    thread.start()
    thread.join()
    assert made == [everywhere] * 2


def test_without_room_for_threads_the_caller_does_all(monkeypatch):
    """A pool that starts threads one by one raises here, and does the work later all the same."""
    start, room, done = threading.Thread.start, [1], []

    def limited(thread):
        if not room:
            raise RuntimeError("can't start new thread")
        room.pop()
        start(thread)

    monkeypatch.setattr(copy_threads, "_cores", lambda: {0, 1})
    monkeypatch.setattr(threading.Thread, "start", limited)
    crowded = CopyThreads("crowded")
    before = threading.active_count()
    crowded.each(lambda i: done.append((i, threading.get_ident())), range(5), WORTH_A_THREAD)
    assert done == [(i, threading.get_ident()) for i in range(5)]
    for thread in threading.enumerate():
        if thread.name.startswith("crowded"):
            thread.join(10)
    assert threading.active_count() <= before and len(done) == 5
    room.extend([1, 1])
    crowded.each(lambda i: done.append((i, threading.get_ident())), range(5), WORTH_A_THREAD)
    assert threading.get_ident() not in {ident for _, ident in done[5:]}
    crowded.close()


def test_cores_that_were_taken_away_end_no_thread(monkeypatch):
    monkeypatch.setattr(copy_threads, "_cores", lambda: {1022, 1023})  # none that is there
    with pytest.raises(OSError):
        os.sched_setaffinity(0, {1022, 1023})
    moved, done = CopyThreads("moved"), []
    moved.each(done.append, range(5), WORTH_A_THREAD)
    assert sorted(done) == list(range(5))
    moved.close()
