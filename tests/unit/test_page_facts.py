# SPDX-License-Identifier: Apache-2.0
"""What counts of attention backends: vLLM's own classes, and its CPU kernels."""

import importlib
import importlib.metadata
import sys
from functools import cached_property, partialmethod
from types import FunctionType, ModuleType, SimpleNamespace

import pytest
import torch
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.models.deepseek_v4.attention import DeepseekV4IndexerCache
from vllm.v1.attention.backend import (
    AttentionBackend,
    subclass_attention_backend,
    subclass_attention_backend_with_overrides,
)
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.attention.backends.turboquant_attn import TurboQuantAttentionBackend

from lmcache_hybrid.core.errors import UnknownPagesError
from lmcache_hybrid.worker import reviewed_backends as module
from lmcache_hybrid.worker.reviewed_backends import page_facts

# The real one needs flashinfer, which has no CPU build.
FlashInferBackend = type(
    "FlashInferBackend",
    (AttentionBackend,),
    {"__module__": "vllm.v1.attention.backends.flashinfer"},
)


def layer(kind: type, **parts) -> object:
    """A layer of a class without what its constructor loads."""
    made = kind.__new__(kind)
    torch.nn.Module.__init__(made)
    for name, part in parts.items():
        object.__setattr__(made, name, part)
    return made


def attention(backend: type, **parts) -> object:
    return layer(Attention, attn_backend=backend, kv_cache_dtype="auto", **parts)


def config(replayssm: bool = False, backend: str = "TRITON", **layers) -> SimpleNamespace:
    return SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers),
        model_config=SimpleNamespace(dtype=torch.bfloat16),
        mamba_config=SimpleNamespace(backend=SimpleNamespace(name=backend)),
        cache_config=SimpleNamespace(use_replayssm=replayssm),
    )


def facts(one: object, **settings) -> dict:
    return page_facts(config(one=one, **settings), ["one", "unknown"]).get("one", {})


def turboquant(soa: bool) -> object:
    return attention(TurboQuantAttentionBackend, impl=SimpleNamespace(_soa_store=soa))


def cpu_layer(isa: str = "vec") -> object:
    """With vLLM's kernel, and as many heads as a small model."""
    impl = object.__new__(CPUAttentionBackendImpl)
    impl.num_kv_heads, impl.head_size, impl.kv_cache_dtype = 2, 64, "auto"
    impl.attn_type = "decoder"
    scales = {"_k_scale_float": 1.0, "_v_scale_float": 1.0}
    return attention(CPUAttentionBackend, impl=impl, isa=isa, **scales)


