"""The prefix index against a naive model that keeps one set of (worker, tier) per block."""

from __future__ import annotations

import random
from collections import defaultdict
from hashlib import blake2b

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvpool.metadata.events import BlockAction, BlockEvent, Delta, EventBatch
from kvpool.metadata.index import PrefixIndex
from kvpool.metadata.membership import DirectoryLimits
from kvpool.metadata.state import DirectoryState
from kvpool.metadata.view import DirectoryView
from kvpool.types import BlockHash, Tier, WorkerEpoch, WorkerId, WorkerKey
from tests.contract.metadata_support import member

WORKERS = [WorkerKey(WorkerId(f"w{number}"), WorkerEpoch(1)) for number in range(4)]


def _child(parent: bytes, branch: int) -> BlockHash:
    return BlockHash(blake2b(parent + bytes([branch]), digest_size=16).digest())


def _chains(rng: random.Random, count: int, length: int) -> list[list[BlockHash]]:
    """Chains that share trunks."""
    chains: list[list[BlockHash]] = []
    for number in range(count):
        trunk = rng.choice(chains)[: rng.randrange(length)] if chains and rng.random() < 0.7 else []
        while len(trunk) < length:
            trunk = [*trunk, _child(trunk[-1] if trunk else b"", number)]
        chains.append(trunk)
    return chains


class NaiveIndex:
    """What the index promises, in the plainest way."""

    def __init__(self) -> None:
        self.current: dict[WorkerKey, set[tuple[BlockHash, int, Tier]]] = defaultdict(set)
        self.incoming: dict[WorkerKey, set[tuple[BlockHash, int, Tier]]] = {}
        self.hidden: set[WorkerKey] = set()

    def target(self, key: WorkerKey) -> set[tuple[BlockHash, int, Tier]]:
        return self.incoming.get(key, self.current[key])

    def prefixes(self, chain: list[BlockHash], group: int) -> dict[WorkerKey, dict[Tier, int]]:
        result = {}
        for key, held in self.current.items():
            found: dict[Tier, int] = {}
            for tier in Tier:
                length = 0
                while length < len(chain) and any(
                    (chain[length], group, near) in held for near in Tier if near <= tier
                ):
                    length += 1
                if length > max(found.values(), default=0):
                    found[tier] = length
            if found and key not in self.hidden:
                result[key] = found
        return result


def _step(rng: random.Random, index: PrefixIndex, naive: NaiveIndex, chains: list[list[BlockHash]]) -> None:
    key, tier, group = rng.choice(WORKERS), rng.choice([Tier.DEVICE, Tier.DEVICE, *Tier]), rng.choice([0, 0, 1])
    chain = rng.choice(chains)
    start = rng.randrange(len(chain)) if rng.random() < 0.5 else 0
    piece = chain[start : start + rng.randrange(1, len(chain))]
    action = rng.random()
    if action < 0.35:
        index.stored(key, tier, piece, group=group, linked=True)
        naive.target(key).update((item, group, tier) for item in piece)
    elif action < 0.5:
        loose = [rng.choice(rng.choice(chains)) for _ in range(rng.randrange(1, 6))]
        index.stored(key, tier, loose, group=group)
        naive.target(key).update((item, group, tier) for item in loose)
    elif action < 0.8:
        if rng.random() < 0.5:
            piece = piece[::-1]
        elif rng.random() < 0.5:
            piece = rng.sample(piece, rng.randrange(1, len(piece) + 1))
        index.removed(key, tier, piece, group=group)
        naive.target(key).difference_update((item, group, tier) for item in piece)
    elif action < 0.84:
        index.remove_worker(key)
        index.add_worker(key)
        naive.current[key] = set()
        naive.incoming.pop(key, None)
        naive.hidden.discard(key)
    elif action < 0.88:
        visible = rng.random() < 0.6
        index.set_visible(key, visible)
        (naive.hidden.discard if visible else naive.hidden.add)(key)
    elif action < 0.92:
        index.begin_snapshot(key)
        naive.incoming[key] = set()
        if not naive.current[key]:
            naive.current[key] = naive.incoming.pop(key)
    elif action < 0.96:
        index.end_snapshot(key)
        if key in naive.incoming:
            naive.current[key] = naive.incoming.pop(key)
    else:
        index.sweep(rng.choice([1, 5, 1000]))


def _check_copies(index: PrefixIndex, naive: NaiveIndex, chain: list[BlockHash], group: int) -> None:
    """Others are counted rightly, and exactly one of a block's visible holders is told that it keeps the block."""
    told = {key: index.copies(key, chain, group=group) for key in WORKERS}
    for place, item in enumerate(chain):
        holders = {
            key
            for key in WORKERS
            if key not in naive.hidden and any((item, group, tier) in naive.current[key] for tier in Tier)
        }
        for key in WORKERS:
            others, kept = told[key][place]
            assert others == len(holders - {key})
            assert kept or key in holders or not others  # who does not hold it: somebody else keeps it
        assert sum(not told[key][place][1] for key in holders) == bool(holders)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 120))
