"""The device tier's book over a segment, with content: a place never serves another block than the one it was given.

Every step writes to a model of both memories as the engine thread would, and poisons each place that nothing is said
to be in. The directory's stand-in checks that no copy is announced before its block or outlives it.
"""

from __future__ import annotations

from random import Random

import pytest

from kvpool.errors import InvariantViolation
from kvpool.store import device
from kvpool.store.device import Offer
from kvpool.store.segment import SealRequest, Segment, SegmentConfig
from kvpool.store.selection import Selection
from kvpool.types import BlockHash, BlockId
from tests.worker_support import RecordingPublisher

BLOCK_BYTES = 16
ROOT = BlockHash(b"\xee" * 16)
POISON = b"poison"


def name(path: tuple[int, ...]) -> BlockHash:
    return BlockHash(bytes(path).ljust(16, b"\xff"))


class World:
    """One segment with a device tier, and what lies in each place."""

    def __init__(self, rng: Random, num_blocks: int, device_blocks: int) -> None:
        self.rng = rng
        self.now_ns = 0
        self.publisher = RecordingPublisher()
        self.memory = memoryview(bytearray(num_blocks * BLOCK_BYTES))
        self.segment = Segment(
            SegmentConfig(BLOCK_BYTES, num_blocks, device_blocks=device_blocks),
            self.memory,
            self.publisher,
            lambda: self.now_ns,
        )
        assert self.segment.device is not None
        self.tier = self.segment.device
        self.places: list[bytes] = [POISON] * device_blocks
        self.running: list[list[BlockId]] = []
        self.found = self.missed = 0

    def chain(self) -> list[BlockHash]:
        path = [self.rng.randrange(2) for _ in range(self.rng.randrange(1, 9))]
        return [name(tuple(path[: stop + 1])) for stop in range(len(path))]

    def serve(self) -> None:
        """A request: what is held is filled from the tier or from pages, the rest computed; then it is offered."""
        chain = self.chain()
        held = self.segment.match(chain)
        if len(chain) - len(held) > self.segment.available_blocks - len(held):
            return
        self.segment.acquire(held)
        offers = self.fill(chain, held)
        fresh = self.segment.allocate(len(chain) - len(held)).block_ids
        for index, page in enumerate(fresh, len(held)):
            self.memory[page * BLOCK_BYTES : (page + 1) * BLOCK_BYTES] = chain[index]
        requests = [
            SealRequest(page, chain[index], chain[index - 1] if index else ROOT)
            for index, page in enumerate(fresh, len(held))
        ]
        assert self.segment.seal(requests) == list(fresh)
        self.offer(chain, offers + list(range(len(held), len(chain))))
        self.running.append([*held, *fresh])

    def fill(self, chain: list[BlockHash], held: list[BlockId]) -> list[int]:
        lacking = []
        for index, place in enumerate(self.tier.find(chain[: len(held)])):
            if place is None:
                self.missed += 1
                lacking.append(index)
            else:
                self.found += 1
                assert self.places[place] == chain[index], "a place serves another block"
        return lacking

    def offer(self, chain: list[BlockHash], indices: list[int]) -> None:
        offers = [Offer(chain[index], chain[index - 1] if index else None) for index in indices]
        for number, place in self.tier.admit(offers):
            self.places[place] = offers[number].block_hash
        held = set(self.tier.held())
        for block_hash in held:
            parent = name(tuple(block_hash.rstrip(b"\xff")[:-1]))
            assert len(block_hash.rstrip(b"\xff")) == 1 or parent in held, "a copy without the one before it"

    def end(self) -> None:
        if self.running:
            self.segment.release(self.running.pop(self.rng.randrange(len(self.running))))

    def evict(self) -> None:
        """By hand, or everything."""
        if self.rng.random() < 0.2:
            self.segment.clear()
        else:
            self.segment.evict(Selection(chain=self.chain()))

    def want(self) -> None:
        self.segment.set_wanted(self.chain() if self.rng.random() < 0.5 else ())

    def step(self) -> None:
        self.now_ns += 1
        self.rng.choice([self.serve, self.serve, self.serve, self.end, self.end, self.evict, self.want])()
        self.segment.check()
        held = self.tier.held()
        assert set(held) == self.publisher.in_device
        assert set(held) <= self.publisher.held == set(self.segment.held_hashes())
        assert len(set(held.values())) == len(held)
        assert all(self.places[place] == block_hash for block_hash, place in held.items())
        self.places = [item if place in held.values() else POISON for place, item in enumerate(self.places)]


@pytest.mark.parametrize("seed", range(30))
def test_a_place_never_serves_another_block_whatever_leaves_the_segment_or_the_tier(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = Random(seed)
    monkeypatch.setattr(device, "FIND_BLOCKS", rng.choice([1, 3, 512]))
    num_blocks = rng.choice([6, 12, 40])
    world = World(rng, num_blocks, rng.choice([1, num_blocks // 2, num_blocks]))
    for _ in range(150):
        world.step()
    assert world.found
    assert world.missed or len(world.places) == num_blocks
    while world.running:
        world.end()
    world.segment.clear()
    assert world.tier.held() == {}
    assert world.publisher.in_device == set()


def small(device_blocks: int = 3, num_blocks: int = 8) -> World:
    return World(Random(0), num_blocks, device_blocks)


def hold(world: World, chain: list[BlockHash]) -> list[BlockId]:
    """Seal a chain in the segment and let it go."""
    pages = world.segment.allocate(len(chain)).block_ids
    parents = [ROOT, *chain]
    world.segment.seal([SealRequest(*parts) for parts in zip(pages, chain, parents[:-1], strict=True)])
    world.segment.release(pages)
    return list(pages)


def offers(chain: list[BlockHash]) -> list[Offer]:
    return [Offer(item, chain[index - 1] if index else None) for index, item in enumerate(chain)]


def test_a_chain_longer_than_the_tier_keeps_its_front_there() -> None:
    world = small()
    chain = [name((0,) * length) for length in range(1, 6)]
    hold(world, chain)
    assert [index for index, _ in world.tier.admit(offers(chain))] == [0, 1, 2]
    assert world.tier.admit(offers(chain)) == []
    assert [place is not None for place in world.tier.find(chain)] == [True, True, True, False, False]


def test_what_the_segment_does_not_hold_gets_no_place() -> None:
    world = small()
    chain = [name((0,) * length) for length in range(1, 4)]
    hold(world, chain[:2])
    assert [index for index, _ in world.tier.admit(offers(chain))] == [0, 1]


def test_a_block_without_its_parent_gets_no_place() -> None:
    world = small()
    chain = [name((0,) * length) for length in range(1, 4)]
    hold(world, chain)
    assert world.tier.admit(offers(chain)[1:]) == []


def test_what_is_asked_for_often_stays_while_others_pass_through() -> None:
    world = small(device_blocks=2)
    often, others = [name((9,))], [[name((number,))] for number in range(5)]
    for chain in (often, *others):
        hold(world, chain)
    world.tier.admit(offers(often))
    for chain in others:
        world.tier.find(often)
        world.tier.admit(offers(chain))
    assert world.tier.find(often) != [None]
    assert world.tier.totals() == {"device_evictions": 4, "device_drops": 0}


def test_a_copy_that_outlived_its_page_is_noticed() -> None:
    world = small()
    chain = [name((0,))]
    hold(world, chain)
    world.tier.admit(offers(chain))
    world.segment.device = None  # the drop is forgotten
    world.publisher.in_device.clear()
    world.segment.clear()
    with pytest.raises(InvariantViolation, match="outlived"):
        world.tier.check()
