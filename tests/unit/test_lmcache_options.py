# SPDX-License-Identifier: Apache-2.0
"""What LMCache would fail on while it serves, or what does nothing here, is told at the start."""

import json
import logging
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from lmcache.integration.vllm import utils as lmcache_utils

from lmcache_hybrid.config.lmcache_config import (
    LOGGERS_OF_VALUES,
    load_lmcache_config,
    refusals,
    settle_lmcache_config,
)
from lmcache_hybrid.config.lmcache_values import misspelt, unasked, without_prefix
from lmcache_hybrid.config.no_hits import with_few_hits, without_hits
from lmcache_hybrid.config.options import without_events
from lmcache_hybrid.config.own_options import MAX_SIZE_KEY
from lmcache_hybrid.config.redis_credentials import connection_options
from lmcache_hybrid.config.store_sizes import check_folder_limit
from lmcache_hybrid.config.stores.fs import absolute_folders
from lmcache_hybrid.core.errors import ConfigError
from lmcache_hybrid.storage.open_store import open_backends
from lmcache_hybrid.storage.service_factory import HybridServiceFactory
from lmcache_hybrid.upstream.lmcache_home import LMCacheManager, VllmServiceFactory

from .helpers import vllm_config
from .lmcache_settings import BLOCK, assert_one_sentence, lmcache_config, options, refusal, transfer

pytestmark = pytest.mark.usefixtures("no_lmcache_settings")


def extra(**settings):
    """LMCache's defaults with this ``extra_config``; a dot in a name is written ``__``."""
    return lmcache_config(
        extra_config={name.replace("__", "."): value for name, value in settings.items()}
    )


# Of LMCache's health monitor, which compares and waits with what it is given


@pytest.mark.parametrize(
    "name, value, told",
    [
        ("get_blocking_failed_threshold", 0, "is not a number of failed reads above 0; write one"),
        ("get_blocking_failed_threshold", "10", "write one without quotes, or remove it"),
        ("get_blocking_failed_threshold", None, "is not a number of failed reads above 0"),
        ("get_blocking_failed_threshold", True, "is not a number of failed reads above 0"),
        ("ping_interval", 0, "is not a number of seconds above 0 to 9000000000"),
        ("ping_interval", "30s", "is not a number of seconds"),
        ("ping_timeout", float("nan"), "is not a number of seconds"),
        ("ping_timeout", 1e10, "is not a number of seconds above 0 to 9000000000"),
        ("waiting_time_for_recovery", -1, "is not a number of seconds from 0;"),
        ("waiting_time_for_recovery", "5m", "is not a number of seconds from 0;"),
    ],
)
def test_a_number_that_switches_lmcache_off_is_refused(name, value, told):
    message = refusal(extra_config={name: value}, remote_url="redis://host:6379")
    assert message.startswith(f"LMCache option extra_config.{name}={value!r} ") and told in message
    assert_one_sentence(message)
    assert refusals(lmcache_config(extra_config={name: value}), BLOCK) == [], "nothing is pinged"


@pytest.mark.parametrize(
    "name, value",
    [
        ("get_blocking_failed_threshold", 3),
        ("ping_interval", 0.5),
        ("waiting_time_for_recovery", 0),
        ("fallback_policy", "local_cpu"),
        ("local_cpu.pinned_align_bytes", 4096),
        ("local_cpu.pinned_align_bytes", "4096"),
        ("rust_raw_block.io_engine", "posix"),
        ("shm_name", None),
    ],
)
def test_what_lmcache_takes_is_accepted(name, value):
    assert refusals(lmcache_config(extra_config={name: value}), BLOCK) == []


@pytest.mark.parametrize("value", [3000, 0, "4k", [], float("inf")])
def test_an_alignment_that_opens_no_store_is_refused(value):
    message = refusal(extra_config={"local_cpu.pinned_align_bytes": value})
    assert "unless it is a power of two; remove it" in message
    assert_one_sentence(message)


@pytest.mark.parametrize(
    "name, value, why",
    [
        ("fallback_policy", None, "knows recompute and local_cpu; write one of them"),
        ("fallback_policy", 3, "knows recompute and local_cpu; write one of them"),
        ("shm_name", "lmcache", "would write into each other's memory"),
        ("rust_raw_block.io_engine", "IO_URING", "has room for whole chunks alone"),
        ("rust_raw_block.use_iouring", True, "has room for whole chunks alone"),
        ("rust_raw_block.use_uring", 1, "has room for whole chunks alone"),
    ],
)
def test_what_is_left_for_other_processes_and_plugins_is_refused(name, value, why):
    message = refusal(extra_config={name: value})
    assert f"extra_config.{name}={value!r}" in message and why in message
    assert_one_sentence(message)


