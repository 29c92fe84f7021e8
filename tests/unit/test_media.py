# SPDX-License-Identifier: Apache-2.0
"""Requests with media: vLLM's renderer and input processor, marked; then what is cached."""

from types import SimpleNamespace as Namespace

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.entrypoints.generate.beam_search.utils import BeamSearchSequence
from vllm.inputs.engine import mm_input
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange
from vllm.multimodal.parse import MultiModalDataParser
from vllm.renderers.base import BaseRenderer
from vllm.renderers.hf import HfRenderer, _build_prompt_embeds_updates
from vllm.v1.engine.input_processor import InputProcessor

import vllm_patch
from lmcache_hybrid.identity.media import CLIENT, CONTENT, MARK, carry_mark, may_cache
from lmcache_hybrid.scheduler.prompt import prefix_of
from tests.unit.helpers import N, make_request
from tests.unit.scheduler_rig import Rig
from vllm_patch.configuration import CONNECTOR

vllm_patch.register()
TOKENS = list(range(4 * N))
PLACE = PlaceholderRange(offset=N + 2, length=4)


def deployment(connector: str | None = CONNECTOR, encoder: bool = False, **cache) -> Namespace:
    """What vLLM's frontend reads of a VllmConfig."""
    media = Namespace(mm_processor_cache_gb=cache.get("gb", 4), mm_hasher_algorithm="blake3")
    transfer = Namespace(has_connector=lambda name: name == connector)
    return Namespace(
        kv_transfer_config=transfer if connector else None,
        ec_transfer_config=Namespace() if encoder else None,
        model_config=Namespace(
            multimodal_config=media, get_multimodal_config=lambda: media, enable_prompt_embeds=True
        ),
        cache_config=Namespace(enable_prefix_caching=cache.get("prefix", True)),
        parallel_config=Namespace(
            data_parallel_size=1, data_parallel_size_local=1, local_engines_only=False
        ),
    )


class Processor:
    """Names the items as every processor of vLLM's does; makes no tensors of them."""

    info = Namespace(parse_mm_data=MultiModalDataParser().parse_mm_data)

    def apply(self, inputs, timing):
        hashes = inputs.get_mm_hashes("model", "blake3")
        kwargs = {"image": [MultiModalKwargsItem({})] * len(hashes["image"])}
        places = {"image": [PLACE] * len(hashes["image"])}
        return mm_input(inputs.prompt, kwargs, hashes, places)


def renderer(config: Namespace) -> BaseRenderer:
    class Renderer(BaseRenderer):
        def get_mm_processor(self):
            return Processor()

        def update_mm_cache_stats(self):
            return None

        def get_eos_token_id(self):
            return None

    Renderer.__abstractmethods__ = frozenset()
    made = object.__new__(Renderer)
    made.config, made.model_config, made.api_process_rank = config, config.model_config, 0
    made._mm_req_counter = Namespace(inc=lambda step: 1)
    made._mm_timing_registry = Namespace(get=lambda name: None)
    made._mm_processor_cache = made._mm_processor_only_cache = None
    return made


def image(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, (8, 8, 3), dtype=np.uint8)


def rendered(config: Namespace, seed: int, uuid: str | None, **kwargs) -> dict:
    uuids = None if uuid is None else {"image": [uuid]}
    data = {"image": [image(seed)]}
    return renderer(config)._process_multimodal(TOKENS, data, uuids, kwargs)


