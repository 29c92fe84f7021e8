# SPDX-License-Identifier: Apache-2.0
"""Collects facts that decide the bytes of a block and show neither in shapes nor in settings.

Each attention backend and each kind of recurrent layer of vLLM was reviewed; the results are in
``reviewed_backends.txt``. Code from outside vLLM counts by its distribution and version.
"""

import importlib.util
import platform
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from lmcache_hybrid.core.errors import UnknownPagesError
from lmcache_hybrid.identity.code import code_identity, homes

if TYPE_CHECKING:
    from vllm.config import VllmConfig

REVIEWED_FILE = "reviewed_backends.txt"
# Packages with a device's own kernels that write pages; vLLM ships those of CUDA and CPUs.
KERNELS = {"rocm": "aiter", "xpu": "vllm_xpu_kernels"}
# Tokens and distinct values of the block that probes how a kernel packs.
PROBED_TOKENS, PROBED_VALUES = 64, 251


def page_facts(vllm_config: "VllmConfig", layers: Iterable[str]) -> dict[str, Any]:
    """Return facts by layer, and those of the device under ``""``; no entry without facts.

    Args:
        layers: names of those whose pages are stored.

    Raises:
        UnknownPagesError: a layer's code was not reviewed.
    """
    context = vllm_config.compilation_config.static_forward_context
    found = {name: _layer_facts(context[name], vllm_config) for name in layers if name in context}
    device = _device_facts()
    return {name: facts for name, facts in {**found, "": device}.items() if facts}


def _device_facts() -> dict[str, str]:
    from vllm.platforms import current_platform

    kind, origin = current_platform._enum.name.lower(), _origin(type(current_platform))
    facts = _version_of(KERNELS[kind]) if kind in KERNELS else {}
    return {**facts, "platform": origin} if origin is not None else facts


def _layer_facts(layer: Any, vllm_config: "VllmConfig") -> dict[str, Any]:
    backend = _backend_of(layer)
    facts: dict[str, Any] = {}
    for code in (type(layer), backend, *_impl_classes(layer)):
        if code is None:
            continue
        origin = _origin(code)
        if origin is not None:
            facts[f"{code.__module__}.{code.__qualname__}"] = origin
        if code in (type(layer), backend):
            for name in _reviewed_facts(code, outside=origin is not None):
                facts.update(_fact(name, layer, vllm_config))
    if backend is not None and not hasattr(layer, "attn_backend") and not _has_states(layer):
        # Otherwise the layer's class decides, or the fingerprint names its backend.
        facts["backend"] = f"{backend.__module__}.{backend.__qualname__}"
    return facts


def _backend_of(layer: Any) -> type | None:
    if hasattr(layer, "attn_backend"):
        return layer.attn_backend
    return layer.get_attn_backend() if hasattr(layer, "get_attn_backend") else None


def _has_states(layer: Any) -> bool:
    return hasattr(layer, "get_state_shape")


def _impl_classes(layer: Any) -> list[type]:
    """List the classes of the layer's implementation: one, or one per variant."""
    impl: Any = getattr(layer, "impl", None)
    if impl is None:
        return []
    parts = impl.get_impl_variants() if hasattr(impl, "get_impl_variants") else [impl]
    return [type(part) for part in parts]


# Who wrote it


def _origin(code: type) -> str | None:
    """Name the packages outside vLLM that a class and its bases come from; None for none.

    Raises:
        UnknownPagesError: a class belongs to no package and no file.
    """
    names = []
    inherited = set[str]().union(*map(homes, code.__mro__[1:])) - sys.stdlib_module_names
    for module in sorted(homes(code) | inherited):
        if module.partition(".")[0] in ("vllm", "torch"):
            continue
        identity = code_identity(module)
        if identity is None:
            raise UnknownPagesError(
                f"the code of {code.__module__}.{code.__qualname__}, which writes pages, belongs "
                "to no package and no file; install it as a package, or choose another "
                "--attention-backend"
            )
        names.append(identity)
    return " ".join(names) or None


@cache
def reviewed() -> Mapping[str, tuple[str, ...]]:
    """Read ``reviewed_backends.txt``: names of facts by class."""
    text = files(__package__).joinpath(REVIEWED_FILE).read_text()
    lines = (line.split("|") for line in text.splitlines() if line and not line.startswith("#"))
    return {f"vllm.{path.strip()}": tuple(names.split()) for path, names, _ in lines}


def _reviewed_facts(code: type, outside: bool) -> tuple[str, ...]:
    """Return the facts of the first reviewed class in ``code``'s MRO.

    A class of vLLM's with pages needs a line of its own: it may override how its base writes.
    Classes that vLLM derives at run time have no module of their own.

    Raises:
        UnknownPagesError: that class was not reviewed.
    """
    for base in code.__mro__:
        path = f"{base.__module__}.{base.__name__}"
        if path in reviewed():
            return reviewed()[path]
        if path.startswith("vllm.") and _has_pages(base):
            code, outside = base, False
            break
    if outside:
        return ()
    raise UnknownPagesError(
        f"nobody has looked at how {code.__module__}.{code.__qualname__} of this vLLM lays out "
        "pages; choose another --attention-backend, or a vLLM that this release was tested with"
    )


