# SPDX-License-Identifier: Apache-2.0
"""Which tiny models are tried, and what stands in for parts that vLLM lacks on CPU."""

# Family of lmcache_hybrid/tools/tiny_families.py: names in tests/e2e/standins.py. All get
# torchvision besides, which costs a model without images nothing.
PLAN: dict[str, tuple[str, ...]] = {
    "qwen3_next": (),
    "qwen3_5": (),
    "qwen3_5_moe": (),
    "olmo_hybrid": ("gpu_kernels",),
    "kimi_linear": ("latent_attention", "delta_attention"),
    "nemotron_h": (),
    "nemotron_h_moe": (),
    "granite4": (),
    "falcon_h1": (),
    "zamba2": (),
    "jamba": ("selective_scan",),
    "lfm2": (),
    "lfm2_moe": (),
}
