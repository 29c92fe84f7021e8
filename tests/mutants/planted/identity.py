# SPDX-License-Identifier: Apache-2.0
"""What makes two requests the same to the cache: adapters, and media that clients name."""

from tests.mutants.defect import one

ADAPTERS = "lmcache_hybrid/identity/adapters.py"
LOOKUP = "lmcache_hybrid/protocol/lookup.py"
TRACKED = "lmcache_hybrid/scheduler/tracker.py"
WORKER = "lmcache_hybrid/worker/worker.py"
MEDIA = "lmcache_hybrid/identity/media.py"
FRONTEND = "vllm_patch/media.py"
CONNECTOR = "lmcache_hybrid/connector.py"

PAGE_FACTS = "lmcache_hybrid/worker/page_facts.py"
MODEL_CODE = "lmcache_hybrid/identity/model_code.py"

DEFECTS = (
    # Code from outside vLLM
    one(
        "a checkout in front of an installed package counts as that package's version",
        "lmcache_hybrid/identity/code.py",
        "file is not None and _has_installed(distribution, file)",
        "True",
    ),
    one(
        "a checkout of setuptools' develop counts by its version",
        "lmcache_hybrid/identity/code.py",
        '    if distribution.read_text("RECORD") is None:',
        "    if False:",
    ),
    one(
        "a function that a plugin puts into a class of vLLM does not count",
        "lmcache_hybrid/identity/code.py",
        "    return {code.__module__} | (set() if top in _DECORATORS else own)",
        "    return {code.__module__}",
    ),
    one(
        "a function counts as the one that it says it wraps",
        "lmcache_hybrid/identity/code.py",
        'function.__globals__.get("__name__", "")',
        "function.__module__",
    ),
    one(
        "functions within decorators do not count",
        "lmcache_hybrid/identity/code.py",
        "        if isinstance(each, _HOLDERS):\n",
        "        if False:\n",
    ),
    one(
        "a base from a second package does not count among what writes pages",
        PAGE_FACTS,
        "sorted(homes(code) | inherited)",
        "sorted(homes(code))",
    ),
    one(
        "a new class of vLLM passes as the one that it is derived from",
        PAGE_FACTS,
        '        if path.startswith("vllm.") and _has_pages(base):\n',
        "        if False:\n",
    ),
    one(
        "code that a link leads to does not count",
        "lmcache_hybrid/identity/code.py",
        "os.walk(folder, followlinks=True)",
        "os.walk(folder)",
    ),
    one(
        "code that is compiled when it is needed does not count",
        "lmcache_hybrid/identity/code.py",
        "                if file.is_file():\n",
        '                if file.is_file() and name.endswith((".py", ".so", ".pyd")):\n',
    ),
    one(
        "how tokens of a video are chosen does not count",
        "lmcache_hybrid/worker/fingerprint.py",
        "        facts += (config.video_pruning_method,)\n",
        "        facts += ()\n",
    ),
    one(
        "scales of a vision tower count by their path",
        "lmcache_hybrid/worker/fingerprint.py",
        "_file_digest(config.mm_encoder_fp8_scale_path)",
        "config.mm_encoder_fp8_scale_path",
    ),
    one(
        "clients may send media without embeddings",
        "vllm_patch/configuration.py",
        "        if not (alone and served) or (",
        "        if (alone and served) or (",
    ),
    one(
        "text behind a pruned video is at wrong positions",
        "vllm_patch/unsound.py",
        "    if pruned and config.model_config.uses_mrope:\n",
        "    if False:\n",
    ),
    one(
        "pages of TurboQuant are taken for each other, whatever their layout",
        PAGE_FACTS,
        '    return {"struct of arrays": layer.impl._soa_store}\n',
        '    return {"struct of arrays": hasattr(layer.impl, "_soa_store")}\n',
    ),
    one(
        "what decides the bytes of a page is left out of the fingerprint",
        "lmcache_hybrid/worker/fingerprint.py",
        '        **({"pages": layout} if layout else {}),\n',
        "",
    ),
    one(
        "how a CPU's kernels pack a block does not count",
        PAGE_FACTS,
        '    return {"packing": packing(layer, vllm_config.model_config.dtype)}\n',
        '    return {"packing": layer.isa}\n',
    ),
    one(
        "a backend from outside vLLM counts by its name only",
        PAGE_FACTS,
        "        if origin is not None:\n            facts",
        "        if False:\n            facts",
    ),
    one(
        "a backend that nobody has looked at is taken for one with nothing to add",
        PAGE_FACTS,
        "    if outside:\n        return ()\n",
        "    return ()\n",
    ),
    one(
        "a plugin's model class counts by its name only",
        MODEL_CODE,
        "        elif top not in _VLLM and module != _ACTIVATIONS:\n",
        "        elif False:\n",
    ),
    one(
        "the bases of a model class do not count",
        MODEL_CODE,
        "        for base in code.__mro__:\n",
        "        for base in code.__mro__[:1]:\n",
    ),
    one(
        "a plugin's quantisation methods do not count",
        MODEL_CODE,
        "{type(each) for each in methods if each is not None}",
        "frozenset()",
    ),
    one(
        "activations of transformers change the fingerprints of vLLM's models",
        MODEL_CODE,
        " and module != _ACTIVATIONS:\n",
        ":\n",
    ),
    one(
        "the program itself is a package where it has a file",
        "lmcache_hybrid/identity/code.py",
        '_NO_PACKAGE = ("builtins", "__main__", "__mp_main__")\n',
        '_NO_PACKAGE = ("builtins",)\n',
    ),
    one(
        "loaders that stream do not note what a model is made of",
        "vllm_patch/loaders.py",
        "stream.identity(model), classes_of(model))",
        "stream.identity(model))",
    ),
    one(
        "loaders that do it all themselves do not note what a model is made of",
        "vllm_patch/loaders.py",
        "tensors_identity(model), classes_of(model))",
        "tensors_identity(model))",
    ),
    one(
        "code from outside is left out of the fingerprint",
        "lmcache_hybrid/worker/fingerprint.py",
        "weights_identity(vllm_config, problem, code)",
        "weights_identity(vllm_config, problem, {})",
    ),
    one(
        "what a rank says of its weights leaves out the code from outside",
        "lmcache_hybrid/identity/weights.py",
        '        own[label] = own[label] and f"',
        '        own[label] = own[label] or f"',
    ),
    one(
        "code of another repository counts as the model's own",
        MODEL_CODE,
        "        return set() if found[2] in known else",
        "        return set() if found[2] else",
    ),
    one(
        "the model's own code changes its fingerprint",
        MODEL_CODE,
        "        return set() if found[2] in known else",
        "        return",
    ),
    one(
        "code of another folder of the same name is the model's own",
        MODEL_CODE,
        "elsewhere = config.hf_config_path is not None or",
        "elsewhere =",
    ),
    one(
        "code of another folder that auto_map names is the model's own",
        MODEL_CODE,
        ' or any("--" in str(each) for each in references)',
        "",
    ),
    one(
        "a file that was put into an installed package counts by the package's version",
        MODEL_CODE,
        "identity = code_identity(module)",
        'identity = code_identity(module.partition(".")[0])',
    ),
    one(
        "folders that a package takes in when it is imported do not count",
        "lmcache_hybrid/identity/code.py",
        "{*(spec.submodule_search_locations or ()), *imported}",
        "{*(spec.submodule_search_locations or ())}",
    ),
    one(
        "what was not to be stored of a session is, with its next part",
        "lmcache_hybrid/scheduler/arrivals.py",
        "        if before is not None and before.skip_save:\n",
        "        if False:\n",
    ),
    one(
        "a session's parts count with the last one's tags",
        "lmcache_hybrid/scheduler/arrivals.py",
        "(prefix is None or before.tags != prefix.tags)",
        "prefix is None",
    ),
    one(
        "code of configurations within a configuration does not count",
        MODEL_CODE,
        '        if hasattr(value, "model_type"):\n',
        "        if False:\n",
    ),
    one(
        "processors of another repository do not count",
        MODEL_CODE,
        "            if commit is not None and commit not in known:\n",
        "            if False:\n",
    ),
    one(
        "a checkout of a plugin counts by its version",
        "lmcache_hybrid/identity/code.py",
        "    return found, installed and not editable\n",
        "    return found, installed\n",
    ),
    one(
        "code in subfolders of a model's folder does not count",
        "lmcache_hybrid/identity/weights.py",
        "        code = (Path(place, name) for name in names if fnmatch(name, _CODE))\n",
        "        code = (Path(place, name) for name in names[:0])\n",
    ),
    one(
        "a file of code counts by its content, wherever it is",
        "lmcache_hybrid/identity/weights.py",
        '        digest.update(f"{name} {len(content)}',
        '        digest.update(f"{file.name} {len(content)}',
    ),
    one(
        "releases with other records look for each other's",
        "lmcache_hybrid/worker/fingerprint.py",
        '        "record": record_format.VERSION,\n',
        '        "record": 0,\n',
    ),
    one(
        "a model's code may be changed in the Hub's cache",
        "lmcache_hybrid/identity/weights.py",
        "whole and (listed is None or are_as_listed(files, listed)):",
        "whole:",
    ),
    one(
        "a part of a model in the Hub's cache is the whole of it",
        "lmcache_hybrid/identity/weights.py",
        '_counted(listed) == {n for n in files if "/" not in n}',
        "True",
    ),
    one(
        "code of another commit counts as the model's",
        "lmcache_hybrid/worker/fingerprint.py",
        "if model.code_revision else",
        "if False else",
    ),
    one(
        "what a model stored under its name is not found without the Hub",
        "lmcache_hybrid/storage/key_names.py",
        "snapshot.name if snapshot is not None else model",
        "model",
    ),
    # Media
    one(
        "names of images that a client gave count across tenants",
        MEDIA,
        "        if request.cache_salt:\n",
        "        if True:\n",
    ),
    one(
        "images that no process has marked are taken for hashed",
        MEDIA,
        "(params.extra_args or {}).get(MARK) if",
        "(params.extra_args or {}).get(MARK, CONTENT) if",
    ),
    one(
        "a client marks its own names as hashes",
        FRONTEND,
        "                extra[MARK] = mark or CLIENT\n",
        "                extra[MARK] = (params.extra_args or {}).get(MARK) or mark or CLIENT\n",
    ),
    one(
        "a client's mark on a text stays for media that come later",
        FRONTEND,
        "        if extra or params.extra_args:\n",
        "        if request.mm_features:\n",
    ),
    one(
        "a client's name may be the hash of another image",
        FRONTEND,
        "            mm_uuids = _prefixed(mm_uuids)\n",
        "            mm_uuids = dict(mm_uuids or {})\n",
    ),
    one(
        "names that vLLM counts are taken for the client's",
        FRONTEND,
        "            if not _has_made_up_names(self.vllm_config):\n",
        "            if True:\n",
    ),
    one(
        "what a client wrote behind the Rust front end is taken for a mark",
        MEDIA,
        "    if envs.VLLM_USE_RUST_FRONTEND:\n",
        "    if False:\n",
    ),
    one(
        "beams with an image are taken for marked by nobody",
        FRONTEND,
        "        if MARK in rendered:\n",
        "        if False:\n",
    ),
    one(
        "embeddings amid text are cached",
        "lmcache_hybrid/scheduler/prompt.py",
        'getattr(request, "prompt_embeds", None) is not None',
        "request.prompt_token_ids is None",
    ),
    one(
        "a hit ends inside an image that attends to itself in both directions",
        "lmcache_hybrid/storage/rank_lookup.py",
        "            if end in barred:\n",
        "            if False:\n",
    ),
    one(
        "a hit ends right at the first token of such an image",
        "lmcache_hybrid/scheduler/whole_items.py",
        "        for tokens in range(-(-place.offset // step) * step,",
        "        for tokens in range((place.offset // step + 1) * step,",
    ),
    one(
        "a state inside such an image is stored",
        "lmcache_hybrid/scheduler/save_planner.py",
        "            if tokens in tracker.checkpoints.barred:\n",
        "            if False:\n",
    ),
    one(
        "windows are stored inside such an image instead of in front of it",
        "lmcache_hybrid/scheduler/checkpoints.py",
        "        while boundary and boundary in self.barred:\n",
        "        while False:\n",
    ),
    one(
        "vLLM is asked to end a step inside such an image",
        "lmcache_hybrid/scheduler/arrivals.py",
        "            barred=barred_boundaries(request, plan),\n",
        "",
    ),
    one(
        "no model's images attend to themselves in both directions",
        CONNECTOR,
        "whole_items=vllm_config.model_config.is_mm_prefix_lm",
        "whole_items=vllm_config.model_config.is_hybrid and False",
    ),
    # Adapters
    one(
        "a request that reads no cache is counted nowhere",
        "lmcache_hybrid/scheduler/arrivals.py",
        'unsaved or ("short" if short else _why_unread(request))',
        'unsaved or ("short" if short else None)',
    ),
    one(
        "a request that stores nothing more after a reset is counted nowhere",
        "lmcache_hybrid/scheduler/scheduler.py",
        "                if tracker.unsaved:\n                    with",
        "                if False:\n                    with",
    ),
    one(
        "an adapter that was read for a lookup is taken although its files changed",
        ADAPTERS,
        "        return same and not lora.load_inplace and _files(lora) == self.files\n",
        "        return same and not lora.load_inplace\n",
    ),
    one(
        "one rank's content names an adapter for all",
        ADAPTERS,
        'b"".join(self.contents)',
        'b"".join(self.contents[:1])',
    ),
    one(
        "blocks of an adapter's old content are stored under the new one",
        ADAPTERS,
        "            if not ever - {known}:\n",
        "            if True:\n",
    ),
    one(
        "an adapter's factors do not count",
        ADAPTERS,
        "        facts = (name, layer.rank, layer.lora_alpha, layer.scaling)\n",
        "        facts = (name, layer.rank)\n",
    ),
    one(
        "what an adapter was loaded from last counts, not what is loaded",
        ADAPTERS,
        "            if lora.lora_int_id in manager.list_adapters():\n",
        "            if lora.lora_int_id in self._contents:\n",
    ),
    one(
        "a rank that does not know its adapter names it all the same",
        "lmcache_hybrid/protocol/prefix.py",
        " or not contents or not all(contents):\n",
        " or not contents:\n",
    ),
    one(
        "blocks are stored before the ranks have named the adapter",
        TRACKED,
        "        return self.save and self.prefix.identified\n",
        "        return self.save\n",
    ),
    one(
        "a step stores under the name of an adapter that was reloaded",
        "lmcache_hybrid/worker/saver.py",
        "                if not named:\n",
        "                if False:\n",
    ),
    one(
        "a request goes on with what its adapter's old content computed",
        "lmcache_hybrid/worker/loads.py",
        "        if result.ok and not self._adapters.holds(load.prefix.adapter):\n",
        "        if False:\n",
    ),
    one(
        "a rank stores what another one computed with other content of the adapter",
        ADAPTERS,
        "        return flags.bool().tolist()\n",
        "        return held\n",
    ),
    one(
        "a rank without a store lets the others wait for its word on an adapter",
        CONNECTOR,
        "            ADAPTERS.all_hold([save.prefix.adapter for save in self._metadata.saves])\n",
        "            pass\n",
    ),
    one(
        "an adapter that was another one in between is taken for the same",
        ADAPTERS,
        "        return said != UNKNOWN and said == self.content(adapter.lora)\n",
        "        return said != UNKNOWN and said == self._known(adapter.lora)\n",
    ),
    one(
        "the model runner is part of the fingerprint",
        "lmcache_hybrid/worker/fingerprint.py",
        '        "record": record_format.VERSION,\n',
        '        "record": record_format.VERSION,\n        "runner": vllm_config.use_v2_model_runner,\n',
    ),
)
