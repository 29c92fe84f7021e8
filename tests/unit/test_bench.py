# SPDX-License-Identifier: Apache-2.0
"""``lmcache-hybrid bench``: what it asks, what it says, and how it ends."""

import importlib
import itertools
import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from lmcache_hybrid.tools.accept.compare import Verdict
from lmcache_hybrid.tools.bench import server
from lmcache_hybrid.tools.bench.report import print_table, sentences, without_tokens
from lmcache_hybrid.tools.bench.run import (
    ALONE,
    CONNECTOR,
    WITH,
    Load,
    Measured,
    arms,
    no_proxy,
    prompt_tokens,
)
from lmcache_hybrid.tools.bench.workload import NEW, QUESTION_TOKENS, rounds
from lmcache_hybrid.tools.cli import app
from lmcache_hybrid.tools.cli.terminal import check_out

OTHER = json.dumps({"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_consumer"})
TITLE = "the same prompts after others"


def common(one: list[int], other: list[int]) -> int:
    """Tokens at the start of both."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other)))


def test_rounds_share_what_their_titles_say():
    asked = {each.title: each for each in rounds(3, 600, 0)}
    new, same = asked["new documents"], asked[TITLE]
    assert same.prompts == asked["the same prompts at once"].prompts == new.prompts
    assert same.forget and not asked["the same prompts at once"].forget
    for title in ("another question to each document", "documents after a restart"):
        pairs = list(zip(new.prompts, asked[title].prompts, strict=True))
        assert all(len(two) == 600 for _, two in pairs)
        assert all(600 - QUESTION_TOKENS <= common(*pair) < 600 for pair in pairs)
    turns = [asked["turn 1"], asked["turn 2"], asked["the next turn of a conversation"]]
    for before, after in itertools.pairwise(turns):
        assert all(
            common(one, two) == len(one) < len(two)
            for one, two in zip(before.prompts, after.prompts, strict=True)
        )
    assert not asked["warm up"].measured and common(asked["warm up"].prompts[0], new.prompts[0]) < 9
    assert [each.title for each in asked.values() if each.restart] == ["documents after a restart"]


def test_the_connector_is_found_however_vllm_lets_its_flag_be_written():
    for flags in (["--kv_transfer_config", OTHER], [f"--kv_transfer_config={OTHER}"]):
        found = arms([*flags, "--max-model-len", "9"])
        assert found[ALONE] == ["--max-model-len", "9"]
        assert found[WITH][-2:] == ["--kv-transfer-config", OTHER]


@pytest.mark.parametrize(
    "flag",
    [
        "--kv-transfer-config.kv_connector",
        "--config",
        "--api-key=k",
        "--ssl_keyfile",
        "--ssl-certfile",
        *("--middleware", "--uds=/tmp/s", "--grpc"),
    ],
)
def test_flags_with_which_servers_cannot_be_compared_are_refused(flag, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    answer = CliRunner().invoke(app, ["bench", str(tmp_path), "--", flag, "x"])
    assert answer.exit_code == 2 and flag in answer.output


def test_no_login_is_written():
    flags = ["--hf-token", "hf_1", "--hf_token=hf_1", OTHER.replace("kv_consumer", "//:pw@h")]
    written = list(without_tokens(flags))
    assert written[:3] == ["--hf-token", "***", "--hf_token=***"] and "pw" not in written[3]


def test_other_seeds_are_other_prompts():
    (one, other) = (rounds(2, 300, seed)[1].prompts for seed in (0, 1))
    assert common(one[0], other[0]) < 9 and rounds(2, 300, 0)[1].prompts == one


@pytest.mark.parametrize(
    "flag", [["--kv-transfer-config", OTHER], [f"--kv-transfer-config={OTHER}"]]
)
def test_each_server_has_the_users_flags(flag):
    plain = ["--max-model-len", "4096"]
    assert arms(plain) == {
        ALONE: plain,
        WITH: [*plain, "--kv-transfer-config", json.dumps(CONNECTOR)],
    }
    found = arms(["-tp", "2", *flag, "--enforce-eager"])
    assert found[ALONE] == ["-tp", "2", "--enforce-eager"]
    assert found[WITH] == [*found[ALONE], "--kv-transfer-config", OTHER]


def load_of(tokens: int, output_tokens: int) -> Load:
    return Load(8, tokens, output_tokens, concurrency=4, seed=0)


def test_prompts_fit_the_model():
    assert prompt_tokens(load_of(0, 32), 4096) == 2048
    assert prompt_tokens(load_of(0, 32), 1 << 20) == 8192
    assert prompt_tokens(load_of(4064, 32), 4096) == 4064
    for load in (load_of(4065, 32), load_of(0, 4096)):
        with pytest.raises(server.ServerError, match=r"--tokens.* do not fit max_model_len 4096"):
            prompt_tokens(load, 4096)


def measured(arm: str, loaded: float = 0.0, failed: int = 0, ms: float = 100.0) -> Measured:
    return Measured(arm, TITLE, ms, 2.0, 0.0, loaded, failed)


def test_the_figures_are_said_in_words():
    good = [measured(ALONE, ms=900), measured(WITH, 0.94, ms=300)]
    assert sentences(good) == [f"{TITLE}: first token 3.0 times as fast."]
    slow = [measured(ALONE, ms=300), measured(WITH, 0.94, ms=450)]
    assert sentences(slow) == [f"{TITLE}: first token 1.50 times as long."]
    new = [replace(each, round=NEW) for each in (measured(ALONE), measured(WITH, ms=104))]
    assert sentences([*new, *good])[0] == "new documents: first token 1.04 times as long."
    (nothing,) = sentences([measured(ALONE), measured(WITH)])
    assert nothing.startswith("Nothing came from LMCache: lmcache-hybrid doctor MODEL -- FLAGS")
    assert "Loads of 5 tokens failed" in " ".join(sentences([measured(WITH, 0.1, 5)]))


def test_the_table_fits_a_terminal(capsys):
    print_table(Console(width=80), [measured(ALONE, ms=123_456), measured(WITH, 1.0, ms=1.0)])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) == 5
    assert "123,456 ms" in lines[2] and "100%" in lines[3]


@pytest.mark.parametrize(
    "words, told",
    [
        (["/no/such/model"], "does not exist"),
        (["some/model", "--lmcache-config", "/no/such/file"], "'/no/such/file' does not exist"),
        (["some/model", "--documents", "0"], "greater than or equal to 1"),
    ],
)
def test_usage_errors(words, told):
    result = CliRunner().invoke(app, ["bench", *words])
    assert result.exit_code == 2 and told in " ".join(result.output.replace("│", "").split())


CAUSE = "ValueError: Available memory is less than desired; store redis://user:secret@cache"


@pytest.mark.parametrize(
    "log, told",
    [
        ([], None),
        (["RuntimeError: Engine core initialization failed. See root cause above."], None),
        ([CAUSE, "RuntimeError: Engine core initialization failed. See root cause above."], CAUSE),
        (["ConfigError: set it to 384.", "SystemExit: 1"], "set it to 384."),
    ],
)
def test_a_server_that_does_not_start_says_why(monkeypatch, tmp_path, log, told):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    script = tmp_path / "vllm.py"
    script.write_text(f"import sys\nprint(*{log!r}, sep='\\n', flush=True)\nsys.exit(3)\n")
    monkeypatch.setattr(server, "COMMAND", script)
    monkeypatch.setattr("lmcache_hybrid.tools.bench.run.CLIENT", "json.tool")
    result = CliRunner().invoke(app, ["bench", "some/model"])
    assert result.exit_code == 1
    *reasons, last = [line for line in result.output.splitlines() if " s  " not in line]
    assert last.startswith("vllm serve ended with exit code 3 before it served. The log is ")
    assert reasons == ([told.replace("user:secret", "...")] if told else [])
    assert len(list(tmp_path.glob("*.log"))) == 1


@pytest.mark.parametrize("given", ["variable", "option", ""])
def test_it_measures_the_users_own_stores_with_prompts_of_its_own(monkeypatch, tmp_path, given):
    """A store that outlives a run would hold what the next one asks."""
    file = tmp_path / "mine.yaml"
    file.touch()
    if given == "variable":
        monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(file))
    else:
        monkeypatch.delenv("LMCACHE_CONFIG_FILE", raising=False)
    seen = []

    def measure(model, flags, load, environment, log, say):
        seen.append((load.seed, environment["LMCACHE_CONFIG_FILE"]))
        return [measured(ALONE), measured(WITH)]

    monkeypatch.setattr("lmcache_hybrid.tools.bench.run.measure", measure)
    words = ["--lmcache-config", str(file)] if given == "option" else []
    out = tmp_path / "out.json"
    for _ in range(2):
        asked = ["bench", "some/model", "--out", str(out), *words]
        assert CliRunner().invoke(app, asked).exit_code == 0
    written = json.loads(out.read_text())
    assert [each["arm"] for each in written["rounds"]] == [ALONE, WITH]
    assert written["date"] and all(written["versions"][name] for name in ("vllm", "lmcache"))
    (one, first), (other, second) = seen
    assert one != other
    assert (first == second == str(file)) == bool(given)


# Stands for vllm serve; ends by itself where a test that failed left it behind.
SERVER = """
import json, os, sys, threading
from http.server import BaseHTTPRequestHandler, HTTPServer
asked = []
class Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        asked.append(self.path)
        model = {"id": "m", "max_model_len": 4096}
        text = json.dumps({"data": [model], "success": True})
        if self.path == "/metrics":
            text = f"vllm:prompt_tokens_total {len(asked)}"
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())
    do_POST = do_GET
