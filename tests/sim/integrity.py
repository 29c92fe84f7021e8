# SPDX-License-Identifier: Apache-2.0
"""What holds between two steps of an engine, on the scheduler side and on every rank."""


def check(engine) -> None:
    """Raises AssertionError when the books of an engine do not agree."""
    engine.hybrid.check_integrity()
    for rank, lookup, store in zip(engine.ranks, engine.lookups, engine.stores, strict=True):
        lookup.check_integrity()
        store.check_integrity()
        filed = [claim for _, claim in lookup._claims.values()]
        worker = rank.connector.worker
        worker.check_integrity()
        taken = [load.claim for load in worker.loads._running.values()]
        assert not {id(claim) for claim in filed} & {id(claim) for claim in taken}, (
            "a claim is filed and taken"
        )
        for claim in (*filed, *filter(None, taken)):
            # A claim in RAM is references: memory without any may be another record by now.
            memories = [memory for unpin in claim._pinned for memory in unpin.args[0]]
            assert all(memory.get_ref_count() > 0 for memory in memories), (
                "a claimed record was given back"
            )
