# SPDX-License-Identifier: Apache-2.0
"""How the plugin gets into vLLM, and what it relies on there."""

from tests.mutants.defect import one

REGISTER = "vllm_patch/__init__.py"
CONFIG = "vllm_patch/configuration.py"
CONNECTOR = "vllm_patch/connector.py"
VERSIONS = "lmcache_hybrid/upstream/versions.py"
SIGNATURES = "lmcache_hybrid/upstream/signatures.py"
SESSIONS = "vllm_patch/sessions.py"
HOME = "lmcache_hybrid/upstream/lmcache_home.py"

DEFECTS = (
    one(
        "a draft model's configuration is settled as an engine's",
        CONFIG,
        "    if _is_drafters(config):\n        return\n",
        "",
    ),
    one(
        "n-gram drafts make the model's own configuration a drafter's",
        CONFIG,
        "    if speculative is None or speculative.target_model_config is model:\n",
        "    if speculative is None:\n",
    ),
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
        "engines with another connector count as ours",
        CONFIG,
        "        return transfer.has_connector(CONNECTOR)\n",
        "        return True\n",
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
        " if all(_fits(pair, here))), None)",
        " if any(_fits(pair, here))), None)",
    ),
    one(
        "a fix of a tested release is let in although it changed a function",
        VERSIONS,
        "    tested = _same(pair, here) if pair else",
        "    tested = (True, True) if pair else",
    ),
    one(
        "an untested release that is tried is let in although it changed a function",
        VERSIONS,
        " if pair else (False, False)",
        " if pair else (True, True)",
    ),
    one(
        "a release that changed what is patched is patched",
        REGISTER,
        " or versions.changed(signatures.AT_START)",
        "",
    ),
    one(
        "a release of LMCache that changed what is called serves hybrid models",
        CONNECTOR,
        "if (problem := versions.changed()) is not None:",
        "if (problem := None) is not None:",
    ),
    one(
        "a call that a later vLLM makes reaches LMCache's own adapter",
        CONNECTOR,
        "is getattr(bases, m, None)]:",
        "is m]:",
    ),
    one(
        "the doctor takes a release for usable that lacks a function",
        "lmcache_hybrid/tools/doctor/installation.py",
        '        if problem is not None:\n            return error("plugin"',
        '        if problem is None:\n            return error("plugin"',
    ),
    one(
        "version takes a release for usable that lacks a function",
        "lmcache_hybrid/tools/cli/__init__.py",
        "versions.unsupported() or versions.changed()",
        "versions.unsupported()",
    ),
    one(
        "a parameter that a release wants in addition is not noticed",
        SIGNATURES,
        " and set(needed) <= set(takes)",
        "",
    ),
    one(
        "parameters in another order are not noticed",
        SIGNATURES,
        "tuple(found[: len(takes)]) == takes",
        "set(takes) <= set(found)",
    ),
    one(
        "a replaced method is not looked up in untested releases",
        SIGNATURES,
        "        Scheduler._preempt_request(request, timestamp)\n",
        "",
    ),
    one(
        "every process of vLLM imports LMCache and what only workers need",
        REGISTER,
        "versions.changed(signatures.AT_START)",
        "versions.changed()",
    ),
    one(
        "a CPU host is sent to a release without CPU build",
        VERSIONS,
        "if not cpu or pair.kernels == pair.vllm]",
        "]",
    ),
    # LMCache's two homes
    one(
        "dense models do not find LMCache's adapter where it moved",
        REGISTER,
        "        lmcache_home.install()\n",
        "        pass\n",
    ),
    one(
        "a module of LMCache's that is still there is replaced by another of its name",
        HOME,
        "self._exists(fullname, path)):",
        "False):",
    ),
    one(
        "modules of a package that moved run twice, once under each name",
        HOME,
        "(not self._in_moved_package(fullname) and self._exists(fullname, path))",
        "self._exists(fullname, path)",
    ),
    one(
        "a name is taken from the module that LMCache left behind",
        HOME,
        "for home in (NEW, OLD):",
        "for home in (OLD, NEW):",
    ),
    one(
        "a module that was found by its old name forgets its own",
        HOME,
        '        vars(module)["__spec__"] = self._spec\n',
        "        pass\n",
    ),
    one(
        "a file imports from LMCache's old home by itself",
        "lmcache_hybrid/tools/standalone.py",
        "from lmcache_hybrid.upstream.lmcache_home import LMCacheEngine, ",
        "from lmcache.v1.cache_engine import LMCacheEngine, ",
    ),
    one(
        "a name that LMCache moved counts as missing in its sources",
        "tests/compat/names/resolver.py",
        "new = None if found else moved(module)",
        "new = None",
    ),
    one(
        "one of the names that a release has instead is enough",
        "tests/compat/names/resolver.py",
        "return None if instead and not any(",
        "return None if instead and not all(",
    ),
    one(
        "the block size is kept where vLLM does so itself, and only there",
        "vllm_patch/cpu.py",
        "if CHOSEN_ONCE in ",
        "if CHOSEN_ONCE not in ",
    ),
    one(
        "keys beside the KV cache are taken for part of it",
        "vllm_patch/unsound.py",
        '.startswith("octave"):',
        '.startswith("no octave"):',
    ),
    one(
        "a copy on write ends where a state ends",
        "vllm_patch/partial_hits.py",
        "    return [caches[index] for index in sorted(kept)]",
        "    return caches",
    ),
    one(
        "views of interleaved blocks are taken for dense pages",
        "vllm_patch/partial_hits.py",
        "return same and within and self.end - self.start <= self.stride",
        "return same and within",
    ),
    one(
        "vLLM's copies on write stay as they are where a model is served",
        "vllm_patch/loaders.py",
        "    partial_hits.copy_whole_pages()",
        "    partial_hits",
    ),
    one(
        "a session's next part goes on from a state that saw a discarded token",
        SESSIONS,
        "    start_parts_over()\n    drop",
        "    drop",
    ),
    one(
        "drafts for a part that has ended count as the next part's",
        SESSIONS,
        "    session.spec_token_ids, session.is_prefill_chunk = [], True\n",
        "",
    ),
    one(
        "a session's part ends while it is preempted",
        SESSIONS,
        "start_parts_over()\n    drop_output_of_preempted_sessions()\n",
        "start_parts_over()\n",
    ),
    one(
        "a part that starts over counts as preempted",
        SESSIONS,
        "    session.num_preemptions = 0\n",
        "",
    ),
    one(
        "the V1 runner keeps where a session's last part had its state",
        "vllm_patch/loaders.py",
        "    sessions.forget_columns_of_parts()\n",
        "",
    ),
    one(
        "a session's later parts are stored as far as its first prompt goes",
        "lmcache_hybrid/scheduler/scheduler.py",
        "before.prompt_tokens == request.num_prompt_tokens",
        "before.prompt_tokens > 0",
    ),
)
