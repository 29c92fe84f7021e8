# SPDX-License-Identifier: Apache-2.0
"""What ``inspect``, ``verify`` and ``purge`` say, and what ``purge`` deletes."""

from tests.mutants.defect import each_of, gone, never, passes

MISTAKES = {
    "lmcache_hybrid/tools/sizing/sharing.py": {
        "plan counts no EXISTS of what is written": (
            "return Asked(2 * records, 0, written)",
            "return Asked(records, 0, written)",
        ),
        "plan counts pages that are equal on all ranks as written by each": (
            'storage.BACKENDS["redis"].copies(group, sizes.tp)',
            "sizes.tp",
        ),
        "plan counts hits of prompts that never hit": (
            "    if not (last := _last(sizes, work)):\n        return Asked(0, 0, 0)\n",
            "    last = _last(sizes, work)\n",
        ),
        "plan counts prompts that hit as stored again": (
            "save(sizes, work).times(new)",
            "save(sizes, work)",
        ),
        "plan adds what a server sends to what it takes": (
            "most = max(asked.read, asked.written)",
            "most = asked.read + asked.written",
        ),
        "plan counts the connections of one rank for all": (
            "engines * sizes.tp * REDIS_CONNECTIONS",
            "engines * REDIS_CONNECTIONS",
        ),
    },
    "lmcache_hybrid/tools/sizing/storage.py": {
        "plan counts no chunks of later prompts from where they leave the shared prefix": (
            "        if work.checkpoint == CHUNK_ENDS:  # chunks of",
            "        if not work.checkpoint:  # chunks of",
        ),
        "a record in Redis takes two keys": ("REDIS_KEYS_BYTES = 160", "REDIS_KEYS_BYTES = 336"),
    },
    "lmcache_hybrid/core/expected_states.py": {
        "plan knows no chunk where a step is shorter than a block": (
            "max(1, step_tokens // block_size) * block_size",
            "step_tokens // block_size * block_size",
        ),
    },
    "lmcache_hybrid/tools/sizing/to_write.py": {
        "a plan for prompts that never hit has a limit of zero": (
            "    bytes_taken = max(bytes_taken, 2 * largest * sizes.tp)",
            "    bytes_taken = max(bytes_taken, 0)",
        ),
        "plan writes the pool of one rank for all": (
            "gib(bytes_taken / sizes.tp)",
            "gib(bytes_taken / sizes.tp**2)",
        ),
        "plan gives a disk no RAM above it": (
            'if backend in ("disk", "fs") and in_ram < taken:',
            "if False:",
        ),
    },
    "lmcache_hybrid/tools/sizing/plan.py": {
        "plan writes no checkpoints of the user's": never(
            "    if work.checkpoint != CHUNK_ENDS:\n"
        ),
    },
    "lmcache_hybrid/tools/cli/plan.py": {
        "plan leaves vLLM's flags out of its lines": (
            "        if value != default\n",
            "        if value != value\n",
        ),
        "plan is silent about copies of KV heads": never("    if copies > 1:\n"),
        "plan's tables are wider than a terminal": (
            "        padding=(0, 1, 0, 0),\n",
            "        padding=(0, 9, 0, 0),\n",
        ),
        "plan keeps to itself with which unit a short prompt hits": never("        if units:\n"),
        "plan's list is never JSON": (
            "    if as_json:\n        print(json.dumps(catalogue.figures",
            "    if False:\n        print(json.dumps(catalogue.figures",
        ),
        "plan counts the last boundary only": (
            "CheckpointOption = CHUNK_ENDS,",
            "CheckpointOption = 0,",
        ),
        "a plan for prompts without a token ends in a traceback": (
            "    if not number:\n",
            "    if number < 0:\n",
        ),
    },
    "lmcache_hybrid/tools/sizing/catalogue.py": {
        "nobody says which model was meant": ("n=1, cutoff=0.8", "n=1, cutoff=1.0"),
        "nobody says how a model's name goes on": never("    if begun:\n"),
    },
    "lmcache_hybrid/tools/cli/inspect.py": {
        "verify removes what an engine has not finished": (
            "opened.delete(damaged) if delete_damaged else 0",
            "opened.delete(damaged)",
        ),
        "a store without records is verified": (
            "1 if left else 0 if found else 2",
            "1 if left else 0",
        ),
        "inspect puts a model's long name into its table": (
            "            row.rank,\n            row.fingerprint,\n",
            '            f"{row.model} {row.rank}",\n            row.fingerprint,\n',
        ),
        "inspect says nothing of damaged records": ('{"damaged": row.damaged, ', '{"damaged": 0, '),
    },
    "lmcache_hybrid/tools/stored/folder_store.py": {
        "nobody looks for records one folder below": (
            "if empty and (inside :=",
            "if not empty and (inside :=",
        ),
    },
    "lmcache_hybrid/core/sizes.py": {
        "sizes are shown in units of a thousand": (
            "(1 << power for power in (10, 20, 30, 40))",
            "(10**power for power in (3, 6, 9, 12))",
        ),
        "a size to write is 0.0": ("if 0 < number < 1 else 1\n", "if False else 1\n"),
    },
    "lmcache_hybrid/tools/accept/child.py": {
        "accept waits for other hosts": never("    if parsed.nnodes > 1:\n"),
        "accept expects ends of chunks from engines that store none": (
            '"chunk_budget": budget if chunk_ends else 0,',
            '"chunk_budget": budget,',
        ),
    },
    "lmcache_hybrid/tools/accept/compare.py": {
        "answers that are no numbers are equal": (
            "return equal and all(map(math.isfinite, numbers))",
            "return equal",
        ),
        "accept takes any hit of a branch for one at a chunk's end": (
            " or self.cached % self.chunk:",
            ":",
        ),
        "accept calls a hit at a chunk's end a fault": (
            "            if self.boundary or not self.chunk or self.cached",
            "            if self.cached or self.cached",
        ),
    },
    "lmcache_hybrid/tools/accept/engine.py": {
        "accept takes no file of a number above 1023": (
            "        while not wait([self._replies.fileno()], POLL_SECONDS):\n",
            "        import select\n\n"
            "        while not select.select([self._replies], [], [], POLL_SECONDS)[0]:\n",
        ),
    },
    "lmcache_hybrid/tools/doctor/context.py": {
        "the doctor fails where LMCache is to publish events": (
            "(kv_transfer_config=self.transfer, kv_events_config=None)",
            "(kv_transfer_config=self.transfer)",
        ),
        "the doctor looks past our settings in a MultiConnector": (
            "                    return type(transfer)(**each)\n",
            "                    break\n",
        ),
    },
    "lmcache_hybrid/tools/doctor/model.py": {
        "the doctor takes all layers for those of a stage": gone(" if layer_of(name) in own"),
        "the doctor takes the whole model for what a rank holds": (
            "        parallel_state.get_tp_group().world_size = ranks",
            "        parallel_state.get_tp_group().world_size = 1",
        ),
        "the doctor advises on a CPU what stops an engine on a GPU": (
            "        return unit if unit and self.fits_gpu(unit) else 0\n",
            "        return unit\n",
        ),
    },
    "lmcache_hybrid/tools/flags.py": {
        "without a network vLLM's default model is looked for": gone(
            "    if model is not None:\n        vars(parsed).update(model=model)\n"
        ),
    },
    "lmcache_hybrid/config/tiers.py": {
        "the doctor forgets states where chunks end": (
            "    interval = chunk if options.chunk_ends else",
            "    interval = 0 if options.chunk_ends else",
        ),
    },
    "lmcache_hybrid/tools/doctor/capacity.py": {
        "the doctor counts the memory of one rank": (
            "if wanted * here > free:",
            "if wanted > free:",
        ),
        "the doctor gives each rank the whole of a shared store": (
            "sum(of_stages) * model.ranks if tier.shared else max(of_stages)",
            "max(of_stages)",
        ),
        "the doctor says nothing of a folder without a limit": (
            '    return warning("disk space", f"{message}, and nothing is ever deleted '
            'there.", fix)\n',
            '    return ok("disk space", f"{message}.")\n',
        ),
        "the doctor takes what only the kernel has for a full disk": (
            "        return _without_size(paths[0])\n    free = usage.free\n",
            "        pass\n    free = usage.free\n",
        ),
        "the doctor gives each of two folders all of one disk": (
            "            where: object = _there(path).stat().st_dev\n",
            "            where: object = path\n",
        ),
        "the doctor takes four prompts in RAM for enough": (
            "FEW_IN_RAM if tier.name == RAM else FEW",
            "FEW",
        ),
    },
    "lmcache_hybrid/tools/doctor/redis_memory.py": {
        "the doctor takes a Redis that tells it nothing for one that is away": (
            "    except (redis.ResponseError, redis.AuthenticationError) as failure:\n",
            "    except ZeroDivisionError as failure:\n",
        ),
    },
    "lmcache_hybrid/tools/doctor/folders.py": {
        "the doctor says that an engine creates a folder in /proc": (
            " and shutil.disk_usage(folder).total > 0\n",
            "\n",
        ),
        "the doctor creates folders of its own user": (
            "        if folder not in self._made and not os.path.lexists(path):\n",
            "        if not path:\n",
        ),
        "the doctor leaves its temporary folders behind": passes(
            "            shutil.rmtree(temporary, ignore_errors=True)\n"
        ),
        "the doctor says nothing of another user's folder": (
            "    if owner in (me, trusted) or (owner == 0 and",
            "    if me == 0 or owner in (me, trusted) or (owner == 0 and",
        ),
    },
    "lmcache_hybrid/tools/doctor/backends.py": {
        "the doctor tries no store of a file that is refused": (
            "    config = context.config or context.written\n",
            "    config = context.config\n",
        ),
        "the doctor refuses a Redis without PING": (
            "            if not isinstance(failure.__cause__, NoPermissionError):\n",
            "            if failure:\n",
        ),
    },
    "lmcache_hybrid/tools/doctor/redis_rights.py": {
        "a node of a cluster is sound if it owns the slot of one name": (
            "for number in range(NAMES):",
            "for number in range(0):",
        ),
        "the doctor takes a user who may not write for one who may": (
            '("SET", "x", "XX"), ("DEL",))',
            ")",
        ),
        "the doctor writes a record before it knows that it may delete it": (
            '("SET", "x", "XX"), ("DEL",))',
            '("SET", "x"),)',
        ),
        "the doctor takes a Redis that misses its replicas for one of too little room": never(
            '    if str(failure).startswith("NOREPLICAS"):\n'
        ),
        "the doctor takes a cluster that is down for one of too little room": never(
            "    if isinstance(failure, ClusterDownError):\n"
        ),
    },
    "lmcache_hybrid/tools/accept/tiers.py": {
        "hits that were computed because that is faster fail the acceptance test": (
            "    if options.load_policy != POLICIES[0]:\n",
            "    if options.load_policy not in POLICIES:\n",
        ),
    },
    "lmcache_hybrid/upstream/versions.py": {
        "the demo starts without LMCache": (
            "    for package, version_here in zip(PACKAGES, found()):\n        if version_here",
            "    for package, version_here in zip(PACKAGES[:1], found()):\n        if version_here",
        ),
        "a permission to try untested versions takes those for installed that are not": (
            "    problem, here = absent(), found()\n",
            "    problem, here = absent(), found()\n"
            '    if os.environ.get(ALLOW_UNTESTED) == "1":\n        return None\n',
        ),
    },
    "lmcache_hybrid/tools/bench/run.py": {
        "bench asks both servers with the connector": never(
            "        if as_vllm_reads(name) == TRANSFER_FLAG:\n"
        ),
        "bench asks prompts that the model does not take": (
            "    if tokens + load.output_tokens > longest:\n",
            "    if tokens > longest:\n",
        ),
    },
    "lmcache_hybrid/tools/bench/report.py": {
        "bench does not say what a new prompt costs": ("if each.round == NEW or ", "if "),
    },
    "lmcache_hybrid/tools/cli/bench.py": {
        "bench asks what its last run has stored": ("seed=secrets.randbits(32))", "seed=0)"),
        "bench keeps the reason of a server that does not start to itself": (
            "if isinstance(error, ServerError) and",
            "if isinstance(error, KeyboardInterrupt) and",
        ),
    },
    "lmcache_hybrid/tools/bench/workload.py": {
        "bench asks a warm cache": (
            'Round("the same prompts after others", first, forget=True)',
            'Round("the same prompts after others", first)',
        ),
    },
    "lmcache_hybrid/tools/cli/purge.py": {
        "a purge takes every model with the same last part of its name": (
            "            elif unsure:\n",
            "            elif unsure and not yes:\n",
        ),
        "a purge takes an answer that nobody gave": (
            "    if not sys.stdin.isatty():\n",
            "    if sys.stdin.closed:\n",
        ),
    },
    "lmcache_hybrid/tools/stored/redis_client.py": {
        "looking behind sentinels counts as use": (
            "        connection.on_connect()\n        greet(connection)\n",
            "        connection.on_connect()\n",
        ),
    },
    "lmcache_hybrid/tools/stored/redis_store.py": {
        "records that a server does not show are none": (
            '        if str(answer).startswith("WRONGTYPE"):\n',
            "        if isinstance(answer, redis.ResponseError):\n",
        ),
    },
    "lmcache_hybrid/tools/stored/record_store.py": {
        "a cut value in Redis counts as being written": (
            "    in_place: bool = False\n",
            "    in_place: bool = True\n",
        ),
    },
    "lmcache_hybrid/tools/stored/summary.py": {
        "every prefix with states is kept in memory": (
            "        while len(self._groups) > SAMPLE:\n",
            "        while len(self._groups) > SAMPLE << 30:\n",
        ),
    },
    "tests/compat/newest.py": {
        "a release that was taken back is the newest one": (
            'any(not file["yanked"] for file in files)',
            "files",
        ),
    },
    "tests/compat/moved.py": {
        "what moved inside upstream is only said to be missing": (
            "{said}{_elsewhere(root, hook, tree)}",
            "{said}",
        ),
    },
    "tests/compat/run.py": {
        "Python over another release's kernels is shown as the release": (
            'if row["kernels"] not in (None, row["vllm"]):',
            'if row["kernels"] is None and row["vllm"]:',
        ),
    },
    "tests/compat/cells.py": {
        "only the first part of the whole suite decides": (
            'if state in states), "yes")',
            'if state in states[:1]), "yes")',
        ),
        "a release over older kernels gets what only a GPU has a use for": (
            "if not GPU_ONLY.match(each.name)]",
            "]",
        ),
    },
    "tests/turns.py": {
        "a test that runs alone runs beside others": (
            "fcntl.LOCK_EX if alone else fcntl.LOCK_SH",
            "fcntl.LOCK_SH",
        ),
    },
    "benchmarks/reuse/plot.py": {
        "a plot shows checkpoints as the defaults": ('ARM, OWN = "default"', 'ARM, OWN = "T4"'),
        "a plot's bars are another arm's than their numbers": (
            "to.axes.barh(place, shares[ARM]",
            "to.axes.barh(place, shares.get(OWN, 0)",
        ),
    },
    "benchmarks/performance/report.py": {
        "the opening of Performance leaves out the largest cost": (
            "to {max(ratios):.2f} times",
            "to {min(ratios):.2f} times",
        ),
        "figures of two models stand in one file": (
            """answers.get(n, {}).get("model") != answer["model"]]""",
            """answers.get(n, {}).get("model") is None]""",
        ),
        "a page keeps a table whose figures are gone": (
            "            replace(page, name, MISSING)\n            continue",
            """            continue""",
        ),
        "a table of an earlier model is not marked": (
            'parts.append(named(answer.get("model")))',
            'parts.extend(named(answer["model"]) for _ in answer if _ == "model")',
        ),
    },
    "benchmarks/performance/plot.py": {
        "a plot's limit is the luckiest measurement": (
            "to.limit(median(seconds[LIMIT]))",
            "to.limit(min(seconds[LIMIT]))",
        ),
        "headings of columns lie over one another": (
            "MEDIAN, FASTER = 600, 690",
            "MEDIAN, FASTER = 640, 690",
        ),
    },
    "benchmarks/performance/engines.py": {
        "a short prompt hits at the end of its block": (
            '{"tokens": hit + 52,',
            '{"tokens": size + 52,',
        ),
    },
    "benchmarks/figures.py": {
        "tables are looked for beside the figures": (
            "file.absolute().parent.with_name(",
            "file.absolute().with_name(",
        ),
    },
}
DEFECTS = each_of(MISTAKES)