ends = threading.Timer(60, os._exit, [1])
ends.daemon = True
ends.start()
port = int(sys.argv[sys.argv.index("--port") + 1])
HTTPServer(("127.0.0.1", port), Answers).serve_forever()
"""
# Stands for vLLM's client, which takes its proxies from the environment, too.
CLIENT = """
import json, os, sys
from urllib.request import urlopen
with os.fdopen(int(sys.argv[1]), "w", buffering=1) as out:
    for line in sys.stdin:
        task = json.loads(line)
        urlopen(task["url"] + "/v1/completions", b"{}")
        found = {"completed": len(task["prompts"]), "median_ttft_ms": 1, "request_throughput": 1}
        out.write(json.dumps(found) + "\\n")
"""
BENCH = """
import sys
from pathlib import Path
from lmcache_hybrid.tools.bench import run, server
from lmcache_hybrid.tools.cli import app
server.COMMAND, run.CLIENT = Path("stand_in_server.py").absolute(), "stand_in_client"
app(["bench", "some/model", "--documents", "1"])
"""


def test_servers_on_this_machine_are_asked_past_any_proxy(tmp_path):
    """A company's proxy answers for 127.0.0.1, too, and the wait had no end."""
    refused = []

    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            refused.append(self.path)
            self.send_error(403)

        do_POST = do_GET

    (tmp_path / "stand_in_server.py").write_text(SERVER)
    (tmp_path / "stand_in_client.py").write_text(CLIENT)
    with HTTPServer(("127.0.0.1", 0), Proxy) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        names = ("http_proxy", "HTTP_PROXY", "no_proxy", "NO_PROXY")
        environment = {name: value for name, value in os.environ.items() if name not in names}
        environment |= {"http_proxy": f"http://127.0.0.1:{proxy.server_port}"}
        environment |= {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"}
        # With cores named, it need not ask vLLM for the platform.
        environment |= {"TMPDIR": str(tmp_path), "VLLM_CPU_OMP_THREADS_BIND": "0"}
        command = [sys.executable, "-c", BENCH]
        try:
            done = subprocess.run(
                command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=45
            )
        finally:
            proxy.shutdown()
    assert not refused
    assert done.returncode == 0 and "documents after a restart" in done.stdout, done.stderr


@pytest.mark.parametrize(
    "given, hosts",
    [
        ({}, "127.0.0.1"),
        ({"no_proxy": "", "NO_PROXY": "hub"}, "hub,127.0.0.1"),
        ({"no_proxy": "hub", "NO_PROXY": "other"}, "hub,127.0.0.1"),
        ({"NO_PROXY": "*"}, "*"),
    ],
)
def test_hosts_without_a_proxy_stay_so_for_the_client(given, hosts):
    """It may fetch a tokenizer from one of them."""
    assert no_proxy(given) == {"no_proxy": hosts, "NO_PROXY": hosts}


@pytest.mark.parametrize("command", ["accept", "bench"])
@pytest.mark.parametrize(
    "name, why",
    [
        ("", "Is a directory"),
        ("no/out.json", "No such file or directory"),
        ("o" * 300, "File name too long"),
    ],
)
def test_an_out_that_cannot_be_written_is_refused_before_the_work(
    command, name, why, tmp_path, monkeypatch
):
    monkeypatch.setattr("lmcache_hybrid.upstream.versions.absent", lambda: "The work began.")
    out = tmp_path / name
    asked = [command, "some/model", "--out", str(out)]
    answer = CliRunner().invoke(app, asked, env={"COLUMNS": "999"})
    told = f"--out {str(out)!r} cannot be written ({why}); name a file in a folder that this user"
    assert answer.exit_code == 2 and told in answer.output


def test_trying_an_out_changes_nothing(tmp_path):
    out, link = tmp_path / "out.json", tmp_path / "link.json"
    check_out(out)
    assert not out.exists()
    out.write_text("of before")
    link.symlink_to(out)
    check_out(out)
    check_out(link)
    assert out.read_text() == "of before" and link.is_symlink()


@pytest.mark.parametrize("command", ["accept", "bench"])
def test_a_result_that_cannot_be_written_is_printed_all_the_same(command, monkeypatch, tmp_path):
    """The disk is full."""
    accept = importlib.import_module("lmcache_hybrid.tools.cli.accept")
    passed = SimpleNamespace(facts={}, verdict=Verdict.PASS)
    found = [measured(ALONE), measured(WITH)]
    monkeypatch.setattr("lmcache_hybrid.tools.bench.run.measure", lambda *rest: found)
    monkeypatch.setattr(accept.Run, "ask_engines", lambda *rest: passed)
    monkeypatch.setattr(accept, "print_verdict", lambda console, result: console.print("PASS"))
    monkeypatch.setattr(accept, "as_json", lambda result: {})
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    answer = CliRunner().invoke(app, [command, "some/model", "--out", "/dev/full"])
    told = "--out '/dev/full' cannot be written (No space left on device); the result is printed"
    assert told in answer.output and "Traceback" not in answer.output
    assert ("PASS" if command == "accept" else TITLE) in answer.output
    assert answer.exit_code == (0 if command == "accept" else 3)
    assert not list(tmp_path.glob("*.log"))


@pytest.mark.parametrize("cpu, cores", [(True, ""), (True, "0,1"), (False, "")])
def test_it_says_that_a_connector_changes_the_cores_of_a_cpu(monkeypatch, cpu, cores):
    module = importlib.import_module("lmcache_hybrid.tools.cli.bench")
    monkeypatch.setattr(module, "_on_cpu", lambda: cpu)
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    if cores:
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", cores)
    found = [measured(ALONE), measured(WITH)]
    monkeypatch.setattr("lmcache_hybrid.tools.bench.run.measure", lambda *rest: found)
    told = CliRunner().invoke(app, ["bench", "some/model"]).output
    assert ("set VLLM_CPU_OMP_THREADS_BIND to cores, such as 0-7." in told) == (cpu and not cores)
