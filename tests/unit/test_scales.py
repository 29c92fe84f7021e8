# SPDX-License-Identifier: Apache-2.0
"""Scales per token and head, which vLLM resets in a layer's first forward."""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode, MambaSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from lmcache_hybrid.connector import HybridConnector
from lmcache_hybrid.core.errors import ConfigError
from lmcache_hybrid.core.groups import page_bytes, plan_groups
from lmcache_hybrid.worker.pages import GroupPages
from lmcache_hybrid.worker.scales import reset_scales

from .helpers import OPTIONS
from .layouts import BLOCKS, Built, N, build, noise

pytestmark = pytest.mark.usefixtures("one_thread")
DTYPES = {
    "int8_per_token_head": (KVQuantMode.INT8_PER_TOKEN_HEAD, torch.int8),
    "fp8_per_token_head": (KVQuantMode.FP8_PER_TOKEN_HEAD, torch.uint8),
    "int4_per_token_head": (KVQuantMode.INT4_PER_TOKEN_HEAD, torch.uint8),
}
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def hybrid(dtype: str, kernel: int = N) -> Built:
    """Attention layers with scales beside states, LBNHC as on a GPU."""
    mode, torch_dtype = DTYPES[dtype]
    attention = TritonAttentionBackend.customize_spec(
        FullAttentionSpec(
            block_size=N, num_kv_heads=2, head_size=16, dtype=torch_dtype, kv_quant_mode=mode
        )
    )
    state = MambaSpec(
        block_size=N,
        shapes=((64, 8),),
        dtypes=(torch.float32,),
        page_size_padded=attention.page_size_bytes,
        mamba_cache_mode="align",
    )
    specs = {"m0": state, "a0": attention, "m1": state, "a1": attention}
    return build(KVCacheLayout.LBNHC, specs, kernel)


def layers_of(built: Built, dtype: str) -> dict[str, SimpleNamespace]:
    """As vLLM binds them; the implementation is vLLM's."""
    return {
        name: SimpleNamespace(
            kv_cache=view,
            kv_cache_dtype=dtype,
            impl=TritonAttentionImpl(4, 16, 1.0, 2, None, None, dtype),
        )
        for name, view in built.views.items()
        if name.startswith("a")
    }


def first_forward(layers: dict[str, SimpleNamespace]) -> None:
    """What ``forward`` and ``do_kv_cache_update`` call before they touch a page."""
    for layer in layers.values():
        layer.impl._pth_key_value_caches(layer.kv_cache)


def load(built: Built, block: int) -> None:
    for group in built.config.kv_cache_groups:
        pages = GroupPages(group.layer_names, built.views, BLOCKS)
        for page, part in pages.pieces(block, noise(pages.block_bytes)):
            page.copy_(part)


@every_dtype
@pytest.mark.parametrize("kernel", [N, 16])
def test_a_load_before_the_first_forward_keeps_its_scales(dtype, kernel):
    built = hybrid(dtype, kernel)
    layers = layers_of(built, dtype)
    reset_scales(built.config, built.views, layers)
    load(built, 5)
    loaded = built.memory.clone()
    first_forward(layers)
    assert torch.equal(built.memory, loaded)


@every_dtype
def test_vllm_resets_them_in_the_first_forward(dtype):
    """The reset can go when this fails."""
    built = hybrid(dtype)
    load(built, 5)
    loaded = built.memory.clone()
    first_forward(layers_of(built, dtype))
    assert not torch.equal(built.memory, loaded)


def test_layers_that_share_a_kv_cache_reset_it_too():
    dtype = "int8_per_token_head"
    built = hybrid(dtype)
    built.views["shared"] = built.views["a1"]
    layers = layers_of(built, dtype)
    layers["shared"] = layers_of(built, dtype)["a1"]
    reset_scales(built.config, built.views, layers)
    loaded = built.memory.fill_(7).clone()
    first_forward(layers)
    assert torch.equal(built.memory, loaded)


def test_other_layers_are_left_alone():
    spec = FullAttentionSpec(block_size=N, num_kv_heads=2, head_size=16, dtype=torch.bfloat16)
    built = build(KVCacheLayout.LBNHC, {"a0": spec, "a1": spec})
    before = built.memory.clone()
    reset_scales(built.config, built.views, {"a0": SimpleNamespace(kv_cache_dtype="auto")})
    assert torch.equal(built.memory, before)


@pytest.mark.parametrize("fault", ["other backend", "no layer", "scales of other memory"])
def test_refuses_scales_that_could_be_reset_later(fault):
    dtype = "int8_per_token_head"
    built = hybrid(dtype)
    layers = layers_of(built, dtype)
    if fault == "other backend":
        layers["a1"].impl = object()
    elif fault == "no layer":
        del layers["a1"]
    else:  # left behind by a profiling run
        layers["a1"].impl._ensure_scale_caches(hybrid(dtype).views["a1"])
    with pytest.raises(ConfigError) as error:
        reset_scales(built.config, built.views, layers)
    assert " of layer a1 may reset the scales of loaded blocks, so --kv-cache-dtype" in str(
        error.value
    )
    assert "use --kv-cache-dtype fp8 or auto" in str(error.value)


def register(built: Built, layers: dict[str, SimpleNamespace], monkeypatch) -> tuple[int, ...]:
    """As vLLM does, with a store that does not open; returns the sizes that stores must hold."""
    connector = object.__new__(HybridConnector)
    connector._registered, connector._options = {}, OPTIONS
    connector.kv_cache_config = built.config
    connector.plan = plan_groups(built.config)
    context = SimpleNamespace(static_forward_context=layers)
    connector._vllm_config = SimpleNamespace(
        compilation_config=context, parallel_config=SimpleNamespace(rank=1)
    )
    connector._manager = SimpleNamespace(config=1, post_init=list, lmcache_engine=None)
    found: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        "lmcache_hybrid.worker_side.check_sizes", lambda _, *sizes: found.append(sizes)
    )
    monkeypatch.setattr("lmcache_hybrid.connector.fingerprints", lambda *_: (bytes(16), None))
    connector.register_kv_caches(dict(built.views))
    # Of another engine in this process.
    with pytest.raises(ConfigError, match="serves one engine of a process"):
        connector.register_kv_caches({})
    assert connector.kv_caches == built.views
    return found[0]


def test_the_connector_resets_them_and_groups_kernel_blocks(monkeypatch, hybrid_log):
    """When the KV cache is registered, before anything can be loaded."""
    dtype = "int8_per_token_head"
    built = hybrid(dtype, 32)
    layers = layers_of(built, dtype)
    sizes = register(built, layers, monkeypatch)
    assert "could not open its store" in hybrid_log.text
    pages = [page_bytes(group) for group in built.config.kv_cache_groups]
    assert sizes == (max(pages), sum(pages), len(pages))
    loaded = built.memory.fill_(7).clone()
    first_forward(layers)
    assert torch.equal(built.memory, loaded)


def test_the_connector_refuses_blocks_of_another_size(monkeypatch):
    built = hybrid("int8_per_token_head")
    built.views["a0"] = built.views["a0"][..., :8]
    with pytest.raises(ConfigError) as error:
        register(built, layers_of(built, "int8_per_token_head"), monkeypatch)
    assert str(error.value) == (
        "blocks of KV cache group 1 have 12288 bytes instead of the 20480 of their specs; choose "
        "another --attention-backend."
    )
