# SPDX-License-Identifier: Apache-2.0
"""Models whose images attend to themselves in both directions: none is entered in its middle."""

from dataclasses import replace
from types import SimpleNamespace as Namespace

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams

from lmcache_hybrid import connector
from lmcache_hybrid.identity.media import CONTENT, MARK
from lmcache_hybrid.scheduler.step_ends import StepEnds
from lmcache_hybrid.scheduler.whole_items import barred_boundaries

from .helpers import PLAN, WINDOWS, N, engine_config, make_request
from .lmcache_settings import lmcache_config
from .scheduler_rig import STATES, Rig, all_offers, attention_of
from .test_vllm_patch import FULL, STATE_SPEC, cache_config

WHOLE = replace(PLAN, whole_items=True)


def asked(offset: int, length: int, tokens: int = 5 * N + 1):
    """A request with an image."""
    place = PlaceholderRange(offset=offset, length=length)
    item = MultiModalFeatureSpec(None, "image", "a" * 64, place)
    request = make_request(tokens=tokens, mm_features=[item])
    request.sampling_params = SamplingParams(max_tokens=8, extra_args={MARK: CONTENT})
    return request


@pytest.mark.parametrize(
    "offset, length, hit",
    [
        (2 * N + 3, 2 * N, 2),  # 3 and 4 lie inside
        (2 * N + 3, N - 3, 4),  # it ends right at 3
        (2 * N + 3, N - 2, 4),
        (3 * N - 1, N + 2, 2),
        (4 * N, 2, 3),  # right at its first token, where vLLM may split it, too
        (4 * N - 2, 2, 4),
        (0, 4 * N + 1, 0),
        (0, 4 * N, 4),
    ],
)
def test_a_hit_ends_inside_no_image(offset, length, hit):
    request = asked(offset, length)
    stored = (5, *range(1, 5))
    assert Rig(plan=PLAN).holds(request, *stored).match(request) == (4 * N, True)
    rig = Rig(2, plan=WHOLE).holds(request, *stored)
    assert rig.match(request) == (hit * N, hit > 0)
    rig.scheduler.request_finished(request)
    rig.step()
    assert rig.ranks.num_claims == [0, 0]


def test_boundaries_inside_a_block_are_barred_too():
    request, plan = asked(N + 3, N), WHOLE.with_unit(N // 4)
    inside = {tokens for tokens in range(N + 3, 2 * N + 3) if tokens % (N // 4) == 0}
    assert barred_boundaries(request, plan) == inside and len(inside) == 4
    assert not barred_boundaries(request, PLAN)


def test_no_state_is_stored_inside_an_image():
    request, rig = asked(2 * N + 3, 2 * N), Rig(plan=WHOLE)
    save = rig.prefill(request, 3 * N)
    assert attention_of(save) == [0, 1, 2], "pages serve hits behind the image"
    assert rig.forward(request, 0, all_offers(3)) is None
    assert rig.scheduler.counts.dropped_offers == {"inside_media": len(STATES)}
    assert rig.forward(request, 2 * N, all_offers(5)).states[0][0] == 5


def test_windows_are_stored_in_front_of_an_image_at_the_end():
    request, plan = asked(3 * N + 3, 2 * N - 2), replace(WINDOWS, whole_items=True)
    rig = Rig(plan=plan)
    save = rig.prefill(request)
    assert attention_of(save) == [0, 1, 2, 3, 4]
    assert [block for _, block, _ in save.windows] == [1, 2] and save.boundaries == (3,)
    save = Rig(plan=WINDOWS).prefill(asked(3 * N + 3, 2 * N - 2))
    assert [block for _, block, _ in save.windows] == [3, 4] and save.boundaries == (5,)


def walk(made: StepEnds, count: int) -> list[int]:
    found = [made.after(0)]
    while found[-1] and len(found) < count:
        found.append(made.after(found[-1]))
    return found


def test_steps_are_not_made_to_end_inside_an_image():
    inside = {5 * N, 6 * N}
    made = StepEnds(N, 2 * N, False, barred=inside)
    made.begin(10 * N)
    made.junction = 5 * N
    assert walk(made, 5) == [2 * N, 4 * N, 8 * N, 0]
    made = StepEnds(N, 0, True, barred=inside)
    made.begin(7 * N)
    # vLLM offers what lies before the last token by itself, and here that is inside.
    assert made.end == 4 * N and walk(made, 3) == [4 * N, 7 * N, 8 * N]


@pytest.mark.parametrize("whole", [False, True])
def test_vllm_says_which_models_are_meant(monkeypatch, whole):
    monkeypatch.setattr(connector, "load_lmcache_config", lambda *_, **__: lmcache_config())
    monkeypatch.setattr(
        connector, "LookupClient", lambda *args: Namespace(ask=0, contents=0, drop=0, keep=0)
    )
    monkeypatch.setattr(connector.HybridConnector, "_start_lmcache", lambda *args: None)
    config, groups = engine_config("lfm2"), cache_config(FULL, STATE_SPEC)
    model = config.model_config
    model.model_arch_config = replace(model.model_arch_config, is_mm_prefix_lm=whole)
    made = connector.HybridConnector(config, KVConnectorRole.SCHEDULER, groups)
    made._queue.close()
    assert made.plan.whole_items == whole
