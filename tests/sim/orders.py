# SPDX-License-Identifier: Apache-2.0
"""In which order the model runners call a connector.

The calls are made by vLLM's own code: ``KVConnectorModelRunnerMixin`` of the V1 runner,
``ActiveKVConnector`` of the V2 runner. What comes between them is the toy rank's.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.worker import kv_connector_model_runner_mixin as mixin
from vllm.v1.worker.gpu import kv_connector as v2


class V1:
    """``gpu_model_runner``: loads and, without a drafter, saves follow the forward.

    With a drafter saves follow the draft's forward, after results were asked for.
    """

    def __init__(self, connector, drafter: bool) -> None:
        self._connector, self._deferred = connector, drafter

    def before_blocks(self, output: SchedulerOutput) -> None:
        """Before blocks are zeroed and states move."""
        self._connector.handle_preemptions(output.kv_connector_metadata)

    @contextmanager
    def forward(self, output: SchedulerOutput) -> Iterator[None]:
        mixed = mixin.KVConnectorModelRunnerMixin
        with mixed._get_kv_connector_output(output, self._deferred) as self._results:
            yield

    def before_drafts(self, output: SchedulerOutput) -> None:
        return

    def finish(self) -> KVConnectorOutput:
        """After the draft's forward."""
        if self._deferred:
            mixin.KVConnectorModelRunnerMixin.finalize_kv_connector()
        return self._results

    def without_forward(self, output: SchedulerOutput) -> ModelRunnerOutput:
        with mixin.KVConnectorModelRunnerMixin._get_kv_connector_output(output) as results:
            pass
        # A copy: an empty one is a constant, which vLLM's aggregator writes to.
        return copy.copy(ModelRunnerOutput.with_kv_conn_output_only(results))


class V2:
    """``gpu.model_runner``: everything after the forward comes in ``sample_tokens``."""

    def __init__(self, connector, vllm_config) -> None:
        self._active = v2.ActiveKVConnector(vllm_config, {})

    def before_blocks(self, output: SchedulerOutput) -> None:
        return

    @contextmanager
    def forward(self, output: SchedulerOutput) -> Iterator[None]:
        self._active.pre_forward(output)
        yield
        self._active.finish_forward()
        self._finished = output.finished_req_ids

    def before_drafts(self, output: SchedulerOutput) -> None:
        return

    def finish(self) -> KVConnectorOutput:
        return self._active.post_forward(self._finished)

    def without_forward(self, output: SchedulerOutput) -> ModelRunnerOutput:
        return copy.copy(self._active.no_forward(output))


class _LaterSaves:
    """A connector that neither saves nor forgets the step yet."""

    def __init__(self, connector) -> None:
        self._connector = connector

    def __getattr__(self, name: str):
        return getattr(self._connector, name)

    def wait_for_save(self) -> None:
        return

    def clear_connector_metadata(self) -> None:
        return


class V2Deferred(V2):
    """vLLM 0.33 with a drafter: results before the draft's forward, saves at the step's end."""

    def before_drafts(self, output: SchedulerOutput) -> None:
        self._results = self._active.post_forward(self._finished, defer_finalize=True)

    def finish(self) -> KVConnectorOutput:
        self._active.finalize_step()
        return self._results


class V2DeferredByUs(V2):
    """The same with the calls of vLLM 0.32, which cannot defer."""

    def before_drafts(self, output: SchedulerOutput) -> None:
        connector = self._active.kv_connector
        self._active.kv_connector = _LaterSaves(connector)
        self._results = self._active.post_forward(self._finished)
        self._active.kv_connector = connector

    def finish(self) -> KVConnectorOutput:
        self._active.kv_connector.wait_for_save()
        self._active.kv_connector.clear_connector_metadata()
        return self._results


def make_order(runner: str, connector, vllm_config, drafter: bool) -> V1 | V2:
    """The order of ``runner``: "v1", "v2", or "v2 deferred"."""
    if runner == "v1":
        return V1(connector, drafter)
    deferred = V2Deferred if hasattr(v2.ActiveKVConnector, "finalize_step") else V2DeferredByUs
    return (deferred if runner == "v2 deferred" else V2)(connector, vllm_config)


def install(patch, running_connector) -> None:
    """Let vLLM's code find the connector of the rank that runs.

    Args:
        patch: pytest's ``monkeypatch``.
        running_connector: returns it.
    """
    patch.setattr(mixin, "get_kv_transfer_group", running_connector)
    patch.setattr(mixin, "has_kv_transfer_group", lambda: True)
    patch.setattr(mixin, "get_forward_context", lambda: None)
    patch.setattr(v2, "get_kv_transfer_group", running_connector)
    patch.setattr(v2, "is_forward_context_available", lambda: True)
    patch.setattr(v2, "get_forward_context", lambda: None)
