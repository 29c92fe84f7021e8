# SPDX-License-Identifier: Apache-2.0
"""A toy model whose weights vLLM's own loaders read from files of every format."""

import copy
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

import vllm_patch
from lmcache_hybrid.identity.weights import weights_identity

vllm_patch.register()

EXPERTS = "experts.w13_weight"


class Toy(nn.Module):
    """A norm, a fused tensor of 128 experts and a buffer, filled as vLLM's models are."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.zeros(8), requires_grad=False)
        self.experts = nn.Module()
        self.experts.w13_weight = nn.Parameter(torch.zeros(128, 64, 16), requires_grad=False)
        self.register_buffer("scale", torch.zeros(()))

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        state, loaded = self.state_dict(), set()
        for name, tensor in weights:
            state[name].copy_(tensor)
            loaded.add(name)
        return loaded


class Fused(Toy):
    """A model that keeps some weights in another folder, ``secondary_weights``."""

    secondary_weights: tuple = ()


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "norm": torch.randn(8, generator=generator, dtype=torch.float32),
        EXPERTS: torch.randn(128, 64, 16, generator=generator, dtype=torch.float32),
        "scale": torch.tensor(3.0, dtype=torch.float32),
    }


def fine_tuned() -> dict[str, torch.Tensor]:
    """Change 10 of 128 experts: 92 % of the tensor's bytes stay."""
    changed = tensors()
    changed[EXPERTS][40:50] += 0.01
    return changed


def configured(made: VllmConfig, model: Path | str, load_format: str = "auto") -> VllmConfig:
    config = copy.deepcopy(made)
    config.model_config.model = str(model)
    config.load_config.load_format = load_format
    return config


def loaded(
    made: VllmConfig,
    model: Path | str,
    load_format: str = "auto",
    loader: BaseModelLoader | None = None,
    toy: nn.Module | None = None,
) -> str:
    """Load ``toy`` with the real ``load_model`` of one of vLLM's loaders; returns its identity."""
    config = configured(made, model, load_format)
    loader = loader or get_model_loader(config.load_config)
    toy = toy or Toy()
    loader.create_model = lambda **_: toy
    with set_current_vllm_config(config):
        found = loader.load_model(vllm_config=config, model_config=config.model_config)
    own = vars(toy)["load_weights"].__wrapped__
    assert found is toy and own == type(toy).load_weights.__get__(toy)
    assert "load_weights" not in vars(loader)
    [identity] = weights_identity(config)["model"]
    return identity


def write_safetensors(folder: Path, content: dict[str, torch.Tensor]) -> None:
    save_file(content, folder / "model.safetensors")


def write_bin(folder: Path, content: dict[str, torch.Tensor]) -> None:
    torch.save(content, folder / "pytorch_model.bin")


def write_pt(folder: Path, content: dict[str, torch.Tensor]) -> None:
    torch.save(content, folder / "model.pt")


def write_mistral(folder: Path, content: dict[str, torch.Tensor]) -> None:
    save_file(content, folder / "consolidated.safetensors")


def write_ranks(folder: Path, content: dict[str, torch.Tensor]) -> None:
    save_file(content, folder / "model-rank-0-part-0.safetensors")


FORMATS = {
    "auto": write_safetensors,
    "safetensors": write_safetensors,
    "hf": write_bin,
    "npcache": write_bin,
    "pt": write_pt,
    "mistral": write_mistral,
    "sharded_state": write_ranks,
}