def submit(config: Namespace, prompt: dict, monkeypatch, salt: str | None = None, **extra):
    """vLLM's request as EngineCore sees it, after the API server."""
    monkeypatch.setattr(InputProcessor, "_validate_params", lambda *_: ())
    monkeypatch.setattr(InputProcessor, "_validate_model_inputs", lambda *_: None)
    monkeypatch.setattr(InputProcessor, "apply_watermarking", lambda *_: None)
    processor = object.__new__(InputProcessor)
    processor.vllm_config, processor.lora_config = config, None
    processor.model_config = config.model_config
    processor.generation_config_fields = {}
    processor.renderer = renderer(config)
    processor.renderer.tokenizer = None
    params = SamplingParams(max_tokens=1, extra_args=extra or None)
    made = processor.process_inputs("r", prompt, params, ())
    assert all(type(item.identifier) is str for item in made.mm_features or ())
    request = make_request(
        tokens=TOKENS,
        mm_features=made.mm_features,
        cache_salt=salt,
        prompt_embeds=made.prompt_embeds,
        prompt_is_token_ids=made.prompt_is_token_ids,
    )
    request.sampling_params = made.sampling_params
    return request


def hashes(request) -> tuple[bytes, ...] | None:
    prefix = prefix_of(request, N, 1)
    return prefix and prefix.hashes


@pytest.mark.parametrize("kwargs", [{}, {"size": 2}], ids=["plain", "processor arguments"])
def test_items_that_vllm_hashed_are_cached(monkeypatch, kwargs):
    config = deployment()
    one, same, other = (
        hashes(submit(config, rendered(config, seed, None, **kwargs), monkeypatch))
        for seed in (1, 1, 2)
    )
    assert one == same and one[0] == other[0] and not set(one[1:]) & set(other)


@pytest.mark.parametrize("kwargs", [{}, {"size": 2}], ids=["plain", "processor arguments"])
def test_a_clients_name_is_no_content(monkeypatch, kwargs):
    """Two clients may call two images "img-1": without a tenant's salt neither is cached."""
    config = deployment()
    prompt = rendered(config, 1, "img-1", **kwargs)
    assert hashes(submit(config, prompt, monkeypatch)) is None
    assert hashes(submit(config, prompt, monkeypatch, salt="")) is None
    mine = hashes(submit(config, prompt, monkeypatch, salt="a"))
    again = hashes(submit(config, rendered(config, 1, "img-1", **kwargs), monkeypatch, salt="a"))
    theirs = hashes(submit(config, rendered(config, 2, "img-1", **kwargs), monkeypatch, salt="b"))
    assert mine == again and not set(mine) & set(theirs)


@pytest.mark.parametrize("uuid, salt", [(None, None), ("img-1", "a"), ("img-1", None)])
def test_beams_are_cached_as_the_prompt_that_they_continue(monkeypatch, uuid, salt):
    config = deployment()
    prompt = rendered(config, 1, uuid)
    beam = BeamSearchSequence(orig_prompt=prompt, tokens=[*TOKENS, 7], logprobs=[]).get_prompt()
    assert beam["prompt_token_ids"] == [*TOKENS, 7]
    asked = hashes(submit(config, prompt, monkeypatch, salt=salt))
    assert hashes(submit(config, beam, monkeypatch, salt=salt)) == asked
    assert (asked is None) == (uuid is not None and salt is None)


def test_beams_of_text_are_left_alone():
    text = {"type": "token", "prompt_token_ids": [1, 2, 3]}
    beam = BeamSearchSequence(orig_prompt=text, tokens=[1, 2, 3, 7], logprobs=[])
    assert beam.get_prompt() == {"type": "token", "prompt_token_ids": [1, 2, 3, 7]}


def test_a_name_that_is_the_hash_of_another_item_stays_a_name(monkeypatch):
    """Else vLLM's own caches would serve the client's image to everybody, and we store it."""
    config = deployment()
    honest = rendered(config, 1, None)
    (content,) = honest["mm_hashes"]["image"]
    forged = rendered(config, 2, content)
    assert forged["mm_hashes"]["image"] != [content]
    honest, forged = (submit(config, prompt, monkeypatch) for prompt in (honest, forged))
    assert not set(map(bytes, honest.block_hashes[1:])) & set(map(bytes, forged.block_hashes))


