"""Which blocks of a view may be copied into the device tier: those that lie there exactly as in their pages."""

from __future__ import annotations

import numpy as np
import pytest

from kvpool.plan import REDO
from kvpool.store.segment import Segment, SegmentConfig
from tests.worker_support import FakeEngine, RecordingPublisher, kv_of, make_request, namespace
from workers import device_copies
from workers.block_table import BlockTable, PageState
from workers.bridge import Bridge
from workers.device_copies import DeviceCopies
from workers.engine.base import SequenceSlice
from workers.fill_speed import FIRST_MIB_NS, FillSpeed
from workers.sequence import Sequence
from workers.step import Work

TOKENS = list(range(12))
MIB = 1 << 20


class Bench:
    """A worker's parts around one request of three blocks, whose view is open."""

    def __init__(self, device_blocks: int = 8) -> None:
        self.engine = FakeEngine()
        block_bytes = self.engine.layout.block_bytes
        self.memory = memoryview(bytearray(8 * block_bytes))
        self.segment = Segment(
            SegmentConfig(block_bytes, 8, device_blocks=device_blocks), self.memory, RecordingPublisher(), lambda: 0
        )
        self.engine.attach_pages(self.memory, 8)
        self.engine.attach_device_pages(device_blocks)
        assert self.segment.device is not None
        self.tier = self.segment.device
        self.copies = DeviceCopies(self.engine, self.tier, lambda: 0)
        self.bridge = Bridge(self.engine, self.segment, self.copies)

    def sequence(self) -> Sequence:
        table = BlockTable(namespace().root(), 4)
        made = Sequence(make_request("r", TOKENS, 4), REDO, "d", table, 0, 1)
        made.slot = self.engine.open(16)
        return made

    def pages(self, sequence: Sequence, *states: PageState) -> None:
        """Pages for the front of the chain, blank or filled by a load, with their content."""
        for index, page in enumerate(self.segment.allocate(len(states)).block_ids):
            sequence.table.assign([index], [page])
            if states[index] is PageState.FILLED:
                for step in (PageState.FLYING, PageState.ARRIVED, PageState.FILLED):
                    sequence.table.move(index, step)
            size = self.segment.config.block_bytes
            raw = kv_of(TOKENS[index * 4 : index * 4 + 4], index * 4).tobytes()
            self.memory[page * size : (page + 1) * size] = raw

    def compute(self, sequence: Sequence, stop: int) -> None:
        assert sequence.slot is not None
        start = sequence.computed_tokens
        self.engine.step([SequenceSlice(sequence.slot, tuple(sequence.tokens[start:stop]), start, None)])
        sequence.computed_tokens = stop

    def in_tier(self, sequence: Sequence) -> list[int]:
        return [index for index, item in enumerate(sequence.table.chain) if item in self.tier.held()]


def fill(bench: Bench, sequence: Sequence, blocks: int, start: int) -> None:
    pages = tuple(page for page in sequence.table.pages()[:blocks])
    bench.bridge.fill(Work(sequence, 0, pages, start, 0, samples=False))
    sequence.computed_tokens = start


def test_what_was_computed_here_comes_in_when_it_is_sealed() -> None:
    bench = Bench()
    sequence = bench.sequence()
    bench.pages(sequence, *[PageState.BLANK] * 3)
    bench.compute(sequence, 8)
    bench.bridge.seal(sequence)
    assert bench.in_tier(sequence) == [0, 1]
    assert bench.copies.counters["device_stores"] == 2


def test_what_a_load_brought_comes_in_once_it_was_filled_and_sealed() -> None:
    bench = Bench()
    sequence = bench.sequence()
    bench.pages(sequence, *[PageState.FILLED] * 3)
    fill(bench, sequence, 3, 12)
    assert bench.in_tier(sequence) == []
    bench.bridge.seal(sequence)
    assert bench.in_tier(sequence) == [0, 1, 2]
    assert bench.copies.counters["host_fills"] == 3


