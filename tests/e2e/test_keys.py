# SPDX-License-Identifier: Apache-2.0
"""Two requests share bytes only if a fresh computation would give both the same.

Every test asks one prompt under two circumstances: the same one must hit, so
that the test proves something, the other one must compute all of it itself.
"""

import copy
import json
import os
import random
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from typer.testing import CliRunner
from vllm.config import LoadConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from lmcache_hybrid.tools.cli import app
from lmcache_hybrid.tools.tiny_models import make_model
from tests.e2e.engine import Answer, Engine

pytestmark = pytest.mark.engine

RAM = {"local_cpu": True}


@pytest.fixture(scope="module")
def model(model_dir: Path) -> Path:
    """LFM2: the smallest blocks, and it takes adapters on CPU."""
    return make_model("lfm2", model_dir / "lfm2")


def prompt(seed: int, length: int = 300) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(32, 127) for _ in range(length)]


def hits(answer: Answer, expected: Answer | None = None) -> bool:
    """Whether the store served it; with ``expected``, its answer must be that one."""
    assert answer.cached == answer.external, "vLLM's own cache served a part"
    if expected is not None:
        assert answer.output == expected.output
    return answer.external > 0


def ask_cold(engine: Engine, ask: list[int] | dict) -> Answer:
    """With vLLM's own cache empty, so that only the store can serve."""
    engine.forget()
    answer = engine.ask(ask)
    engine.settle()
    return answer


# Tenants


def test_another_salt_never_hits_nor_looks_deeper(model: Path) -> None:
    """For the store, another tenant's prompt is as unknown as a new one.

    Time is not compared but work: lookups, keys asked for, keys found, records
    read and written are the same, so there is nothing that could take longer.
    """
    with Engine(model, RAM) as engine:
        ids, unknown = prompt(1), prompt(2)

        def work_of(ask: list[int] | dict) -> tuple[Answer, dict]:
            engine.forget()
            before = engine.call("work")
            answer = engine.ask(ask)
            engine.settle()
            after = engine.call("work")
            return answer, {name: after[name] - before[name] for name in after}

        tenant_a = {"prompt_token_ids": ids, "cache_salt": "tenant A"}
        first, first_work = work_of(tenant_a)
        assert not hits(first) and first_work["keys_found"] == 0 < first_work["saved_bytes"]
        again, again_work = work_of(tenant_a)
        assert hits(again, first) and again_work["keys_found"] > 0

        _, never_seen = work_of({"prompt_token_ids": unknown, "cache_salt": "tenant B"})
        for other in (
            {"prompt_token_ids": ids, "cache_salt": "tenant B"},
            {"prompt_token_ids": ids, "cache_salt": "tenant A "},
            {"prompt_token_ids": ids},
        ):
            answer, work = work_of(other)
            assert not hits(answer, first), other
            assert work == never_seen, other
            # What they stored is theirs.
            assert hits(ask_cold(engine, other), first)
        assert hits(ask_cold(engine, tenant_a), first)


# Adapters


