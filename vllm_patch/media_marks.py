# SPDX-License-Identifier: Apache-2.0
"""Marks requests in the API server: are their media named by content, or by the client?

Once vLLM has processed an item, a client's ``uuid`` cannot be distinguished from the item's hash:
with processor arguments vLLM also hashes the uuid. :mod:`lmcache_hybrid.identity.media` reads the
mark in EngineCore. A request with media and without a mark is not cached.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from lmcache_hybrid.identity.media import CLIENT, CLIENT_PREFIX, CONTENT, MARK
from vllm_patch.configuration import is_ours

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.entrypoints.generate.beam_search.utils import BeamSearchSequence
    from vllm.renderers.base import BaseRenderer
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.input_processor import InputProcessor

Uuids = Mapping[str, str | Sequence[str | None] | None]


def install() -> None:
    """Hook vLLM's renderer, its beams and its input processor. Mutates these classes."""
    _mark_rendered()
    _mark_beams()
    _mark_requests()


def _finds_by_name(config: "VllmConfig") -> bool:
    """Whether an encoder cache connector fetches embeddings by the items' names.

    Then names must not be changed, and may not be of the content.
    """
    return config.ec_transfer_config is not None


def _has_made_up_names(config: "VllmConfig") -> bool:
    """Whether vLLM names items by numbers, from zero in every process."""
    media = config.model_config.multimodal_config
    return (
        media is not None
        and media.mm_processor_cache_gb == 0
        and not config.cache_config.enable_prefix_caching
    )


def _mark_rendered() -> None:
    """Prefix the names that clients gave, and mark the inputs that have one."""
    from vllm.renderers.base import BaseRenderer

    original = BaseRenderer._process_multimodal

    @functools.wraps(original)
    def _process_multimodal(
        self: "BaseRenderer",
        prompt: list[int],
        mm_data: Any,
        mm_uuids: Uuids | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if not is_ours(self.config):
            return original(self, prompt, mm_data, mm_uuids, *args, **kwargs)
        named = _has_uuids(mm_uuids)
        if named and not _finds_by_name(self.config):
            mm_uuids = _prefixed(mm_uuids)
        inputs = original(self, prompt, mm_data, mm_uuids, *args, **kwargs)
        inputs[MARK] = CLIENT if named or _finds_by_name(self.config) else CONTENT
        return inputs

    BaseRenderer._process_multimodal = _process_multimodal


def _mark_beams() -> None:
    """Copy the mark to each beam, whose prompt vLLM makes from parts of the rendered one."""
    from vllm.entrypoints.generate.beam_search.utils import BeamSearchSequence

    original = BeamSearchSequence.get_prompt

    @functools.wraps(original)
    def get_prompt(self: "BeamSearchSequence") -> Any:
        prompt, rendered = original(self), cast(dict[str, Any], self.orig_prompt)
        if MARK in rendered:
            prompt[MARK] = rendered[MARK]
        return prompt

    BeamSearchSequence.get_prompt = get_prompt


def _mark_requests() -> None:
    """Carry the mark to EngineCore. Items without one count as named by the client."""
    from vllm.v1.engine.input_processor import InputProcessor

    original = InputProcessor.process_inputs

    @functools.wraps(original)
    def process_inputs(
        self: "InputProcessor", request_id: str, prompt: Any, *args: Any, **kwargs: Any
    ) -> "EngineCoreRequest":
        request = original(self, request_id, prompt, *args, **kwargs)
        params = request.sampling_params
        if params is None or not is_ours(self.vllm_config):
            return request
        # Drop a client's forged mark even without media: a later part of a session may have some.
        extra = {key: value for key, value in (params.extra_args or {}).items() if key != MARK}
        if request.mm_features:
            mark = prompt.get(MARK) if isinstance(prompt, dict) else None
            if mark is None and not _finds_by_name(self.vllm_config):
                for item in request.mm_features:
                    item.identifier = CLIENT_PREFIX + item.identifier
            if not _has_made_up_names(self.vllm_config):
                extra[MARK] = mark or CLIENT
        if extra or params.extra_args:
            params.extra_args = extra
        return request

    InputProcessor.process_inputs = process_inputs


def _has_uuids(uuids: Uuids | None) -> bool:
    return any(
        isinstance(given, str) or any(uuid is not None for uuid in given or ())
        for given in (uuids or {}).values()
    )


def _prefixed(uuids: Uuids | None) -> Uuids:
    def prefixed(uuid: str | None) -> str | None:
        return None if uuid is None else CLIENT_PREFIX + uuid

    return {
        modality: prefixed(given)
        if given is None or isinstance(given, str)
        else [prefixed(uuid) for uuid in given]
        for modality, given in (uuids or {}).items()
    }
