# SPDX-License-Identifier: Apache-2.0
"""Ranks on several hosts: who is let in, what is sent, and in whose time."""

from tests.mutants.defect import each_of, gone

MISTAKES = {
    "lmcache_hybrid/storage/hosts.py": {
        "ranks with IPv6 addresses are not reached": gone(
            "    socket.setsockopt(zmq.IPV6, is_valid_ipv6_address(host))\n"
        ),
        "a clock that has lost time is believed for a minute": (
            "                if self._ahead[rank] > then - sent[rank]:",
            "                if False:",
        ),
        "whoever has a key is let in": (
            "        if self._admitted and key == self._admitted:\n",
            "        if key:\n",
        ),
        "whoever has no key of ours is let in, too": (
            '        code = b"200" if admitted else b"400"\n',
            '        code = b"200"\n',
        ),
        "the clocks' round takes its time from the lookup": (
            "            msg = [verb, body, deadline + self._learned - began]\n",
            "            msg = [verb, body, deadline]\n",
        ),
        "lookups between hosts are not encrypted": gone(
            "            self.socket.setsockopt(zmq.CURVE_SERVER, 1)\n"
            "            self.socket.setsockopt(zmq.CURVE_SECRETKEY, secret_key)\n"
        ),
        "a secret key is in logs": (
            "    secret_key: bytes = field(repr=False)\n",
            "    secret_key: bytes\n",
        ),
        "a deadline is sent in the scheduler's time": (
            "                until = self.encoder.encode(deadline + self._ahead[rank])\n",
            "                until = self.encoder.encode(deadline)\n",
        ),
        "a rank that answers beside a slow one has too little time for the next lookup": (
            "                self._ahead[rank] = max(self._ahead[rank], then - time.monotonic())\n",
            "                self._ahead[rank] = then - time.monotonic() - 5\n",
        ),
        "clocks that have run apart are not asked again": (
            "        if began > self._learned + CLOCK_SECONDS:\n",
            "        if self._learned < 0:\n",
        ),
        "after a timeout the old answer is taken for the next lookup's": (
            "            self._recreate_all_sockets()\n            self._learned",
            "            self._learned",
        ),
        "ranks listen at any address": (
            "            self.socket.bind(get_tcp_uri(host, 0))\n",
            '            self.socket.bind("tcp://0.0.0.0:0")\n',
        ),
        "a rank that Ray has placed makes the scheduler's keys": (
            "        if self._rank == 0 and self._scheduler is None:\n",
            "        if self._rank == 0:\n",
        ),
        "the scheduler asks ranks that do not know it": (
            "            if public_key != introduction.public_key:\n",
            "            if public_key == introduction.rank_keys:\n",
        ),
        "ranks that Ray has placed listen at another address than Ray's": (
            "own_address() if scheduler is None else node_address()\n",
            "own_address()\n",
        ),
        "ranks in another order than vLLM numbers them are asked": (
            "        if numbers != tuple(range(len(numbers))):\n",
            "        if len(numbers) == 0:\n",
        ),
    },
    "lmcache_hybrid/storage/rpc.py": {
        "an old reset that comes late takes a rank back": (
            "                if epoch < self._epoch:",
            "                if False:",
        ),
        "a drop is done after its caller has given up": (
            "        if time.monotonic() > deadline:  # its caller has given up, and others",
            "        if False:  # its caller has given up, and others",
        ),
        "a keep is done after its caller has given up": (
            "        if time.monotonic() > deadline:  # its caller has given up, and may",
            "        if False:  # its caller has given up, and may",
        ),
        "a reset fails where no rank can be asked": (
            "            return True  # no rank could be reached so far, and each has "
            "nothing stored\n",
            "            return False\n",
        ),
    },
    "lmcache_hybrid/connector.py": {
        "a scheduler that cannot connect ends the engine": (
            "                except Exception as error:\n"
            "                    self._switch_off(error)\n",
            "                except ZeroDivisionError as error:\n"
            "                    self._switch_off(error)\n",
        ),
        "a load's deadline is in the scheduler's time on another host": gone(
            "        if self._hosts:\n            metadata = metadata.on_this_clock()\n"
        ),
        "a load's deadline is moved on the scheduler's host": (
            "        if self._hosts:\n            metadata = metadata.on_this_clock()\n",
            "        metadata = metadata.on_this_clock()\n",
        ),
        "the scheduler takes another connector's handshake": (
            "            if isinstance(introduction, Introduction) and self._client is not None:\n",
            "            if self._client is not None:\n",
        ),
    },
    "lmcache_hybrid/config/parallel.py": {
        "engines whose ranks do not know each other start": (
            "    if parallel.data_parallel_size > 1:\n        raise",
            "    if parallel.data_parallel_size > 9:\n        raise",
        ),
        "hosts start beside another connector, and ask no rank": (
            "    if transfer.get_from_extra_config(BESIDE_KEY, False):\n",
            "    if transfer is None:\n",
        ),
        "ranks that Ray spreads over hosts are asked on local sockets": (
            '"nnodes_within_dp", 1) > 1 or placed_by_ray(parallel)\n',
            '"nnodes_within_dp", 1) > 1\n',
        ),
        "vLLM's first executor for Ray starts": (
            '    if not getattr(envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", True):\n',
            "    if executor is None:\n",
        ),
        "an executor of somebody else's for Ray starts": (
            '    if executor != "ray":\n',
            "    if executor is None:\n",
        ),
        "data-parallel engines start whose ranks Ray places": (
            "        _check_ray(size, executor)\n",
            "        _check_ray(size, executor)\n        return\n",
        ),
    },
    "lmcache_hybrid/core/by_ray.py": {
        "an executor for Ray that is named by its path is not known as one": (
            '    return bool(getattr(resolve_obj_by_qualname(executor), "uses_ray", False))\n',
            "    return False\n",
        ),
        "ranks are not told of a scheduler in a MultiConnector": (
            '    for each in extra.get("connectors", ()):',
            "    for each in ():",
        ),
        "ranks that Ray places are sent the scheduler's secret key": (
            "    key = scheduler_keys()[0].decode()\n",
            '    key = b" ".join(scheduler_keys()).decode()\n',
        ),
    },
    "vllm_patch/executors.py": {
        "an engine of another connector gets a scheduler's key": (
            "        if is_ours(vllm_config) and placed",
            "        if placed",
        ),
        "ranks that Ray places do not know their scheduler": (
            "            name_scheduler(vllm_config)\n",
            "            assert name_scheduler\n",
        ),
    },
}
DEFECTS = each_of(MISTAKES)
