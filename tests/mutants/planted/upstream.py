# SPDX-License-Identifier: Apache-2.0
"""How the plugin gets into vLLM, and what it relies on there."""

from tests.mutants.defect import each_of, gone, passes

CONNECTOR = "vllm_patch/connector.py"

MISTAKES = {
    "vllm_patch/configuration.py": {
        "a draft model's configuration is settled as an engine's": gone(
            "    if _is_drafters(config):\n        return\n"
        ),
        "n-gram drafts make the model's own configuration a drafter's": (
            "    if speculative is None or speculative.target_model_config is model:\n",
            "    if speculative is None:\n",
        ),
        "a refused version changes models that it does not refuse": (
            '{_problem}")\n        return\n',
            '{_problem}")\n',
        ),
        "engines with another connector count as ours": (
            "        return transfer.has_connector(CONNECTOR)\n",
            "        return True\n",
        ),
    },
    "vllm_patch/__init__.py": {
        "a process that was patched by half serves hybrid models": (
            "        _refuse(problem)\n\n\ndef _install",
            "        pass\n\n\ndef _install",
        ),
        "a patch that fails ends engines without this connector": (
            "    except Exception as error:\n        logging",
            "    except ImportError as error:\n        logging",
        ),
        "a release that changed what is patched is patched": gone(
            " or versions.changed(signatures.AT_START)"
        ),
        "every process of vLLM imports LMCache and what only workers need": (
            "versions.changed(signatures.AT_START)",
            "versions.changed()",
        ),
        "dense models do not find LMCache's adapter where it moved": passes(
            "        lmcache_home.install()\n"
        ),
    },
    "vllm_patch/connector.py": {
        "the patched class stays where the factory does not find it": gone(
            "        upstream.LMCacheConnectorV1 = UpstreamConnector\n"
        ),
        "a release of LMCache that changed what is called serves hybrid models": (
            "if (problem := versions.changed()) is not None:",
            "if (problem := None) is not None:",
        ),
        "a call that a later vLLM makes reaches LMCache's own adapter": (
            "is getattr(bases, m, None)]:",
            "is m]:",
        ),
    },
    "lmcache_hybrid/upstream/versions.py": {
        "a release candidate counts as the release": (
            "    fix = new > old and ",
            "    fix = new.release >= old.release and ",
        ),
        "a development snapshot counts as a release": gone(" and not new.is_devrelease"),
        "a pair counts as tested when each of its halves was, with another": (
            " if all(_fits(pair, here))), None)",
            " if any(_fits(pair, here))), None)",
        ),
        "a fix of a tested release is let in although it changed a function": (
            "    tested = _same(pair, here) if pair else",
            "    tested = (True, True) if pair else",
        ),
        "an untested release that is tried is let in although it changed a function": (
            " if pair else (False, False)",
            " if pair else (True, True)",
        ),
        "a CPU host is sent to a release without CPU build": (
            "if not cpu or pair.kernels == pair.vllm]",
            "]",
        ),
    },
    "lmcache_hybrid/tools/doctor/installation.py": {
        "the doctor takes a release for usable that lacks a function": (
            '        if problem is not None:\n            return error("plugin"',
            '        if problem is None:\n            return error("plugin"',
        ),
    },
    "lmcache_hybrid/tools/cli/__init__.py": {
        "version takes a release for usable that lacks a function": (
            "versions.unsupported() or versions.changed()",
            "versions.unsupported()",
        ),
    },
    "lmcache_hybrid/upstream/signatures.py": {
        "a parameter that a release wants in addition is not noticed": gone(
            " and set(needed) <= set(takes)"
        ),
        "parameters in another order are not noticed": (
            "tuple(found[: len(takes)]) == takes",
            "set(takes) <= set(found)",
        ),
        "a replaced method is not looked up in untested releases": gone(
            "        Scheduler._preempt_request(request, timestamp)\n"
        ),
    },
    "lmcache_hybrid/upstream/lmcache_home.py": {
        "a module of LMCache's that is still there is replaced by another of its name": (
            "self._exists(fullname, path)):",
            "False):",
        ),
        "modules of a package that moved run twice, once under each name": (
            "(not self._in_moved_package(fullname) and self._exists(fullname, path))",
            "self._exists(fullname, path)",
        ),
        "a name is taken from the module that LMCache left behind": (
            "for home in (NEW, OLD):",
            "for home in (OLD, NEW):",
        ),
        "a module that was found by its old name forgets its own": passes(
            '        vars(module)["__spec__"] = self._spec\n'
        ),
    },
    "lmcache_hybrid/tools/standalone.py": {
        "a file imports from LMCache's old home by itself": (
            "from lmcache_hybrid.upstream.lmcache_home import LMCacheEngine, ",
            "from lmcache.v1.cache_engine import LMCacheEngine, ",
        ),
    },
    "tests/compat/names/resolver.py": {
        "a name that LMCache moved counts as missing in its sources": (
            "new = None if found else moved(module)",
            "new = None",
        ),
        "one of the names that a release has instead is enough": (
            "return None if instead and not any(",
            "return None if instead and not all(",
        ),
    },
    "vllm_patch/cpu.py": {
        "the block size is kept where vLLM does so itself, and only there": (
            "if CHOSEN_ONCE in ",
            "if CHOSEN_ONCE not in ",
        ),
    },
    "vllm_patch/unsound.py": {
        "keys beside the KV cache are taken for part of it": (
            '.startswith("octave"):',
            '.startswith("no octave"):',
        ),
    },
    "vllm_patch/partial_hits.py": {
        "a copy on write ends where a state ends": (
            "    return [caches[index] for index in sorted(kept)]",
            "    return caches",
        ),
        "views of interleaved blocks are taken for dense pages": (
            "return same and within and self.end - self.start <= self.stride",
            "return same and within",
        ),
    },
    "vllm_patch/loaders.py": {
        "vLLM's copies on write stay as they are where a model is served": (
            "    partial_hits.copy_whole_pages()",
            "    partial_hits",
        ),
        "checkpoints of Kimi-K3 fill the room for drafts": gone(
            "    kimi_k3.write_windows_as_they_are_read(model)\n"
        ),
        "the V1 runner keeps where a session's last part had its state": gone(
            "    sessions.forget_columns_of_parts()\n"
        ),
    },
    "vllm_patch/sessions.py": {
        "a session's next part forgets the mark of its media": gone(
            "        carry_mark(session, mark, had_media, bool(update.mm_features))\n"
        ),
        "a session's next part goes on from a state that saw a discarded token": (
            "    start_parts_over()\n    drop",
            "    drop",
        ),
        "drafts for a part that has ended count as the next part's": gone(
            "    session.spec_token_ids, session.is_prefill_chunk = [], True\n"
        ),
        "a session's part ends while it is preempted": (
            "start_parts_over()\n    drop_output_of_preempted_sessions()\n",
            "start_parts_over()\n",
        ),
        "a part that starts over counts as preempted": gone("    session.num_preemptions = 0\n"),
    },
    "lmcache_hybrid/scheduler/scheduler.py": {
        "a session's later parts are stored as far as its first prompt goes": (
            "before.prompt_tokens == request.num_prompt_tokens",
            "before.prompt_tokens > 0",
        ),
    },
}
DEFECTS = each_of(MISTAKES)
