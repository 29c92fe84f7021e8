# SPDX-License-Identifier: Apache-2.0
"""What of a request may be cached, and under which names."""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from lmcache_hybrid.config import Options
from lmcache_hybrid.lookup import Prefix

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

logger = init_logger("vllm.lmcache_hybrid.prefix")


class Adapters:
    """Identities of the LoRA adapters that this engine has loaded.

    vLLM goes on with what it loaded when the files change, and a name may be given
    to another adapter. So the identity is that of the first request, and an adapter
    whose files are others since is not cached any more.
    """

    def __init__(self) -> None:
        self._loaded: dict[int, str] = {}

    def identity(self, lora: "LoRARequest") -> str | None:
        """Name of an adapter's bytes; None when they are not known for certain."""
        found = _files_identity(lora)
        if found is None:
            logger.warning_once(
                "Requests of LoRA adapter %s are not cached: %s is not a local folder, so its "
                "content is not known.",
                lora.lora_name,
                lora.lora_path,
            )
            return None
        if self._loaded.setdefault(lora.lora_int_id, found) != found:
            logger.warning_once(
                "Requests of LoRA adapter %s are no longer cached: the files in %s are others "
                "than those this engine has loaded. Restart the engine, or load the adapter anew.",
                lora.lora_name,
                lora.lora_path,
            )
            return None
        return found


def _files_identity(lora: "LoRARequest") -> str | None:
    """Name, path, sizes and times of an adapter; None where it is not a local folder."""
    folder = Path(lora.lora_path).expanduser()
    if not folder.is_dir():
        return None
    facts: list[Any] = [lora.lora_name, lora.lora_path]
    for file in sorted(folder.glob("adapter_*")):
        status = file.stat()
        facts.append((file.name, status.st_size, status.st_mtime_ns))
    return hashlib.blake2b(repr(facts).encode(), digest_size=8).hexdigest()


def transfer_params(request: "Request") -> dict[str, Any]:
    """The request's ``lmcache.*`` settings (``kv_transfer_params`` or sampling extra args)."""
    from lmcache.integration.vllm.utils import extract_request_configs_from_request

    return extract_request_configs_from_request(request) or {}


def prefix_of(
    request: "Request", block_size: int, hashes_per_block: int, adapters: Adapters
) -> Prefix | None:
    """The prompt's whole blocks; None when the request must not be cached.

    vLLM's block hashes cover tokens, multimodal items, LoRA name and cache salt.
    Added as tags: the user's ``lmcache.tag.*`` and the identity of the LoRA files.
    """
    if getattr(request, "prompt_embeds", None) is not None:
        return None
    tags = []
    for key, value in sorted(transfer_params(request).items()):
        if key.startswith("lmcache.tag."):
            name = key.removeprefix("lmcache.tag.")
            if not isinstance(value, str) or not _is_plain(name + value):
                logger.warning_once(
                    "Requests tagged %s=%s are not cached: LMCache needs tags that are printable "
                    "strings without '@' and '%%'.",
                    key,
                    repr(value)[:80],
                )
                return None
            tags.append((name, value))
    if request.lora_request is not None:
        identity = adapters.identity(request.lora_request)
        if identity is None:
            return None
        tags.append(("lora", identity))
    blocks = request.num_prompt_tokens // block_size
    return extended(Prefix((), tuple(tags)), request, blocks, hashes_per_block)


def why_unsaved(request: "Request", prefix: Prefix | None, options: Options) -> str | None:
    """The reason for counters why nothing of a request is stored; None where it is."""
    if prefix is None:
        return "uncacheable"
    if not options.save:
        return "read_only"
    if options.priority_limit is not None and request.priority > options.priority_limit:
        return "priority"
    return "skip_save" if transfer_params(request).get("lmcache.skip_save", False) else None


def extended(prefix: Prefix, request: "Request", blocks: int, hashes_per_block: int) -> Prefix:
    """``prefix`` with the hashes of the request's first ``blocks`` blocks."""
    first = len(prefix.hashes)
    ends = range((first + 1) * hashes_per_block - 1, blocks * hashes_per_block, hashes_per_block)
    more = tuple(bytes(request.block_hashes[end]) for end in ends)
    return Prefix(prefix.hashes + more, prefix.tags)


def _is_plain(text: str) -> bool:
    return text.isprintable() and not set("@%") & set(text)