@pytest.mark.parametrize("option", ["lookup_timeout_ms", "blocking_timeout_secs"])
def test_a_time_that_no_socket_takes_is_refused(option):
    """A lookup's is one of 32 bits in ZeroMQ."""
    message = refusal(**{option: 10**12})
    assert f"{option}=1000000000000 is longer than a timer takes; set it to " in message
    assert_one_sentence(message)
    assert "leaves no time to wait" in refusal(pin_check_interval_sec=0)


# NUMA nodes


@pytest.mark.parametrize("nodes", [{0: 0, 1: 1}, {"0": 0, "1": 1}], ids=str)
def test_nodes_by_number_of_gpu_are_found_as_json_writes_them(nodes):
    config = lmcache_config(numa_mode="manual", extra_config={"gpu_to_numa_mapping": nodes})
    settle_lmcache_config(config, BLOCK)
    assert config.extra_config["gpu_to_numa_mapping"] == {0: 0, 1: 1}


@pytest.mark.parametrize(
    "mode, nodes, told",
    [
        ("Auto", None, "numa_mode='Auto' is not a mode; write auto or manual, or remove it."),
        ("manual", None, "gpu_to_numa_mapping=None, which is no table of NUMA nodes"),
        ("manual", {}, "is no table of NUMA nodes"),
        ("manual", {"cuda:0": 0}, "is no table of NUMA nodes"),
        ("manual", {0: "0"}, "is no table of NUMA nodes"),
    ],
)
def test_nodes_that_open_no_store_are_refused(mode, nodes, told):
    config = {"numa_mode": mode, "extra_config": {"gpu_to_numa_mapping": nodes} if nodes else None}
    message = refusal(**config)
    assert told in message
    assert_one_sentence(message)


def test_another_table_of_nodes_is_left_alone_where_nothing_reads_it():
    config = extra(gpu_to_numa_mapping={"cuda:0": 0})
    settle_lmcache_config(config, BLOCK)
    assert config.extra_config == {"gpu_to_numa_mapping": {"cuda:0": 0}}


@pytest.mark.parametrize("written", ["5s", "-1", "0", "nan", "inf", "1e10"])
def test_a_time_behind_sentinels_with_which_redis_is_not_used_is_refused(monkeypatch, written):
    monkeypatch.setenv("REDIS_TIMEOUT", written)
    message = refusal(remote_url="redis-sentinel://h:26379")
    assert f"REDIS_TIMEOUT='{written}' is not a number of seconds that a socket" in message
    assert_one_sentence(message)
    settle_lmcache_config(lmcache_config(remote_url="redis://h:6379"), BLOCK)


@pytest.mark.parametrize("threads", ["8", 0, -1, 8.0, True, None])
def test_threads_with_which_no_disk_opens_are_refused(tmp_path, threads):
    disk = {"local_disk": str(tmp_path), "max_local_disk_size": 1}
    message = refusal(**disk, extra_config={"disk_io_threads": threads})
    assert f"extra_config.disk_io_threads={threads!r} is no number of threads" in message
    assert_one_sentence(message)
    # LMCache's GPU buffers, which are refused, take a 0.
    settle_lmcache_config(extra(disk_io_threads=threads), BLOCK)


@pytest.mark.parametrize("bounds", ["0.1, 0.5", [1, 0.5], [], 5, ["a"], {"a": 1}, [float("inf")]])
def test_bounds_with_which_lmcache_does_not_start_are_refused(bounds):
    message = refusal(extra_config={"histogram_bucket_time_to_store": bounds})
    assert f"extra_config.histogram_bucket_time_to_store={bounds!r} is no list of rising" in message
    assert_one_sentence(message)


@pytest.mark.parametrize("bounds", [None, [0.1, 1], [5], ["0.1", "0.5"]])
def test_bounds_of_a_histogram_are_lmcaches(bounds):
    settle_lmcache_config(extra(histogram_bucket_time_to_store=bounds), BLOCK)


def test_ranks_of_the_controller_that_is_refused_do_not_end_the_start():
    config = lmcache_config(lmcache_worker_ids=[0, 1, 2, 3])
    settle_lmcache_config(config, BLOCK)
    assert config.get_lmcache_worker_ids(False, 1) == [0]


