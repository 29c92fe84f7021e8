# SPDX-License-Identifier: Apache-2.0
"""Every family on every backend: the same tokens, log-probabilities and hits as vLLM alone.

Difference of log-probability allowed: 0 against vLLM's own prefix cache, which
resumes at the same boundary and so splits the prompt the same way. Against a
cold run it is 0 for repeated prompts, whose last chunk is the same; an extended
prompt is split elsewhere when cold, and matrix products of other shapes round
bfloat16 otherwise, so there only the first token is compared.
"""

import pytest

from tests.bucket import EXTRA, Bucket
from tests.e2e.engine import Engine
from tests.e2e.golden import FAMILIES, Golden
from tests.marks import slow

pytestmark = pytest.mark.engine


def over(*quick: str) -> pytest.MarkDecorator:
    """All families; those that ``make test`` takes first."""
    rest = (family for family in FAMILIES if family not in quick)
    return pytest.mark.parametrize("golden", [*quick, *slow(*rest)], indirect=True, scope="module")


def store_all(engine: Engine, golden: Golden) -> None:
    """Ask every stored prompt cold; nothing may be hit, everything is written."""
    for case in golden.cases:
        engine.forget()
        answer = engine.ask(list(case.stored))
        assert answer.cached == 0, f"{case.name} hit before it was stored"
    engine.settle()
    counts = engine.counts()
    assert counts["worker"]["saved_states"] >= len(golden.cases)
    assert counts["worker"]["skipped_saves"] == 0


def check_all(engine: Engine, golden: Golden, again: bool = False) -> None:
    """Ask every prompt with only the store warm, and compare.

    ``again``: for the second time. By then the extended prompts have left a
    deeper boundary themselves, so only repeated ones are asked.
    """
    cases = [case for case in golden.cases if not again or case.asked == case.stored]
    before = engine.counts()
    hit_tokens = 0
    for case in cases:
        engine.forget()
        answer = engine.ask(list(case.asked))
        warm, cold = golden.warm[case.name], golden.cold[case.name]
        assert answer.external == answer.cached == warm.cached > 0, case.name
        assert answer.output == warm.output, case.name
        if case.asked == case.stored:
            assert answer.output == cold.output, case.name
        else:
            assert answer.tokens[0] == cold.tokens[0], case.name
        hit_tokens += answer.external
    counts = engine.counts()
    loaded = counts["worker"]["loaded_states"] - before["worker"]["loaded_states"]
    assert loaded == len(cases)
    assert counts["scheduler"]["hit_tokens"] - before["scheduler"]["hit_tokens"] == hit_tokens
    assert counts["worker"]["failed_loads"] == counts["scheduler"]["failed_loads"] == 0
    check_nothing_held(engine)


def check_nothing_held(engine: Engine) -> None:
    """No pin, claim, buffer or request outlives the requests."""
    live = engine.counts()["live"]
    assert {name: live[name] for name in ("tracked", "claims", "pinned", "held")} == {
        "tracked": 0,
        "claims": 0,
        "pinned": 0,
        "held": 0,
    }


@over("qwen3_next", "granite4", "lfm2")
def test_family_is_what_we_think(golden: Golden) -> None:
    """At least one attention and one state group; between them the shapes that matter."""
    assert "MambaSpec" in golden.groups and "FullAttentionSpec" in golden.groups
    if golden.family == "qwen3_next":
        assert golden.groups[0] == "MambaSpec" and golden.groups.count("MambaSpec") == 3
        assert golden.block_size != 128


@over("qwen3_next")
def test_ram_and_fs_after_a_restart(golden: Golden, tmp_path) -> None:
    config = {"local_cpu": True, "remote_url": f"fs://localhost:0{tmp_path}"}
    with Engine(golden.model, config) as engine:
        assert engine.info["connector"] == "vllm_patch.connector"
        store_all(engine, golden)
        check_all(engine, golden)
        assert engine.reads().keys() == {"LocalCPUBackend"}
        engine.settle()
    config["remote_url"] = f"file://{tmp_path}"  # the same files
    with Engine(golden.model, config) as engine:
        check_all(engine, golden, again=True)
        assert "RemoteBackend" in engine.reads()


@over("lfm2")
def test_local_disk_and_redis_after_restarts(golden: Golden, tmp_path, redis_url: str) -> None:
    disk = {"local_cpu": False, "local_disk": str(tmp_path), "max_local_disk_size": 2}
    redis = {"local_cpu": False, "remote_url": redis_url}
    with Engine(golden.model, {**disk, **redis}) as engine:
        store_all(engine, golden)
        check_all(engine, golden)
        assert engine.reads().keys() == {"LocalDiskBackend"}
        engine.settle()
    for config, backend in ((disk, "LocalDiskBackend"), (redis, "RemoteBackend")):
        with Engine(golden.model, config) as engine:
            check_all(engine, golden, again=True)
            assert engine.reads().keys() == {backend}


@pytest.mark.parametrize("golden", ["lfm2"], indirect=True, scope="module")
def test_s3_after_a_restart(golden: Golden, bucket: Bucket) -> None:
    config = {"local_cpu": False, "remote_url": bucket.url, "extra_config": EXTRA}
    with Engine(golden.model, config) as engine:
        store_all(engine, golden)
        check_all(engine, golden)
        engine.settle()
    with Engine(golden.model, config) as engine:
        check_all(engine, golden, again=True)
        assert engine.reads().keys() == {"RemoteBackend"}
