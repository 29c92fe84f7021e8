# SPDX-License-Identifier: Apache-2.0
"""What users set ends in hits, in a refusal, or in one warning: ``tests/situations.toml``.

Each row on an engine, and asked of the doctor.
"""

import json
import os
import random
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import yaml

from lmcache_hybrid.tools.tiny_models import make_model
from tests.e2e.blocks import block_size
from tests.e2e.engine import CONNECTOR, POOL_GB, Engine, EngineDied
from tests.e2e.processes import FORKS
from tests.situations import Situation, situations

# Of what is refused, tests/unit/test_values.py and test_config.py try each kind in `make test`.
pytestmark = [pytest.mark.engine, pytest.mark.slow]
SECONDS = 120.0


@pytest.fixture(scope="module")
def model(model_dir: Path) -> Path:
    return make_model("lfm2", model_dir / "lfm2")


class Set:
    """What a row sets, with its folder and the model's N in place."""

    def __init__(self, row: Situation, folder: Path, size: int) -> None:
        (folder / "data").mkdir()

        def put(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: put(each) for key, each in value.items()}
            if isinstance(value, str):
                sizes = {"N": size, "N + 1": size + 1}
                return sizes.get(value) or value.replace("FOLDER", str(folder / "data"))
            return value

        self.flags = put(row.flags)
        self.transfer = {**put(row.transfer), "kv_connector_extra_config": put(row.extra)}
        self.env = put(row.env)
        pool = {} if "LMCACHE_MAX_LOCAL_CPU_SIZE" in self.env else {"max_local_cpu_size": POOL_GB}
        lmcache = put(row.lmcache)
        text = yaml.safe_dump(pool) if pool else ""
        text = text + lmcache["text"] if "text" in lmcache else yaml.safe_dump({**pool, **lmcache})
        (folder / "lmcache.yaml").write_text(text)
        self.env.setdefault("LMCACHE_CONFIG_FILE", str(folder / "lmcache.yaml"))

    def flags_of_serve(self) -> list[str]:
        """As a user writes them."""
        words = ["--kv-transfer-config", json.dumps({**CONNECTOR, **self.transfer})]
        for name, value in {"max_model_len": 8192, **self.flags}.items():
            name = name.replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{name}" if value else f"--no-{name}")
            else:
                words += [f"--{name}", str(value)]
        return words


def named(row: Situation) -> str:
    return row.set.replace("`", "")[:60]


@pytest.mark.parametrize("row", situations(), ids=named)
def test_it_ends_as_the_table_says(row: Situation, model: Path, tmp_path: Path) -> None:
    given = Set(row, tmp_path, block_size(model))
    words = (row.words, *row.also)
    engine = Engine(model, {}, given.transfer, given.env, **given.flags)
    if row.outcome == "refused":
        with pytest.raises(EngineDied) as died, engine:
            pass
        assert all(each in str(died.value) for each in words), died.value
        return
    with engine:
        length = min(3 * engine.info["block_size"], given.flags.get("max_model_len", 8192) - 8)
        ids = [random.Random(0).randrange(32, 127) for _ in range(length)]
        first = engine.ask(ids)
        engine.settle()
        engine.forget()
        again = engine.ask(ids)
        assert again.output == first.output
        assert (again.external > 0) == (row.outcome == "hits")
        assert all(each in engine.log for each in words), engine.log
        if row.doctor is None:  # a warning, and one is enough
            assert all(engine.log.count(each) == 1 for each in words if each), engine.log
        if row.outcome == "off":
            assert "LMCache will not serve hits: " in engine.log


@pytest.mark.parametrize("row", situations(), ids=named)
def test_the_doctor_says_the_same(row: Situation, model: Path, tmp_path: Path) -> None:
    given = Set(row, tmp_path, block_size(model))
    answers, child = FORKS.Pipe(duplex=False)
    arguments = (given.env, str(model), given.flags_of_serve(), tmp_path / "log", child)
    process = FORKS.Process(target=diagnose, args=arguments)
    process.start()
    child.close()
    assert answers.poll(SECONDS), (tmp_path / "log").read_text()
    found = answers.recv()
    process.join(SECONDS)
    said = [f"{each['message']} {each['fix']}" for each in found if each["status"] != "ok"]
    words = (row.words, *row.also) if row.doctor is None else (row.doctor,)
    assert all(any(each in text for text in said) for each in words if each), said
    errors = [each for each in found if each["status"] == "error"]
    assert bool(errors) == (row.outcome != "hits"), errors


def diagnose(
    env: dict[str, str], model: str, flags: list[str], log: Path, answers: Connection
) -> None:
    """The doctor's checks of settings, in a process of their own; sends what they find."""
    os.environ.update(env)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    from lmcache_hybrid.tools.doctor.__main__ import guarded
    from lmcache_hybrid.tools.doctor.context import read_context
    from lmcache_hybrid.tools.doctor.options import check_model, check_options

    context = read_context(model, flags)
    found = [*guarded(check_model, context), *guarded(check_options, context)]
    answers.send([{**asdict(each), "status": str(each.status.value)} for each in found])
    answers.close()
