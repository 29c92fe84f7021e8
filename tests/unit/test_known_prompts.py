# SPDX-License-Identifier: Apache-2.0
"""A restarted engine announces what ranks find on disk before anybody asks for it."""

import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm.distributed.kv_events import BlockRemoved
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher

from lmcache_hybrid.core.digests import PLAIN, KeyedDigester
from lmcache_hybrid.identity.media import CONTENT, MARK
from lmcache_hybrid.protocol.blocks import Block
from lmcache_hybrid.protocol.changes import DISK, RankReport, RankReports
from lmcache_hybrid.protocol.prefix import record_keys
from lmcache_hybrid.scheduler import boundaries
from lmcache_hybrid.scheduler.events import KVEvents
from lmcache_hybrid.scheduler.prompt import prefix_of
from lmcache_hybrid.storage.disk import prompts_file as module
from lmcache_hybrid.storage.disk.files import PROMPTS_FILES
from lmcache_hybrid.storage.disk.prompt_entries import PromptEntries
from lmcache_hybrid.storage.disk.prompts_file import PromptsFile

from .helpers import OPTIONS, PLAN, N, make_request
from .lmcache_settings import lmcache_config
from .test_kv_events import GROUPS, PAGES, EventRig, record, saved

CBOR = "sha256_cbor"


class Life(EventRig):
    """An engine from its start to its end, which may be a ``kill -9`` in any test."""

    def __init__(self, folder: Path, ranks=1, unit=N, algorithm=CBOR, digester=PLAIN) -> None:
        plan = PLAN if unit == N else PLAN.with_unit(unit)
        super().__init__(ranks, plan, unit)
        self.path = folder / PROMPTS_FILES[0]
        self.file = PromptsFile(str(folder), PromptEntries(N, unit, algorithm, digester))
        self.events = self.scheduler.events = self.scheduler._admission._events = KVEvents(
            plan, GROUPS, ranks, self.file
        )
        self.events.take()

    def settled(self) -> list:
        """What is published until the file's thread has nothing to do."""
        events = []
        while True:
            self.file._thread.submit(int).result()
            if self.events._boundaries.settled and not self.file.recalling:
                return events
            events += self.events.take()

    def found(self, *requests, blocks: int = 3, ranks=(0,)) -> list:
        """Each rank finds so many blocks of the requests, and states at the last boundary."""
        changes = []
        for request in requests:
            prefix = prefix_of(request, N, 1)
            for at in range(blocks):
                changes += [(record(k), DISK) for k in record_keys(prefix, at, N, 0, (PAGES,))]
            last = record_keys(prefix, blocks - 1, N, 1, PLAN.states) if blocks else []
            changes += [(record(key), DISK) for key in last]
        events = [event for rank in ranks for event in self.report(*changes, rank=rank)]
        return events + self.settled()


def first_life(folder: Path, *requests, blocks: int = 3, **options) -> tuple[Life, list]:
    """An engine that starts with an empty folder and stores the requests; it is not closed."""
    life = Life(folder, **options)
    assert life.found(blocks=0) == []
    for request in requests:
        saved(life, request, blocks)
    return life, life.found(*requests, blocks=blocks)


def prefix_key(request, at: int):
    (key,) = record_keys(prefix_of(request, N, 1), at, N, 0, (PAGES,))
    return key


def restarted(folder: Path, *requests, **options) -> list:
    """What an engine announces that finds the requests' first three blocks."""
    life = Life(folder, **options)
    try:
        return life.found(*requests)
    finally:
        life.events.close()


def prompt(number: int, blocks: int = 3, **options):
    ids = [number * 1000 + i for i in range(blocks * N + 1)]
    return make_request(f"r{number}", ids, **options)