def test_one_name_among_hashes_is_enough(monkeypatch):
    config = deployment()
    data, uuids = {"image": [image(1), image(2)]}, {"image": [None, "img-1"]}
    prompt = renderer(config)._process_multimodal(TOKENS, data, uuids, {})
    assert hashes(submit(config, prompt, monkeypatch)) is None


def embeddings(seed: int) -> torch.Tensor:
    """Of one token, the first of the last block."""
    return torch.full((1, 8), float(seed))


def beside_an_image(config, seed: int, uuid: str | None = None) -> dict:
    """A chat with an image and embeddings, as vLLM renders it."""
    prompt, given = rendered(config, 1, uuid), [embeddings(seed)]
    updates = _build_prompt_embeds_updates(given, TOKENS[3 * N])
    HfRenderer._apply_prompt_embeds_to_engine_input(renderer(config), prompt, given, updates)
    return prompt


def test_embeddings_beside_an_image_are_cached_by_their_content(monkeypatch):
    config = deployment()
    one, same, other = (
        hashes(submit(config, beside_an_image(config, seed), monkeypatch)) for seed in (1, 1, 2)
    )
    assert one == same and one[:3] == other[:3] and one[3] != other[3]
    plain = hashes(submit(config, rendered(config, 1, None), monkeypatch))
    assert plain[:3] == one[:3] and plain[3] not in (one[3], other[3])


def test_embeddings_beside_an_image_that_a_client_named_need_a_salt(monkeypatch):
    config = deployment()
    prompt = beside_an_image(config, 1, "img-1")
    assert hashes(submit(config, prompt, monkeypatch)) is None
    assert hashes(submit(config, prompt, monkeypatch, salt="a")) is not None


@pytest.mark.parametrize("amid_text", [False, True])
def test_embeddings_without_media_are_not_cached(monkeypatch, amid_text):
    config, prompt = deployment(), {"prompt_embeds": torch.ones(len(TOKENS), 8)}
    if amid_text:
        prompt = {"prompt_token_ids": TOKENS}
        HfRenderer._apply_prompt_embeds_to_prompt(prompt, [embeddings(1)], TOKENS[3 * N])
    request = submit(config, renderer(config)._process_embeds(prompt), monkeypatch)
    assert request.prompt_embeds is not None and len(request.block_hashes) == 4
    assert hashes(request) is None


def test_hashes_that_a_client_sends_are_names(monkeypatch):
    """Of the endpoint for tokens: nothing says what such a hash was made of."""
    config = deployment()
    content = rendered(config, 1, None)
    honest = submit(config, content, monkeypatch)
    sent = {key: value for key, value in content.items() if key != MARK}
    assert hashes(submit(config, dict(sent), monkeypatch)) is None
    named = submit(config, dict(sent), monkeypatch, salt="a")
    assert hashes(named) is not None
    unsalted = submit(config, dict(sent), monkeypatch)
    assert not set(map(bytes, honest.block_hashes[1:])) & set(map(bytes, unsalted.block_hashes))


def test_a_client_cannot_mark_its_own_request(monkeypatch):
    config = deployment()
    prompt = rendered(config, 1, "img-1")
    request = submit(config, prompt, monkeypatch, **{MARK: CONTENT, "other": 1})
    assert hashes(request) is None
    assert request.sampling_params.extra_args == {MARK: CLIENT, "other": 1}


def test_a_client_cannot_mark_the_media_of_later_parts(monkeypatch):
    text = {"type": "token", "prompt_token_ids": [1, 2, 3]}
    request = submit(deployment(), text, monkeypatch, **{MARK: CONTENT, "other": 1})
    assert request.sampling_params.extra_args == {"other": 1}


@pytest.mark.parametrize("salt", [None, "a"])
def test_names_that_vllm_counts_are_never_cached(monkeypatch, salt):
    """Without its caches vLLM hashes nothing: "renderer0-mm-1-image-0" in every process."""
    config = deployment(gb=0, prefix=False)
    request = submit(
        config, rendered(config, 1, None), monkeypatch, salt=salt, **{MARK: CONTENT, "other": 1}
    )
    assert hashes(request) is None


