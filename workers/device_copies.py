"""Copies between views and the device tier, so that a hit does not travel from host memory again.

A block comes from the tier when it has a place there, else from its page, and is offered to the tier once it lies in
a view exactly as in its page: after the step, so that no token waits for it. Engine thread only.

How fast pages reach a view is learned here, because what the tier lacks costs a request that long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby

from kvpool.errors import InvariantViolation
from kvpool.store.device import DeviceTier, Offer
from kvpool.types import BlockId
from workers.block_table import PageState
from workers.engine.base import Engine
from workers.fill_speed import FillSpeed
from workers.sequence import Sequence as Request
from workers.step import Work

COUNTERS = (
    *("device_fills", "device_fill_bytes", "host_fills", "host_fill_bytes"),
    *("device_promotions", "device_stores"),
)

OFFERS_AT_ONCE = 128
"""Bounds how long the segment's lock is held."""


class DeviceCopies:
    """Fills views from the tier or from pages, and fills the tier from views.

    Args:
        engine: its device pages are attached already.
        tier: whose places they are.
        clock_ns: monotonic clock.
    """

    def __init__(self, engine: Engine, tier: DeviceTier, clock_ns: Callable[[], int]) -> None:
        self._engine = engine
        self._tier = tier
        self._clock_ns = clock_ns
        self.speed = FillSpeed()
        self.counters = Counter(dict.fromkeys(COUNTERS, 0))  # all names now: others copy it while we count
        """Blocks that went into views, by where they lay, their bytes, and blocks that came into the tier."""

    def fill(self, work: Work) -> None:
        """Copy the readable blocks of ``work`` into its sequence's view, and offer to the tier what came from a page
        that is sealed."""
        request, first_block, pages = work.sequence, work.first_block, work.fill
        places = self._places(request, first_block, len(pages))
        for in_tier, group in groupby(range(len(pages)), lambda number: places[number] is not None):
            run = list(group)
            begin, end = run[0], run[-1] + 1
            if in_tier:
                found = [place for place in places[begin:end] if place is not None]
                self._engine.load_device_blocks(_slot(request), first_block + begin, found)
            else:
                self._fill_from_pages(request, first_block + begin, pages[begin:end])
                self._note(request, range(first_block + begin, first_block + end), work.start)
            where = "device" if in_tier else "host"
            self.counters[f"{where}_fills"] += end - begin
            self.counters[f"{where}_fill_bytes"] += (end - begin) * self._engine.layout.block_bytes

    def take_offers(self, request: Request) -> None:
        """Copy what the request offers from its view into the tier, as far as that has room."""
        if not request.offers:
            return
        indices = sorted(request.offers)
        for start in range(0, len(indices), OFFERS_AT_ONCE):
            self._take(request, indices[start : start + OFFERS_AT_ONCE])
        request.offers.clear()

    def _take(self, request: Request, indices: list[int]) -> None:
        chain = request.table.chain
        offers = [Offer(chain[index], chain[index - 1] if index else None) for index in indices]
        admitted = [(indices[number], place) for number, place in self._tier.admit(offers)]
        for _, group in groupby(enumerate(admitted), lambda item: item[1][0] - item[0]):
            run = [item for _, item in group]
            self._engine.store_device_blocks(_slot(request), run[0][0], [place for _, place in run])
        promoted = sum(request.offers[index] for index, _ in admitted)
        self.counters["device_promotions"] += promoted
        self.counters["device_stores"] += len(admitted) - promoted

    def _places(self, request: Request, first_block: int, count: int) -> list[BlockId | None]:
        """Of each block its place in the tier. Only sealed pages have an identity that the request holds on to, so that
        the place stays valid."""
        table, blocks = request.table, range(first_block, first_block + count)
        sealed = [index for index in blocks if table.state(index) is PageState.SEALED]
        found = dict(zip(sealed, self._tier.find([table.chain[index] for index in sealed]), strict=True))
        return [found.get(index) for index in blocks]

    def _fill_from_pages(self, request: Request, first_block: int, pages: Sequence[BlockId]) -> None:
        started_ns = self._clock_ns()
        self._engine.load_blocks(_slot(request), first_block, pages)
        self.speed.observe(len(pages) * self._engine.layout.block_bytes, max(1, self._clock_ns() - started_ns))

    def _note(self, request: Request, blocks: range, start: int) -> None:
        """These came from pages and stay as they came, but for the block in which the step computes on from token
        ``start``: what is computed again is rounded again."""
        table = request.table
        for index in blocks:
            if (index + 1) * table.block_tokens > start:
                continue
            if table.state(index) is PageState.SEALED:
                request.offers[index] = True
            else:
                request.unsealed_fills.add(index)

    def sealed(self, request: Request, index: int, *, stored: bool) -> None:
        """A page of the request got its identity; ``stored`` when it was copied from the view just now. It is offered
        if it lies in the view as in the page: what a load brought when it was computed here already does not."""
        if stored or index in request.unsealed_fills:
            request.offers[index] = False


def _slot(request: Request) -> int:
    if request.slot is None:
        raise InvariantViolation(f"{request.request_id} has no open view")
    return request.slot