def said(events: list, number: int | None = None) -> list[tuple]:
    """All that events say, in any order; of one prompt or of all."""
    fields = [
        (e.block_hashes, e.parent_block_hash, e.token_ids, e.extra_keys, e.group_idx, e.medium)
        for e in events
        if number in (None, e.token_ids[0] // 1000)
    ]
    return sorted(fields, key=repr)


def test_what_is_found_is_announced_before_anybody_asks(tmp_path) -> None:
    one, two = prompt(1), prompt(2)
    _, before = first_life(tmp_path, one, two)
    assert len(before) == 12 and {event.medium for event in before} == {"STORAGE"}
    # Killed: what the first engine knew is in the file already. The third finds it, too.
    assert said(restarted(tmp_path, one, two)) == said(before)
    assert said(restarted(tmp_path, one)) == said(before, 1) != []
    assert restarted(tmp_path, two) == []  # not found by the third


def test_a_start_with_a_rank_that_is_off_costs_nothing_of_the_file(tmp_path) -> None:
    """It has not looked what lies on disk, so nothing is gone for it."""
    one, two = prompt(1), prompt(2)
    life, before = first_life(tmp_path, one)
    life.events.close()
    off = Life(tmp_path)
    off.events.receive(RankReports([RankReport(0, 0, (), serving=False, writing=False)]))
    assert not off.events.pending
    saved(off, two, 3)
    off.settled()
    off.events.close()
    assert said(restarted(tmp_path, one)) == said(before)


def test_the_file_never_says_that_a_block_is_held(tmp_path) -> None:
    one, two = prompt(1), prompt(2)
    first_life(tmp_path, one, two)
    life = Life(tmp_path)
    assert life.found(one, blocks=2) and life.events._boundaries.num_blocks == 2
    gone = life.stored(one, 2, (2,), tier=None)
    assert {type(event) for event in gone} == {BlockRemoved} and life.settled() == []
    assert life.events._boundaries.num_blocks == 0


def test_what_is_evicted_while_the_file_is_read_is_not_learned(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(module, "AT_ONCE", 1)
    one = prompt(1)
    first_life(tmp_path, one)
    life = Life(tmp_path)
    names = [record(prefix_key(one, at)) for at in range(3)]
    assert life.report(*((name, DISK) for name in names)) == []
    assert life.events.pending  # an idle engine makes steps until all of it is learned
    assert life.report((names[2], None)) == []
    assert life.settled() == [] and not life.events.pending
    assert life.events._boundaries.num_blocks == 2


def test_nothing_is_announced_before_all_ranks_have_found_it(tmp_path) -> None:
    one = prompt(1)
    first_life(tmp_path, one)
    life = Life(tmp_path, ranks=2)
    assert life.found(one, ranks=(1,)) == [] and not life.file.recalling
    assert len(life.found(one, ranks=(0,))) == 6


@pytest.mark.parametrize("at_once", [1, 2, 1000])
def test_more_is_found_than_is_remembered_of_what_nobody_holds(
    tmp_path, monkeypatch, at_once
) -> None:
    monkeypatch.setattr(module, "AT_ONCE", at_once)
    prompts = [prompt(number) for number in range(5)]
    _, before = first_life(tmp_path, *prompts)
    monkeypatch.setattr(boundaries, "KEPT_UNHELD", 1)
    assert said(restarted(tmp_path, *prompts)) == said(before)


def test_blocks_of_a_later_life_are_kept_beside_the_older_ones(tmp_path) -> None:
    one, two = prompt(1), prompt(2)
    first_life(tmp_path, one)
    life = Life(tmp_path)
    saved(life, two, 3)  # before the ranks have said what they found
    life.found(one, two)
    saved(life, prompt(3), 3)
    life.settled()
    assert len(restarted(tmp_path, one, two, prompt(3))) == 18


def test_boundaries_inside_a_block_and_hashes_of_parts_of_one(tmp_path) -> None:
    unit = N // 4
    request = make_request(tokens=2 * N + 1, hash_block_size=unit, cache_salt="tenant")
    prefix = prefix_of(request, N, 4).with_inner({N + 2 * unit: bytes(request.block_hashes[5])})
    keys = record_keys(prefix, 0, N, 0, (PAGES,))
    inner = [record(keys[0])._replace(group=g, block_hash=prefix.inner[24]) for g in range(4)]
    changes = [(record(keys[0]), DISK), *((name, DISK) for name in inner)]
    first = Life(tmp_path, unit=unit)
    first.found(blocks=0)
    first.events.learn(request, prefix, 1, [N + 2 * unit])
    before = first.report(*changes) + first.settled()
    assert [event.block_size for event in before] == [N] + [2 * unit] * 4
    assert [event.extra_keys for event in before] == [[("tenant",)]] + [[None]] * 4
    second = Life(tmp_path, unit=unit)
    assert said(second.report(*changes) + second.settled()) == said(before)


@pytest.mark.parametrize("algorithm", ["sha256", CBOR, "xxhash", "xxhash_cbor"])
def test_media_and_salts_are_kept_and_adapters_are_not(tmp_path, algorithm) -> None:
    """Which adapter has a name after the restart only a request can tell."""
    features = [
        MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset=at, length=2))
        for name, at in (("aa", 2), ("bb", 5), ("cc", N + 3))
    ]
    seen = prompt(1, mm_features=features, cache_salt="tenant")
    seen.sampling_params.extra_args = {MARK: CONTENT}
    tuned = prompt(2, lora=LoRARequest("sql", 3, "/adapters/sql"))
    hasher = get_request_block_hasher(N, get_hash_fn_by_name(algorithm))
    for request in (seen, tuned):
        request.block_hashes.clear()
        request.block_hashes.extend(hasher(request))
    _, before = first_life(tmp_path, seen, algorithm=algorithm)
    keys = [event.extra_keys for event in before if event.group_idx == PAGES]
    assert keys == [[(("aa", 2), ("bb", 5), "tenant")], [(("cc", 3),)], [None]]
    assert said(restarted(tmp_path, seen, algorithm=algorithm)) == said(before)
    prefix = prefix_of(tuned, N, 1).computed_with((b"content",))
    life = Life(tmp_path, algorithm=algorithm)
    life.found(seen)
    life.events.learn(tuned, prefix, 3)
    life.settled()
    assert b"sql" not in life.path.read_bytes()
    assert said(restarted(tmp_path, seen, algorithm=algorithm)) == said(before)


