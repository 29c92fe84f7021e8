# SPDX-License-Identifier: Apache-2.0
"""What ``inspect``, ``verify`` and ``purge`` say, and what ``purge`` deletes."""

from tests.mutants.defect import one

PURGE = "lmcache_hybrid/tools/cli/purge.py"
CLIENT = "lmcache_hybrid/tools/stored/redis_client.py"
REDIS_STORE = "lmcache_hybrid/tools/stored/redis_store.py"
SUMMARY = "lmcache_hybrid/tools/stored/summary.py"

DEFECTS = (
    # Ends of chunks
    one(
        "plan counts no chunks of later prompts from where they leave the shared prefix",
        "lmcache_hybrid/tools/sizing/storage.py",
        "        if work.checkpoint == CHUNK_ENDS:  # chunks of",
        "        if not work.checkpoint:  # chunks of",
    ),
    one(
        "plan knows no chunk where a step is shorter than a block",
        "lmcache_hybrid/core/prefill.py",
        "max(1, step_tokens // block_size) * block_size",
        "step_tokens // block_size * block_size",
    ),
    one(
        "plan writes the pool of one rank for all",
        "lmcache_hybrid/tools/sizing/to_write.py",
        "gib(bytes_taken / sizes.tp)",
        "gib(bytes_taken / sizes.tp**2)",
    ),
    one(
        "plan writes no checkpoints of the user's",
        "lmcache_hybrid/tools/sizing/plan.py",
        "    if work.checkpoint != CHUNK_ENDS:\n",
        "    if False:\n",
    ),
    one(
        "plan leaves vLLM's flags out of its lines",
        "lmcache_hybrid/tools/cli/plan.py",
        "        if value != default\n",
        "        if value != value\n",
    ),
    one(
        "plan is silent about copies of KV heads",
        "lmcache_hybrid/tools/cli/plan.py",
        "    if copies > 1:\n",
        "    if False:\n",
    ),
    one(
        "plan's tables are wider than a terminal",
        "lmcache_hybrid/tools/cli/plan.py",
        "        padding=(0, 1, 0, 0),\n",
        "        padding=(0, 9, 0, 0),\n",
    ),
    one(
        "nobody says which model was meant",
        "lmcache_hybrid/tools/sizing/catalogue.py",
        "n=1, cutoff=0.8",
        "n=1, cutoff=1.0",
    ),
    one(
        "nobody says how a model's name goes on",
        "lmcache_hybrid/tools/sizing/catalogue.py",
        "    if begun:\n",
        "    if False:\n",
    ),
    one(
        "plan gives a disk no RAM above it",
        "lmcache_hybrid/tools/sizing/to_write.py",
        'if backend in ("disk", "fs") and in_ram < taken:',
        "if False:",
    ),
    one(
        "plan keeps to itself with which unit a short prompt hits",
        "lmcache_hybrid/tools/cli/plan.py",
        "        if units:\n",
        "        if False:\n",
    ),
    one(
        "plan's list is never JSON",
        "lmcache_hybrid/tools/cli/plan.py",
        "    if as_json:\n        print(json.dumps(catalogue.figures",
        "    if False:\n        print(json.dumps(catalogue.figures",
    ),
    one(
        "a store without records is verified",
        "lmcache_hybrid/tools/cli/inspect.py",
        "1 if left else 0 if found else 2",
        "1 if left else 0",
    ),
    one(
        "nobody looks for records one folder below",
        "lmcache_hybrid/tools/stored/folder_store.py",
        "if empty and (inside :=",
        "if not empty and (inside :=",
    ),
    one(
        "inspect puts a model's long name into its table",
        "lmcache_hybrid/tools/cli/inspect.py",
        "            row.rank,\n            row.fingerprint,\n",
        '            f"{row.model} {row.rank}",\n            row.fingerprint,\n',
    ),
    one(
        "inspect says nothing of damaged records",
        "lmcache_hybrid/tools/cli/inspect.py",
        '{"damaged": row.damaged, ',
        '{"damaged": 0, ',
    ),
    one(
        "sizes are shown in units of a thousand",
        "lmcache_hybrid/core/sizes.py",
        "(1 << power for power in (10, 20, 30, 40))",
        "(10**power for power in (3, 6, 9, 12))",
    ),
    one(
        "plan counts the last boundary only",
        "lmcache_hybrid/tools/cli/plan.py",
        "CheckpointOption = CHUNK_ENDS,",
        "CheckpointOption = 0,",
    ),
    one(
        "accept expects ends of chunks from engines that store none",
        "lmcache_hybrid/tools/accept/child.py",
        '"chunk_budget": budget if chunk_ends else 0,',
        '"chunk_budget": budget,',
    ),
    one(
        "accept takes any hit of a branch for one at a chunk's end",
        "lmcache_hybrid/tools/accept/compare.py",
        " or self.cached % self.chunk:",
        ":",
    ),
    one(
        "accept calls a hit at a chunk's end a fault",
        "lmcache_hybrid/tools/accept/compare.py",
        "            if self.boundary or not self.chunk or self.cached",
        "            if self.cached or self.cached",
    ),
    one(
        "accept takes no file of a number above 1023",
        "lmcache_hybrid/tools/accept/engine.py",
        "        while not wait([self._replies.fileno()], POLL_SECONDS):\n",
        "        import select\n\n"
        "        while not select.select([self._replies], [], [], POLL_SECONDS)[0]:\n",
    ),
    one(
        "the doctor fails where LMCache is to publish events",
        "lmcache_hybrid/tools/doctor/context.py",
        "(kv_transfer_config=self.transfer, kv_events_config=None)",
        "(kv_transfer_config=self.transfer)",
    ),
    one(
        "the doctor looks past our settings in a MultiConnector",
        "lmcache_hybrid/tools/doctor/context.py",
        "                    return type(transfer)(**each)\n",
        "                    break\n",
    ),
    one(
        "the doctor takes the whole model for what a rank holds",
        "lmcache_hybrid/tools/doctor/model.py",
        "        parallel_state.get_tp_group().world_size = ranks",
        "        parallel_state.get_tp_group().world_size = 1",
    ),
    one(
        "without a network vLLM's default model is looked for",
        "lmcache_hybrid/tools/flags.py",
        "    if model is not None:\n        vars(parsed).update(model=model)\n",
        "",
    ),
    one(
        "the doctor forgets states where chunks end",
        "lmcache_hybrid/config/tiers.py",
        "    interval = chunk if options.chunk_ends else",
        "    interval = 0 if options.chunk_ends else",
    ),
    one(
        "the doctor gives each rank the whole of a shared store",
        "lmcache_hybrid/tools/doctor/capacity.py",
        "    taken *= model.ranks if tier.shared else 1\n",
        "",
    ),
    one(
        "the doctor says nothing of a folder without a limit",
        "lmcache_hybrid/tools/doctor/capacity.py",
        '    return warning("disk space", f"{message}, and nothing is ever deleted there.", fix)\n',
        '    return ok("disk space", f"{message}.")\n',
    ),
    one(
        "the doctor takes four prompts in RAM for enough",
        "lmcache_hybrid/tools/doctor/capacity.py",
        "FEW_IN_RAM if tier.name == RAM else FEW",
        "FEW",
    ),
    one(
        "the doctor advises on a CPU what stops an engine on a GPU",
        "lmcache_hybrid/tools/doctor/model.py",
        "        return unit if unit and self.fits_gpu(unit) else 0\n",
        "        return unit\n",
    ),
    one(
        "the doctor creates folders of its own user",
        "lmcache_hybrid/tools/doctor/folders.py",
        "        if folder not in self._made and not os.path.lexists(path):\n",
        "        if not path:\n",
    ),
    one(
        "the doctor leaves its temporary folders behind",
        "lmcache_hybrid/tools/doctor/folders.py",
        "            shutil.rmtree(temporary, ignore_errors=True)\n",
        "            pass\n",
    ),
    one(
        "the doctor says nothing of another user's folder",
        "lmcache_hybrid/tools/doctor/folders.py",
        "    if owner in (me, trusted) or (owner == 0 and",
        "    if me == 0 or owner in (me, trusted) or (owner == 0 and",
    ),
    one(
        "the doctor blames the user for what LMCache sets",
        "lmcache_hybrid/tools/doctor/written.py",
        "if _option(sentence) in own] or told",
        "] or told",
    ),
    one(
        "the doctor hides a refusal that nobody wrote",
        "lmcache_hybrid/tools/doctor/written.py",
        " in own] or told\n",
        " in own]\n",
    ),
    one(
        "the doctor tries no store of a file that is refused",
        "lmcache_hybrid/tools/doctor/backends.py",
        "    config = context.config or context.written\n",
        "    config = context.config\n",
    ),
    one(
        "the doctor takes a user who may not write for one who may",
        "lmcache_hybrid/tools/doctor/redis_rights.py",
        '("SET", "x", "XX"), ("DEL",))',
        ")",
    ),
    one(
        "the doctor writes a record before it knows that it may delete it",
        "lmcache_hybrid/tools/doctor/redis_rights.py",
        '("SET", "x", "XX"), ("DEL",))',
        '("SET", "x"),)',
    ),
    one(
        "the doctor refuses a Redis without PING",
        "lmcache_hybrid/tools/doctor/backends.py",
        "            if not isinstance(failure.__cause__, NoPermissionError):\n",
        "            if failure:\n",
    ),
    one(
        "hits that were computed because that is faster fail the acceptance test",
        "lmcache_hybrid/tools/accept/tiers.py",
        "    if options.load_policy != POLICIES[0]:\n",
        "    if options.load_policy not in POLICIES:\n",
    ),
    one(
        "a plan for prompts without a token ends in a traceback",
        "lmcache_hybrid/tools/cli/plan.py",
        "    if not number:\n",
        "    if number < 0:\n",
    ),
    one(
        "a record in Redis takes two keys",
        "lmcache_hybrid/tools/sizing/storage.py",
        "REDIS_KEYS_BYTES = 160",
        "REDIS_KEYS_BYTES = 336",
    ),
    one(
        "the demo starts without LMCache",
        "lmcache_hybrid/upstream/versions.py",
        "    for package, version_here in zip(PACKAGES, found()):\n        if version_here",
        "    for package, version_here in zip(PACKAGES[:1], found()):\n        if version_here",
    ),
    one(
        "a permission to try untested versions takes those for installed that are not",
        "lmcache_hybrid/upstream/versions.py",
        "    problem, here = absent(), found()\n",
        "    problem, here = absent(), found()\n"
        '    if os.environ.get(ALLOW_UNTESTED) == "1":\n        return None\n',
    ),
    one(
        "bench asks both servers with the connector",
        "lmcache_hybrid/tools/bench/run.py",
        "        if name == TRANSFER_FLAG:\n",
        "        if False:\n",
    ),
    one(
        "bench asks what its last run has stored",
        "lmcache_hybrid/tools/cli/bench.py",
        "seed=secrets.randbits(32))",
        "seed=0)",
    ),
    one(
        "bench asks a warm cache",
        "lmcache_hybrid/tools/bench/workload.py",
        'Round("the same prompts after others", first, forget=True)',
        'Round("the same prompts after others", first)',
    ),
    one(
        "a purge takes every model with the same last part of its name",
        PURGE,
        "            elif unsure:\n",
        "            elif unsure and not yes:\n",
    ),
    one(
        "a purge takes an answer that nobody gave",
        PURGE,
        "    if not sys.stdin.isatty():\n",
        "    if sys.stdin.closed:\n",
    ),
    one(
        "looking behind sentinels counts as use",
        CLIENT,
        "        connection.on_connect()\n        greet(connection)\n",
        "        connection.on_connect()\n",
    ),
    one(
        "records that a server does not show are none",
        REDIS_STORE,
        '        if str(answer).startswith("WRONGTYPE"):\n',
        "        if isinstance(answer, redis.ResponseError):\n",
    ),
    one(
        "what an earlier release wrote beside a record outlives it",
        REDIS_STORE,
        "for part in (METADATA, VALUE))",
        "for part in (VALUE, VALUE))",
    ),
    one(
        "a cut value in Redis counts as being written",
        "lmcache_hybrid/tools/stored/record_store.py",
        "    in_place: bool = False\n",
        "    in_place: bool = True\n",
    ),
    one(
        "every prefix with states is kept in memory",
        SUMMARY,
        "        while len(self._groups) > SAMPLE:\n",
        "        while len(self._groups) > SAMPLE << 30:\n",
    ),
    # make compat
    one(
        "a release that was taken back is the newest one",
        "tests/compat/newest.py",
        'any(not file["yanked"] for file in files)',
        "files",
    ),
    one(
        "what moved inside upstream is only said to be missing",
        "tests/compat/moved.py",
        "{said}{_elsewhere(root, hook, tree)}",
        "{said}",
    ),
    one(
        "Python over another release's kernels is shown as the release",
        "tests/compat/run.py",
        'if row["kernels"] not in (None, row["vllm"]):',
        'if row["kernels"] is None and row["vllm"]:',
    ),
    one(
        "only the first part of the whole suite decides",
        "tests/compat/cells.py",
        'if state in states), "yes")',
        'if state in states[:1]), "yes")',
    ),
    one(
        "a test that runs alone runs beside others",
        "tests/turns.py",
        "fcntl.LOCK_EX if alone else fcntl.LOCK_SH",
        "fcntl.LOCK_SH",
    ),
    one(
        "a release over older kernels gets what only a GPU has a use for",
        "tests/compat/cells.py",
        "if not GPU_ONLY.match(each.name)]",
        "]",
    ),
    one(
        "a plot shows checkpoints as the defaults",
        "benchmarks/reuse/plot.py",
        'ARM, OWN = "default"',
        'ARM, OWN = "T4"',
    ),
    one(
        "a plot's bars are another arm's than their numbers",
        "benchmarks/reuse/plot.py",
        "to.axes.barh(place, shares[ARM]",
        "to.axes.barh(place, shares.get(OWN, 0)",
    ),
    one(
        "the opening of Performance leaves out the largest cost",
        "benchmarks/performance/report.py",
        "to {max(ratios):.2f} times",
        "to {min(ratios):.2f} times",
    ),
    one(
        "a plot's limit is the luckiest measurement",
        "benchmarks/performance/plot.py",
        "to.limit(median(seconds[LIMIT]))",
        "to.limit(min(seconds[LIMIT]))",
    ),
    one(
        "headings of columns lie over one another",
        "benchmarks/performance/plot.py",
        "MEDIAN, FASTER = 600, 690",
        "MEDIAN, FASTER = 640, 690",
    ),
    one(
        "figures of two models stand in one file",
        "benchmarks/performance/report.py",
        """answers.get(n, {}).get("model") != answer["model"]]""",
        """answers.get(n, {}).get("model") is None]""",
    ),
    one(
        "a page keeps a table whose figures are gone",
        "benchmarks/performance/report.py",
        """            replace(page, name, MISSING)
            continue""",
        """            continue""",
    ),
    one(
        "a table of an earlier model is not marked",
        "benchmarks/performance/report.py",
        'parts.append(named(answer.get("model")))',
        'parts.extend(named(answer["model"]) for _ in answer if _ == "model")',
    ),
    one(
        "a short prompt hits at the end of its block",
        "benchmarks/performance/engines.py",
        '{"tokens": hit + 52,',
        '{"tokens": size + 52,',
    ),
    one(
        "tables are looked for beside the figures",
        "benchmarks/reuse/report.py",
        "out.absolute().parent.with_name(",
        "out.absolute().with_name(",
    ),
)
