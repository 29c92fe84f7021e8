# SPDX-License-Identifier: Apache-2.0
"""In place of what vLLM's CPU build lacks and some hybrid models need. For tests only.

Give :func:`install` to ``Engine(prepare=...)``, in a ``functools.partial`` with the names.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from tests.e2e import gpu_kernels


class _Any(type):
    """Of an empty class that has every name, each a class like it."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Any(name, (), {})


class _Hollow(ModuleType):
    """A module that has every name, each an empty class."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return _Any.__getattr__(_Any, name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torchvision":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Hollow(spec.name)

    def exec_module(self, module) -> None:
        pass


def torchvision() -> None:
    """An empty torchvision: vLLM's modules of models with images import it.

    vLLM inspects a model's class in a process of its own, which has no stand-ins; so it is
    inspected in this one. Call after transformers was imported, which asks for torchvision's
    version.
    """
    import transformers.image_utils  # noqa: F401
    from vllm.model_executor.models import registry

    sys.meta_path.insert(0, _Finder())
    registry._run_in_subprocess = lambda inspect: inspect()


def selective_scan() -> None:
    """Mamba1's recurrence a token at a time: vLLM has its prefill for GPUs only, and what it
    has for decoding on CPU takes Mamba2's shapes.

    With AVX512-BF16 vLLM packs the weights of its convolution, for kernels that it does not have.
    """
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.mamba import mamba_mixer

    if hasattr(ops, "causal_conv1d_weight_pack"):
        del ops.causal_conv1d_weight_pack
    mamba_mixer.selective_scan_fn = _scan
    mamba_mixer.selective_state_update = _scan_once


def _scan(
    u, ssm_states, delta, A, B, C, D, z, delta_bias, delta_softplus, query_start_loc,
    cache_indices, has_initial_state, **kwargs,
):  # fmt: skip
    """As ``mamba_ssm.selective_scan_fn``: u, delta, z (dim, tokens); A (dim, state); B, C
    (state, tokens); the states in ``ssm_states`` (slots, dim, state) are read and written."""
    import torch

    out, ends = torch.empty_like(u), query_start_loc.tolist()
    for row, (begin, end) in enumerate(zip(ends, ends[1:])):
        slots = cache_indices[row : row + 1]
        if not has_initial_state[row]:
            ssm_states[slots] = 0
        for token in range(begin, end):
            part = slice(token, token + 1)
            _scan_once(
                ssm_states, u[:, part].T, delta[:, part].T, A, B[:, part].T, C[:, part].T, D,
                delta_bias, z=z[:, part].T, state_batch_indices=slots, out=out[:, part].T,
            )  # fmt: skip
    return out


def _scan_once(state, x, dt, A, B, C, D, dt_bias, *, z, state_batch_indices, out, **kwargs) -> None:
    """As ``selective_state_update``: x, dt, z, out (requests, dim); B, C (requests, state)."""
    from torch.nn.functional import silu, softplus

    slots = state_batch_indices.flatten()[: len(x)].long()
    step = softplus(dt.float() + dt_bias.float())
    new = state[slots].float() * (step[..., None] * A).exp()
    new += (step * x.float())[..., None] * B.float()[:, None]
    state[slots] = new.to(state.dtype)
    y = (new * C.float()[:, None]).sum(-1) + D.float() * x.float()
    out.copy_(y * silu(z.float()))


def latent_attention() -> None:
    """Prefix caching, chunked prefill and blocks of N tokens for latent attention (MLA).

    vLLM's CPU backend turns the first two off, because its prefill looks at a step's own tokens
    only, and takes blocks of 16. Of Kimi-Linear's two implementations AMD's has no other kernels.
    """
    import vllm.models.kimi_k3 as kimi
    from vllm.models.kimi_k3.amd.linear import KimiLinearForCausalLM
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backend import MultipleOf
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

    original = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls, vllm_config):
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        chunked, batched = scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens
        cached = cache.enable_prefix_caching
        original(cls, vllm_config)
        scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens = chunked, batched
        cache.enable_prefix_caching = cached

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    CPUMLABackend.supports_block_size = classmethod(lambda cls, size: not size or size % 16 == 0)
    CPUMLABackend.get_supported_kernel_block_sizes = staticmethod(
        lambda spec=None: [MultipleOf(16)]
    )
    CPUMLAImpl.forward_mha, CPUMLAImpl.forward_mqa = _latent_prefill, _latent_decode
    _hide_numba()
    kimi.KimiLinearForCausalLM = KimiLinearForCausalLM


def _hide_numba() -> None:
    """vLLM looks for its kernels in all modules, and trips over one of numba's.

    Kimi's modules import numba before vLLM looks.
    """
    from llvmlite.binding import ffi

    library = type(ffi.lib)
    original = library.__getattr__

    def __getattr__(self, name):
        if name == "__dict__":
            raise AttributeError(name)
        return original(self, name)

    library.__getattr__ = __getattr__


def _latent_prefill(
    self, q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, attn_metadata, k_scale, output,
    output_scale=None,
) -> None:  # fmt: skip
    """As ``MLACommonImpl.forward_mha``: q (tokens, heads, head size), output (tokens, heads x
    value size); what was computed before is in the cache (blocks, tokens, latent + rope)."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention as attend

    prefill, ends = attn_metadata.prefill, attn_metadata.prefill.query_start_loc.tolist()
    chunked = prefill.chunked_context
    for row, (begin, end) in enumerate(zip(ends, ends[1:])):
        before = chunked.context_lens_list[row] if chunked is not None else 0
        cached = kv_c_and_k_pe_cache[prefill.block_table[row].long()].flatten(0, 1)[:before]
        new = torch.cat([kv_c_normed[begin:end], k_pe[begin:end].flatten(1)], -1)
        latent, rope = torch.cat([cached, new]).split([self.kv_lora_rank, k_pe.shape[-1]], -1)
        parts = self.kv_b_proj(latent.contiguous())[0].unflatten(-1, (self.num_heads, -1))
        nope, value = parts.split([self.qk_nope_head_dim, self.v_head_dim], -1)
        key = torch.cat([nope, rope[:, None].expand(-1, self.num_heads, -1)], -1)
        causal = torch.ones(end - begin, len(key), dtype=torch.bool).tril(before)
        query, key, value = (each.transpose(0, 1) for each in (q[begin:end], key, value))
        made = attend(query, key, value, attn_mask=causal, scale=self.scale)
        output[begin:end] = made.transpose(0, 1).flatten(1)