# What others wrote


def blocks_of(request) -> list[Block]:
    """Depth and description, as an engine keeps them."""
    rig = EventRig()
    rig.events.learn(request, prefix_of(request, N, 1), 3)
    return [block for _, block in rig.events._boundaries.known()]


def forged(folder: Path, *blocks: Block, digester=PLAIN) -> None:
    """A file as an engine writes it, of any blocks."""
    file = PromptsFile(str(folder), PromptEntries(N, N, CBOR, digester))
    file.rewrite([(0, block) for block in blocks])
    file.close()


def test_tokens_under_another_blocks_hash_are_not_announced(tmp_path) -> None:
    one, two = prompt(1), prompt(2)
    mine, other = blocks_of(one), blocks_of(two)
    empty = mine[0].tokens[:0]
    for lie in (
        dataclasses.replace(mine[1], tokens=other[1].tokens),
        dataclasses.replace(mine[1], tokens=mine[1].tokens[:-1]),
        dataclasses.replace(mine[1], parent_hash=other[0].block_hash),
        dataclasses.replace(mine[1], parent_hash=None),
        dataclasses.replace(mine[1], parent_hash=b""),
        dataclasses.replace(mine[1], extra_keys=(("cache_salt", "x"),)),
        dataclasses.replace(mine[1], extra_keys=(("lora", "x", "y"),)),
        dataclasses.replace(mine[1], extra_keys=()),
        dataclasses.replace(mine[1], parent_hash=mine[1].block_hash, tokens=empty),
    ):
        forged(tmp_path, mine[0], lie, mine[2], *other)
        events = restarted(tmp_path, one, two)
        assert [event.token_ids[0] // 1000 for event in events] == [2] * 6, lie
    forged(tmp_path, lie, *mine, *mine)  # and an honest one behind it counts
    assert len(restarted(tmp_path, one, two)) == 6


def test_a_file_that_was_cut_off_or_damaged_counts_as_far_as_it_is_right(tmp_path) -> None:
    one, two = prompt(1), prompt(2)
    forged(tmp_path, *blocks_of(one), *blocks_of(two))
    path = tmp_path / PROMPTS_FILES[0]
    whole = path.read_bytes()
    for cut in (1, 40, 90):  # bytes; the last block's
        path.write_bytes(whole[:-cut])
        assert len(restarted(tmp_path, one, two)) == 6
    at = whole.index(blocks_of(one)[2].block_hash)
    path.write_bytes(whole[:at] + b"x" + whole[at + 1 :])
    assert [e.token_ids[0] // 1000 for e in restarted(tmp_path, one, two)] == [2] * 6
    path.write_bytes(whole + b"\xff" * 100)
    assert len(restarted(tmp_path, one, two)) == 12


KEY = KeyedDigester(bytes(32))


@pytest.mark.parametrize("why", ["mode", "owner", "layout", "link", "key", "folder"])
def test_a_file_of_others_is_begun_anew(tmp_path, monkeypatch, hybrid_log, why) -> None:
    one, options, user = prompt(1), {}, os.geteuid()
    forged(tmp_path, *blocks_of(one))
    path = tmp_path / PROMPTS_FILES[0]
    if why == "mode":
        path.chmod(0o640)
    elif why == "owner":
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    elif why == "layout":
        path.write_bytes(path.read_bytes().replace(b"prompts 1,", b"prompts 2,"))
    elif why == "link":
        path.rename(tmp_path / "target")
        path.symlink_to(tmp_path / "target")
    elif why == "key":
        options["digester"] = KEY
    else:  # its group may read and write the files of such a folder
        tmp_path.chmod(0o2770)
    life = Life(tmp_path, **options)
    assert life.found(one) == []
    life.events.learn(one, prefix_of(one, N, 1), 3)
    assert len(life.settled()) == 6
    told = [each for each in hybrid_log.messages if f"{path} is not read, and begun anew" in each]
    assert len(told) == (why != "key")
    assert path.stat().st_mode & 0o777 == (0o660 if why == "folder" else 0o600)
    assert not path.is_symlink()
    monkeypatch.undo()
    assert len(restarted(tmp_path, one, **options)) == 6


# What is kept


def test_the_file_has_no_more_than_twice_what_is_known(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(module, "SLACK", 2)
    life, _ = first_life(tmp_path, prompt(0))
    one = life.path.stat().st_size
    for number in range(1, 9):
        saved(life, prompt(number), 3)
        life.found(prompt(number))
        life.stored(prompt(number), 3, (3,), tier=None)
        life.settled()
        assert life.path.stat().st_size < 4 * one
    assert len(restarted(tmp_path, *map(prompt, range(9)))) == 6


def test_a_disk_that_cannot_be_written_costs_nothing_but_the_file(
    tmp_path, monkeypatch, hybrid_log
) -> None:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    folder = tmp_path / "d"
    folder.mkdir()
    life, _ = first_life(folder, prompt(1))
    (folder / PROMPTS_FILES[0]).unlink()  # as somebody who empties the folder does
    folder.rmdir()
    for number in (2, 3):
        saved(life, prompt(number), 3)
        assert len(life.found(prompt(number))) == 6
        now[0] += module.RETRY_SECONDS
    told = [each for each in hybrid_log.messages if "cannot be written" in each]
    assert len(told) == 2 and "it was deleted" in told[0]
    folder.mkdir()
    saved(life, prompt(4), 3)
    life.settled()
    # All that is known, the first ones too.
    assert len(restarted(folder, *map(prompt, range(1, 5)))) == 24


def test_an_engine_that_ends_has_written_all(tmp_path) -> None:
    life, _ = first_life(tmp_path)
    requests = [prompt(number) for number in range(9)]
    for request in requests:
        life.events.learn(request, prefix_of(request, N, 1), 3)
        if request is requests[0]:
            life.events.take()  # from here on the file is there
    life.events.close()
    life.events.close()
    assert len(restarted(tmp_path, *requests)) == 54


@pytest.mark.parametrize("events", [False, True])
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("folders", [None, "{0}", "{0}/a, {0}"])
def test_only_an_engine_that_announces_its_disk_keeps_prompts(
    tmp_path, events, alone, folders
) -> None:
    (tmp_path / "a").mkdir()
    config = lmcache_config(local_disk=folders and folders.format(tmp_path))
    left = [(tmp_path / "a" if folders and "a" in folders else tmp_path) / n for n in PROMPTS_FILES]
    for each in left:
        each.touch()
    vllm = SimpleNamespace(cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256"))
    options = dataclasses.replace(OPTIONS, events=events, alone=alone)
    file = module.prompts_file_for(vllm, config, options, N, N)
    assert (file is not None) == bool(events and alone and folders)
    assert all(each.exists() == (file is not None or not folders) for each in left)
    if file is not None:
        file.recall(set())
        file.rewrite([])
        file.close()
        (written,) = tmp_path.rglob(PROMPTS_FILES[0])
        assert written.parent == (tmp_path / "a" if "a" in folders else tmp_path)


@pytest.mark.parametrize("events", [False, True])
def test_a_list_of_folders_in_another_order_has_the_same_prompts(tmp_path, events) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    (tmp_path / "b" / PROMPTS_FILES[0]).touch()
    config = lmcache_config(local_disk=f"{tmp_path}/a,{tmp_path}/b")
    vllm = SimpleNamespace(cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256"))
    options = dataclasses.replace(OPTIONS, events=events, alone=True)
    file = module.prompts_file_for(vllm, config, options, N, N)
    if file is not None:
        file.rewrite([])
        file.close()
    left = [path.parent.name for path in tmp_path.rglob(PROMPTS_FILES[0])]
    assert left == (["b"] if events else [])
