"""N and bytes of the models under test: they depend on the processor, so no test may know them."""

from functools import cache
from pathlib import Path

from vllm.engine.arg_utils import AsyncEngineArgs

from lmcache_hybrid.tools.doctor.model import Model, read_model
from lmcache_hybrid.tools.flags import parse_flags
from tests.e2e.processes import inspect_models_here


@cache
def block_size(model: Path) -> int:
    """N of a model on this machine, as vLLM settles it; starts no engine."""
    inspect_models_here()
    return described(model).block_size


def described(model: Path) -> Model:
    """Groups and bytes of a model on this machine, as ``doctor`` tells them."""
    return read_model(AsyncEngineArgs.from_cli_args(parse_flags(str(model), ())))
