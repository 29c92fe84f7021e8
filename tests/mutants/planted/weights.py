# SPDX-License-Identifier: Apache-2.0
"""Which weights a model has got."""

from tests.mutants.defect import one

WEIGHTS = "lmcache_hybrid/identity/weights.py"
LOADERS = "vllm_patch/loaders.py"
CONNECTOR = "lmcache_hybrid/connector.py"

GUARD = "lmcache_hybrid/storage/weights_guard.py"

DEFECTS = (
    one(
        "only the first sleep that discards the weights is warned of",
        GUARD,
        '            self._said = ""\n            return True\n',
        "            return True\n",
    ),
    one(
        "only the first change of weights is warned of",
        GUARD,
        '.changes, True\n        self._said = ""\n',
        ".changes, True\n",
    ),
    one(
        "weights are written into the running model and nobody counts it",
        LOADERS,
        "        model.load_weights = _changing(model.load_weights)\n",
        "        pass\n",
    ),
    one(
        "weights that a trainer sends straight into parameters are not counted",
        LOADERS,
        "    Worker.update_weights = _changing(Worker.update_weights)\n",
        "",
    ),
    one(
        "weights that are written when an update ends are not counted",
        LOADERS,
        "    Worker.finish_weight_update = _changing(Worker.finish_weight_update)\n",
        "",
    ),
    one(
        "a step under way when a reset comes is stored as of the weights before",
        CONNECTOR,
        "        self.worker.reset(epoch)\n",
        "        self._guard.reset()\n        self.worker.reset(epoch)\n",
    ),
    one(
        "a change of weights between a reset and the first step of the new ones is the last one",
        GUARD,
        "        if changes != self._seen and self._unused:\n",
        "        if changes != self._seen:\n",
    ),
    one(
        "a lookup hits what other weights have stored",
        GUARD,
        "        if self._guard.stands():\n",
        "        if True:\n",
    ),
    one(
        "a load of what other weights have stored succeeds",
        "lmcache_hybrid/worker/worker.py",
        "        results.failed_recving.update(results.finished_recving)\n",
        "",
    ),
    one(
        "steps of new weights are stored as those of the old ones",
        CONNECTOR,
        "        if self.worker is not None and self._guard.stands():\n",
        "        if self.worker is not None:\n",
    ),
    one(
        "of a weight only the beginning counts",
        WEIGHTS,
        "xxhash.xxh3_128_hexdigest(flat.view(torch.uint8).numpy())",
        "xxhash.xxh3_128_hexdigest(flat.view(torch.uint8)[:4096].numpy())",
    ),
    one(
        "the names of weights do not count",
        WEIGHTS,
        'self._lines.append(f"{name} {digest}\\n")',
        'self._lines.append(f"{digest}\\n")',
    ),
    one(
        "the order of a checkpoint's files counts",
        WEIGHTS,
        '"".join(sorted(self._lines))',
        '"".join(self._lines)',
    ),
    one(
        "a weight is read when its memory may hold the next one",
        WEIGHTS,
        "        for name, tensor in weights:\n            if self._problem",
        "        for name, tensor in list(weights):\n            if self._problem",
    ),
    one(
        "buffers do not count where a loader fills the model's tensors",
        WEIGHTS,
        "if name not in parameters and isinstance(tensor, torch.Tensor):",
        "if name in parameters:",
    ),
    one(
        "a weight that cannot be read is left out of the identity",
        WEIGHTS,
        "        if self._problem is not None:\n            return None\n",
        "",
    ),
    one(
        "an identity is found by the number of an object that is gone",
        WEIGHTS,
        "if loaded is not None and loaded.owner() is model_config else None",
        "if loaded is not None else None",
    ),
    one(
        "the weights of other ranks do not count",
        WEIGHTS,
        "for rank in ranks]",
        "for rank in ranks[:1]]",
    ),
    one(
        "a rank that knows its weights stores although another does not",
        WEIGHTS,
        "if len(known) < len(identities):",
        "if not known:",
    ),
    one(
        "a draft model's weights do not count",
        WEIGHTS,
        '**({"draft model": draft} if draft else {})',
        "**{}",
    ),
    one(
        "weights that late ranks get from others count as loaded",
        WEIGHTS,
        "None if elastic else LOADED.of(config)",
        "LOADED.of(config)",
    ),
    one(
        "a name on a hub without a commit counts as known",
        WEIGHTS,
        '    if not re.fullmatch("[0-9a-f]{40}", commit or ""):\n',
        '    if commit == "":\n',
    ),
    one(
        "a name on a hub is known only where the user wrote its commit",
        WEIGHTS,
        'getattr(revision, "resolved", revision)',
        "revision",
    ),
    one(
        "a model named by its weight file has no configuration",
        WEIGHTS,
        "return path.parent if path.is_file() else path",
        "return path",
    ),
    one(
        "a load that shows nothing keeps the identity of the one before",
        LOADERS,
        "    LOADED.note(model_config, None)\n",
        "",
    ),
    one(
        "a reload in place changes the identity",
        LOADERS,
        "        del loader.load_weights\n",
        "        pass\n",
    ),
    one(
        "a loader that fills a model by itself leaves no note",
        LOADERS,
        '_WHOLE = ("TensorizerLoader", "IpcModelLoader")',
        '_WHOLE = ("IpcModelLoader",)',
    ),
    one(
        "what a loader did by itself counts as seen",
        LOADERS,
        " and type(loader).__name__ in _WHOLE:",
        ":",
    ),
    one(
        "an engine stores although its weights are not known",
        CONNECTOR,
        "            if refusal is None and self._problem is None:\n"
        "                self._switch_off(error)\n",
        "            self._open(pages, bytes(16), None)\n",
    ),
    one(
        "weights that vLLM's daemon maps into the model are not known",
        LOADERS,
        '_WHOLE = ("TensorizerLoader", "IpcModelLoader")',
        '_WHOLE = ("TensorizerLoader",)',
    ),
)