def _latent_decode(self, q, kv_c_and_k_pe_cache, attn_metadata, layer) -> tuple:
    """As ``CPUMLAImpl.forward_mqa``, whose kernel takes blocks of 16 tokens, over blocks of N."""
    import torch
    from vllm import _custom_ops as ops

    q = torch.cat(q, -1) if isinstance(q, tuple) else q.contiguous()
    parts = kv_c_and_k_pe_cache.shape[1] // 16
    table = attn_metadata.decode.block_table[..., None] * parts + torch.arange(parts)
    out = q.new_zeros(*q.shape[:2], self.kv_lora_rank)
    ops.mla_decode_kvcache_cpu(
        out,
        q,
        kv_c_and_k_pe_cache.view(-1, 16, q.shape[-1]),
        self.scale,
        table.flatten(1).int(),
        attn_metadata.decode.seq_lens.int(),
    )
    return out, None


def delta_attention() -> None:
    """Kimi Delta Attention a token at a time: vLLM's Triton kernels take minutes in the
    interpreter. No drafts."""
    from vllm.model_executor.layers.mamba.gdn import kimi_gdn_linear_attn as layer
    from vllm.platforms import current_platform

    # At start-up vLLM looks for kernels to replace in all modules, and fails at numba's, which the
    # import below brings. So it does that now, and not again.
    current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)
    from vllm.models.kimi_k3.nvidia.ops.third_party import kda

    layer.gather_initial_states = _initial_states
    layer.causal_conv1d_update = _convolve_once
    kda.chunk_kda_with_fused_gate = _delta_prefill
    kda.fused_recurrent_kda_packed_decode = _delta_decode


def _initial_states(state, indices, has_initial_state):
    """States of each request, zeros where it has none: (requests, heads, size, size)."""
    return state[indices.long()] * has_initial_state[:, None, None, None].to(state.dtype)


def _convolve_once(x, conv_state, weight, bias, *, conv_state_indices, **kwargs):
    """As ``causal_conv1d_update``: x (requests, dim), weight (dim, width); the states in
    ``conv_state`` (slots, dim, width - 1) are read and written. SiLU, no bias."""
    import torch

    slots = conv_state_indices.long()
    window = torch.cat([conv_state[slots], x[..., None].to(conv_state.dtype)], -1)
    conv_state[slots] = window[..., 1:]
    return torch.nn.functional.silu((window.float() * weight.float()).sum(-1)).to(x.dtype)


def _delta_prefill(*, q, k, v, raw_g, raw_beta, A_log, g_bias, initial_state, cu_seqlens, **kwargs):
    """As ``chunk_kda_with_fused_gate``: q, k, v, raw_g (1, tokens, heads, size), initial_state
    (requests, heads, size, size). Returns (output, states)."""
    import torch

    out, ends = torch.empty_like(v), cu_seqlens.tolist()
    states = initial_state.clone()
    for row, (begin, end) in enumerate(zip(ends, ends[1:])):
        for token in range(begin, end):
            parts = (each[0, token : token + 1] for each in (q, k, v, raw_g, raw_beta))
            out[0, token : token + 1] = _delta_step(states[row : row + 1], *parts, A_log, g_bias)
    return out, states


def _delta_decode(
    *, mixed_qkv, raw_g, raw_beta, A_log, dt_bias, initial_state, state_indices, **kwargs
):
    """As ``fused_recurrent_kda_packed_decode``: mixed_qkv (requests, 3 x heads x size); the
    states in ``initial_state`` (slots, heads, size, size) are read and written."""
    q, k, v = mixed_qkv.unflatten(-1, (3, *raw_g.shape[-2:])).unbind(1)
    slots = state_indices.long()
    states = initial_state[slots]
    out = _delta_step(states, q, k, v, raw_g[0], raw_beta[0], A_log, dt_bias)
    initial_state[slots] = states
    return out[None], initial_state


def _delta_step(states, q, k, v, raw_g, raw_beta, A_log, bias):
    """One token of each request; ``states`` (requests, heads, size, size) are written."""
    from torch.nn.functional import normalize, softplus

    q, k, v = normalize(q.float(), dim=-1) * q.shape[-1] ** -0.5, normalize(k.float(), dim=-1), v
    gate = -A_log.float().exp()[:, None] * softplus(raw_g.float() + bias.view(raw_g.shape[-2:]))
    new = states.float() * gate.exp()[..., None]
    learned = v.float() - (k[..., None, :] @ new)[..., 0, :]
    new += k[..., None] * (raw_beta.float().sigmoid()[..., None] * learned)[..., None, :]
    states.copy_(new)
    return (q[..., None, :] @ new)[..., 0, :].to(v.dtype)


STANDINS: dict[str, Callable[[], None]] = {
    "torchvision": torchvision,
    "selective_scan": selective_scan,
    "latent_attention": latent_attention,
    "delta_attention": delta_attention,
    "gpu_kernels": gpu_kernels.use,
}


def install(names: tuple[str, ...]) -> None:
    for name in names:
        STANDINS[name]()
