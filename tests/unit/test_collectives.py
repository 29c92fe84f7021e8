# SPDX-License-Identifier: Apache-2.0
"""An error on one rank is a value that it sends: no rank waits for one that is not there."""

import copy
from types import SimpleNamespace as Namespace

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.lora.request import LoRARequest

from lmcache_hybrid import connector as door
from lmcache_hybrid.connector import HybridConnector
from lmcache_hybrid.core.errors import ConfigError, UnknownWeightsError
from lmcache_hybrid.identity.adapters import Adapter, LoadedAdapters
from lmcache_hybrid.identity.weights import LOADED
from lmcache_hybrid.worker.fingerprint import fingerprints
from tests.injection.ranks import Meeting

from . import test_fingerprint as one_rank
from .helpers import PLAN
from .lmcache_settings import transfer
from .test_fingerprint import PAGES
from .test_shared_fingerprint import LATENT

model, made, config = one_rank.model, one_rank.made, one_rank.config


@pytest.fixture
def meeting(monkeypatch) -> Meeting:
    meeting = Meeting(2)
    meeting.install(monkeypatch)
    return meeting


def configs(config, folder) -> list:
    """One for each rank; the second rank's folder has a file that cannot be read."""
    found = []
    for rank in range(2):
        own = copy.deepcopy(config)
        own.parallel_config.rank, own.parallel_config.world_size = rank, 2
        LOADED.note(own.model_config, "weights")
        found.append(own)
    (folder / "config.json").symlink_to("/proc/self/mem")  # reading its first byte is an EIO
    found[1].model_config.model = str(folder)
    return found


def test_a_file_that_one_rank_cannot_read_turns_lmcache_off_on_all(config, meeting, tmp_path):
    own = configs(config, tmp_path)
    said = []

    def start(rank: int) -> None:
        with pytest.raises(UnknownWeightsError) as error:
            fingerprints(own[rank], LATENT, PAGES)
        said.append(str(error.value))

    meeting.run(start)
    assert said[0] == said[1]
    assert said[0].startswith(f"on rank 1 {tmp_path}/config.json cannot be read (Input/output")
    assert "make it readable" in said[0] and "\n" not in said[0]


def test_what_fails_on_one_rank_before_the_ranks_meet_is_said_to_the_others(
    config, meeting, monkeypatch, hybrid_log
):
    """Also where that rank refuses to start."""
    refused = []

    def start(rank: int) -> None:
        hybrid = object.__new__(HybridConnector)
        hybrid._registered, hybrid.kv_cache_config, hybrid._manager = {}, None, None
        hybrid._vllm_config, hybrid.plan = copy.deepcopy(config), PLAN
        hybrid._options = Namespace(events=False)
        LOADED.note(hybrid._vllm_config.model_config, "weights")
        try:
            hybrid.register_kv_caches({"rank": rank})
        except ConfigError as error:
            refused.append((rank, str(error)))
        assert hybrid.worker is None

    def map_pages(vllm_config, kv_cache_config, plan, kv_caches, config, options):
        if kv_caches["rank"] == 1:
            raise ConfigError("this layout is not served.")
        return PAGES

    monkeypatch.setattr(door, "map_pages", map_pages)
    monkeypatch.setattr(door.HybridConnector, "_open", lambda *_: pytest.fail("opened"))
    meeting.run(start)
    assert refused == [(1, "this layout is not served.")]
    assert "because on rank 1 its KV cache cannot be mapped" in hybrid_log.text


def test_a_rank_that_refuses_in_its_constructor_leaves_no_other_waiting(config, meeting):
    """vLLM makes the connector and registers the KV cache in one call to all ranks."""
    said = []

    def start(rank: int) -> None:
        own = copy.deepcopy(config)
        own.parallel_config.prefill_context_parallel_size = 1 + rank
        own.kv_transfer_config = transfer()
        LOADED.note(own.model_config, "weights")
        if rank == 1:
            with pytest.raises(ConfigError, match="prefill_context_parallel_size=2"):
                HybridConnector(own, KVConnectorRole.WORKER, None)
            return
        with pytest.raises(UnknownWeightsError) as error:
            fingerprints(own, PLAN, PAGES)
        said.append(str(error.value))

    meeting.run(start)
    assert said[0].startswith("on rank 1 it does not start: prefill_context_parallel_size=2")


def test_ranks_that_have_no_problem_start(config, meeting):
    """Or the tests above would pass without a meeting."""

    def start(rank: int) -> bytes:
        own = copy.deepcopy(config)
        own.parallel_config.rank, own.parallel_config.world_size = rank, 2
        LOADED.note(own.model_config, "weights")
        return fingerprints(own, LATENT, PAGES)[1].fingerprint

    first, second = meeting.run(start)
    assert first == second


def test_an_adapter_that_fails_on_one_rank_is_held_by_none(meeting, lenient, hybrid_log):
    lora = LoRARequest("name", 1, "/nowhere")
    ranks = [LoadedAdapters(), LoadedAdapters()]
    for rank, adapters in enumerate(ranks):
        adapters.rank = rank
        adapters._manager = Namespace(list_adapters=lambda: {1})
        adapters._contents[1] = b"content"

    def broken():
        raise OSError("a folder that is gone")

    adapter = Adapter(lora, (b"content", b"content"))
    held = lambda: meeting.run(lambda rank: ranks[rank].all_hold([adapter]))  # noqa: E731
    assert held() == [[True], [True]]
    ranks[1]._manager.list_adapters = broken
    assert held() == [[False], [False]]
    assert lenient == {"adapter_content": 1}
    assert "errors_total" not in hybrid_log.text, "no rank counts it yet"
    assert "a folder that is gone" in hybrid_log.text
