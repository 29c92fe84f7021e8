# SPDX-License-Identifier: Apache-2.0
"""Ranks that Ray places: how they know their scheduler, and what is refused; no engine starts."""

import contextlib
import pickle
import uuid
from types import SimpleNamespace

import pytest
import zmq
from vllm import envs
from vllm.config import KVTransferConfig
from vllm.distributed import parallel_state
from vllm.v1.executor import ray_utils
from vllm.v1.executor.abstract import Executor

import vllm_patch
from lmcache_hybrid.config.parallel import check_parallelism, local_ranks, spans_hosts
from lmcache_hybrid.core.by_ray import SCHEDULER_KEY, scheduler_keys
from lmcache_hybrid.core.errors import ConfigError
from lmcache_hybrid.storage import hosts
from lmcache_hybrid.storage.rpc import LookupClient, LookupServer

from .lmcache_settings import assert_one_sentence

vllm_patch.register()
FIRST_EXECUTOR = hasattr(envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND")


class AnExecutor(Executor):
    """Notes what a rank would be sent; starts none."""

    def _init_executor(self) -> None:
        self.sent = pickle.dumps(self.vllm_config.kv_transfer_config)

    collective_rpc = check_health = None
    __abstractmethods__ = frozenset()


class OfRay(AnExecutor):
    uses_ray = True


def config(
    executor: str | type = "ray",
    connector: str = "LMCacheConnectorV1",
    rank: int = 0,
    by_ray: bool = True,
    engines: int = 1,
) -> SimpleNamespace:
    transfer = KVTransferConfig(
        kv_connector=connector, kv_role="kv_both", engine_id=str(uuid.uuid4())
    )
    parallel = SimpleNamespace(
        distributed_executor_backend=executor,
        use_ray=by_ray,
        world_size=1,
        local_world_size=1,
        rank=rank,
        pipeline_parallel_size=1,
        data_parallel_size=engines,
        nnodes_within_dp=1,
    )
    others = "model cache lora load scheduler device speculative observability".split()
    return SimpleNamespace(
        kv_transfer_config=transfer,
        parallel_config=parallel,
        use_v2_model_runner=False,
        **{f"{each}_config": None for each in others},
    )


@pytest.fixture
def address(monkeypatch):
    """The address that Ray has for this host."""
    module = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.4")
    monkeypatch.setattr(ray_utils, "ray", SimpleNamespace(util=module))
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.5")


def alone(monkeypatch, rank: int = 0) -> None:
    """Make a process group of one rank."""
    group = SimpleNamespace(world_size=1, cpu_group=None)
    monkeypatch.setattr(parallel_state, "get_world_group", lambda: group)

    def gather(ranks: list, own: tuple, group: object) -> None:
        ranks[:] = [(rank, *own[1:])]

    monkeypatch.setattr(hosts.torch.distributed, "all_gather_object", gather)


def test_ranks_are_sent_the_public_key_of_this_process_only():
    said = config()
    sent = AnExecutor(said).sent
    public, secret = scheduler_keys()
    assert pickle.loads(sent).kv_connector_extra_config == {SCHEDULER_KEY: public.decode()}
    assert public in sent and secret not in sent
    for other in (config(connector="NixlConnector"), config("mp", by_ray=False)):
        AnExecutor(other)
        assert SCHEDULER_KEY not in other.kv_transfer_config.kv_connector_extra_config


def test_a_connector_in_another_one_is_told_too():
    said = config(connector="MultiConnector")
    children = [{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}]
    said.kv_transfer_config.kv_connector_extra_config["connectors"] = children
    AnExecutor(said)
    assert children[0]["kv_connector_extra_config"] == {SCHEDULER_KEY: scheduler_keys()[0].decode()}


def test_an_executor_for_ray_that_is_named_by_its_path_is_refused():
    path = f"{__name__}.{OfRay.__name__}"
    assert refusal(config(path, by_ray=False)).startswith(f"distributed_executor_backend={path} ")
    check_parallelism(config("vllm.v1.executor.multiproc_executor.MultiprocExecutor", by_ray=False))


def test_where_no_socket_can_listen_the_fix_is_ray_s(address, monkeypatch):
    said = config()
    AnExecutor(said)
    monkeypatch.setattr(hosts, "node_address", lambda: "192.0.2.1")
    with pytest.raises(ConfigError, match="192.0.2.1.*; ray start --node-ip-address"):
        LookupServer(said)


def test_a_rank_answers_the_scheduler_that_its_configuration_names(monkeypatch, address):
    alone(monkeypatch)
    said = config()
    AnExecutor(said)
    with contextlib.closing(LookupServer(said)) as server:
        known = server.introduce()
        assert known.addresses[0].startswith("tcp://127.0.0.4:")
        public, secret = scheduler_keys()
        assert known.public_key == public and known.secret_key == b""
        assert secret not in pickle.dumps(known)
        with contextlib.closing(LookupClient(said, 10_000)) as client:
            client.connect(pickle.loads(pickle.dumps(known)))
            assert client.clear(7)


def test_a_scheduler_that_the_ranks_do_not_know_asks_nobody(monkeypatch):
    known = hosts.Introduction(("tcp://127.0.0.1:1",), (b"key",), zmq.curve_keypair()[0], b"")
    with pytest.raises(RuntimeError, match="the ranks know another scheduler"):
        hosts.ClientTransport(known, 1000)


def test_a_rank_that_is_another_one_for_the_others_is_not_introduced(monkeypatch, address):
    alone(monkeypatch, rank=1)
    said = config()
    AnExecutor(said)
    with (
        contextlib.closing(LookupServer(said)) as server,
        pytest.raises(RuntimeError, match=r"has its ranks in this order: \(1,\)"),
    ):
        server.introduce()


def test_a_rank_without_a_scheduler_to_answer_does_not_listen(address):
    with pytest.raises(KeyError, match=SCHEDULER_KEY):
        LookupServer(config())


def refusal(said: SimpleNamespace) -> str:
    with pytest.raises(ConfigError) as error:
        check_parallelism(said)
    assert_one_sentence(str(error.value))
    return str(error.value)


def test_what_ray_places_may_be_on_several_hosts():
    said = config()
    check_parallelism(said)
    assert spans_hosts(said.parallel_config) and not spans_hosts(SimpleNamespace())
    said.parallel_config.local_world_size = 4
    assert local_ranks(said) == 1


@pytest.mark.skipif(not FIRST_EXECUTOR, reason="vLLM 0.33 has one executor for Ray")
def test_vllms_first_executor_for_ray_is_refused(monkeypatch):
    monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "0")
    message = refusal(config())
    assert message.startswith(
        "distributed_executor_backend=ray with VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0"
    )
    assert message.endswith("unset it.")
    check_parallelism(config("mp", by_ray=False))


def test_an_executor_of_somebody_elses_for_ray_is_refused():
    message = refusal(config(AnExecutor))
    assert message.startswith("distributed_executor_backend=AnExecutor places ranks by Ray")
    assert message.endswith("use --distributed-executor-backend ray.")


def test_data_parallel_engines_are_refused_where_ray_places_their_ranks():
    message = refusal(config(engines=2))
    assert message.startswith("distributed_executor_backend=ray with data_parallel_size=2")
    check_parallelism(config("mp", by_ray=False, engines=2))
