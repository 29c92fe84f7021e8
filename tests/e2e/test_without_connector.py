# SPDX-License-Identifier: Apache-2.0
"""What runs of this package in an engine that does not use its connector."""

import sys
from pathlib import Path
from types import FrameType

import pytest

from lmcache_hybrid.tools.tiny_models import make_model
from tests.e2e import engine_child
from tests.e2e.engine import Engine

pytestmark = pytest.mark.engine

PACKAGES = ("vllm_patch", "lmcache_hybrid")
# Each stands in for one of vLLM's functions, calls it, and looks whether its bug shows.
ENTERED = {
    "vllm_patch.scheduler_repairs.leave_no_chunk_empty",
    "vllm_patch.scheduler_repairs.part_chunks_of_two_blocks",
    "vllm_patch.scheduler_repairs.publish_checkpoints_once",
    "vllm_patch.scheduler_repairs.publish_where_steps_ended",
    "vllm_patch.partial_hits.copy_what_is_computed",
    "vllm_patch.partial_hits.publish_no_state_late",
    "vllm_patch.partial_hits.stop_at_the_next_boundary",
    "vllm_patch.media_marks._mark_requests",
    "vllm_patch.configuration.is_ours",  # which they ask
    "vllm_patch.configuration._say_what_is_no_list",  # which that one asks
}


def note_calls() -> None:
    """Have the engine note which functions of ours are called while it answers. In its process."""
    ask, called = engine_child.Child.ask, set()

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename).with_suffix("").parts
        for package in PACKAGES:
            if event == "call" and package in path:
                module = ".".join(path[len(path) - path[::-1].index(package) - 1 :])
                called.add(f"{module}.{frame.f_code.co_qualname}")

    def ask_and_note(self: engine_child.Child, *args, **kwargs):
        sys.setprofile(note)
        try:
            return ask(self, *args, **kwargs)
        finally:
            sys.setprofile(None)

    engine_child.Child.ask = ask_and_note
    engine_child.Child.called = lambda self: sorted(called)


@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_only_the_named_hooks_are_entered(model_dir: Path, family: str) -> None:
    model = make_model(family, model_dir / family)
    with Engine(model, prepare=note_calls) as engine:
        prompt = [32 + 7 * i % 90 for i in range(700)]
        engine.ask(prompt)
        assert engine.ask(prompt).cached > 0
        engine.ask_many([prompt + [40] * 300, prompt[:300]])
        called = engine.call("called")
    assert {name.partition(".<locals>")[0] for name in called} <= ENTERED and called
