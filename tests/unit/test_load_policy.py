# SPDX-License-Identifier: Apache-2.0
"""Which hits are loaded, and which are computed because that is faster."""

import math
from types import SimpleNamespace

import pytest

from lmcache_hybrid.protocol.lookup import LookupResult
from lmcache_hybrid.scheduler import load_policy
from lmcache_hybrid.scheduler.load_policy import LoadWhenFaster
from lmcache_hybrid.scheduler.speeds import Line, Speeds

from .helpers import PLAN, N, make_request

RAM, DISK = "LocalCPUBackend", "LocalDiskBackend"
PAGE_BYTES = dict.fromkeys(PLAN.groups, 1_000_000)  # a block of a group
END_BYTES = 3_000_000  # three groups of states


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Engine:
    """A policy, and an engine whose speeds are given."""

    def __init__(self, compute: float | None = 1000.0, **tiers: float) -> None:
        """Measure each once.

        Args:
            compute: tokens a second, None for not measured.
            tiers: bytes a second by backend.
        """
        self.clock = Clock()
        self.policy = LoadWhenFaster(PLAN, PAGE_BYTES, self.clock)
        if compute is not None:
            self.compute(100 * N, 100.0)  # the first says nothing
            for tokens in (100 * N, 300 * N):
                self.compute(tokens, tokens / compute)
        for tier, speed in tiers.items():
            for blocks in (10, 100):
                self.load(tier, blocks, (blocks * 1e6 + END_BYTES) / speed)

    def compute(self, tokens: int, seconds: float) -> None:
        request = SimpleNamespace(
            request_id="computed",
            num_computed_tokens=0,
            num_output_tokens=0,
            num_prompt_tokens=tokens,
            num_preemptions=0,
        )
        self.policy.scheduled([request])
        self.clock.now += seconds
        request.num_output_tokens = 1
        self.policy.scheduled([])

    def load(self, tier: str, blocks: int, seconds: float, failed: bool = False) -> None:
        self.policy.sent("loaded", hit((tier, blocks)), 0)
        self.clock.now += seconds
        self.policy.ended(["loaded"], ["loaded"] if failed else [], {})

    def give_up(self, tier: str, blocks: int, after: float, whole: float) -> None:
        """A load is given up ``after`` seconds, which would have taken ``whole``."""
        self.policy.sent("slow", hit((tier, blocks)), 0)
        self.clock.now += after
        self.policy.ended(["slow"], ["slow"], {"slow": whole})

    def leave_out(self, *runs: tuple[str, int]) -> list[float | None]:
        """Judge hits until one is loaded all the same; returns what was chosen."""
        return [self.judge(*runs) for _ in range(load_policy.TRY_EVERY)]

    def judge(self, *runs: tuple[str, int], start: int = 0) -> float | None:
        request = SimpleNamespace(request_id="judged")
        return self.policy.judge(request, hit(*runs), start)

    def loads(self, *runs: tuple[str, int], start: int = 0) -> bool:
        return self.judge(*runs, start=start) is not None


def hit(*runs: tuple[str, int]) -> LookupResult:
    blocks = sum(count for _, count in runs)
    return LookupResult(blocks, blocks, tuple(runs))


# What was measured


def test_a_line_finds_both_parts():
    line = Line(0.9)
    for x, y in ((1000, 1), (2000, 1), (50_000, 2)):
        line.add(x, y, 0.001 * x + 0.2 * y, x)
    assert line.at(4000, 1) == pytest.approx(4.2, rel=1e-3)


def test_a_line_over_one_size_goes_through_the_origin():
    line = Line(0.9)
    assert line.at(1, 1) is None
    for _ in range(5):
        line.add(1000, 1, 2.0, 1000)
    assert line.at(500, 1) == pytest.approx(1.0)


@pytest.mark.parametrize("measured", [((1, 9.0), (100, 1.0)), ((1, 0.1), (2, 9.0), (100, 9.1))])
def test_no_estimate_is_negative(measured):
    line = Line(0.9)
    for x, seconds in measured:
        line.add(x, 1, seconds, x)
    assert all(line.at(x, 1) >= 0 for x in (1, 10, 100, 1000))


def test_a_new_speed_replaces_the_old_one():
    speeds = Speeds()
    for _ in range(20):
        speeds.loaded([{DISK: 10**9}], 1.0)
    for _ in range(10):
        speeds.loaded([{DISK: 10**9}], 5.0)
    assert speeds.load_seconds({DISK: 10**9}) == pytest.approx(5.0, rel=0.05)


