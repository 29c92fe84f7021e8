# SPDX-License-Identifier: Apache-2.0
"""The fingerprint of what all tensor-parallel ranks hold alike, and how ranks compare it."""

import copy
import dataclasses
from types import SimpleNamespace

from lmcache_hybrid.core.groups import GroupPlan
from lmcache_hybrid.worker import fingerprint as module
from lmcache_hybrid.worker.fingerprint import fingerprints

from . import test_fingerprint as one_rank
from .helpers import PLAN
from .test_fingerprint import FACTS, PAGES

model, made, config = one_rank.model, one_rank.made, one_rank.config

LATENT = dataclasses.replace(PLAN, replicated=PLAN.attention)


def replicas(config, monkeypatch, rank: int = 0, others=(), plan: GroupPlan = LATENT, first=0):
    """What a rank gets; the others say (name, salt) as it does, or what they are given."""
    said: list = []
    world = 1 + len(others)
    group = SimpleNamespace(world_size=world, cpu_group="cpu", rank_in_group=rank - first)
    config.parallel_config.rank, config.parallel_config.world_size = rank, first + world
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("vllm.distributed.parallel_state.get_tp_group", lambda: group)
    monkeypatch.setattr(module, "weights_identity", lambda config, problem, code: "weights")

    def all_gather_object(ranks, own, group):
        assert group == "cpu" and len(ranks) == world
        said.append(own)
        answers = [(other or own[0], bytes([at]) * 16) for at, other in enumerate(others)]
        answers.insert(rank - first, own)
        ranks[:] = answers

    monkeypatch.setattr("torch.distributed.all_gather_object", all_gather_object)
    own, found = fingerprints(config, plan, PAGES)
    return own, found, said


def test_ranks_name_equal_pages_equally(config, monkeypatch):
    alike = [replicas(config, monkeypatch, rank, [None, None]) for rank in range(3)]
    names = {found.fingerprint for _, found, _ in alike}
    assert len(names) == 1 and len({own for own, _, _ in alike} | names) == 4
    for rank, (_, found, said) in enumerate(alike):
        assert found.groups == frozenset(PLAN.attention) and found.owner == 0
        # The first rank's salt, whoever it is.
        assert found.salt == (said[0][1] if rank == 0 else bytes(16))
    assert len({said[0][1] for _, _, said in alike}) == 3, "salts are random"


def test_the_owner_is_the_first_of_the_tensor_parallel_ranks(config, monkeypatch):
    """Not of all ranks: those of another pipeline stage hold other layers."""
    _, found, _ = replicas(config, monkeypatch, rank=5, others=[None], first=4)
    assert found.owner == 4


def test_what_all_ranks_share_is_named_by_all_that_a_rank_is(config, made, monkeypatch):
    names = set()
    facts = {name: change for name, change in FACTS.items() if name not in ("rank", "world")}
    for change in (lambda config: None, *facts.values()):
        other = copy.deepcopy(made)
        change(other)
        names.add(replicas(other, monkeypatch, others=[None])[1].fingerprint)
    names.add(replicas(config, monkeypatch, others=[None, None])[1].fingerprint)
    assert len(names) == len(facts) + 2


def test_ranks_that_compute_differently_share_nothing(config, monkeypatch, hybrid_log):
    for others in ([b"other"], [None, b"other"]):
        own, found, _ = replicas(config, monkeypatch, others=others)
        assert found is None and len(own) == 16
    assert [r for r in hybrid_log.records if "compute in different ways" in r.getMessage()]


def test_one_rank_alone_and_other_models_ask_nobody(config, monkeypatch):
    assert replicas(config, monkeypatch)[1:] == (None, [])
    assert replicas(config, monkeypatch, others=[None], plan=PLAN)[1:] == (None, [])
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)
    assert fingerprints(config, LATENT, PAGES)[1] is None
