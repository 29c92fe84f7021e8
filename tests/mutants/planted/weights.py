# SPDX-License-Identifier: Apache-2.0
"""Which weights a model has got."""

from tests.mutants.defect import always, each_of, gone, passes

MISTAKES = {
    "lmcache_hybrid/storage/weights_guard.py": {
        "only the first sleep that discards the weights is warned of": (
            '            self._said = ""\n            return True\n',
            "            return True\n",
        ),
        "only the first change of weights is warned of": (
            '.changes, True\n        self._said = ""\n',
            ".changes, True\n",
        ),
        "a change of weights between a reset and the first step of the new ones is the last one": (
            "        if changes != self._seen and self._unused:\n",
            "        if changes != self._seen:\n",
        ),
        "a lookup hits what other weights have stored": always(
            "        if self._guard.stands():\n"
        ),
    },
    "vllm_patch/loaders.py": {
        "weights are written into the running model and nobody counts it": passes(
            "        model.load_weights = _changing(model.load_weights)\n"
        ),
        "weights that a trainer sends straight into parameters are not counted": gone(
            "    Worker.update_weights = _changing(Worker.update_weights)\n"
        ),
        "weights that are written when an update ends are not counted": gone(
            "    Worker.finish_weight_update = _changing(Worker.finish_weight_update)\n"
        ),
        "a load that shows nothing keeps the identity of the one before": gone(
            "    LOADED.note(model_config, None)\n"
        ),
        "a reload in place changes the identity": passes("        del loader.load_weights\n"),
        "a loader that fills a model by itself leaves no note": (
            '_WHOLE = ("TensorizerLoader", "IpcModelLoader")',
            '_WHOLE = ("IpcModelLoader",)',
        ),
        "what a loader did by itself counts as seen": (
            " and type(loader).__name__ in _WHOLE:",
            ":",
        ),
        "weights that vLLM's daemon maps into the model are not known": (
            '_WHOLE = ("TensorizerLoader", "IpcModelLoader")',
            '_WHOLE = ("TensorizerLoader",)',
        ),
    },
    "lmcache_hybrid/connector.py": {
        "a step under way when a reset comes is stored as of the weights before": (
            "        self.worker.reset(epoch)\n",
            "        self._guard.reset()\n        self.worker.reset(epoch)\n",
        ),
        "steps of new weights are stored as those of the old ones": (
            "        elif self.worker is not None and self._guard.stands():\n",
            "        elif self.worker is not None:\n",
        ),
        "an engine stores although its weights are not known": (
            "            if refusal is None and self._problem is None:\n"
            "                self._switch_off(error)\n",
            "            self._open(pages, bytes(16), None)\n",
        ),
    },
    "lmcache_hybrid/worker/worker.py": {
        "a load of what other weights have stored succeeds": gone(
            "        results.failed_recving.update(results.finished_recving)\n"
        ),
    },
    "lmcache_hybrid/identity/weights.py": {
        "of a weight only the beginning counts": (
            "xxhash.xxh3_128_hexdigest(flat.view(torch.uint8).numpy())",
            "xxhash.xxh3_128_hexdigest(flat.view(torch.uint8)[:4096].numpy())",
        ),
        "the names of weights do not count": (
            'self._lines.append(f"{name} {digest}\\n")',
            'self._lines.append(f"{digest}\\n")',
        ),
        "the order of a checkpoint's files counts": (
            '"".join(sorted(self._lines))',
            '"".join(self._lines)',
        ),
        "a weight is read when its memory may hold the next one": (
            "        for name, tensor in weights:\n            if self._problem",
            "        for name, tensor in list(weights):\n            if self._problem",
        ),
        "buffers do not count where a loader fills the model's tensors": (
            "if name not in parameters and isinstance(tensor, torch.Tensor):",
            "if name in parameters:",
        ),
        "a weight that cannot be read is left out of the identity": gone(
            "        if self._problem is not None:\n            return None\n"
        ),
        "an identity is found by the number of an object that is gone": (
            "if loaded is not None and loaded.owner() is model_config else None",
            "if loaded is not None else None",
        ),
        "the weights of other ranks do not count": ("for rank in ranks]", "for rank in ranks[:1]]"),
        "a rank that knows its weights stores although another does not": (
            "if len(known) < len(identities):",
            "if not known:",
        ),
        "a draft model's weights do not count": (
            '**({"draft model": draft} if draft else {})',
            "**{}",
        ),
        "weights that late ranks get from others count as loaded": (
            "None if elastic else LOADED.of(config)",
            "LOADED.of(config)",
        ),
    },
    "lmcache_hybrid/identity/model_files.py": {
        "a name on a hub without a commit counts as known": (
            '    if not re.fullmatch("[0-9a-f]{40}", commit or ""):\n',
            '    if commit == "":\n',
        ),
        "a name on a hub is known only where the user wrote its commit": (
            'getattr(revision, "resolved", revision)',
            "revision",
        ),
        "a model named by its weight file has no configuration": (
            "return path.parent if path.is_file() else path",
            "return path",
        ),
    },
}
DEFECTS = each_of(MISTAKES)
