# SPDX-License-Identifier: Apache-2.0
"""Images, their places and salts in a request's block hashes."""

import pytest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from lmcache_hybrid.identity.media import CONTENT, MARK
from lmcache_hybrid.scheduler.prompt import prefix_of

from .helpers import N, make_request


def image(identifier: str, offset: int = N + 2, length: int = 4) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier=identifier,
        mm_position=PlaceholderRange(offset=offset, length=length),
    )


def hashes(**request) -> tuple[bytes, ...]:
    made = make_request(tokens=4 * N, **request)
    made.sampling_params.extra_args = {MARK: CONTENT}
    return prefix_of(made, N, 1).hashes


@pytest.mark.parametrize(
    "other",
    [
        [image("b")],
        [image("a", offset=N + 3)],
        [image("a"), image("a", offset=N + 8)],
        [],
    ],
    ids=["item", "place", "number", "none"],
)
def test_items_count_from_their_block_on(other):
    """Placeholder tokens are the same for every image; the block before it is shared."""
    one = hashes(mm_features=[image("a")])
    assert one == hashes(mm_features=[image("a")])
    two = hashes(mm_features=other)
    assert one[0] == two[0]
    assert not set(one[1:]) & set(two)


def test_an_item_across_blocks_counts_in_each():
    one, two = (hashes(mm_features=[image(name, length=2 * N)]) for name in "ab")
    assert one[0] == two[0] and not set(one[1:]) & set(two)


@pytest.mark.parametrize("other", [{}, {"cache_salt": "b"}, {"cache_salt": "a "}])
def test_a_salt_counts_from_the_first_block_on(other):
    one = hashes(cache_salt="a")
    assert one == hashes(cache_salt="a") and not set(one) & set(hashes(**other))