def _has_pages(code: type) -> bool:
    """Whether a class is a layer with pages or a backend, other than the abstract roots."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.v1.attention.backend import AttentionBackend

    roots = (AttentionLayerBase, MambaBase, AttentionBackend)
    return issubclass(code, roots) and code not in roots


# Facts


def _fact(name: str, layer: Any, vllm_config: "VllmConfig") -> dict[str, Any]:
    """Read a fact. Raises UnknownPagesError where vLLM lacks the attribute."""
    try:
        return FACTS[name](layer, vllm_config)
    except AttributeError as error:
        raise UnknownPagesError(
            f"this vLLM does not say how its backend lays out pages ({error}); choose another "
            "--attention-backend"
        ) from error


def _turboquant(layer: Any, vllm_config: "VllmConfig") -> dict[str, Any]:
    """Structs of arrays where flydsl can be imported on gfx950, else arrays of structs."""
    return {"struct of arrays": layer.impl._soa_store}


def _sycl(layer: Any, vllm_config: "VllmConfig") -> dict[str, Any]:
    """Which kernels keep the state on XPU; 0.32 has one kind."""
    kernels = getattr(layer, "gdn_xpu_backend", None)
    return {} if kernels is None else {"kernels": kernels}


def _flashinfer_nvfp4(layer: Any, vllm_config: "VllmConfig") -> dict[str, Any]:
    return _version_of("flashinfer") if layer.impl.nvfp4_fa2 else {}


def _hpc(layer: Any, vllm_config: "VllmConfig") -> dict[str, Any]:
    return _version_of("hpc") if layer.impl.use_fp8 else {}


def _replay(layer: Any, vllm_config: "VllmConfig") -> dict[str, Any]:
    """flashinfer fills the rings of ReplaySSM in its own way."""
    flashinfer = vllm_config.mamba_config.backend.name == "FLASHINFER"
    return (
        _version_of("flashinfer") if flashinfer and vllm_config.cache_config.use_replayssm else {}
    )


def _torch_signs(layer: Any, vllm_config: "VllmConfig") -> dict[str, Any]:
    """Values are rotated by signs that torch draws from a fixed seed."""
    return {"torch": torch.__version__}


def _int4_signs(layer: Any, vllm_config: "VllmConfig") -> dict[str, Any]:
    rotated = str(layer.kv_cache_dtype).startswith("int4")
    return _torch_signs(layer, vllm_config) if rotated else {}


def _cpu_packing(layer: Any, vllm_config: "VllmConfig") -> dict[str, Any]:
    """On x86 the fingerprint is enough; elsewhere it also matters how vLLM was compiled.

    On Arm keys are packed for BFMMLA if the compiler had bf16, so builds of one vLLM version
    differ.
    """
    if platform.machine().lower() in ("x86_64", "amd64"):
        return {}
    return {"packing": packing(layer, vllm_config.model_config.dtype)}


FACTS: Mapping[str, Callable[[Any, "VllmConfig"], dict[str, Any]]] = {
    "turboquant": _turboquant,
    "gdn": _sycl,
    "nvfp4": _flashinfer_nvfp4,
    "hpc": _hpc,
    "replay": _replay,
    "torch": _torch_signs,
    "int4": _int4_signs,
    "cpu": _cpu_packing,
}


def packing(layer: Any, dtype: torch.dtype) -> str:
    """Digest a block that vLLM's CPU kernel writes, called as vLLM calls it."""
    heads, size = layer.impl.num_kv_heads, layer.impl.head_size
    values = torch.arange(2 * PROBED_TOKENS * heads * size) * 37 % PROBED_VALUES
    key, value = values.to(dtype).view(2, PROBED_TOKENS, heads, size)
    quantized = str(layer.impl.kv_cache_dtype).startswith("fp8")
    cache = torch.zeros(
        1, heads, PROBED_TOKENS, 2 * size, dtype=torch.uint8 if quantized else dtype
    )
    layer.impl.do_kv_cache_update(layer, key, value, cache, torch.arange(PROBED_TOKENS))
    return xxhash.xxh3_128_hexdigest(cache.view(torch.uint8).numpy())


def _version_of(package: str) -> dict[str, str]:
    """Return the version of a package whose kernels write pages; empty if not installed.

    Raises:
        UnknownPagesError: it is installed, but its version is unknown.
    """
    if importlib.util.find_spec(package) is None:
        return {}
    identity = code_identity(package)
    if identity is None:
        raise UnknownPagesError(f"the version of {package}, whose kernels write pages, is unknown")
    return {package: identity}
