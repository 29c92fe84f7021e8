# SPDX-License-Identifier: Apache-2.0
"""How the plugin gets into vLLM, and what it relies on there."""

from tests.mutants.defect import one

REGISTER = "vllm_patch/__init__.py"
CONFIG = "vllm_patch/config_hooks.py"
CONNECTOR = "vllm_patch/connector.py"
VERSIONS = "vllm_patch/versions.py"

DEFECTS = (
    one(
        "a process that was patched by half serves hybrid models",
        REGISTER,
        "        _refuse(problem)\n\n\ndef _install",
        "        pass\n\n\ndef _install",
    ),
    one(
        "a patch that fails ends engines without this connector",
        REGISTER,
        "    except Exception as error:\n        logging",
        "    except ImportError as error:\n        logging",
    ),
    one(
        "the patched class stays where the factory does not find it",
        CONNECTOR,
        "        upstream.LMCacheConnectorV1 = UpstreamConnector\n",
        "",
    ),
    one(
        "a refused version changes models that it does not refuse",
        CONFIG,
        '{_problem}")\n        return\n',
        '{_problem}")\n',
    ),
    one(
        "a release candidate counts as the release",
        VERSIONS,
        "    fix = new > old and ",
        "    fix = new.release >= old.release and ",
    ),
    one(
        "a development snapshot counts as a release",
        VERSIONS,
        " and not new.is_devrelease",
        "",
    ),
    one(
        "a pair counts as tested when each of its halves was, with another",
        VERSIONS,
        "        if all(_fits(pair, (vllm, lmcache))):",
        "        if any(_fits(pair, (vllm, lmcache))):",
    ),
    one(
        "a fix of a tested release is let in although it lacks a name",
        VERSIONS,
        "        return _moved(_others(pair, (vllm, lmcache)))",
        "        return None",
    ),
    one(
        "a CPU host is sent to a release without CPU build",
        VERSIONS,
        "if not cpu or pair.kernels == pair.vllm]",
        "]",
    ),
)