def test_an_internal_api_server_that_does_not_start_takes_nothing_with_it(monkeypatch, hybrid_log):
    def broken(self, manager):
        raise KeyError("loud")

    monkeypatch.setattr(VllmServiceFactory, "maybe_create_internal_api_server", broken)
    factory = object.__new__(HybridServiceFactory)
    assert factory.maybe_create_internal_api_server(None) is None
    (record,) = [each for each in hybrid_log.records if "internal API server" in each.message]
    assert record.levelname == "WARNING" and "KeyError('loud')" in record.message


def test_why_a_store_does_not_open_is_in_the_sentence(hybrid_log):
    """For what no check knows: LMCache's own manager, and services that cannot be made."""

    class Services:
        def get_or_create_metadata(self):
            raise RuntimeError("mmap failed: Cannot allocate memory")

    manager = LMCacheManager(lmcache_config(), Services())
    assert open_backends(manager) is None
    (said,) = [each.message for each in hybrid_log.records if "could not open" in each.message]
    assert said.startswith(
        "LMCache could not open its store (RuntimeError: mmap failed: Cannot allocate memory): "
    )


# A server that LMCache asks for its configuration


class Answers(BaseHTTPRequestHandler):
    answer: object = None

    def do_GET(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(self.answer).encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{served.server_port}"
        served.shutdown()


def test_a_server_of_settings_is_asked_once_its_limit_is_a_number(monkeypatch, server, hybrid_log):
    """``requests`` does not send infinity, which LMCache's default is."""
    monkeypatch.setattr(lmcache_utils, "_config_instance", None)
    monkeypatch.setattr(
        Answers, "answer", {"configs": [{"key": "max_local_cpu_size", "value": "0.25"}]}
    )
    monkeypatch.setenv("LMCACHE_REMOTE_CONFIG_URL", server)
    assert load_lmcache_config(vllm_config(transfer())).max_local_cpu_size == 5.0
    (told,) = [each.message for each in hybrid_log.records if "never asked" in each.message]
    assert told.startswith("LMCACHE_REMOTE_CONFIG_URL is never asked, ")
    assert told.endswith("set pd_allocation_timeout_sec to a number, such as 3600.")
    assert_one_sentence(told)
    monkeypatch.setattr(lmcache_utils, "_config_instance", None)
    monkeypatch.setenv("LMCACHE_PD_ALLOCATION_TIMEOUT_SEC", "3600")
    hybrid_log.clear()
    assert load_lmcache_config(vllm_config(transfer())).max_local_cpu_size == 0.25
    assert "never asked" not in hybrid_log.text


def test_a_server_of_settings_may_send_passwords(monkeypatch, server, caplog):
    """LMCache logs each value that it gets, and where it got it."""
    monkeypatch.setattr(lmcache_utils, "_config_instance", None)
    keys = {"aws_secret_access_key": "s3cr3t", "save_chunk_meta": False}
    sent = {"remote_url": "redis://:s3cr3t@h:1", "extra_config": keys, "no_such": "//u:s3cr3t@h"}
    sent |= {
        "nor_this": "unix:///run/redis.sock?password=o'h,_s3cr3t&db=0",
        "one_more": "//:o'h_s3cr3t@h",
    }
    configs = [{"key": key, "value": value} for key, value in sent.items()]
    configs += [{"value": "redis://:s3cr3t@h"}]  # without a key
    monkeypatch.setattr(Answers, "answer", {"configs": configs})
    monkeypatch.setenv("LMCACHE_REMOTE_CONFIG_URL", server.replace("//", "//user:s3cr3t@"))
    monkeypatch.setenv("LMCACHE_PD_ALLOCATION_TIMEOUT_SEC", "3600")
    loggers = [logging.getLogger(name) for name in LOGGERS_OF_VALUES]
    for each in loggers:
        each.addHandler(caplog.handler)
    try:
        config = load_lmcache_config(vllm_config(transfer()))
    finally:
        for each in loggers:
            each.removeHandler(caplog.handler)
    assert "Applied remote config: remote_url=redis://h:1" in caplog.text
    assert "s3cr3t" not in caplog.text + repr(config.to_dict())
    assert config.extra_config["aws_secret_access_key"] == "s3cr3t"
    assert connection_options(config.remote_url)["password"] == "s3cr3t"


@pytest.mark.parametrize("answer", [[1], "hello"], ids=str)
def test_an_answer_that_is_no_table_is_told_as_what_it_is(monkeypatch, server, answer):
    monkeypatch.setattr(lmcache_utils, "_config_instance", None)
    monkeypatch.setattr(Answers, "answer", answer)
    monkeypatch.setenv("LMCACHE_REMOTE_CONFIG_URL", server)
    monkeypatch.setenv("LMCACHE_PD_ALLOCATION_TIMEOUT_SEC", "3600")
    with pytest.raises(ConfigError) as error:
        load_lmcache_config(vllm_config(transfer()))
    assert "the answer of the server that LMCACHE_REMOTE_CONFIG_URL names" in str(error.value)
    assert_one_sentence(str(error.value))


def test_a_server_that_is_named_too_late_is_told():
    (told,) = unasked(None, {}, {"lmcache.remote_config_url": "http://h"})
    assert told.startswith("lmcache.remote_config_url does nothing in kv_connector_extra_config, ")
    assert_one_sentence(told)


# What does nothing


@pytest.mark.parametrize(
    "name",
    ["first_rank_max_local_cpu_size", "save_only_first_rank", "force_store_wait"],
)
def test_an_option_of_other_models_is_told(name):
    (told,) = with_few_hits(extra(**{name: 20}))
    assert told.startswith(f"extra_config.{name}=20 does nothing: ") and "; remove it." in told
    assert_one_sentence(told)


def test_memory_that_is_not_reserved_is_told():
    (told,) = with_few_hits(lmcache_config(reserve_local_cpu_size=4.0))
    assert told.startswith("reserve_local_cpu_size=4.0 does nothing: ")
    assert_one_sentence(told)


def test_a_store_that_is_never_read_is_told():
    config = lmcache_config(remote_url="redis://h:1", retrieve_locations=["LocalCPUBackend"])
    (told,) = with_few_hits(config)
    assert told.startswith("retrieve_locations=['LocalCPUBackend'] leaves out 'RemoteBackend', so")
    assert_one_sentence(told)
    config.retrieve_locations.append("RemoteBackend")
    assert not list(with_few_hits(config))


def test_a_plugins_store_has_a_name_of_its_own(tmp_path):
    """RemoteBackend is that of remote_url."""
    config = extra(fs_base_path=str(tmp_path))
    config.remote_storage_plugins = ["fs"]
    config.retrieve_locations = ["LocalCPUBackend", "RemoteBackend"]
    (told,) = with_few_hits(config)
    assert "leaves out 'RemoteBackend-fs', so nothing is ever read there" in told


@pytest.mark.parametrize("most, said", [(0, False), (999, True), (1000, True), (1008, False)])
def test_loads_that_may_not_be_as_long_as_they_must_are_told(most, said):
    told = list(without_hits(lmcache_config(min_retrieve_tokens=1000), None, 4096, 16, 0, most))
    assert len(told) == said
    for sentence in told:
        assert sentence.startswith(f"lmcache.max_tokens_per_load={most} allows loads of 992 tokens")
        assert "which is below min_retrieve_tokens=1000, so no load is as long" in sentence
        assert_one_sentence(sentence)


def test_a_limit_of_a_folder_that_holds_no_block_is_refused(tmp_path):
    config = lmcache_config(remote_url=f"fs://localhost:0{tmp_path}")

    def check(size):
        check_folder_limit(options(lmcache=config, **{MAX_SIZE_KEY: size}), 1 << 21, 2)

    with pytest.raises(ConfigError) as error:
        check(0.0015)
    told = f"{MAX_SIZE_KEY}=0.0015 is too small: the records of one block of this model take 2.0 M"
    assert str(error.value).startswith(told)
    assert_one_sentence(str(error.value))
    helps = re.search(r"set it to ([\d.]+) or more, or remove it", str(error.value))
    assert helps is not None
    check(float(helps[1]))
    check_folder_limit(options(lmcache=config), 1 << 21, 2)


@pytest.mark.parametrize("inside, said", [(True, 1), (False, 0)])
def test_events_of_a_connector_among_others_are_told(inside, said):
    told = list(without_events(lmcache_config(enable_kv_events=True), True, inside))
    assert len(told) == said
    for sentence in told:
        assert "has no effect in a MultiConnector" in sentence
        assert_one_sentence(sentence)
    assert not list(without_events(lmcache_config(), True, inside))


# Names of other times and places


@pytest.mark.parametrize(
    "name, told",
    [
        ("LMCACHE_LOCAL_DEVICE", "set LMCACHE_LOCAL_CPU, or LMCACHE_LOCAL_DISK"),
        ("LM_CACHE_LOCAL_DEVICE", "set LMCACHE_LOCAL_CPU, or LMCACHE_LOCAL_DISK"),
        ("LMCACHE_LOOKUP_URL", "set LMCACHE_REMOTE_URL"),
        ("LMCACHE_ERROR_HANDLING", "unset it."),
        ("LMCACHE_EC_LOCAL_DISK", None),  # of its connector for encoders
        ("LMCACHE_LOOKUP_URL_SERVICE_HOST", None),  # of a service of Kubernetes
    ],
)
def test_a_variable_of_an_older_release_is_told(name, told):
    said = list(misspelt({name: "1"}))
    assert len(said) == (told is not None)
    for sentence in said:
        assert sentence.startswith(f"{name} does nothing, as LMCache has no such option any more; ")
        assert told in sentence
        assert_one_sentence(sentence)


@pytest.mark.parametrize("key", ["lmcache_config_file", "LMCACHE_CONFIG_FILE", "lmcache.config"])
def test_a_file_that_nobody_reads_is_refused(key):
    (told,) = without_prefix({key: "/lmcache.yaml"})
    assert told.startswith(f"kv_connector_extra_config has {key}, which nobody reads; name the fi")
    assert_one_sentence(told)
    with pytest.raises(ConfigError, match="in the variable LMCACHE_CONFIG_FILE"):
        load_lmcache_config(vllm_config(transfer(**{key: "/lmcache.yaml"})))


@pytest.mark.parametrize("folder", ["/srv/$POD", "/srv/${POD}", "/srv/$(POD_NAME)", "/~/x"])
def test_a_folder_that_nobody_expands_is_refused(folder, monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match=r"as it is written, without ~ and \$VARIABLES"):
        absolute_folders("remote_url", folder)
    monkeypatch.setenv("LMCACHE_LOCAL_DISK", folder)
    if "~" not in folder:
        with pytest.raises(ConfigError, match="LMCACHE_LOCAL_DISK is taken as it is written"):
            load_lmcache_config(vllm_config(transfer()))
    assert absolute_folders("remote_url", "/srv/a$,/b/~c") == ("/srv/a$", "/b/~c")
    (tmp_path / "of$them").mkdir()
    assert absolute_folders("remote_url", f"{tmp_path}/of$them") == (f"{tmp_path}/of$them",)


@pytest.mark.parametrize("name", ["disable_tls", "s3_prefer_http2", "s3_enable_s3express"])
def test_a_switch_of_s3_in_quotes_is_refused(name):
    options = {"remote_url": "s3://b.example", "extra_config": {"s3_region": "r", name: "false"}}
    message = refusal(**options)
    assert f"extra_config.{name}='false' is a text, which LMCache takes for true" in message
    assert_one_sentence(message)


def test_another_division_of_folders_is_refused_where_there_are_any():
    message = refusal(
        local_disk="/srv", max_local_disk_size=1.0, local_disk_path_sharding="by_rank"
    )
    assert "local_disk_path_sharding='by_rank' is none that LMCache knows; write by_gpu" in message
    assert_one_sentence(message)
    config = lmcache_config(local_disk_path_sharding="by_rank")
    assert refusals(config, BLOCK) == []
    config.local_disk_path_sharding = None
    settle_lmcache_config(config, BLOCK)
    assert config.local_disk_path_sharding == "by_gpu"


def test_what_is_stored_in_one_place_alone_is_read_there():
    """Nothing is said of stores that nothing is written to."""
    read = ["RemoteBackend"]
    config = lmcache_config(
        remote_url="redis://h:1", store_location="RemoteBackend", retrieve_locations=read
    )
    assert not list(with_few_hits(config))


def api_server(first: int, **settings):
    return lmcache_config(
        internal_api_server_enabled=True, internal_api_server_port_start=first, **settings
    )


@pytest.mark.parametrize("first, last", [(70000, 65533), (65534, 65533), (0, 65533), (-1, 65533)])
def test_ports_that_do_not_exist_are_refused(first, last):
    (message,) = refusals(api_server(first), BLOCK, ranks=2)
    assert message.startswith(f"LMCache option internal_api_server_port_start={first} is no port")
    assert f"set it to a number from 1 to {last}" in message
    assert_one_sentence(message)


def test_ports_that_nobody_listens_on_are_accepted():
    assert refusals(api_server(65533), BLOCK, ranks=2) == []
    by_files = api_server(70000, internal_api_server_socket_path_prefix="/tmp/api/server")
    assert refusals(by_files, BLOCK) == []
    assert refusals(lmcache_config(internal_api_server_port_start=70000), BLOCK) == []
    of_scheduler = api_server(65535, internal_api_server_include_index_list=[0, 9])
    assert refusals(of_scheduler, BLOCK, ranks=2) == []
