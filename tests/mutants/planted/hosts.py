# SPDX-License-Identifier: Apache-2.0
"""Ranks on several hosts: who is let in, what is sent, and in whose time."""

from tests.mutants.defect import one

CONNECTOR = "lmcache_hybrid/connector.py"
HOSTS = "lmcache_hybrid/storage/hosts.py"
BY_RAY = "lmcache_hybrid/core/by_ray.py"
EXECUTORS = "vllm_patch/executors.py"
METADATA = "lmcache_hybrid/protocol/metadata.py"
PARALLEL = "lmcache_hybrid/config/parallel.py"
RPC = "lmcache_hybrid/storage/rpc.py"

DEFECTS = (
    one(
        "a clock that has lost time is believed for a minute",
        HOSTS,
        "                if self._ahead[rank] > then - sent[rank]:",
        "                if False:",
    ),
    one(
        "an old reset that comes late takes a rank back",
        RPC,
        "                if epoch < self._epoch:",
        "                if False:",
    ),
    one(
        "a drop is done after its caller has given up",
        RPC,
        "        if time.monotonic() > deadline:  # its caller has given up, and others",
        "        if False:  # its caller has given up, and others",
    ),
    one(
        "a keep is done after its caller has given up",
        RPC,
        "        if time.monotonic() > deadline:  # its caller has given up, and may",
        "        if False:  # its caller has given up, and may",
    ),
    one(
        "a scheduler that cannot connect ends the engine",
        CONNECTOR,
        "                except Exception as error:\n                    self._switch_off(error)\n",
        "                except ZeroDivisionError as error:\n"
        "                    self._switch_off(error)\n",
    ),
    one(
        "whoever has a key is let in",
        HOSTS,
        "        if self._admitted and key == self._admitted:\n",
        "        if key:\n",
    ),
    one(
        "whoever has no key of ours is let in, too",
        HOSTS,
        '        code = b"200" if admitted else b"400"\n',
        '        code = b"200"\n',
    ),
    one(
        "the clocks' round takes its time from the lookup",
        HOSTS,
        "            msg = [verb, body, deadline + self._learned - began]\n",
        "            msg = [verb, body, deadline]\n",
    ),
    one(
        "lookups between hosts are not encrypted",
        HOSTS,
        "            self.socket.setsockopt(zmq.CURVE_SERVER, 1)\n"
        "            self.socket.setsockopt(zmq.CURVE_SECRETKEY, secret_key)\n",
        "",
    ),
    one(
        "a secret key is in logs",
        HOSTS,
        "    secret_key: bytes = field(repr=False)\n",
        "    secret_key: bytes\n",
    ),
    one(
        "a deadline is sent in the scheduler's time",
        HOSTS,
        "                until = self.encoder.encode(deadline + self._ahead[rank])\n",
        "                until = self.encoder.encode(deadline)\n",
    ),
    one(
        "a rank that answers beside a slow one has too little time for the next lookup",
        HOSTS,
        "                self._ahead[rank] = max(self._ahead[rank], then - time.monotonic())\n",
        "                self._ahead[rank] = then - time.monotonic() - 5\n",
    ),
    one(
        "clocks that have run apart are not asked again",
        HOSTS,
        "        if began > self._learned + CLOCK_SECONDS:\n",
        "        if self._learned < 0:\n",
    ),
    one(
        "after a timeout the old answer is taken for the next lookup's",
        HOSTS,
        "            self._recreate_all_sockets()\n            self._learned",
        "            self._learned",
    ),
    one(
        "ranks listen at any address",
        HOSTS,
        "            self.socket.bind(get_tcp_uri(host, 0))\n",
        '            self.socket.bind("tcp://0.0.0.0:0")\n',
    ),
    one(
        "a load's deadline is in the scheduler's time on another host",
        CONNECTOR,
        "        if self._hosts:\n            metadata = metadata.on_this_clock()\n",
        "",
    ),
    one(
        "a load's deadline is moved on the scheduler's host",
        CONNECTOR,
        "        if self._hosts:\n            metadata = metadata.on_this_clock()\n",
        "        metadata = metadata.on_this_clock()\n",
    ),
    one(
        "the scheduler takes another connector's handshake",
        CONNECTOR,
        "            if isinstance(introduction, Introduction) and self._client is not None:\n",
        "            if self._client is not None:\n",
    ),
    one(
        "a reset fails where no rank can be asked",
        RPC,
        "            return True  # no rank could be reached so far, and each has nothing stored\n",
        "            return False\n",
    ),
    one(
        "engines whose ranks do not know each other start",
        PARALLEL,
        "    if parallel.data_parallel_size > 1:\n        raise",
        "    if parallel.data_parallel_size > 9:\n        raise",
    ),
    one(
        "hosts start beside another connector, and ask no rank",
        PARALLEL,
        "    if transfer.get_from_extra_config(BESIDE_KEY, False):\n",
        "    if transfer is None:\n",
    ),
    one(
        "ranks that Ray spreads over hosts are asked on local sockets",
        PARALLEL,
        '"nnodes_within_dp", 1) > 1 or placed_by_ray(parallel)\n',
        '"nnodes_within_dp", 1) > 1\n',
    ),
    one(
        "vLLM's first executor for Ray starts",
        PARALLEL,
        '    if not getattr(envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", True):\n',
        "    if executor is None:\n",
    ),
    one(
        "an executor of somebody else's for Ray starts",
        PARALLEL,
        '    if executor != "ray":\n',
        "    if executor is None:\n",
    ),
    one(
        "data-parallel engines start whose ranks Ray places",
        PARALLEL,
        "        _check_ray(size, executor)\n",
        "        _check_ray(size, executor)\n        return\n",
    ),
    one(
        "an executor for Ray that is named by its path is not known as one",
        BY_RAY,
        '    return bool(getattr(resolve_obj_by_qualname(executor), "uses_ray", False))\n',
        "    return False\n",
    ),
    one(
        "ranks are not told of a scheduler in a MultiConnector",
        BY_RAY,
        '    for each in extra.get("connectors", ()):',
        "    for each in ():",
    ),
    one(
        "ranks that Ray places are sent the scheduler's secret key",
        BY_RAY,
        "    key = scheduler_keys()[0].decode()\n",
        '    key = b" ".join(scheduler_keys()).decode()\n',
    ),
    one(
        "a rank that Ray has placed makes the scheduler's keys",
        HOSTS,
        "        if self._rank == 0 and self._scheduler is None:\n",
        "        if self._rank == 0:\n",
    ),
    one(
        "the scheduler asks ranks that do not know it",
        HOSTS,
        "            if public_key != introduction.public_key:\n",
        "            if public_key == introduction.rank_keys:\n",
    ),
    one(
        "ranks that Ray has placed listen at another address than Ray's",
        HOSTS,
        "own_address() if scheduler is None else node_address()\n",
        "own_address()\n",
    ),
    one(
        "ranks in another order than vLLM numbers them are asked",
        HOSTS,
        "        if numbers != tuple(range(len(numbers))):\n",
        "        if len(numbers) == 0:\n",
    ),
    one(
        "an engine of another connector gets a scheduler's key",
        EXECUTORS,
        "        if is_ours(vllm_config) and placed",
        "        if placed",
    ),
    one(
        "ranks that Ray places do not know their scheduler",
        EXECUTORS,
        "            name_scheduler(vllm_config)\n",
        "            assert name_scheduler\n",
    ),
)
