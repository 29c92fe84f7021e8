"""N of the models under test: it depends on the processor, so no test may know it."""

from functools import cache
from pathlib import Path

from engine import CONNECTOR
from processes import inspect_models_here

from lmcache_hybrid.tools.doctor.model import read_model


@cache
def block_size(model: Path) -> int:
    """N of a model on this machine, as vLLM settles it; starts no engine."""
    inspect_models_here()
    return read_model(str(model), CONNECTOR).block_size
