# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers on the Triton kernels that a GPU runs, in Triton's interpreter.

For engines with ``runner="v2"``: give :func:`use` to ``Engine(prepare=...)``. vLLM's CPU
kernels of recurrent layers know no drafts, and Kimi Delta Attention and some other layers
have none. Attention stays with vLLM's CPU backend.
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

# Modules that replace their Triton functions by the CPU's while they are imported.
OPS = tuple(
    f"vllm.model_executor.layers.mamba.ops.{name}"
    for name in ("causal_conv1d", "mamba_ssm", "ssd_combined")
)
# Builtins of triton.language that kernels' modules keep under names of their own.
KEPT = ("exp", "exp2", "log", "log2", "gather", "make_tensor_descriptor")


def use() -> None:
    """Take the GPU's kernels. Call before a model is made, in a child of v2's server."""
    mend_interpreter()
    _import_triton_ops()
    _choose_them()
    unkeep_builtins()


def mend_interpreter() -> None:
    """Four things that Triton's interpreter does not do as its compiler does."""
    from triton.language import bfloat16, float32, int1
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    load, store, dot = builder.create_masked_load, builder.create_masked_store, builder.create_dot
    unary, binary = builder.unary_op, builder.binary_op

    def boolean(mask: Any) -> Any:
        """It keeps some masks as integers and then refuses them."""
        return handle(mask.data.astype(bool), int1)

    def wide(factor: Any) -> Any:
        """It computes with the bits of bfloat16 as if they were integers."""
        if factor.dtype.scalar != bfloat16:
            return factor
        return handle((factor.data.astype("uint32") << 16).view("float32"), float32)

    def narrow(result: Any) -> Any:
        """Rounded to the nearest, to even."""
        if result.data.dtype != "float32":
            return result  # of a comparison
        bits = result.data.view("uint32")
        return handle(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("uint16"), bfloat16)

    def alike(self: Any, one: Any, other: Any, op: Any) -> Any:
        if one.dtype.scalar != bfloat16:
            return binary(self, one, other, op)
        return narrow(binary(self, wide(one), wide(other), op))

    def alone(self: Any, one: Any, op: Any) -> Any:
        if one.dtype.scalar != bfloat16:
            return unary(self, one, op)
        return narrow(unary(self, wide(one), op))

    builder.create_masked_load = lambda self, pointers, mask, *rest: load(
        self, pointers, boolean(mask), *rest
    )
    builder.create_masked_store = lambda self, pointers, value, mask, *rest: store(
        self, pointers, value, boolean(mask), *rest
    )
    builder.create_dot = lambda self, a, b, *rest: dot(self, wide(a), wide(b), *rest)
    builder.binary_op, builder.unary_op = alike, alone
    run = interpreter.InterpretedFunction.run

    def run_on_grid(self: Any, *args: Any, grid: Any, **kwargs: Any) -> Any:
        """It asks for a grid with its own tensors in place of torch's and of numbers."""
        if callable(grid):
            known = {k: v for k, v in kwargs.items() if k in self.arg_names}
            grid = grid(inspect.getcallargs(self.fn, *args, **known))
        return run(self, *args, grid=grid, **kwargs)

    interpreter.InterpretedFunction.run = run_on_grid


def _import_triton_ops() -> None:
    from vllm.platforms import current_platform

    with mock.patch.object(type(current_platform), "is_cpu", lambda self: False):
        for name in OPS:
            if name in sys.modules:
                importlib.reload(sys.modules[name])
            else:
                importlib.import_module(name)


def _choose_them() -> None:
    """Where vLLM asks whether it runs on a CPU, answer with what a GPU gets."""
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as gdn
    from vllm.model_executor.layers.mamba.ops import ssu_dispatch
    from vllm.third_party.flash_linear_attention.ops import chunk_delta_h

    layer = gdn.QwenGatedDeltaNetAttention
    layer.forward_cpu = layer.forward_cuda
    kinds = ssu_dispatch.MambaBackendEnum
    registry = ssu_dispatch._BACKEND_REGISTRY
    registry[kinds.CPU] = registry[kinds.TRITON]
    # It calls a method of the counter, which in the interpreter is a plain int.
    chunk_delta_h.range = _tensors


def _tensors(*ends: Any) -> Iterator[Any]:
    from triton.runtime import interpreter

    plain = (int(end.handle.data.item()) if hasattr(end, "handle") else int(end) for end in ends)
    return map(interpreter._implicit_cvt, range(*plain))


def unkeep_builtins() -> None:
    """The interpreter replaces builtins in ``triton.language`` only, so look there each time."""
    from triton import language

    kept = {id(getattr(language, name)): name for name in KEPT if hasattr(language, name)}

    def anew(name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: getattr(language, name)(*args, **kwargs)

    for module in [m for n, m in sys.modules.items() if n.startswith("vllm.") and m is not None]:
        for name, value in list(vars(module).items()):
            if id(value) in kept:
                setattr(module, name, anew(kept[id(value)]))