def test_every_lookup_equals_the_naive_model_after_any_sequence_of_events(seed: int, steps: int) -> None:
    rng = random.Random(seed)
    chains = _chains(rng, 5, 14)
    index, naive = PrefixIndex(max_workers=len(WORKERS)), NaiveIndex()
    for key in WORKERS:
        index.add_worker(key)
        naive.current[key] = set()
    for _ in range(steps):
        _step(rng, index, naive, chains)
        index.check()
        for chain in chains:
            group = rng.choice([0, 1])
            assert index.prefixes(chain, group=group, learn=rng.random() < 0.3) == naive.prefixes(chain, group)
            _check_copies(index, naive, chain, group)
    while not index.sweep(3):
        index.check()
    assert index.entries == sum(map(len, naive.current.values())) + sum(map(len, naive.incoming.values()))


@settings(max_examples=60, deadline=None)
@example(seed=810107, part_blocks=3)  # a first snapshot that begins while the dump is under way
@given(seed=st.integers(0, 2**32), part_blocks=st.sampled_from([1, 3, 10, 1000]))
def test_a_dump_taken_while_things_change_plus_the_changes_is_an_exact_copy(seed: int, part_blocks: int) -> None:
    """The copy goes through `DirectoryView`, as at a router; the changes since the dump began follow it."""
    rng = random.Random(seed)
    chains = _chains(rng, 4, 12)
    state = DirectoryState(1, DirectoryLimits(max_workers=8), 0)
    view = DirectoryView(max_entries=10_000, max_workers=8)
    log, epochs, sequences = list[Delta](), dict.fromkeys(range(3), 0), dict.fromkeys(range(3), 0)

    def change() -> None:
        number = rng.randrange(3)
        info = member(f"w{number}", epochs[number])
        if rng.random() < 0.06 or not epochs[number]:
            epochs[number] += 1
            log.extend(state.join(member(f"w{number}", epochs[number]), 0)[1])
            sequences[number] = 0
            return
        start = rng.randrange(12)
        piece = tuple(rng.choice(chains)[start : start + rng.randrange(1, 8)])
        action = rng.choice([BlockAction.STORED, BlockAction.STORED, BlockAction.REMOVED])
        event = BlockEvent(action, rng.choice([Tier.HOST, Tier.DISK]), piece, rng.choice([0, 0, 1]), True)
        sequences[number] += 1
        begin = sequences[number] == 1 or rng.random() < 0.1
        batch = EventBatch(info.key, 1, sequences[number], (event,), begin, rng.random() < 0.3)
        log.extend(state.publish(batch)[1])

    for _ in range(rng.randrange(60)):
        change()
    view.begin(state.header())
    for part in state.index.dump(part_blocks):
        view.fill(part)
        for _ in range(rng.randrange(4)):
            change()
            state.tick(0, rng.choice([1, 1000]))
    view.finish()
    for _ in range(5):
        change()
    for delta in log:
        assert view.apply(delta)
    view.index.check()
    for chain in chains:
        for group in (0, 1):
            assert view.prefixes(chain, group=group) == state.lookup(chain, group)
    assert [view.index.counts(key) for key in view.index.workers] == [
        state.index.counts(k) for k in state.index.workers
    ]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), bound=st.integers(1, 40))
def test_the_bound_holds_and_refused_blocks_are_counted(seed: int, bound: int) -> None:
    rng = random.Random(seed)
    chains = _chains(rng, 5, 14)
    index = PrefixIndex(max_entries=bound, max_workers=len(WORKERS))
    truth: dict[WorkerKey, set[BlockHash]] = {key: set() for key in WORKERS}
    for key in WORKERS:
        index.add_worker(key)
    for _ in range(40):
        key, piece = rng.choice(WORKERS), rng.choice(chains)[: rng.randrange(1, 15)]
        result = index.stored(key, Tier.DEVICE, piece, linked=rng.random() < 0.5)
        assert result.added + result.known + result.refused == len(piece)
        truth[key].update(piece)
        index.check()
        assert index.entries <= bound
        for chain in chains:
            for holder, found in index.prefixes(chain).items():
                assert all(item in truth[holder] for item in chain[: found[Tier.DEVICE]])
    assert (index.refused_blocks > 0) == (sum(map(len, truth.values())) > index.entries)


@pytest.mark.parametrize("seed", range(3))
def test_long_chains_with_many_runs_equal_the_naive_model(seed: int) -> None:
    rng = random.Random(seed)
    chains = _chains(rng, 3, 1200)
    index, naive = PrefixIndex(max_workers=len(WORKERS)), NaiveIndex()
    for key in WORKERS:
        index.add_worker(key)
        naive.current[key] = set()
    for _ in range(60):
        _step(rng, index, naive, chains)
    index.check()
    for chain in chains:
        for stop in (1, 700, 1200):
            assert index.prefixes(chain[:stop], learn=True) == naive.prefixes(chain[:stop], 0)
    index.check()