def make_adapter(model: Path, folder: Path, seed: int, rank: int = 8) -> Path:
    """A PEFT adapter with random matrices beside queries and values, strong enough to show."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    with safe_open(model / "model.safetensors", "pt") as weights:
        for name in weights.keys():  # noqa: SIM118
            if not name.endswith(("self_attn.q_proj.weight", "self_attn.v_proj.weight")):
                continue
            rows, columns = weights.get_slice(name).get_shape()
            base = "base_model.model." + name.removesuffix(".weight")
            for part, shape in (("lora_A", (rank, columns)), ("lora_B", (rows, rank))):
                values = torch.randn(shape, generator=generator) * shape[1] ** -0.5
                tensors[f"{base}.{part}.weight"] = values.bfloat16()
    assert tensors
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_each_adapter_finds_only_its_own_records(model: Path, tmp_path: Path) -> None:
    """Name, path and content count: each adapter computes for itself, also in a new engine."""
    config = {"local_cpu": False, "remote_url": f"fs://localhost:0{tmp_path / 'store'}"}
    options = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    here = make_adapter(model, tmp_path / "here", 1)
    there = make_adapter(model, tmp_path / "there", 2)
    ids = prompt(3)

    def with_adapter(name: str, number: int, path: Path) -> dict:
        return {"prompt_token_ids": ids, "lora": [name, number, str(path)]}

    base = {"prompt_token_ids": ids}
    first = with_adapter("one", 1, here)
    same_content = with_adapter("two", 2, here)
    same_name = with_adapter("one", 3, there)
    with Engine(model, config, **options) as engine:
        cold = {}
        for key, ask in (("base", base), ("first", first), ("same content", same_content)):
            cold[key] = ask_cold(engine, ask)
            assert not hits(cold[key]), key
            assert hits(ask_cold(engine, ask), cold[key]), key
        # The same bytes under another name are only computed once more.
        assert cold["same content"].output == cold["first"].output != cold["base"].output
        # vLLM knows an adapter by its number: one name may stand for two of them.
        other = ask_cold(engine, same_name)
        assert not hits(other) and other.output != cold["first"].output
        assert hits(ask_cold(engine, same_name), other)
        assert hits(ask_cold(engine, first), cold["first"])
    make_adapter(model, here, 4)
    with Engine(model, config, **options) as engine:
        assert hits(ask_cold(engine, base), cold["base"])
        assert hits(ask_cold(engine, same_name), other)
        trained = ask_cold(engine, first)
        assert not hits(trained) and trained.output != cold["first"].output
        assert hits(ask_cold(engine, first), trained)
    # An adapter's tag is a part of the name and of the record, which must agree.
    result = CliRunner().invoke(app, ["verify", str(tmp_path / "store"), "--json"])
    assert result.exit_code == 0 and json.loads(result.stdout)[0]["counts"].keys() == {"good"}
    assert list((tmp_path / "store").glob("*@of%*"))


@pytest.mark.slow
def test_an_adapter_whose_files_change_under_a_running_engine(model: Path, tmp_path: Path) -> None:
    """Records count by the adapter that vLLM had loaded, not by what its files hold later."""
    config = {"local_cpu": False, "remote_url": f"fs://localhost:0{tmp_path / 'store'}"}
    options = {"enable_lora": True, "max_lora_rank": 8}

    def write(seed: int, when: int) -> Path:
        """The same name, path and sizes, and the same time if asked to."""
        folder = make_adapter(model, tmp_path / "adapter", seed)
        for file in folder.iterdir():
            os.utime(file, (when, when))
        return folder

    path = write(1, 10**9)
    before, after = (
        {"prompt_token_ids": prompt(seed), "lora": ["one", 1, str(path)]} for seed in (10, 11)
    )
    with Engine(model, config, **options) as engine:
        ask_cold(engine, before)
        write(2, 10**9)
        old = ask_cold(engine, after)
        assert hits(ask_cold(engine, after), old)
    with Engine(model, config, **options) as engine:
        new = ask_cold(engine, after)
        assert not hits(new) and new.output != old.output
        assert hits(ask_cold(engine, after), new)
    write(1, 10**9 + 1)
    with Engine(model, config, **options) as engine:
        assert hits(ask_cold(engine, after), old)


# Prompt embeddings


def test_prompt_embeddings_are_never_cached(model: Path, tmp_path: Path) -> None:
    """Not even where they are the very embeddings of tokens that are stored."""
    ids = prompt(5)
    with safe_open(model / "model.safetensors", "pt") as weights:
        table = weights.get_tensor("model.embed_tokens.weight")
    paths = []
    for name, rows in (("same", ids), ("other", prompt(6))):
        paths.append(str(tmp_path / f"{name}.pt"))
        torch.save(table[torch.tensor(rows)].clone(), paths[-1])
    same, other = ({"prompt_embeds": path} for path in paths)
    with Engine(model, RAM, enable_prompt_embeds=True) as engine:
        before = engine.call("work")
        answers = [ask_cold(engine, same), ask_cold(engine, other)]
        assert answers[0].output != answers[1].output
        assert not any(hits(ask_cold(engine, ask)) for ask in (same, other))
        assert engine.call("work") == before, "the store was asked, or written to"
        tokens = ask_cold(engine, ids)
        assert not hits(tokens, answers[0]), "tokens hit what embeddings left"
        assert hits(ask_cold(engine, ids), answers[0])
        assert not hits(ask_cold(engine, same), answers[0]), "embeddings hit what tokens left"
        assert not hits(ask_cold(engine, other), answers[1])


# The model, and how its cache is kept


def check_apart(model: Path, store: str, asked: list[int], variants: list[dict]) -> list[Answer]:
    """Engines of these options in turn on one store: each computes what the others stored."""
    config = {"local_cpu": False, "remote_url": store}
    answers = []
    for options in variants:
        with Engine(model, config, **options) as engine:
            cold = ask_cold(engine, asked)
            assert not hits(cold), f"{options} hit what another one had stored"
            assert hits(ask_cold(engine, asked), cold), options
            answers.append(cold)
    # Their caches do mean different things, so a hit would have been an error.
    assert len({repr(answer.output) for answer in answers}) == len(answers)
    return answers


@pytest.mark.slow
def test_dtypes_and_overrides(model: Path, tmp_path: Path) -> None:
    """fp8 and fp8_e5m2 pages have the same shape and size, as have two ropes'.

    vLLM's CPU build has fp8 on processors with AVX-512 only; elsewhere the ropes are left.
    """
    store, asked = f"fs://localhost:0{tmp_path}", prompt(7)
    rope = {"rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"}}
    has_fp8 = torch.cpu._is_avx512_supported()
    dtypes = [{"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8_e5m2"}] if has_fp8 else [{}]
    answers = check_apart(model, store, asked, [*dtypes, {"hf_overrides": rope}])
    # And the first one again, in an engine of its own.
    with Engine(model, {"local_cpu": False, "remote_url": store}, **dtypes[0]) as engine:
        assert hits(ask_cold(engine, asked), answers[0])


@pytest.mark.slow
def test_state_dtype(model_dir: Path, tmp_path: Path) -> None:
    """Granite's recurrent states in two precisions, its convolutions in one."""
    model = make_model("granite4", model_dir / "granite4")
    check_apart(
        model,
        f"fs://localhost:0{tmp_path}",
        prompt(8, 600),
        [{"mamba_ssm_cache_dtype": "float32"}, {"mamba_ssm_cache_dtype": "float16"}],
    )


