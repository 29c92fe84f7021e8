# SPDX-License-Identifier: Apache-2.0
"""What makes two requests the same to the cache: adapters, and media that clients name."""

from tests.mutants.defect import always, each_of, gone, never, passes

ADAPTERS = "lmcache_hybrid/identity/adapters.py"


MISTAKES = {
    "lmcache_hybrid/identity/code.py": {
        "a checkout in front of an installed package counts as that package's version": (
            "file is not None and _has_installed(distribution, file)",
            "True",
        ),
        "a checkout of setuptools' develop counts by its version": (
            '    if distribution.read_text("RECORD") is None:',
            "    if False:",
        ),
        "a function that a plugin puts into a class of vLLM does not count": (
            "    return {code.__module__} | (set() if top in _DECORATORS else own)",
            "    return {code.__module__}",
        ),
        "a function counts as the one that it says it wraps": (
            'function.__globals__.get("__name__", "")',
            "function.__module__",
        ),
        "functions within decorators do not count": never(
            "        if isinstance(each, _HOLDERS):\n"
        ),
        "code that a link leads to does not count": (
            "os.walk(folder, followlinks=True)",
            "os.walk(folder)",
        ),
        "code that is compiled when it is needed does not count": (
            "                if file.is_file():\n",
            '                if file.is_file() and name.endswith((".py", ".so", ".pyd")):\n',
        ),
        "the program itself is a package where it has a file": (
            '_NO_PACKAGE = ("builtins", "__main__", "__mp_main__")\n',
            '_NO_PACKAGE = ("builtins",)\n',
        ),
        "folders that a package takes in when it is imported do not count": (
            "{*(spec.submodule_search_locations or ()), *imported}",
            "{*(spec.submodule_search_locations or ())}",
        ),
        "a checkout of a plugin counts by its version": (
            "    return found, installed and not editable\n",
            "    return found, installed\n",
        ),
    },
    "lmcache_hybrid/worker/reviewed_backends.py": {
        "a base from a second package does not count among what writes pages": (
            "sorted(homes(code) | inherited)",
            "sorted(homes(code))",
        ),
        "a new class of vLLM passes as the one that it is derived from": never(
            '        if path.startswith("vllm.") and _has_pages(base):\n'
        ),
        "pages of TurboQuant are taken for each other, whatever their layout": (
            '    return {"struct of arrays": layer.impl._soa_store}\n',
            '    return {"struct of arrays": hasattr(layer.impl, "_soa_store")}\n',
        ),
        "how a CPU's kernels pack a block does not count": (
            '    return {"packing": packing(layer, vllm_config.model_config.dtype)}\n',
            '    return {"packing": layer.isa}\n',
        ),
        "a backend from outside vLLM counts by its name only": (
            "        if origin is not None:\n            facts",
            "        if False:\n            facts",
        ),
        "a backend that nobody has looked at is taken for one with nothing to add": (
            "    if outside:\n        return ()\n",
            "    return ()\n",
        ),
    },
    "lmcache_hybrid/worker/fingerprint.py": {
        "the code that makes pixels of images does not count": passes(
            '        facts += (_version("transformers"),)\n'
        ),
        "how tokens of a video are chosen does not count": (
            "        facts += (config.video_pruning_method,)\n",
            "        facts += ()\n",
        ),
        "scales of a vision tower count by their path": (
            "_file_digest(config.mm_encoder_fp8_scale_path)",
            "config.mm_encoder_fp8_scale_path",
        ),
        "what decides the bytes of a page is left out of the fingerprint": gone(
            '        **({"pages": layout} if layout else {}),\n'
        ),
        "code from outside is left out of the fingerprint": (
            "weights_identity(vllm_config, problem, code)",
            "weights_identity(vllm_config, problem, {})",
        ),
        "releases with other records look for each other's": (
            '        "record": record_format.VERSION,\n',
            '        "record": 0,\n',
        ),
        "code of another commit counts as the model's": (
            "if model.code_revision else",
            "if False else",
        ),
        "the model runner is part of the fingerprint": (
            '        "record": record_format.VERSION,\n',
            '        "record": record_format.VERSION,\n'
            '        "runner": vllm_config.use_v2_model_runner,\n',
        ),
    },
    "vllm_patch/configuration.py": {
        "clients may send media without embeddings": (
            "        if not (alone and served) or (",
            "        if (alone and served) or (",
        ),
    },
    "vllm_patch/unsound.py": {
        "text behind a pruned video is at wrong positions": never(
            "    if pruned and config.model_config.uses_mrope:\n"
        ),
    },
    "lmcache_hybrid/identity/model_code.py": {
        "a plugin's model class counts by its name only": (
            "        elif top not in _VLLM and module != _ACTIVATIONS:\n",
            "        elif False:\n",
        ),
        "the bases of a model class do not count": (
            "        for base in code.__mro__:\n",
            "        for base in code.__mro__[:1]:\n",
        ),
        "a plugin's quantisation methods do not count": (
            "{type(each) for each in methods if each is not None}",
            "frozenset()",
        ),
        "activations of transformers change the fingerprints of vLLM's models": (
            " and module != _ACTIVATIONS:\n",
            ":\n",
        ),
        "code of another repository counts as the model's own": (
            "        return set() if found[2] in known else",
            "        return set() if found[2] else",
        ),
        "the model's own code changes its fingerprint": (
            "        return set() if found[2] in known else",
            "        return",
        ),
        "code of another folder of the same name is the model's own": (
            "elsewhere = config.hf_config_path is not None or",
            "elsewhere =",
        ),
        "code of another folder that auto_map names is the model's own": gone(
            ' or any("--" in str(each) for each in references)'
        ),
        "a file that was put into an installed package counts by the package's version": (
            "identity = code_identity(module)",
            'identity = code_identity(module.partition(".")[0])',
        ),
        "code of configurations within a configuration does not count": never(
            '        if hasattr(value, "model_type"):\n'
        ),
        "processors of another repository do not count": never(
            "            if commit is not None and commit not in known:\n"
        ),
    },
    "vllm_patch/loaders.py": {
        "loaders that stream do not note what a model is made of": (
            "stream.identity(model), classes_of(model))",
            "stream.identity(model))",
        ),
        "loaders that do it all themselves do not note what a model is made of": (
            "tensors_identity(model), classes_of(model))",
            "tensors_identity(model))",
        ),
    },
    "lmcache_hybrid/identity/weights.py": {
        "what a rank says of its weights leaves out the code from outside": (
            '        own[label] = own[label] and f"',
            '        own[label] = own[label] or f"',
        ),
    },
    "lmcache_hybrid/identity/model_files.py": {
        "code in subfolders of a model's folder does not count": (
            "        code = (Path(place, name) for name in names if fnmatch(name, _CODE))\n",
            "        code = (Path(place, name) for name in names[:0])\n",
        ),
        "a file of code counts by its content, wherever it is": (
            '        digest.update(f"{name} {len(content)}',
            '        digest.update(f"{file.name} {len(content)}',
        ),
        "a model's code may be changed in the Hub's cache": (
            "whole and (listed is None or are_as_listed(files, listed)):",
            "whole:",
        ),
        "a part of a model in the Hub's cache is the whole of it": (
            '_counted(listed) == {n for n in files if "/" not in n}',
            "True",
        ),
    },
    "lmcache_hybrid/scheduler/arrivals.py": {
        "what was not to be stored of a session is, with its next part": never(
            "        if before is not None and before.skip_save:\n"
        ),
        "a session's parts count with the last one's tags": (
            "(prefix is None or before.tags != prefix.tags)",
            "prefix is None",
        ),
        "vLLM is asked to end a step inside such an image": gone(
            "            barred=barred_boundaries(request, plan),\n"
        ),
        "a request that reads no cache is counted nowhere": (
            'unsaved or ("short" if short else why_unread(request))',
            'unsaved or ("short" if short else None)',
        ),
    },
    "lmcache_hybrid/storage/key_names.py": {
        "what a model stored under its name is not found without the Hub": (
            "snapshot.name if snapshot is not None else model",
            "model",
        ),
    },
    "lmcache_hybrid/identity/media.py": {
        "a session's next part vouches for the media of all": (
            "marks = {earlier, mark_of(params)} if media_added else {earlier}",
            "marks = {mark_of(params)} if media_added else {earlier}",
        ),
        "names of images that a client gave count across tenants": always(
            "        if request.cache_salt:\n"
        ),
        "images that no process has marked are taken for hashed": (
            "(params.extra_args or {}).get(MARK) if",
            "(params.extra_args or {}).get(MARK, CONTENT) if",
        ),
        "what a client wrote behind the Rust front end is taken for a mark": never(
            "    if envs.VLLM_USE_RUST_FRONTEND:\n"
        ),
    },
    "vllm_patch/media_marks.py": {
        "a client marks its own names as hashes": (
            "                extra[MARK] = mark or CLIENT\n",
            "                extra[MARK] = (params.extra_args or {}).get(MARK) or mark or CLIENT\n",
        ),
        "a client's mark on a text stays for media that come later": (
            "        if extra or params.extra_args:\n",
            "        if request.mm_features:\n",
        ),
        "a client's name may be the hash of another image": (
            "            mm_uuids = _prefixed(mm_uuids)\n",
            "            mm_uuids = dict(mm_uuids or {})\n",
        ),
        "names that vLLM counts are taken for the client's": always(
            "            if not _has_made_up_names(self.vllm_config):\n"
        ),
        "beams with an image are taken for marked by nobody": never(
            "        if MARK in rendered:\n"
        ),
    },
    "lmcache_hybrid/scheduler/prompt.py": {
        "embeddings amid text are cached": (
            'getattr(request, "prompt_embeds", None) is not None',
            "request.prompt_token_ids is None",
        ),
    },
    "lmcache_hybrid/storage/rank_lookup.py": {
        "a hit ends inside an image that attends to itself in both directions": never(
            "            if end in barred:\n"
        ),
    },
    "lmcache_hybrid/scheduler/whole_items.py": {
        "a hit ends right at the first token of such an image": (
            "        for tokens in range(-(-place.offset // step) * step,",
            "        for tokens in range((place.offset // step + 1) * step,",
        ),
    },
    "lmcache_hybrid/scheduler/save_planner.py": {
        "a state inside such an image is stored": never(
            "            if tokens in tracker.step_ends.barred:\n"
        ),
    },
    "lmcache_hybrid/scheduler/step_ends.py": {
        "windows are stored inside such an image instead of in front of it": (
            "        while boundary and boundary in self.barred:\n",
            "        while False:\n",
        ),
    },
    "lmcache_hybrid/connector.py": {
        "no model's images attend to themselves in both directions": (
            "whole_items=vllm_config.model_config.is_mm_prefix_lm",
            "whole_items=vllm_config.model_config.is_hybrid and False",
        ),
        "a rank without a store lets the others wait for its word on an adapter": passes(
            "            ADAPTERS.all_hold([save.prefix.adapter for save in "
            "self._metadata.saves])\n"
        ),
    },
    "lmcache_hybrid/scheduler/scheduler.py": {
        "a request that stores nothing more after a reset is counted nowhere": (
            "                if tracker.unsaved:\n                    with",
            "                if False:\n                    with",
        ),
    },
    "lmcache_hybrid/identity/adapters.py": {
        "an adapter that was read for a lookup is taken although its files changed": (
            "        return same and not lora.load_inplace and _files(lora) == self.files\n",
            "        return same and not lora.load_inplace\n",
        ),
        "one rank's content names an adapter for all": (
            'b"".join(self.contents)',
            'b"".join(self.contents[:1])',
        ),
        "blocks of an adapter's old content are stored under the new one": always(
            "            if not ever - {known}:\n"
        ),
        "an adapter's factors do not count": (
            "        facts = (name, layer.rank, layer.lora_alpha, layer.scaling)\n",
            "        facts = (name, layer.rank)\n",
        ),
        "what an adapter was loaded from last counts, not what is loaded": (
            "            if lora.lora_int_id in manager.list_adapters():\n",
            "            if lora.lora_int_id in self._contents:\n",
        ),
        "a rank stores what another one computed with other content of the adapter": (
            "        return flags.bool().tolist()\n",
            "        return held\n",
        ),
        "an adapter that was another one in between is taken for the same": (
            "        return said != UNKNOWN and said == self._content(adapter.lora, reads)\n",
            "        return said != UNKNOWN and said == self._known(adapter.lora, reads)\n",
        ),
    },
    "lmcache_hybrid/protocol/prefix.py": {
        "a rank that does not know its adapter names it all the same": (
            " or not contents or not all(contents):\n",
            " or not contents:\n",
        ),
    },
    "lmcache_hybrid/scheduler/tracker.py": {
        "blocks are stored before the ranks have named the adapter": (
            "        return self.save and self.prefix.identified\n",
            "        return self.save\n",
        ),
    },
    "lmcache_hybrid/worker/saver.py": {
        "a step stores under the name of an adapter that was reloaded": never(
            "                if not named:\n"
        ),
    },
    "lmcache_hybrid/worker/loads.py": {
        "a request goes on with what its adapter's old content computed": never(
            "        if ok and not self._adapters.holds(load.prefix.adapter):\n"
        ),
    },
}
DEFECTS = each_of(MISTAKES)
