"""The block table of one sequence: which pages its chain lies in and how far they can be used.  (pure)

Indices count blocks of the sequence's chain from 0. A page is in one of these states:

    none ──assign──► BLANK ──start_flight──► FLYING ──arrive──► ARRIVED ──land──► FILLED ──seal──► SEALED
                       │        (land without arrival: back to BLANK)                              ▲
                       └──────────────────────── computed here and stored ──────────────────────────┘

`ARRIVED` content may be read but the page must not be offered before the load is terminal; `FILLED` content is
verified and waits only for its identity. Only a sealed *leading* run is ever published, so that every holder holds
a prefix. Knows no pool, no tensor, no clock: `workers.scheduler` moves references, `workers.bridge` moves bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum

from kvpool.errors import InvariantViolation
from kvpool.hashing import iter_block_hashes
from kvpool.types import BlockHash, BlockId


class PageState(Enum):
    """What a sequence's page holds."""

    BLANK = "blank"
    FLYING = "flying"
    ARRIVED = "arrived"
    FILLED = "filled"
    SEALED = "sealed"


READABLE = (PageState.ARRIVED, PageState.FILLED, PageState.SEALED)
"""States in which the page's content is the block's KV, verified."""


class BlockTable:
    """Chain and pages of one sequence.

    Args:
        root: hash of the empty chain (`kvpool.hashing.Namespace.root`).
        block_tokens: tokens per block.
    """

    def __init__(self, root: BlockHash, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.chain: list[BlockHash] = []
        self._root = root
        self._pages: dict[int, tuple[BlockId, PageState]] = {}
        self.sealed_blocks = 0
        """Length of the leading sealed run."""

    def extend_chain(self, tokens: Sequence[int]) -> None:
        """Hash the full blocks of ``tokens`` (the whole sequence) that the chain lacks."""
        done = len(self.chain)
        if (done + 1) * self.block_tokens > len(tokens):
            return
        rest = tokens[done * self.block_tokens :]
        self.chain.extend(iter_block_hashes(rest, self.parent_of(done), self.block_tokens))

    def parent_of(self, index: int) -> BlockHash:
        """Hash of the chain before block ``index``."""
        return self.chain[index - 1] if index else self._root

    def page(self, index: int) -> BlockId | None:
        """The page of a block, None when it has none."""
        entry = self._pages.get(index)
        return None if entry is None else entry[0]

    def state(self, index: int) -> PageState | None:
        """State of a block's page, None when it has none."""
        entry = self._pages.get(index)
        return None if entry is None else entry[1]

    def pages(self) -> list[BlockId]:
        """Every page, in chain order."""
        return [self._pages[index][0] for index in sorted(self._pages)]

    def missing(self, stop: int) -> list[int]:
        """Blocks of ``[0, stop)`` without a page."""
        return [index for index in range(stop) if index not in self._pages]

    def flying(self) -> list[int]:
        """Blocks a load still has to bring, in order."""
        return sorted(index for index, (_, state) in self._pages.items() if state is PageState.FLYING)

    def arrived(self) -> list[int]:
        """Blocks a load brought that may not be offered yet, in order."""
        return sorted(index for index, (_, state) in self._pages.items() if state is PageState.ARRIVED)

    def late(self, computed_tokens: int) -> list[int]:
        """Blocks that a view of ``computed_tokens`` tokens holds whole, whose page a load may still write, in order."""
        held = computed_tokens // self.block_tokens
        return [index for index in sorted((*self.arrived(), *self.flying())) if index < held]

    def lacks(self, index: int, block_hash: BlockHash) -> bool:
        """This block is the chain's, and cannot be read yet."""
        mine = index < len(self.chain) and self.chain[index] == block_hash
        return mine and self.state(index) not in READABLE

    def assign(self, indices: Sequence[int], block_ids: Sequence[BlockId]) -> None:
        """Give blank pages to blocks that have none."""
        for index, block_id in zip(indices, block_ids, strict=True):
            if index in self._pages:
                raise InvariantViolation(f"block {index} gets a second page")
            self._pages[index] = (block_id, PageState.BLANK)

    def detach(self, indices: Sequence[int]) -> list[BlockId]:
        """Take the pages of blocks that a load may still write away from them; returns them in chain order for the
        caller to release."""
        for index in indices:
            if self.state(index) not in (PageState.FLYING, PageState.ARRIVED):
                raise InvariantViolation(f"block {index} is detached, and no load writes its page")
        return [self._pages.pop(index)[0] for index in sorted(indices)]

    def adopt(self, index: int, block_id: BlockId) -> BlockId | None:
        """Use a sealed page of the pool for block ``index``; returns the page it replaces, None if it had none."""
        replaced = self.page(index)
        self._pages[index] = (block_id, PageState.SEALED)
        self._advance_sealed()
        return replaced

    def share(self, index: int, block_id: BlockId, state: PageState) -> BlockId | None:
        """Use the page of another one's load, in the state it is in there; returns the page it replaces, if any."""
        replaced = self.page(index)
        self._pages[index] = (block_id, state)
        return replaced

    def move(self, index: int, state: PageState) -> None:
        """Put a page into another state; sealing goes through `seal`."""
        block_id, before = self._pages[index]
        if state not in _NEXT[before]:
            raise InvariantViolation(f"block {index} cannot go from {before.value} to {state.value}")
        self._pages[index] = (block_id, state)

    def seal(self, index: int, block_id: BlockId) -> None:
        """The block is published and lies in ``block_id``, its own page or the pool's twin of it."""
        before = self.state(index)
        if before not in (PageState.BLANK, PageState.FILLED):
            raise InvariantViolation(f"block {index} cannot be sealed from {before}")
        self._pages[index] = (block_id, PageState.SEALED)
        self._advance_sealed()

    def clear(self) -> list[BlockId]:
        """Forget every page; returns them in chain order for the caller to release. The chain stays."""
        pages = self.pages()
        self._pages.clear()
        self.sealed_blocks = 0
        return pages

    def readable_run(self, start: int, stop: int) -> int:
        """How many blocks from ``start`` on, before ``stop``, can be read without a gap."""
        index = start
        while index < stop:
            if self.state(index) not in READABLE:
                break
            index += 1
        return index - start

    def next_in(self, start: int, stop: int, states: Collection[PageState]) -> int:
        """First block in ``[start, stop)`` whose page is in one of ``states``; ``stop`` when there is none."""
        for index in range(start, stop):
            entry = self._pages.get(index)
            if entry is not None and entry[1] in states:
                return index
        return stop

    def sealable(self, computed_blocks: int) -> list[int]:
        """Blocks that extend the sealed run now: filled by a load, or computed here and blank. In order."""
        ready: list[int] = []
        for index in range(self.sealed_blocks, len(self.chain)):
            state = self.state(index)
            if state is PageState.SEALED:
                continue
            computed_here = state is PageState.BLANK and index < computed_blocks
            if state is not PageState.FILLED and not computed_here:
                break
            ready.append(index)
        return ready

    def _advance_sealed(self) -> None:
        while self.state(self.sealed_blocks) is PageState.SEALED:
            self.sealed_blocks += 1


_NEXT: dict[PageState, tuple[PageState, ...]] = {
    PageState.BLANK: (PageState.FLYING,),
    PageState.FLYING: (PageState.ARRIVED, PageState.BLANK),
    PageState.ARRIVED: (PageState.FILLED,),
    PageState.FILLED: (),
    PageState.SEALED: (),
}
