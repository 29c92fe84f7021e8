# SPDX-License-Identifier: Apache-2.0
"""Which requests share records."""

from pathlib import Path

import pytest
import torch
from vllm.lora.request import LoRARequest

from lmcache_hybrid.scheduler.prompt import prefix_of

from .helpers import N, make_request, tags_of
from .scheduler_rig import Rig, all_offers


def keys(**kwargs):
    request = make_request(tokens=2 * N, **kwargs)
    return prefix_of(request, N, 1, tags_of(request))


HERE = Path(__file__).parent  # folders stand for adapters' folders


def lora(name: str = "a", path: Path = HERE) -> LoRARequest:
    return LoRARequest(name, 1, str(path))


def tagged(**tags) -> dict:
    return {f"lmcache.tag.{name}": value for name, value in tags.items()}


OTHERS = [
    dict(cache_salt="x"),
    dict(params=tagged(user="a")),
    dict(params=tagged(user="b")),
    dict(params=tagged(team="a")),
    dict(params=tagged(user="a", team="a")),
    dict(lora=lora()),
    dict(lora=lora("b")),
    dict(lora=lora(path=HERE.parent)),
]


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_requests_that_must_not_share_have_other_keys(other):
    mine = keys(**other)
    assert mine == keys(**other)
    assert sum(mine == keys(**kind) for kind in [{}, *OTHERS]) == 1


def test_parameters_that_are_no_tags_do_not_change_keys():
    assert keys(params={"lmcache.skip_save": True, "other": 1}) == keys()


def test_the_order_of_tags_does_not_matter():
    one = keys(params=tagged(a="1", b="2"))
    assert one == keys(params=dict(reversed(tagged(a="1", b="2").items())))
    assert one.tags == (("a", "1"), ("b", "2"))


@pytest.mark.parametrize("value", ["a@b", "50%", "a\n", 7.0, True, None, ["x"], {"a": 1}])
def test_a_bad_tag_means_no_caching(value):
    tagged_request = make_request(params=tagged(user=value))
    rig = Rig().holds(make_request(), 3, 3)
    assert rig.match(tagged_request) == (0, False)
    assert not rig.ranks.questions
    assert rig.forward(tagged_request, 3 * N + 1, all_offers(3)) is None


def test_a_bad_tag_name_means_no_caching():
    assert keys(params={"lmcache.tag.a@b": "x"}) is None


@pytest.mark.parametrize("stored, asked", [("7", 7), (7, "7"), (-7, "-7")])
def test_a_whole_number_and_its_text_are_one_tag(stored, asked):
    """As in LMCache's names of records."""
    mine, same = (make_request(r, params=tagged(user=v)) for r, v in (("a", stored), ("b", asked)))
    assert Rig().holds(mine, 3, 3).match(same) == (3 * N, True)


def test_whole_numbers_are_tags_that_lmcache_reads_back():
    from lmcache.utils import CacheEngineKey

    def name(value) -> str:
        return CacheEngineKey("m", 1, 0, 0, torch.uint8, tagged(user=value)).to_string()

    assert name(7) == name("7") != name("07")
    assert [dict(keys(params=tagged(user=v)).tags)["user"] for v in (7, "07")] == ["7", "07"]


def test_tagged_requests_hit_their_own_tags_only():
    mine = dict(tokens=3 * N + 1, params=tagged(user="a"))
    rig = Rig().holds(make_request(**mine), 3, 3)
    assert rig.match(make_request("same", **mine)) == (3 * N, True)
    assert rig.match(make_request("none", 3 * N + 1)) == (0, False)
    assert rig.match(make_request("b", 3 * N + 1, params=tagged(user="b"))) == (0, False)


def test_refuses_hashes_that_end_elsewhere_than_blocks():
    """Also with python -O: a block would get another one's name."""
    with pytest.raises(ValueError, match="have no hash of their own"):
        Rig(hash_block_size=N - 1)


@pytest.mark.parametrize("tokens", [1, N - 1, N, N + 1, 2 * N, 5 * N - 1])
@pytest.mark.parametrize("hash_block_size", [N, N // 2, N // 4])
def test_a_block_has_the_hash_at_its_end(tokens, hash_block_size):
    request = make_request(tokens=tokens, hash_block_size=hash_block_size)
    per_block = N // hash_block_size
    hashes = prefix_of(request, N, per_block).hashes
    assert len(hashes) == tokens // N
    for i, found in enumerate(hashes):
        assert found == request.block_hashes[(i + 1) * per_block - 1]


def test_generated_tokens_do_not_lengthen_the_prefix():
    request = make_request(tokens=N + 1)
    request.append_output_token_ids(list(range(2 * N)))
    assert len(request.block_hashes) == 3
    assert len(prefix_of(request, N, 1).hashes) == 1
