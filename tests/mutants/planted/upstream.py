# SPDX-License-Identifier: Apache-2.0
"""How the plugin gets into vLLM, and what it relies on there."""

from tests.mutants.defect import one

REGISTER = "vllm_patch/__init__.py"
CONFIG = "vllm_patch/config_hooks.py"
CONNECTOR = "vllm_patch/connector.py"

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
)