def test_depth_makes_tokens_slower():
    speeds = Speeds()
    for tokens in (1000, 4000, 16_000, 2000, 8000):
        speeds.computed(0, tokens, 1e-4 * tokens + 1e-8 * tokens * tokens)
    assert speeds.compute_seconds(32_000, 33_000) > 3 * speeds.compute_seconds(0, 1000)


def test_the_time_of_two_backends_is_split_as_expected():
    speeds = Speeds()
    for _ in range(3):
        speeds.loaded([{RAM: 10**9}], 0.1)
        speeds.loaded([{DISK: 10**9}], 1.0)
    for _ in range(10):
        speeds.loaded([{RAM: 10**9, DISK: 10**9}], 2.2)
    assert speeds.load_seconds({DISK: 10**9}) == pytest.approx(2.0, rel=0.1)
    assert speeds.load_seconds({RAM: 10**9}) == pytest.approx(0.2, rel=0.1)


# What is decided


def test_before_anything_was_computed_a_slow_engine_is_assumed():
    engine = Engine(None)
    first = engine.judge((DISK, 100))  # 1600 tokens
    assert first == pytest.approx(1.25 * 16 + 0.05)
    engine.load(DISK, 100, 5.0)
    assert engine.judge((DISK, 100)) == math.inf
    engine = Engine(None, **{DISK: 1e6})
    assert not engine.loads((DISK, 100))  # 103 s


def test_what_was_computed_counts_more_than_what_was_assumed():
    engine = Engine(10.0, **{DISK: 1e6})
    assert engine.loads((DISK, 100))  # 103 s instead of 160 s


def test_the_first_load_of_a_backend_has_a_little_longer_than_computing():
    assert Engine().judge((DISK, 100)) == pytest.approx(1.25 * 1.6 + 0.05)


def test_what_is_faster_is_done():
    engine = Engine(**{RAM: 1e9, DISK: 1e7})
    assert engine.loads((RAM, 100))  # 0.1 s instead of 1.6 s
    assert not engine.loads((DISK, 100))  # 10 s


def test_a_load_that_is_expected_to_be_faster_has_no_deadline():
    assert Engine(**{RAM: 1e9}).judge((RAM, 100)) == math.inf


def test_loads_under_way_are_waited_for():
    engine = Engine(**{RAM: 1e8})
    assert engine.loads((RAM, 100))  # 1.03 s instead of 1.6 s
    engine.policy.sent("other", hit((RAM, 100)), 0)
    assert not engine.loads((RAM, 100))
    engine.clock.now += 1.0
    engine.policy.ended(["other"], [], {})
    assert engine.loads((RAM, 100))


def test_loads_that_were_faster_than_expected_are_not_waited_for():
    """Where one load always follows another, so that none is ever the last."""
    engine = Engine(**{RAM: 1e8})
    engine.policy.sent("0", hit((RAM, 100)), 0)
    for number in range(20):
        engine.policy.sent(str(number + 1), hit((RAM, 100)), 0)  # 1.03 s, it was
        engine.clock.now += 0.1
        engine.policy.ended([str(number)], [], {})
    assert engine.loads((RAM, 100))  # 0.2 s instead of 1.6 s


def test_what_vllm_holds_is_not_loaded():
    engine = Engine(**{DISK: 4e7})
    assert not engine.loads((DISK, 10))  # 0.325 s instead of 0.16 s
    engine.policy.sent("rest", hit((RAM, 90), (DISK, 10)), 90 * N)
    assert engine.policy._sent["rest"][1] == {DISK: 10 * 10**6 + END_BYTES}


def test_a_slow_backend_must_be_clearly_faster_to_come_back(hybrid_log):
    engine = Engine(**{DISK: 1e7})
    engine.leave_out((DISK, 100))
    engine.load(DISK, 100, 1.45)  # of 1.6
    assert not engine.loads((DISK, 100))
    engine.clock.now += load_policy.LOG_SECONDS
    engine.load(DISK, 100, 1.2)
    assert engine.loads((DISK, 100))
    said = [record.getMessage() for record in hybrid_log.records]
    assert [line.split(":")[0] for line in said] == [
        f"Hits in {DISK} are computed from now on",
        f"Hits in {DISK} are loaded again",
    ]


@pytest.mark.parametrize("runs", [((DISK, 100),), ((RAM, 20), (DISK, 80)), ((RAM, 300), (DISK, 9))])
def test_one_fast_load_is_enough_to_come_back(runs):
    engine = Engine(**{RAM: 1e9, DISK: 1e6})
    *left, tried = engine.leave_out(*runs)
    assert not any(left) and tried < 7
    engine.load(DISK, 100, 0.1)
    assert engine.judge(*runs) == math.inf


