"""The whole pool through seeded disasters: no wrong token, nobody lost or hung, nothing left over, one truth.

Replay one seed: ``./scripts/simulate_forever --seed 123 --verbose``. More: ``./scripts/simulate_forever``, or
``KVPOOL_POOL_SEEDS=500 pytest tests/simulation/test_pool_simulation.py``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from kvpool.store.device import DeviceTier
from kvpool.store.pool import BlockPool
from kvpool.store.segment import Segment
from kvpool.transfer import loader
from kvpool.transfer.machine import Outcome
from kvpool.transport.base import BlockStatus
from router.ledger import Ledger
from tests.simulation.forever import Failed, run_seed
from tests.simulation.pool_world import KINDS, PoolWorld, Swarm
from workers.load_book import LoadBook

SEEDS = int(os.environ.get("KVPOOL_POOL_SEEDS", "40"))
GROUP = 5


@pytest.mark.parametrize("first", range(0, SEEDS, GROUP))
def test_after_any_disaster_requests_and_books_are_right(first: int) -> None:
    for seed in range(first, min(first + GROUP, SEEDS)):
        run_seed(seed)


def test_a_run_is_reproducible() -> None:
    first, second = (PoolWorld(3) for _ in range(2))
    first.run()
    second.run()
    assert first.totals() == second.totals()
    assert [(ask.ended, ask.ended_ns, ask.delivered) for ask in first.asks] == [
        (ask.ended, ask.ended_ns, ask.delivered) for ask in second.asks
    ]


def test_seeds_draw_every_kind_of_fault_and_loads_succeed_and_fail_in_every_way() -> None:
    assert {kind for seed in range(SEEDS) for kind in Swarm.draw(seed).kinds} == set(KINDS)
    seen: dict[str, int] = {}
    for seed in (1, 2, 6, 13, 16, 36, 39):
        world = PoolWorld(seed)
        world.run()
        for name, times in world.totals().items():
            seen[name] = seen.get(name, 0) + times
    for name in ("loaded", "evictions", "preemptions", "loads_given_up", "device_fills"):
        assert seen[name] > 0, name
    assert {name for name in seen if name.startswith("load_failures.")} >= {
        "load_failures.stale", "load_failures.stall", "load_failures.integrity", "load_failures.deadline_exceeded",
    }  # fmt: skip


# -- canaries: the law bites


def _trusts_corrupt_blocks(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(loader._OUTCOMES, BlockStatus.CORRUPT, Outcome.ARRIVED)


def _forgets_to_unpin(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Segment, "unpin", lambda self, lease_id: None)


def _frees_pages_when_a_load_is_given_up(patch: pytest.MonkeyPatch) -> None:
    original = LoadBook.abandon

    def abandon(self: Any, sequence: Any) -> None:
        flight = self.of(sequence)
        original(self, sequence)
        if flight is not None:
            self._blocks.end_flight(flight.pages.values())

    patch.setattr(LoadBook, "abandon", abandon)


def _hides_evictions(patch: pytest.MonkeyPatch) -> None:
    original = BlockPool.allocate

    def allocate(self: Any, *arguments: Any, **named: Any) -> Any:
        return type(made := original(self, *arguments, **named))(made.block_ids)

    patch.setattr(BlockPool, "allocate", allocate)


def _forgets_to_drop_device_copies(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DeviceTier, "drop", lambda self, hashes: None)


def _keeps_promises_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ledger, "expire", lambda self, now_ns: ())


@pytest.mark.parametrize(
    "sabotage",
    [
        _trusts_corrupt_blocks,
        _forgets_to_unpin,
        _frees_pages_when_a_load_is_given_up,
        _hides_evictions,
        _forgets_to_drop_device_copies,
        _keeps_promises_for_ever,
    ],
)
def test_canary_sabotage_is_found(
    sabotage: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    sabotage(monkeypatch)
    with pytest.raises(Failed):
        _run_all((6, 39, 2, 13, 36, 16, *range(SEEDS)))


def _run_all(seeds: Iterable[int]) -> None:
    for seed in seeds:
        run_seed(seed)
