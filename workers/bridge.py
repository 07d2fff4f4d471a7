"""The only place where engine views and pool pages meet: pages fill views, computed blocks go into pages.

Called by the engine thread only. A block is offered to the pool only when it is complete, its content is verified or
computed here, and every block before it is offered too.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kvpool.errors import InvariantViolation
from kvpool.store.segment import SealRequest, Segment
from kvpool.store.worth import WORK_UNIT
from kvpool.types import BlockId
from workers.block_table import BlockTable, PageState
from workers.device_copies import DeviceCopies
from workers.engine.base import Engine
from workers.fill_speed import FillSpeed
from workers.sequence import Sequence
from workers.step import Work


class Bridge:
    """Moves blocks between an engine's views and a segment's pages.

    Args:
        engine: its pages are attached to the segment's memory already.
        segment: who holds the pages.
        device: copies to and from the device tier, None without one.
        clock_ns: monotonic clock.
    """

    def __init__(
        self,
        engine: Engine,
        segment: Segment,
        device: DeviceCopies | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._engine = engine
        self._segment = segment
        self._device = device
        self._clock_ns = clock_ns
        self._speed = FillSpeed() if device is None else device.speed
        self.pair_ratio = 0.0
        """How much more a token costs for every token before it; see `workers.calibrate.pair_ratio`."""

    def fill(self, work: Work) -> None:
        """Copy the readable pages of ``work``, or their copies on the device, into its sequence's view."""
        sequence = work.sequence
        if not work.fill:
            return
        block_bytes = self._segment.config.block_bytes
        if self._device is None:
            started_ns = self._clock_ns()
            self._engine.load_blocks(_slot(sequence), work.first_block, work.fill)
            self._speed.observe(len(work.fill) * block_bytes, max(1, self._clock_ns() - started_ns))
        else:
            self._device.fill(work)
        sequence.filled(work.first_block, len(work.fill), block_bytes)

    @property
    def fill_block_ns(self) -> int | None:
        """What copying a block from its page into a view takes, None before one was."""
        return self._speed.block_ns(self._segment.config.block_bytes)

    def seal(self, sequence: Sequence) -> int:
        """Store what became complete and offer it; returns how many blocks the sealed run grew by."""
        table = sequence.table
        computed_blocks = sequence.computed_tokens // table.block_tokens
        self._take_sealed(table, computed_blocks)
        ready = table.sealable(computed_blocks)
        blank = {index: None for index in ready if table.state(index) is PageState.BLANK}
        self._store(sequence, list(blank))
        fresh = [
            SealRequest(_page(sequence, index), table.chain[index], table.parent_of(index), self.work_of(index))
            for index in ready
        ]
        for index, request, kept in zip(ready, fresh, self._segment.seal(fresh), strict=True):
            table.seal(index, kept)
            if self._device is not None and kept == request.block_id:  # not a twin, which was computed elsewhere
                self._device.sealed(sequence, index, stored=index in blank)
        if self._device is not None:
            self._device.take_offers(sequence)
        return len(ready)

    def _take_sealed(self, table: BlockTable, computed_blocks: int) -> None:
        """Pages that several requests share, because one's load brought them, are sealed by the first."""
        for index in table.sealable(computed_blocks):
            page = table.page(index)
            if table.state(index) is PageState.FILLED and self._segment.lookup(table.chain[index]) == page:
                assert page is not None
                table.seal(index, page)

    def work_of(self, index: int) -> int:
        """What computing the block at this place of a chain costs, in `kvpool.store.worth.WORK_UNIT`."""
        tokens_before = index * self._engine.layout.block_tokens
        return round(WORK_UNIT * (1 + self.pair_ratio * tokens_before))

    def check_at_rest(self) -> None:
        """With no request and no load, no block may be referenced or in flight.

        Raises:
            InvariantViolation: one is; it would be lost for ever.
        """
        counts = self._segment.counts()
        if counts.referenced or counts.in_flight:
            raise InvariantViolation(f"blocks leaked: nothing runs, yet {counts}")

    def _store(self, sequence: Sequence, indices: list[int]) -> None:
        """Copy view blocks into pages, one engine call a run of neighbours."""
        begin = 0
        for end in range(1, len(indices) + 1):
            if end == len(indices) or indices[end] != indices[end - 1] + 1:
                pages = [_page(sequence, index) for index in indices[begin:end]]
                self._engine.store_blocks(_slot(sequence), indices[begin], pages)
                begin = end


def _slot(sequence: Sequence) -> int:
    if sequence.slot is None:
        raise InvariantViolation(f"{sequence.request_id} has no open view")
    return sequence.slot


def _page(sequence: Sequence, index: int) -> BlockId:
    page = sequence.table.page(index)
    if page is None:
        raise InvariantViolation(f"{sequence.request_id} has no page for block {index}")
    return page