def test_what_was_measured_just_now_is_not_forgotten():
    """Short hits are left out beside long ones, because each load takes a while to begin."""
    engine = Engine()
    for blocks in (1, 100):
        engine.load(DISK, blocks, 0.05 + blocks / 1000)
    for _ in range(10):
        assert engine.loads((DISK, 100))  # 0.15 s instead of 1.6 s
        engine.policy.sent("long", hit((DISK, 100)), 0)
        assert not engine.loads((DISK, 1))
        engine.clock.now += 0.15
        engine.policy.ended(["long"], [], {})
        assert not engine.loads((DISK, 1))  # 0.051 s instead of 0.016 s


def test_no_flood_of_log_lines(hybrid_log):
    engine = Engine(**{RAM: 1e8, DISK: 1e8})
    for _ in range(100):
        assert not engine.loads((DISK, 1))
        assert engine.loads((DISK, 100))
        assert engine.loads((RAM, 100))
        engine.policy.sent("other", hit((RAM, 100)), 0)
        assert not engine.loads((RAM, 100))  # no sign of a slow backend
        engine.clock.now += 1.03
        engine.policy.ended(["other"], [], {})
    said = [record.getMessage() for record in hybrid_log.records]
    assert 0 < len(said) <= 1 + 103 / load_policy.LOG_SECONDS
    assert not any(RAM in line for line in said)


def test_a_first_load_that_broke_off_says_nothing():
    engine = Engine()
    engine.load(DISK, 100, 0.001, failed=True)
    assert engine.judge((DISK, 100)) < math.inf


@pytest.mark.parametrize("tries", [0, 2, load_policy.TRY_EVERY])
def test_a_load_that_was_given_up_does_not_bring_its_backend_back(tries):
    """It took less time than computing takes."""
    engine = Engine(**{DISK: 1e7})
    for _ in range(tries):
        engine.judge((DISK, 100))
    engine.give_up(DISK, 100, after=0.4, whole=4.0)
    for blocks in (5, 50, 100, 1000):
        assert not engine.loads((DISK, blocks))


def test_a_first_load_that_was_given_up_is_measured():
    engine = Engine()
    engine.give_up(DISK, 100, after=0.4, whole=4.0)
    assert engine.policy._speeds.load_seconds({DISK: 103 * 10**6}) == pytest.approx(4.0, rel=0.01)
    assert not engine.loads((DISK, 100))
    assert not engine.loads((DISK, 20))
    engine.give_up(RAM, 100, after=0.4, whole=0.0)  # it waited for others
    assert engine.judge((RAM, 100)) < math.inf, "it is still the first"


def test_a_load_beside_one_that_was_given_up_says_nothing():
    engine = Engine(**{RAM: 1e9})
    for each in ("fast", "slow"):
        engine.policy.sent(each, hit((RAM if each == "fast" else DISK, 100)), 0)
    engine.clock.now += 1.0
    engine.policy.ended(["fast", "slow"], ["slow"], {"slow": 9.0})
    assert engine.loads((RAM, 100)) and not engine.loads((DISK, 100))
    assert engine.policy._speeds.load_seconds({RAM: 10**9}) == pytest.approx(1.0, rel=0.01)


def test_it_goes_on_measuring():
    engine = Engine(**{DISK: 1e7})
    judged = [engine.judge((DISK, 100)) for _ in range(2 * load_policy.TRY_EVERY)]
    tried = [seconds for seconds in judged if seconds is not None]
    assert tried == [pytest.approx(1.25 * 1.6)] * 2


def test_a_load_that_broke_off_says_nothing():
    engine = Engine(**{DISK: 1e8})
    for _ in range(5):
        engine.load(DISK, 100, 0.001, failed=True)
    assert engine.policy._speeds.load_seconds({DISK: 10**8}) == pytest.approx(1.0, rel=0.05)
    for _ in range(5):
        engine.load(DISK, 100, 60.0, failed=True)
    assert not engine.loads((DISK, 100))


def test_a_preempted_request_says_nothing():
    engine = Engine()
    before = engine.policy._speeds.compute_seconds(0, 1000)
    request = make_request(tokens=100)
    engine.policy.scheduled([request])
    engine.clock.now += 100
    request.num_preemptions = 1
    request.append_output_token_ids(1)
    engine.policy.finished(request)
    assert engine.policy._speeds.compute_seconds(0, 1000) == before
    assert not engine.policy._computing