ORDINARY = {
    "cpu": cpu_layer,
    "flash": lambda: attention(FlashAttentionBackend),
    "triton": lambda: attention(TritonAttentionBackend),
    "flashinfer": lambda: attention(FlashInferBackend, impl=SimpleNamespace(nvfp4_fa2=False)),
    "gdn": lambda: layer(QwenGatedDeltaNetAttention, gdn_xpu_backend=None),
    "gdn of 0.32": lambda: layer(QwenGatedDeltaNetAttention),
    "mamba2": lambda: layer(MambaMixer2),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_an_ordinary_layer_adds_nothing(name, monkeypatch):
    """Its records keep their names. SimpleNamespace stands in for impls, and is no package's."""
    monkeypatch.setattr(module, "_impl_classes", lambda layer: [])
    monkeypatch.setattr(module.platform, "machine", lambda: "x86_64")
    assert page_facts(config(one=ORDINARY[name]()), ["one"]) == {}


@pytest.fixture(autouse=True)
def bare(monkeypatch):
    """Impls that are SimpleNamespace here are vLLM's there."""
    real = module._impl_classes

    def impls(layer):
        return [kind for kind in real(layer) if kind is not SimpleNamespace]

    monkeypatch.setattr(module, "_impl_classes", impls)


def test_both_layouts_of_turboquant_are_named():
    """Records without a name for it may be of either."""
    found = [facts(turboquant(soa)) for soa in (False, True)]
    assert found[0] and found[1] and found[0] != found[1]


def test_a_class_that_vllm_derives_on_the_spot_counts_as_its_base():
    derived = subclass_attention_backend("Chunked", TurboQuantAttentionBackend, type)
    one = attention(derived, impl=SimpleNamespace(_soa_store=True))
    assert facts(one) == facts(turboquant(True))


def function_of(name: str) -> FunctionType:
    """A function that was written in another module."""
    scope: dict = {"__name__": name}
    exec("def writes(*arguments): return None", scope)
    return scope["writes"]


def test_what_is_derived_on_the_spot_with_functions_from_outside_counts(monkeypatch):
    monkeypatch.setattr(module, "code_identity", lambda of: f"{of}==1")
    overrides = {"writes": function_of("plugged.backend")}
    derived = subclass_attention_backend_with_overrides("Own", FlashAttentionBackend, overrides)
    assert "plugged.backend==1" in facts(attention(derived)).values()
    derived = subclass_attention_backend("Own", FlashAttentionBackend, type)
    assert facts(attention(derived)) == {}


def test_a_class_that_vllm_derives_in_its_source_needs_its_own_line():
    """It may override how its base writes; its base's line says nothing of that."""
    kind = {"__module__": "vllm.v1.attention.backends.flash_attn"}
    new = type("NewBackend", (FlashAttentionBackend,), kind)
    outside = type("OutsideBackend", (new,), {"__module__": "xxhash.backend"})
    for backend in (new, subclass_attention_backend("Chunked", new, type), outside):
        with pytest.raises(UnknownPagesError, match="looked at how .*flash_attn.NewBackend of"):
            facts(attention(backend))


def test_a_layout_that_vllm_does_not_tell_is_refused():
    with pytest.raises(UnknownPagesError, match="_soa_store.*--attention-backend"):
        facts(attention(TurboQuantAttentionBackend, impl=SimpleNamespace()))


def test_a_backend_of_vllm_that_nobody_has_looked_at_is_refused(monkeypatch):
    new = type("NewBackend", (AttentionBackend,), {"__module__": "vllm.v1.attention.backends.new"})
    with pytest.raises(UnknownPagesError, match="looked at how vllm.v1.attention.backends.new.New"):
        facts(attention(new))


# Packages whose kernels write pages


@pytest.fixture
def installed(monkeypatch):
    """Packages with their versions; others are as they are."""
    versions: dict[str, str] = {}
    found, identity = module.importlib.util.find_spec, module.code_identity
    monkeypatch.setattr(
        module.importlib.util, "find_spec", lambda name: name in versions or found(name)
    )
    monkeypatch.setattr(module, "code_identity", lambda name: versions.get(name) or identity(name))
    return versions


def flashinfer_fa2() -> object:
    return attention(FlashInferBackend, impl=SimpleNamespace(nvfp4_fa2=True))


def int4() -> object:
    made = attention(TritonAttentionBackend)
    made.kv_cache_dtype = "int4_per_token_head"
    return made


def test_the_version_of_flashinfer_counts_where_it_writes_pages(installed):
    found = []
    for version in ("1", "2"):
        installed["flashinfer"] = version
        found.append(facts(flashinfer_fa2()))
        found.append(facts(layer(MambaMixer2), replayssm=True, backend="FLASHINFER"))
    assert found[0] == found[1] != found[2] == found[3]
    assert facts(layer(MambaMixer2), replayssm=True) == {}
    assert facts(layer(MambaMixer2), backend="FLASHINFER") == {}


def test_signs_that_torch_draws_count_with_its_version(monkeypatch):
    before = facts(int4())
    monkeypatch.setattr(torch, "__version__", "99")
    assert before and facts(int4()) != before


@pytest.mark.parametrize("kind, package", module.KERNELS.items())
def test_the_package_of_a_devices_kernels_counts(installed, monkeypatch, kind, package):
    import vllm.platforms as platforms

    platform = type(platforms.current_platform)()
    platform._enum = platforms.PlatformEnum[kind.upper()]
    monkeypatch.setattr(platforms, "current_platform", platform)
    one = config(one=attention(FlashAttentionBackend))
    assert page_facts(one, ["one"]) == {}  # not installed: none of its kernels writes
    installed[package] = "1"
    first = page_facts(one, ["one"])
    installed[package] = "2"
    assert first == {"": {package: "1"}} and page_facts(one, ["one"]) == {"": {package: "2"}}


def test_a_package_without_a_version_is_refused(installed, monkeypatch):
    installed["flashinfer"] = "1"
    monkeypatch.setattr(module, "code_identity", lambda name: None)
    with pytest.raises(UnknownPagesError, match="version of flashinfer"):
        facts(flashinfer_fa2())


def test_on_xpu_the_kernels_that_keep_the_state_count():
    found = [
        facts(layer(QwenGatedDeltaNetAttention, gdn_xpu_backend=kind))
        for kind in ("sycl", "triton")
    ]
    assert found[0] != found[1] and all(found)


def test_layers_without_a_backend_of_their_own_count_with_the_one_they_chose():
    """The same layer may have pages of several layouts, as with 16 tokens for aiter."""
    one = layer(DeepseekV4IndexerCache)
    first = facts(one)
    object.__setattr__(one, "get_attn_backend", lambda: FlashAttentionBackend)
    assert first and facts(one) != first


# CPU


@pytest.mark.parametrize("machine", ["aarch64", "riscv64", "s390x", "ppc64le"])
def test_beside_x86_it_counts_how_the_kernels_pack_a_block(monkeypatch, machine):
    """Arm's are compiled with or without BFMMLA, under one version and on one machine."""
    monkeypatch.setattr(module.platform, "machine", lambda: machine)
    found = [facts(cpu_layer(isa)) for isa in ("vec", "vec")]
    assert found[0] == found[1] and "packing" in found[0]


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="one packing here")
def test_a_kernel_that_packs_otherwise_is_seen():
    packings = {isa: module.packing(cpu_layer(isa), torch.bfloat16) for isa in ("vec", "amx")}
    assert packings["vec"] != packings["amx"]
    assert packings["vec"] == module.packing(cpu_layer("vec"), torch.bfloat16)