def test_what_a_load_brought_too_late_is_not_taken_from_the_view_in_which_it_was_computed() -> None:
    bench = Bench()
    sequence = bench.sequence()
    bench.pages(sequence, *[PageState.FILLED] * 3)
    bench.compute(sequence, 12)
    bench.bridge.seal(sequence)
    assert sequence.table.sealed_blocks == 3
    assert bench.in_tier(sequence) == []


@pytest.mark.parametrize("sealed_before", [False, True])
def test_the_block_whose_last_token_is_computed_again_is_not_taken_from_the_view(sealed_before: bool) -> None:
    bench = Bench()
    sequence = bench.sequence()
    bench.pages(sequence, *[PageState.FILLED] * 3)
    if sealed_before:
        bench.bridge.seal(sequence)
    fill(bench, sequence, 3, 11)
    bench.bridge.seal(sequence)
    assert bench.in_tier(sequence) == [0, 1]
    assert bench.copies.counters["device_promotions"] == (2 if sealed_before else 0)


def test_the_twin_of_a_sealed_block_is_not_taken_from_the_view() -> None:
    bench = Bench()
    first, second = bench.sequence(), bench.sequence()
    bench.pages(first, *[PageState.FILLED] * 3)
    bench.pages(second, *[PageState.BLANK] * 3)
    bench.compute(second, 12)
    bench.bridge.seal(first)
    bench.bridge.seal(second)
    assert second.table.pages() == first.table.pages()
    assert bench.in_tier(second) == []


def test_offers_are_taken_in_pieces_and_a_chain_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_copies, "OFFERS_AT_ONCE", 1)
    bench = Bench()
    sequence = bench.sequence()
    bench.pages(sequence, *[PageState.BLANK] * 3)
    bench.compute(sequence, 12)
    bench.bridge.seal(sequence)
    places = [bench.tier.held()[item] for item in sequence.table.chain]
    assert bench.engine._device_pages is not None
    assert np.array_equal(bench.engine._device_pages[places].reshape(12, -1), kv_of(TOKENS, 0))


def test_what_is_known_of_a_view_is_forgotten_with_it() -> None:
    bench = Bench()
    sequence = bench.sequence()
    bench.pages(sequence, *[PageState.FILLED] * 3)
    fill(bench, sequence, 3, 12)
    bench.segment.release(sequence.table.clear())
    sequence.restart()
    sequence.slot = bench.engine.open(16)
    bench.pages(sequence, *[PageState.FILLED] * 3)
    bench.compute(sequence, 12)
    bench.bridge.seal(sequence)
    assert bench.in_tier(sequence) == []
    sequence.offers[0] = True
    sequence.restart()
    assert not sequence.offers


def test_a_fill_takes_places_where_there_are_some_and_pages_elsewhere() -> None:
    bench = Bench(device_blocks=2)
    first, second = bench.sequence(), bench.sequence()
    bench.pages(first, *[PageState.BLANK] * 3)
    bench.compute(first, 12)
    bench.bridge.seal(first)
    for index, page in enumerate(first.table.pages()):
        bench.segment.acquire([page])
        second.table.adopt(index, page)
    fill(bench, second, 3, 12)
    assert [bench.copies.counters[name] for name in ("device_fills", "host_fills")] == [2, 1]
    assert second.slot is not None
    assert np.array_equal(bench.engine._views[second.slot][:12], kv_of(TOKENS, 0))


def test_the_fill_speed_follows_large_fills_and_forgets() -> None:
    speed = FillSpeed()
    assert speed.mib_ns == FIRST_MIB_NS
    speed.observe(8 * MIB, 8_000)
    speed.observe(64, 1_000)
    assert speed.mib_ns == pytest.approx(1_000, rel=0.2)
    for _ in range(30):
        speed.observe(MIB, 5_000)
    assert speed.mib_ns == pytest.approx(5_000, rel=0.05)