def test_beside_an_encoder_cache_connector_names_stay_and_need_a_salt(monkeypatch):
    config = deployment(encoder=True)
    named = rendered(config, 1, "img-1")
    assert named["mm_hashes"]["image"] == ["img-1"]
    for prompt in (named, rendered(config, 1, None)):
        assert hashes(submit(config, prompt, monkeypatch)) is None
        assert hashes(submit(config, prompt, monkeypatch, salt="a")) is not None


@pytest.mark.parametrize("connector", [None, "NixlConnector"])
def test_other_engines_are_left_alone(monkeypatch, connector):
    config = deployment(connector)
    prompt = rendered(config, 1, "img-1")
    assert prompt["mm_hashes"]["image"] == ["img-1"] and MARK not in prompt
    assert submit(config, prompt, monkeypatch).sampling_params.extra_args is None


def unmarked(**kwargs):
    item = MultiModalFeatureSpec(None, "image", "a" * 64, PLACE)
    return make_request(tokens=TOKENS, mm_features=[item], **kwargs)


def test_behind_the_rust_front_end_no_mark_counts(monkeypatch, hybrid_log):
    """It passes on what a client writes where the mark stands."""
    request = unmarked()
    request.sampling_params.extra_args = {MARK: CONTENT}
    assert may_cache(request)
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    assert not may_cache(request)
    assert "Unset VLLM_USE_RUST_FRONTEND" in hybrid_log.text
    assert may_cache(make_request(tokens=TOKENS))


def test_without_a_mark_nothing_is_cached():
    """The plugin was not loaded in the process that read the items."""
    assert not may_cache(unmarked()) and not may_cache(unmarked(cache_salt="a"))
    request = unmarked()
    request.sampling_params = None  # pooling
    assert not may_cache(request)
    assert may_cache(make_request(tokens=TOKENS))


@pytest.mark.parametrize(
    "earlier, later, now",
    [
        (CONTENT, "no media", CONTENT),
        (CLIENT, "no media", CLIENT),
        (None, "no media", None),
        (CONTENT, CONTENT, CONTENT),
        (CLIENT, CONTENT, CLIENT),
        (CONTENT, CLIENT, CLIENT),
        (None, CONTENT, None),
        (CONTENT, None, None),
    ],
)
def test_the_mark_of_a_session_covers_the_media_of_all_parts(earlier, later, now):
    """vLLM keeps the media of earlier parts, and replaces their parameters with the mark."""
    session, added = unmarked(), later != "no media"
    mark = {MARK: later} if added and later else {}
    session.sampling_params = SamplingParams(extra_args={"other": 1, **mark})
    carry_mark(session, earlier, True, added)
    assert session.sampling_params.extra_args == {"other": 1, **({MARK: now} if now else {})}
    assert may_cache(session) == (now == CONTENT)


def test_a_first_part_without_media_changes_no_mark():
    session = unmarked()
    session.sampling_params = SamplingParams(extra_args={MARK: CONTENT})
    carry_mark(session, None, False, True)
    assert may_cache(session)


def test_a_later_part_of_a_session_brings_its_own_names():
    """vLLM appends them to the request's own, with the part's tokens and parameters."""
    request, rig = make_request(tokens=TOKENS), Rig(2)
    assert rig.prefill(request).attention
    request.sampling_params = SamplingParams(extra_args={MARK: CONTENT})
    place = PlaceholderRange(offset=4 * N + 2, length=4)
    item = MultiModalFeatureSpec(None, "image", "client-uuid:img-1", place)
    request.mm_features.append(item)
    request.append_output_token_ids(list(range(2 * N)))
    request.num_prompt_tokens, request.num_computed_tokens = request.num_tokens, 0
    assert rig.prefill(request) is None, "its name is the client's"
    assert rig.scheduler.counts.skipped_requests == {"uncacheable": 1}
