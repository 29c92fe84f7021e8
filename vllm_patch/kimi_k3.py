# SPDX-License-Identifier: Apache-2.0
"""A repair of vLLM's Kimi-K3 on NVIDIA."""

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def write_windows_as_they_are_read(model: "nn.Module") -> None:
    """A checkpoint inside a chunk must have the last K - 1 tokens where a window is read.

    Bug: beside a drafter a convolution window has room for the drafts, too. FlashKDA's exporter is
    made without the window's own length, fills all of that room, and so begins as many tokens too
    early as there are drafts.
    Symptom: whoever goes on from such a state has wrong tokens, with or without a connector. vLLM's
    own hit has the same error, so ``accept`` cannot see it.
    Seen in: vLLM 0.32.0 and 0.33.0, by reading.
    Remove when: ``vllm.models.kimi_k3.nvidia.kda`` gives the exporter ``state_len``.

    Args:
        model: as loaded, before its first step. Its layers are changed.
    """
    for layer in model.modules():
        exporter = getattr(layer, "_checkpoint_exporter", None)
        if exporter is not None and getattr(exporter, "state_len", 0) is None:
            layer._checkpoint_exporter = dataclasses.replace(
                exporter, state_len=layer.conv_size - 1
            )
