# SPDX-License-Identifier: Apache-2.0
"""The acceptance test's engine: flags, logs, and its end."""

import fcntl
import io
import json
import os
import subprocess
import threading
from types import SimpleNamespace

import pytest
from vllm.entrypoints.cli.serve import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from lmcache_hybrid.core.errors import ConfigError
from lmcache_hybrid.tools.accept.child import Child, engine_arguments
from lmcache_hybrid.tools.accept.engine import Engine as AcceptEngine
from lmcache_hybrid.tools.accept.engine import EngineError, cause_in, redacted, sentence_in, tail
from lmcache_hybrid.tools.flags import parse_flags

from .helpers import model


def test_a_command_line_of_vllm_serve_is_taken(tmp_path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("max-num-seqs: 7\nport: 8001\n")
    flags = "--api-key secret --host 0.0.0.0 --max-model-len 4k --served-model-name me"
    made = engine_arguments("some/model", [*flags.split(), "--config", str(file)])
    assert (made.model, made.max_model_len, made.max_num_seqs) == ("some/model", 4000, 7)
    assert made.kv_transfer_config.kv_connector == "LMCacheConnectorV1"
    assert made.kv_transfer_config.kv_role == "kv_both" and made.disable_log_stats is False
    assert made.worker_extension_cls.endswith("AcceptExtension")


def test_settings_of_the_connector_are_kept() -> None:
    extra = {"lmcache.hybrid_checkpoint_tokens": 384}
    transfer = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
    text = json.dumps({**transfer, "kv_connector_extra_config": extra})
    made = engine_arguments("m", ["--kv-transfer-config", text, "--disable-log-stats"])
    assert made.kv_transfer_config.kv_connector_extra_config == extra
    assert made.disable_log_stats is False


@pytest.mark.parametrize(
    "flags, says",
    [
        (["--data-parallel-size", "2"], "--data-parallel-size=2 starts copies"),
        (["--nnodes", "2", "--master-addr", "10.0.0.1"], "--nnodes=2 makes this engine wait"),
        (["--worker-extension-cls", "a.B"], "--worker-extension-cls=a.B takes the place"),
        (
            [
                "--kv-transfer-config",
                '{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_consumer"}',
            ],
            "names LMCacheConnectorV1 with kv_role kv_consumer; test LMCacheConnectorV1",
        ),
    ],
)
def test_flags_that_cannot_be_tested_are_refused(flags: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        engine_arguments("m", flags)
    assert says in str(error.value)


def test_the_cause_is_found_in_a_log() -> None:
    log = (
        "(EngineCore pid=1) ERROR lmcache_hybrid.core.errors.ConfigError: chunk_size=100 is wrong; "
        "remove it.\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    assert sentence_in(log) == "chunk_size=100 is wrong; remove it."
    late = "ValueError: no\ntorch.OutOfMemoryError: CUDA out of memory.\n"
    assert cause_in(late) == "OutOfMemoryError: CUDA out of memory."
    assert cause_in("all is well") is sentence_in(late) is None


def test_no_password_of_a_store_is_shown(tmp_path) -> None:
    log = tmp_path / "log"
    log.write_text("INFO remote_url: 'redis://me:se/c@ret@store:6379/0', fs://host:0/tmp/x\n")
    assert tail(log) == "INFO remote_url: 'redis://...@store:6379/0', fs://host:0/tmp/x"
    assert redacted("no://url here, but a@b") == "no://url here, but a@b"


def test_an_engine_that_was_killed_is_noticed_though_its_workers_hold_the_pipe(tmp_path) -> None:
    pipe, write = os.pipe()
    # Its number is one that select() does not take.
    read = fcntl.fcntl(pipe, fcntl.F_DUPFD, 1024)
    os.close(pipe)
    timed_out = threading.Timer(30, os.close, [write])
    driven = AcceptEngine.__new__(AcceptEngine)
    driven._log, driven._written, driven._replies = tmp_path / "log", 0, os.fdopen(read)
    driven._log.write_text("")
    with subprocess.Popen(["sleep", "60"]) as process:
        driven._process = SimpleNamespace(stdin=io.StringIO(), poll=process.poll, wait=process.wait)
        process.kill()
        timed_out.start()
        with pytest.raises(EngineError, match="exit code -9"):
            driven.call("start")
    assert timed_out.is_alive()
    timed_out.cancel()
    driven._replies.close()
    os.close(write)


@pytest.fixture(scope="module")
def config():
    """vLLM's, of an engine that takes these flags."""
    return engine_arguments(model("lfm2"), []).create_engine_config()


def facts_of(config, extra: dict, **scheduler) -> dict:
    """Of an engine with these settings of the connector and the scheduler, without a tokenizer."""
    config.kv_transfer_config.kv_connector_extra_config = extra
    vars(config.scheduler_config).update({"max_num_scheduled_tokens": None, **scheduler})
    child = Child()
    # As --skip-tokenizer-init leaves an engine: get_tokenizer() would raise.
    child._engine = SimpleNamespace(vllm_config=config, tokenizer=None)
    return child._facts()


def test_without_a_tokenizer_ids_come_from_the_middle_of_the_vocabulary(config) -> None:
    facts = facts_of(config, {})
    assert facts["ordinary"] == list(range(80, 160)) and facts["eagle_drop"] is False


def test_vllm_gives_up_a_block_for_a_drafter(config, monkeypatch) -> None:
    drafting = SimpleNamespace(method="mtp", use_eagle_block_drop=lambda: True)
    monkeypatch.setitem(vars(config), "speculative_config", drafting)
    assert facts_of(config, {})["eagle_drop"] is True


@pytest.mark.parametrize(
    "chosen, checkpoint, chunk",
    [(None, 0, 2048), ("chunk", 0, 2048), (0, 0, 0), (1568, 1568, 0), ("1568", 1568, 0)],
)
def test_states_on_the_way_are_those_of_the_option(config, chosen, checkpoint, chunk) -> None:
    extra = {} if chosen is None else {"lmcache.hybrid_checkpoint_tokens": chosen}
    facts = facts_of(config, extra, max_num_batched_tokens=2048)
    assert (facts["checkpoint_tokens"], facts["chunk_budget"]) == (checkpoint, chunk)


def test_a_chunk_is_what_the_scheduler_takes_in_a_step(config) -> None:
    facts = facts_of(config, {}, max_num_batched_tokens=2048, max_num_scheduled_tokens=2000)
    assert facts["chunk_budget"] == 2000


def test_a_secret_in_a_flag_that_is_none_is_not_shown():
    with pytest.raises(ConfigError) as error:
        parse_flags("m", ["--apikey=s3cr3t"])
    assert "--apikey" in str(error.value) and "s3cr3t" not in str(error.value)


@pytest.mark.parametrize(
    "flags, told",
    [(["--help"], "vllm serve --help"), (["--config", "/no.yaml"], "file of --config")],
)
def test_what_ends_vllms_parser_is_one_sentence(flags, told):
    with pytest.raises(ConfigError, match=told):
        parse_flags("m", flags)


@pytest.mark.parametrize(
    "name, text, told",
    [
        ("serve.yaml", "", "it is no table of flags."),
        ("serve.yaml", "- port\n", "it is no table of flags."),
        ("serve.json", "{}", "must be of a yaml/yml type. json supplied."),
    ],
)
def test_a_file_of_flags_that_vllm_fails_on_is_one_sentence(tmp_path, name, text, told):
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        parse_flags("m", ["--config", str(file)])
    assert str(error.value).startswith("vLLM cannot read the file of --config: ")
    assert str(error.value).endswith(told)


def test_a_file_of_flags_that_vllm_does_not_read_is_told(tmp_path):
    """Behind a ``=``, vLLM 0.32 and 0.33 take the flag and start without what the file says."""
    file = tmp_path / "serve.yaml"
    file.write_text("max-num-seqs: 7\n")
    with pytest.raises(ConfigError, match="write --config FILE"):
        parse_flags("m", [f"--config={file}"])
    plain = make_arg_parser(FlexibleArgumentParser())
    assert plain.parse_args(["m", f"--config={file}"]).max_num_seqs is None
    assert plain.parse_args(["m", "--config", str(file)]).max_num_seqs == 7
    with pytest.raises(ConfigError, match="^vLLM does not take these flags: .*--max-modl-len"):
        parse_flags("m", ["--config", str(file), "--max-modl-len", "1"])
