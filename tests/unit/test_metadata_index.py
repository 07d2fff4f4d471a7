"""The index's promises that a random walk would rarely meet."""

from __future__ import annotations

import pytest

from kvpool.errors import CapacityError, StaleError
from kvpool.metadata.index import PrefixIndex
from kvpool.metadata.masks import MAX_RUN_BLOCKS, MaskTable, block_key
from kvpool.types import BlockHash, Tier, WorkerEpoch, WorkerId, WorkerKey


def _key(number: int) -> WorkerKey:
    return WorkerKey(WorkerId(f"w{number}"), WorkerEpoch(1))


def _chain(count: int, branch: int = 0, trunk: tuple[BlockHash, ...] = ()) -> tuple[BlockHash, ...]:
    made = tuple(BlockHash(bytes([branch]) + position.to_bytes(15, "big")) for position in range(len(trunk), count))
    return trunk + made


def _index(workers: int, **limits: int) -> PrefixIndex:
    index = PrefixIndex(**limits)
    for number in range(workers):
        index.add_worker(_key(number))
    return index


def test_a_prefix_ends_at_the_first_hole_and_goes_on_when_it_is_filled() -> None:
    index, chain = _index(1), _chain(100)
    index.stored(_key(0), Tier.DEVICE, chain, linked=True)
    index.removed(_key(0), Tier.DEVICE, [chain[40]])
    assert index.prefixes(chain) == {_key(0): {Tier.DEVICE: 40}}
    index.stored(_key(0), Tier.DEVICE, [chain[40]])
    assert index.prefixes(chain) == {_key(0): {Tier.DEVICE: 100}}


def test_children_before_parents_and_duplicates_make_no_difference() -> None:
    index, chain = _index(1), _chain(64)
    for start in (48, 16, 48, 0, 32, 16):
        index.stored(_key(0), Tier.DEVICE, chain[start : start + 16], linked=True)
    assert index.prefixes(chain) == {_key(0): {Tier.DEVICE: 64}}
    assert index.entries == 64


def test_tiers_count_blocks_of_faster_tiers_too() -> None:
    index, chain = _index(2), _chain(30)
    index.stored(_key(0), Tier.DEVICE, chain[:10], linked=True)
    index.stored(_key(0), Tier.HOST, chain[10:20], linked=True)
    index.stored(_key(0), Tier.DISK, chain[5:30], linked=True)
    index.stored(_key(1), Tier.HOST, chain[:7], linked=True)
    assert index.prefixes(chain) == {
        _key(0): {Tier.DEVICE: 10, Tier.HOST: 20, Tier.DISK: 30},
        _key(1): {Tier.HOST: 7},
    }
    assert index.holders(chain[6]) == {_key(0): (Tier.DEVICE, Tier.DISK), _key(1): (Tier.HOST,)}


def test_groups_are_apart() -> None:
    index, chain = _index(1), _chain(8)
    index.stored(_key(0), Tier.DEVICE, chain, group=1)
    assert index.prefixes(chain) == {}
    assert index.prefixes(chain, group=1) == {_key(0): {Tier.DEVICE: 8}}


def test_a_removed_worker_is_invisible_at_once_and_its_memory_returns_with_sweeps() -> None:
    index, chain = _index(2), _chain(1000)
    for number in range(2):
        index.stored(_key(number), Tier.DEVICE, chain, linked=True)
    index.remove_worker(_key(0))
    assert index.prefixes(chain) == {_key(1): {Tier.DEVICE: 1000}}
    assert index.entries == 2000
    passes = 1
    while not index.sweep(100):
        index.check()
        passes += 1
    assert passes > 5
    assert index.entries == 1000


def test_a_returning_worker_does_not_inherit_blocks_of_a_slot_before_it_is_swept() -> None:
    index, chain = _index(1, max_workers=1), _chain(10)
    for _ in range(50):
        index.stored(_key(0), Tier.DEVICE, chain)
        index.remove_worker(_key(0))
        index.add_worker(_key(0))
        assert index.prefixes(chain) == {}
    index.check()


def test_an_unfinished_snapshot_leaves_the_old_state_visible_and_a_finished_one_replaces_it() -> None:
    index, chain = _index(1), _chain(20)
    index.stored(_key(0), Tier.DEVICE, chain[:10])
    index.begin_snapshot(_key(0))
    index.stored(_key(0), Tier.DEVICE, chain[:4])
    assert index.loading(_key(0))
    assert index.prefixes(chain) == {_key(0): {Tier.DEVICE: 10}}
    index.end_snapshot(_key(0))
    assert index.prefixes(chain) == {_key(0): {Tier.DEVICE: 4}}


def test_a_snapshot_without_room_for_two_copies_gives_up_the_old_one() -> None:
    index, chain = _index(1, max_entries=10), _chain(20)
    index.stored(_key(0), Tier.DEVICE, chain[:10])
    index.begin_snapshot(_key(0))
    assert index.stored(_key(0), Tier.DEVICE, chain[10:]).refused == 0
    index.end_snapshot(_key(0))
    assert index.entries == 10
    assert len(index.holders(chain[15])) == 1


def test_every_worker_can_begin_a_snapshot_at_once() -> None:
    index, chain = _index(40, max_workers=40), _chain(4)
    for number in range(40):
        index.stored(_key(number), Tier.DEVICE, chain)
    for number in range(40):
        index.begin_snapshot(_key(number))
        index.stored(_key(number), Tier.DEVICE, chain)
        index.check()
    for number in range(40):
        index.end_snapshot(_key(number))
    assert index.prefixes(chain) == {_key(number): {Tier.DEVICE: 4} for number in range(40)}


def test_over_the_bound_blocks_are_refused_and_counted_and_room_is_used_again() -> None:
    index, chain = _index(2, max_entries=10), _chain(30)
    result = index.stored(_key(0), Tier.DEVICE, chain[:15], linked=True)
    assert (result.added, result.known, result.refused) == (10, 0, 5)
    assert index.stored(_key(0), Tier.DEVICE, chain[:15]).known == 10
    assert index.refused_blocks == 10
    index.remove_worker(_key(0))
    assert index.stored(_key(1), Tier.DEVICE, chain[:10]).refused == 0


def test_too_many_workers_are_refused_by_name() -> None:
    index = _index(3, max_workers=3)
    with pytest.raises(CapacityError, match="max_workers"):
        index.add_worker(_key(3))
    with pytest.raises(StaleError):
        index.stored(_key(3), Tier.DEVICE, _chain(1))


def test_learning_joins_the_pieces_of_a_chain_into_one_run() -> None:
    table, chain = MaskTable(), _chain(MAX_RUN_BLOCKS)
    keys = [block_key(item) for item in chain]
    for start in range(0, len(keys), 16):
        table.add(1, keys[start : start + 16], linked=True, limit=1 << 30)
    assert len(list(table.walk(chain))) == len(keys) // 16
    assert table.learn(chain)
    assert list(table.walk(chain)) == [(len(chain), 1)]
    assert not table.learn(chain)
    table.check()


def test_two_branches_do_not_take_their_trunk_from_each_other_for_ever() -> None:
    table, trunk = MaskTable(), _chain(40)
    branches = [_chain(80, branch, trunk) for branch in range(1, 5)]
    for chain in branches:
        for start in range(0, 80, 8):
            table.add(1, [block_key(item) for item in chain[start : start + 8]], linked=True, limit=1 << 30)
    joined = [sum(table.learn(chain) for chain in branches) for _ in range(4)]
    assert joined[-1] == 0
    assert all(len(list(table.walk(chain))) <= 2 for chain in branches)
    table.check()
