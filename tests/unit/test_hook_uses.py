# SPDX-License-Identifier: Apache-2.0
"""Names of upstream's that our code uses, against the lists of hooks; see test_names.py."""

import ast
import builtins
import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from lmcache_hybrid.worker import fingerprint
from tests.compat import names

from .test_hooks import FILES, ROOT

OURS = ("lmcache_hybrid", "vllm_patch")
# Methods of what functions of other libraries return; of transformers' and torch's classes.
OTHERS = {
    "__tensor_flatten__",  # torch, of tensors that wrap others
    "_args",  # threading.Thread
    "_commit_hash",  # transformers
    "_user_set_keys",  # of LMCache's configuration, see the hook of _update_config_from_env
    *("HF_HUB_CACHE", "blob_id", "lfs"),  # huggingface_hub
    "_unfinished_tasks",  # asyncio.Queue
    "all_special_ids",  # transformers
    "get_extra_config_value",  # LMCache makes this method of _get_extra_config_value
    *("ray", "get_node_ip_address"),  # ray, as vLLM imports it in vllm.v1.executor.ray_utils
    "hip",  # torch.version
    *("disk_partitions", "fstype", "mountpoint"),  # psutil
    "start_mark",  # of yaml's nodes
    "verify_message",  # ssl, of an error
    *("auto_map", "layer_types"),  # transformers
    "cuDriverGetVersion",  # CUDA, through ctypes
    "_C_cache_ops",  # torch.ops, see the hook of swap_blocks_batch
    "cuda_stream",  # torch.cuda.Stream, in C++
    "loggerDict",  # logging.Manager
    "middleware",  # fastapi.FastAPI
    "operation_name",  # awscrt.s3.S3ResponseError
    "problem_mark",  # yaml.MarkedYAMLError
    "origin",  # importlib's ModuleSpec
    "resolved",  # huggingface_hub.ResolvedRevision
    "returncode",  # subprocess.Popen
    "status_code",  # awscrt.s3.S3ResponseError
    "submodule_search_locations",  # importlib's ModuleSpec
    "to_dict",  # transformers
    "update_config_from_env",  # LMCache makes this method of _update_config_from_env
}


def uses(file: Path) -> Iterator[str]:
    """Names of attributes that a file reads, ``getattr`` and ``hasattr`` with a text included."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif (
            isinstance(node, ast.Call)
            and getattr(node.func, "id", "") in ("getattr", "hasattr")
            and isinstance(node.args[1], ast.Constant)
        ):
            yield node.args[1].value


def own() -> set[str]:
    """What our files define."""
    names: set[str] = set()
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if getattr(node.value, "id", "") == "self":
                    names.add(node.attr)
    return names


def modules() -> Iterator[ModuleType]:
    """What our files import from others than upstream: Python's own modules and libraries."""
    found = {"os.path", "torch", "torch.nn", "torch.cuda"}
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module)
    for name in sorted(found):
        if name.split(".")[0] not in (*names.PACKAGES, *OURS) or name.startswith("torch"):
            with contextlib.suppress(ImportError):  # an extra
                yield importlib.import_module(name)


def elsewhere() -> set[str]:
    """Public names of Python, of libraries and of their classes."""
    names = set(OTHERS)
    for module in (builtins, *modules()):
        for name, value in list(vars(module).items()):
            names.add(name)
            if isinstance(value, type):
                names.update((*dir(value), *getattr(value, "_fields", ())))
            elif isinstance(value, ModuleType) and value.__name__.startswith(module.__name__):
                names.update(n for n in vars(value) if not n.startswith("_"))
    return names


def listed() -> set[str]:
    found = [*names.HOOKS, *names.imports()]
    found += [other for hook in found for other in hook.otherwise]
    return {part for hook in found for part in hook.name.split(".")}


def test_every_foreign_attribute_that_we_use_is_listed() -> None:
    """A name that is ours or Python's too is not seen; the others must be in the lists."""
    known = own() | elsewhere() | listed()
    missing = {
        f"{name} in {file.relative_to(ROOT)}"
        for file in FILES
        for name in uses(file)
        if name not in known and not name.startswith("_hybrid")
    }
    assert sorted(missing) == []


def test_every_variable_of_vllms_environment_that_counts_is_listed() -> None:
    """Read with a default, a renamed one would no longer count, without a word."""
    listed = {str(hook) for hook in names.HOOKS if hook.module == "vllm.envs"}
    prefix = "vllm.envs.environment_variables."
    # Read as attributes.
    others = {
        "VLLM_ENABLE_V1_MULTIPROCESSING",
        "VLLM_RPC_BASE_PATH",
        "VLLM_USE_RAY_V2_EXECUTOR_BACKEND",
        "VLLM_USE_RUST_FRONTEND",
    }
    assert listed == {prefix + name for name in {*fingerprint._ENVIRONMENT, *others}}
