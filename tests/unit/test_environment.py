# SPDX-License-Identifier: Apache-2.0
"""Variables of vLLM's environment that name a number format: each has been looked at."""

import re

from vllm import envs

from lmcache_hybrid.worker import fingerprint

FORMAT = re.compile(
    r"QUANT|FP8|FP4|INT[348]|W\d?A\d|A16|BMM|DTYPE|PRECISION|CAST|SITU|WNA|E8M0|DISABLED_KERNELS"
)

# Why these do not count.
_AT_LOAD = "the same values, made when weights are loaded or in every step"
_KERNEL = "chooses a kernel for the same formats"
NOT_COUNTED = {
    "VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE": "how much room there is",
    "VLLM_MXFP4_EMULATION_DEQUANT_AT_LOAD": _AT_LOAD,
    "VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD": _AT_LOAD,
    "VLLM_ROCM_FP8_PADDING": "where weights lie in memory",
    "VLLM_ROCM_USE_AITER_FP4_ASM_GEMM": _KERNEL,
    "VLLM_ROCM_USE_AITER_LINEAR_HIPBMM": _KERNEL,
    "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4": "DeepSeek V4.1 only, which is not served",
}


def test_every_number_format_has_been_looked_at() -> None:
    """One that a new release adds fails here until it counts or has a reason not to."""
    formats = {name for name in envs.environment_variables if FORMAT.search(name)}
    assert "VLLM_ROCM_USE_AITER_FP8BMM" in formats
    assert formats - set(fingerprint._ENVIRONMENT) - NOT_COUNTED.keys() == set()


def test_what_switches_a_number_format_counts() -> None:
    """AITER and DeepGEMM, which quantize again what a checkpoint brings quantized."""
    aiter = {"VLLM_ROCM_USE_AITER", "VLLM_ROCM_USE_AITER_MOE"}
    deep_gemm = {"VLLM_USE_DEEP_GEMM", "VLLM_MOE_USE_DEEP_GEMM"}
    assert aiter | deep_gemm <= set(fingerprint._ENVIRONMENT)
