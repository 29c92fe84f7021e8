"""Small random-weight models of real Hugging Face architectures, for tests and demos.

    python -m lmcache_hybrid.tools.tiny_models qwen3_next /tmp/qwen3_next

Each model is a few layers of the genuine ``transformers`` class, saved as bfloat16
safetensors with a byte-level tokenizer beside it (token id == byte, ids from 256 are
specials), so ``vllm serve DIR`` and ``LLM(model=DIR)`` take plain text.

The weights are random but scaled so that the output depends on the whole context:
unit-variance projections, sharp attention, and recurrent heads whose memory spans
from tens to thousands of tokens. A wrong or missing state shows in the log-probabilities.
Only printable ASCII can win the greedy choice, so generated text survives a round trip
through the tokenizer.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmcache_hybrid.tools.tiny_families import COMMON, FAMILIES, VOCAB_SIZE, Family

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerFast

RECIPE_VERSION = 1
"""Raise it when weights or tokenizer change, so that older folders are rebuilt."""

MARKER = "tinymodel.json"
"""Written last; a folder with it is complete."""

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(max_position: int) -> PreTrainedTokenizerFast:
    """Make a tokenizer whose first 256 ids are the bytes themselves, then the specials."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # The GPT-2 alphabet: printable bytes stand for themselves, the others get U+0100 and up.
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    vocab = {chr(b if b in printable else next(others)): b for b in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fillers = [f"<|reserved_{i}|>" for i in range(VOCAB_SIZE - 256 - len(SPECIALS))]
    tokenizer.add_special_tokens([AddedToken(s, special=True) for s in SPECIALS + fillers])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=SPECIALS[0],
        pad_token=SPECIALS[0],
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_position,
        clean_up_tokenization_spaces=False,
    )


def _scale_weights(model: nn.Module, family: Family, generator: Any) -> None:
    """Fill the weights so that every layer matters and memory reaches far back."""
    import torch

    def normal(param: torch.Tensor, std: float) -> None:
        param.copy_(torch.randn(param.shape, generator=generator) * std)

    names = [name for name, _ in model.named_parameters()]
    has_q_norm = any("q_norm" in n or "q_layernorm" in n for n in names)
    sharpness = 3.0  # standard deviation of attention scores: a few tokens dominate
    for name, param in model.named_parameters():
        if name.endswith("A_log"):
            # Per head, exp(-decay): time constants from 64 to 4,096 tokens.
            horizon = torch.logspace(6, 12, param.numel(), base=2)
            param.copy_(-torch.log(horizon * math.log(2)).view(param.shape))
        elif name.endswith("dt_bias"):
            param.zero_()  # softplus(0) = log(2)
        elif "embed_tokens" in name:
            normal(param, family.embed_std)
            if family.tied:
                _mute_unprintable(param, family.embed_std / 8)
        elif "lm_head" in name:
            normal(param, 2.0 * param.shape[-1] ** -0.5)
            _mute_unprintable(param, 0.0)
        elif "q_norm" in name or "q_layernorm" in name:
            param.add_(sharpness - 1)  # whether the norm's weight is centred on 0 or on 1
        elif param.ndim >= 2:
            gain = sharpness if name.endswith("q_proj.weight") and not has_q_norm else 1.0
            normal(param, gain * param.shape[-1] ** -0.5)


def _mute_unprintable(rows: Any, std: float) -> None:
    """Shrink the output rows of tokens that are not printable ASCII: they never win."""
    for part in (rows[:32], rows[127:]):
        part.mul_(std / part.std())


def _recipe(family: str, seed: int, max_position: int) -> dict[str, Any]:
    """Return all settings that decide the files on disk; stored beside the weights."""
    spec = FAMILIES[family]
    config = {**COMMON, **spec.config, "max_position_embeddings": max_position}
    config["tie_word_embeddings"] = spec.tied
    return {
        "version": RECIPE_VERSION,
        "family": family,
        "seed": seed,
        "embed_std": spec.embed_std,
        "config": config,
        "extra": spec.extra,
        "renames": spec.renames,
    }


def _finish(folder: Path, spec: Family) -> None:
    """Convert the files of transformers to those that vLLM reads."""
    if spec.extra:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **spec.extra}, indent=2))
    if spec.renames:
        from safetensors.torch import load_file, save_file

        weights = load_file(folder / "model.safetensors")
        for old, new in spec.renames.items():
            weights = {name.replace(old, new): tensor for name, tensor in weights.items()}
        save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _holds(folder: Path, recipe: dict[str, Any]) -> bool:
    """Whether ``folder`` already holds a complete model of this recipe."""
    marker = folder / MARKER
    return marker.is_file() and json.loads(marker.read_text()) == recipe


def make_model(
    family: str, out_dir: str | Path, *, seed: int = 0, max_position: int = 16384
) -> Path:
    """Write a small model of ``family`` to ``out_dir`` and return that path.

    A folder already holding the same recipe is reused; one this module wrote with another
    recipe is replaced; any other non-empty folder is refused.
    """
    if family not in FAMILIES:
        raise ValueError(f"unknown family {family!r}; choose from {', '.join(FAMILIES)}")
    out = Path(out_dir)
    recipe = _recipe(family, seed, max_position)
    if _holds(out, recipe):
        return out
    if out.exists() and not (out / MARKER).is_file() and any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty and was not written by this module")

    import torch
    import transformers

    spec = FAMILIES[family]
    config = getattr(transformers, spec.config_class)(**recipe["config"])
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = getattr(transformers, spec.model_class)(config)
        _scale_weights(model, spec, torch.Generator().manual_seed(seed))

    out.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        with _without_bars():
            model.to(torch.bfloat16).save_pretrained(part)
        _finish(part, spec)
        make_tokenizer(max_position).save_pretrained(part)
        (part / MARKER).write_text(json.dumps(recipe, indent=2))
        part.chmod(0o755)
        if not _holds(out, recipe):  # another process may have been faster
            shutil.rmtree(out, ignore_errors=True)
            os.replace(part, out)
    except OSError:
        if not _holds(out, recipe):
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return out


@contextmanager
def _without_bars() -> Iterator[None]:
    """Hide the progress bars of ``transformers``."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def main(
    family: Annotated[str, typer.Argument(help=f"One of: {', '.join(FAMILIES)}.")],
    out_dir: Annotated[Path, typer.Argument(help="Folder to write; reused if complete.")],
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
    max_position: Annotated[int, typer.Option(help="Longest context, in tokens.")] = 16384,
) -> None:
    """Write a small random-weight model of FAMILY to OUT_DIR."""
    try:
        typer.echo(make_model(family, out_dir, seed=seed, max_position=max_position))
    except (ValueError, FileExistsError) as error:
        raise typer.BadParameter(str(error)) from error


if __name__ == "__main__":
    typer.run(main)
