# SPDX-License-Identifier: Apache-2.0
"""The digest of a stream of tensors: any byte, type, shape or name changes it."""

import pytest
import torch

from lmcache_hybrid.identity.weights import TensorDigest


def digest_of(**content: torch.Tensor) -> str | None:
    digest = TensorDigest()
    for name, tensor in content.items():
        digest.add(name, tensor)
    return digest.hexdigest()


def test_a_digest_covers_name_type_shape_and_bytes():
    base = torch.arange(6, dtype=torch.int32)
    found = [
        digest_of(a=base),
        digest_of(b=base),
        digest_of(a=base.view(2, 3)),
        digest_of(a=base.view(torch.float32)),
        digest_of(a=base.flip(0)),
        digest_of(a=base, b=base),
        digest_of(),
    ]
    assert len(set(found)) == len(found) and found[-1] is None
    assert digest_of(b=base, a=base) == found[5], "loaders read files in any order"
    assert digest_of(a=torch.stack([base, base], 1)[:, 0]) == found[0], "strides are no content"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bool, torch.bfloat16, torch.int8])
def test_values_of_every_type_count(dtype):
    zeros, ones = torch.zeros(4).to(dtype), torch.ones(4).to(dtype)
    assert digest_of(a=zeros) != digest_of(a=ones)
    assert digest_of(a=zeros[0]) and digest_of(a=zeros[:0])