def test_a_probe_shows_the_place_of_each_value(monkeypatch):
    """Also where no second kernel runs: values that change places are another packing."""
    monkeypatch.setattr(module.platform, "machine", lambda: "aarch64")
    one = cpu_layer()
    before = facts(one)
    write = CPUAttentionBackendImpl.do_kv_cache_update

    def swapped(self, layer, key, value, cache, slots):
        write(self, layer, key, value, cache, slots)
        flat = cache.view(-1)
        flat[[0, 1]] = flat[[1, 0]].clone()

    monkeypatch.setattr(CPUAttentionBackendImpl, "do_kv_cache_update", swapped)
    assert facts(one) != before


# Code from outside vLLM


def plugged(name: str, version: str, monkeypatch, base: type = AttentionBackend) -> type:
    """A backend of a package that is installed in a version."""
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(module, "code_identity", lambda of: f"{name}-kit=={version}")
    return type("PluggedBackend", (base,), {"__module__": f"{name}.backend"})


def test_a_backend_from_outside_counts_with_its_version(monkeypatch):
    found = [
        facts(attention(plugged("plugged", version, monkeypatch))) for version in ("1.2", "1.3")
    ]
    assert found[0] != found[1] and "plugged-kit==1.2" in found[0].values()


def test_one_that_derives_from_vllms_counts_as_that_too(monkeypatch):
    backend = plugged("plugged", "1", monkeypatch, TurboQuantAttentionBackend)
    one = attention(backend, impl=SimpleNamespace(_soa_store=True))
    assert facts(one).items() > facts(turboquant(True)).items()


@pytest.mark.parametrize("part", ["layer", "impl"])
def test_layers_and_impls_from_outside_count(monkeypatch, part):
    """vLLM lets plugins replace its layers, and a backend of vLLM name an impl of theirs."""
    kind = plugged("plugged", "1", monkeypatch, object)
    one = (
        layer(type("Layer", (Attention,), {"__module__": "plugged.layer"}), kv_cache_dtype="auto")
        if part == "layer"
        else attention(FlashAttentionBackend, impl=kind())
    )
    if part == "layer":
        object.__setattr__(one, "attn_backend", FlashAttentionBackend)
    assert "plugged-kit==1" in facts(one).values()


def plain(written):
    return written