@pytest.mark.slow
def test_one_tensor_of_the_weights(model: Path, tmp_path: Path) -> None:
    """The same folder with one norm trained further: same name, sizes, configuration."""
    config = {"local_cpu": False, "remote_url": f"fs://localhost:0{tmp_path / 'store'}"}
    folder = make_model("lfm2", tmp_path / "lfm2")
    ids = prompt(9)
    with Engine(folder, config) as engine:
        cold = ask_cold(engine, ids)
        assert not hits(cold) and hits(ask_cold(engine, ids), cold)
    file = folder / "model.safetensors"
    with safe_open(file, "pt") as weights:
        tensors = {name: weights.get_tensor(name) for name in weights.keys()}  # noqa: SIM118
    name = next(name for name in tensors if "operator_norm" in name)
    tensors[name] *= 1.25
    size = file.stat().st_size
    save_file(tensors, file, metadata={"format": "pt"})
    assert file.stat().st_size == size
    with Engine(folder, config) as engine:
        trained = ask_cold(engine, ids)
        assert not hits(trained) and trained.output != cold.output
        assert hits(ask_cold(engine, ids), trained)


class _Silent(DefaultModelLoader):
    """A loader from outside vLLM; nothing tells which weights it reads."""

    def __init__(self, load_config: LoadConfig) -> None:
        known = copy.copy(load_config)
        known.load_format = "auto"
        vars(self).update(vars(DefaultModelLoader(known)))
        del self.load_model


def register_silent_loader() -> None:
    register_model_loader("silent")(_Silent)


def test_weights_that_nobody_saw_loaded(model: Path) -> None:
    """The engine serves, stores nothing and says so once."""
    options = {"load_format": "silent", "prepare": register_silent_loader}
    with Engine(model, RAM, **options) as engine:
        cold = engine.ask(prompt(10))
        engine.forget()
        again = engine.ask(prompt(10))
        assert not hits(cold) and not hits(again) and again.output == cold.output
        log = engine.log_path.read_text()
    assert log.count("LMCache is off on this rank, which computes every prompt, because ") == 1
    assert "load_format=silent does not tell which weights the model " in log
