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


class _Hollow(ModuleType):
    """A module that has every name, each an empty class."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


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
    has for decoding on CPU takes Mamba2's shapes."""
    from vllm.model_executor.layers.mamba import mamba_mixer

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


STANDINS: dict[str, Callable[[], None]] = {
    "torchvision": torchvision,
    "selective_scan": selective_scan,
}


def install(names: tuple[str, ...]) -> None:
    for name in names:
        STANDINS[name]()