def wrapped(written):
    """As with functools.wraps, which makes it look like vLLM's own."""
    written.__module__ = "vllm.v1.attention.backends.flash_attn"
    written.__wrapped__ = FlashAttentionBackend.get_name
    return written


@pytest.mark.parametrize("where", [Attention, FlashAttentionBackend, AttentionBackend])
@pytest.mark.parametrize(
    "put", [plain, wrapped, staticmethod, classmethod, property, cached_property, partialmethod]
)
def test_a_function_that_a_plugin_puts_into_a_class_of_vllm_counts(monkeypatch, where, put):
    monkeypatch.setattr(where, "writes", put(function_of("xxhash.plugin")), raising=False)
    version = importlib.metadata.version("xxhash")
    assert f"xxhash=={version}" in facts(attention(FlashAttentionBackend)).values()


def test_the_original_under_a_decorator_of_a_known_package_counts(monkeypatch):
    written = torch.no_grad()(function_of("xxhash.plugin"))
    monkeypatch.setattr(FlashAttentionBackend, "writes", written, raising=False)
    assert facts(attention(FlashAttentionBackend))


def test_functions_of_packages_that_only_decorate_do_not_count(monkeypatch):
    for name in ("functools", "torch.autograd", "lmcache_hybrid.worker", "vllm_patch.media_marks"):
        monkeypatch.setattr(FlashAttentionBackend, "writes", function_of(name), raising=False)
        assert facts(attention(FlashAttentionBackend)) == {}


def test_a_function_that_nobody_knows_is_refused(monkeypatch):
    monkeypatch.setattr(FlashAttentionBackend, "writes", function_of("__main__"), raising=False)
    with pytest.raises(UnknownPagesError, match="the code of .*FlashAttentionBackend.*no package"):
        facts(attention(FlashAttentionBackend))


def test_a_base_from_a_second_package_counts(monkeypatch):
    base = type("Base", (AttentionBackend,), {"__module__": "xxhash.backend"})
    monkeypatch.setattr(module, "code_identity", lambda of: f"{of}==1")
    derived = type("Derived", (base,), {"__module__": "plugged.backend"})
    found = facts(attention(derived)).values()
    assert "plugged.backend==1 xxhash.backend==1" in found


def test_every_reviewed_class_of_this_vllm_is_all_vllms(monkeypatch):
    """Otherwise records would lose their names with a release of some other package."""
    # Code for AMD's GPUs imports vLLM's kernels by the name of those for the newest processors; a
    # second set of kernels aborts the process.
    importlib.import_module("vllm._custom_ops")  # loads those of this processor
    monkeypatch.setitem(sys.modules, "vllm._C", sys.modules.get("vllm._C"))
    seen = 0
    for path in module.reviewed():
        place, _, name = path.rpartition(".")
        try:
            code = getattr(importlib.import_module(place), name)
        except (ImportError, AttributeError, RuntimeError, AssertionError):
            continue  # of another release, or of a device that is not here
        assert module._origin(code) is None, path
        seen += 1
    assert seen > 60


def test_a_platform_from_outside_counts(monkeypatch):
    import vllm.platforms as platforms

    base = type(platforms.current_platform)
    monkeypatch.setattr(module, "code_identity", lambda of: "plugged-kit==1")
    made = type("Platform", (base,), {"__module__": "plugged.platform"})()
    monkeypatch.setattr(platforms, "current_platform", made)
    found = page_facts(config(one=attention(FlashAttentionBackend)), ["one"])
    assert found == {"": {"platform": "plugged-kit==1"}}


@pytest.mark.parametrize("place", ["__main__", "builtins", "no_such_package.backend"])
def test_code_that_belongs_to_nothing_is_refused(place):
    backend = type("MadeUp", (AttentionBackend,), {"__module__": place})
    with pytest.raises(UnknownPagesError, match=f"the code of {place}.MadeUp.*install it as a"):
        facts(attention(backend))


def test_a_real_package_is_named_as_it_is_installed():
    backend = type("Backend", (AttentionBackend,), {"__module__": "xxhash.backend"})
    version = importlib.metadata.version("xxhash")
    assert facts(attention(backend)) == {"xxhash.backend.Backend": f"xxhash=={version}"}
