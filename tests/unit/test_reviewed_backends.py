# SPDX-License-Identifier: Apache-2.0
"""Every class of this vLLM that has pages was looked at, and all that its code may choose by."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import vllm
import vllm.v1.attention.backends.registry as registry

from lmcache_hybrid.worker import fingerprint, reviewed_backends

ROOT = Path(vllm.__file__).parent
# Roots of what has pages, and of what writes them.
BASES = {"AttentionBackend", "AttentionLayerBase", "MambaBase"}
# Folders of code that lays out pages.
FOLDERS = ("v1/attention", "model_executor/layers/attention", "model_executor/layers/mamba")


@pytest.fixture(scope="module", autouse=True)
def forgotten() -> Iterator[None]:
    """Millions of nodes; with them a garbage collection, as in each load of weights, takes 3 s."""
    yield
    for kept in (sources, with_pages, layout_code):
        kept.cache_clear()


@cache
def sources() -> dict[str, ast.Module]:
    """Modules of vLLM by dotted name that may define such a class."""
    texts = {file: file.read_text() for file in ROOT.rglob("*.py")}
    heads = {file: re.findall(r"\bclass (\w+)\(([^:]*)", text) for file, text in texts.items()}
    kinds, before = set(BASES), 0
    while before != len(kinds):
        before = len(kinds)
        kinds |= {
            name
            for head in heads.values()
            for name, bases in head
            if kinds & set(re.findall(r"\w+", bases))
        }
    return {
        ".".join(("vllm", *file.relative_to(ROOT).with_suffix("").parts)): ast.parse(texts[file])
        for file, head in heads.items()
        if kinds & {name for name, _ in head}
    }


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    for module, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                yield f"{module}.{node.name}", node


def base_names(node: ast.ClassDef) -> set[str]:
    return {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases}


@cache
def with_pages() -> set[str]:
    """Paths of all classes that derive from BASES, by the names of their bases."""
    kinds, found = set(BASES), set[str]()
    while True:
        more = {path for path, node in classes() if base_names(node) & kinds}
        if more == found:
            return {path for path in found if path.rpartition(".")[2] not in BASES}
        found = more
        kinds |= {path.rpartition(".")[2] for path in more}


def registered() -> set[str]:
    """Paths of vLLM's registries; some are made on the spot, and no class statement shows them."""
    members = (*registry.AttentionBackendEnum, *registry.MambaAttentionBackendEnum)
    return {member.value for member in members if member.value}


def test_every_backend_and_every_layer_with_pages_has_been_looked_at():
    """A new one: read its source, then add its line to reviewed_backends.txt."""
    assert len(with_pages()) > 100 and len(registered()) > 40
    missing = (with_pages() | registered()) - reviewed_backends.reviewed().keys()
    assert not missing, f"nobody has looked at {sorted(missing)}"


def test_each_line_names_facts_that_are_known_and_says_what_was_found():
    names = set()
    for line in Path(reviewed_backends.__file__).with_name(reviewed_backends.REVIEWED_FILE).open():
        if not line.startswith("#"):
            path, facts, found = (part.strip() for part in line.split("|"))
            assert path and found and path not in names
            assert set(facts.split()) <= reviewed_backends.FACTS.keys()
            names.add(path)
    used = {name for facts in reviewed_backends.reviewed().values() for name in facts}
    assert used == reviewed_backends.FACTS.keys()


# Why each does not count, or how it does.
_READS, _SUMS = "read kernels only", "changes the order of sums only"
ENVIRONMENT = {
    "FORCE_NUM_KV_SPLITS": _SUMS,
    "TRITON_CACHE_DIR": "where compiled kernels lie",
    "VLLM_CACHE_ROOT": "where compiled kernels lie",
    "VLLM_CPU_ATTN_SPLIT_KV": _SUMS,
    "VLLM_DISABLE_PYNCCL": "how ranks talk",
    "VLLM_ENABLE_FLA_PACKED_RECURRENT_DECODE": _SUMS,
    "VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE": "room",
    "VLLM_GDN_DECODE_KERNEL": _SUMS,
    "VLLM_KV_CACHE_LAYOUT": "shows in the order of strides",
    "VLLM_ROCM_AITER_MLA_ASM_PADDING": "pads queries",
    "VLLM_ROCM_AITER_MLA_DCP_VERIFY": "of drafts, which are refused beside context parallelism",
    "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB": "room",
    "VLLM_SSM_CONV_STATE_LAYOUT": "counts as the conv layout",
    "VLLM_TRITON_USE_TD": _READS,
    "VLLM_TUNED_CONFIG_FOLDER": _SUMS,
    "VLLM_USE_DIRECT_DCP_A2A": "how ranks talk",
    "VLLM_USE_DIRECT_DCP_KV_GATHER": "how ranks talk",
    "VLLM_USE_DIRECT_DCP_Q_GATHER": "how ranks talk",
    "VLLM_USE_NCCL_SYMM_MEM": "how ranks talk",
}
OPTIONAL = {
    "aiter": "counts on ROCm",
    "flash_attn": _READS,
    "flashinfer": "counts where it writes: NVFP4, ReplaySSM",
    "flydsl": "counts by what TurboQuant makes of it; UltraQuant only reads with it",
    "hpc": "counts where it writes",
    "tokenspeed_mla": _READS,
    "torch": "counts where it draws signs",
    "vllm": "its version counts",
}


@cache
def layout_code() -> list[tuple[str, ast.Module]]:
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
    return [(file.read_text(), ast.parse(file.read_text())) for file in files]


def test_every_environment_variable_of_code_that_lays_out_pages_has_been_looked_at():
    read = r"\benvs\.(VLLM_\w+)|os\.(?:environ|getenv)[^\n\"']*[\"'](\w+)"
    found = {one or other for text, _ in layout_code() for one, other in re.findall(read, text)}
    assert "VLLM_KV_CACHE_LAYOUT" in found
    assert not found - set(fingerprint._ENVIRONMENT) - ENVIRONMENT.keys()


def optional(tree: ast.Module) -> Iterator[str]:
    """Packages that may be missing: imported in a try, or looked for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Try):
            for inner in (each for part in node.body for each in ast.walk(part)):
                if isinstance(inner, ast.Import):
                    yield from (alias.name for alias in inner.names)
                elif isinstance(inner, ast.ImportFrom) and not inner.level:
                    yield inner.module or ""
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("find_spec"):
            yield from (arg.value for arg in node.args if isinstance(arg, ast.Constant))


def test_every_optional_import_of_code_that_lays_out_pages_has_been_looked_at():
    found = {name.partition(".")[0] for _, tree in layout_code() for name in optional(tree)}
    assert "flydsl" in found
    assert not found - OPTIONAL.keys()


@pytest.mark.parametrize("name", ["aiter", "flashinfer", "hpc"])
def test_a_package_that_is_said_to_count_does(name):
    text = Path(reviewed_backends.__file__).read_text()
    assert f'"{name}"' in text
