# SPDX-License-Identifier: Apache-2.0
"""vLLM's copy on write with our repair: every byte of a page, once."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from vllm.config import KVTransferConfig
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu import model_runner

from vllm_patch import kimi_k3, loaders, partial_hits, sessions
from vllm_patch.configuration import CONNECTOR
from vllm_patch.partial_hits import copy_whole_pages, without_covered

copy_whole_pages()

BLOCKS, PAGE = 5, 48


def buffer(slots: int = 2) -> torch.Tensor:
    """Pages [slot, block, byte] in one buffer, as vLLM has them on CPU and, by default, on CUDA."""
    return (
        torch.arange(slots * BLOCKS * PAGE, dtype=torch.int32)
        .to(torch.int8)
        .view(slots, BLOCKS, PAGE)
    )


def state(pages: torch.Tensor, size: int, first: int = 0) -> torch.Tensor:
    return pages[:, first : first + size].unflatten(1, (1, 1, size))


def attention(pages: torch.Tensor, kernel_blocks: int = 1) -> torch.Tensor:
    return pages.view(torch.bfloat16).view(BLOCKS * kernel_blocks, 2, -1, 4)


@pytest.mark.parametrize("runner", [gpu_model_runner, model_runner], ids=["V1", "V2"])
@pytest.mark.parametrize(
    "views",
    [
        pytest.param(lambda pages: [state(pages, 30), attention(pages)], id="state first"),
        pytest.param(lambda pages: [attention(pages), state(pages, 30)], id="attention first"),
        pytest.param(lambda pages: [state(pages, 30), attention(pages, 3)], id="kernel blocks"),
        pytest.param(
            lambda pages: [state(pages, 10), state(pages, 20, 10), attention(pages)],
            id="conv and ssm apart",
        ),
        pytest.param(lambda pages: [attention(pages), attention(pages)], id="shared by two layers"),
    ],
)
def test_a_copy_has_every_byte_of_its_page(views, runner):
    pages = buffer()
    before = pages.clone()
    caches = [view for slot in pages for view in views(slot)]
    runner.copy_kv_cache_blocks_inplace(caches, BLOCKS, [(1, 3), (3, 2)])
    for block, source in enumerate((0, 1, 3, 1, 4)):
        assert torch.equal(pages[:, block], before[:, source]), f"block {block}"


def test_views_that_cover_no_other_are_all_copied():
    pages = buffer(1)[0]
    conv, ssm = state(pages, 10), state(pages, 20, 10)
    assert without_covered([conv, ssm], BLOCKS) == [conv, ssm]


def test_blocks_that_interleave_are_left_alone():
    """Where heads come before blocks, a block's bytes lie between those of others."""
    pages = torch.arange(2 * BLOCKS * PAGE, dtype=torch.int32).to(torch.int8)
    by_head = pages.view(2, BLOCKS, PAGE).transpose(0, 1)
    narrow = by_head[:, :, :8]
    assert len(without_covered([narrow, by_head], BLOCKS)) == 2


def test_a_step_without_copies_looks_at_nothing():
    gpu_model_runner.copy_kv_cache_blocks_inplace(iter(()), BLOCKS, [])


@pytest.mark.parametrize("connector, repaired", [(CONNECTOR, 3), ("NixlConnector", 0)])
def test_an_engine_with_this_connector_is_repaired_and_no_other(connector, repaired, monkeypatch):
    calls: list[bool] = []
    monkeypatch.setattr(partial_hits, "copy_whole_pages", lambda: calls.append(True))
    monkeypatch.setattr(sessions, "forget_columns_of_parts", lambda: calls.append(True))
    monkeypatch.setattr(kimi_k3, "write_windows_as_they_are_read", lambda model: calls.append(True))
    transfer = KVTransferConfig(kv_connector=connector, kv_role="kv_both")
    loader = SimpleNamespace(load_weights=lambda model, model_config: None)
    config = SimpleNamespace(kv_transfer_config=transfer, model_config=None)
    loaders._load_model(loader, lambda **_: nn.Linear(1, 1), config, SimpleNamespace())
    assert len(calls) == repaired
