"""KV groups by attention kind: how many bytes a prefix is, what must move, and where a hit may end.  (pure)

A model is described by groups of layers that share one attention kind and one block table. A model with several
branches (compressed entries, selected rows, a window) has one group per branch.

| kind | bytes at n tokens | needed to start decoding at n | what a hit needs |
|---|---|---|---|
| full, latent | entries of all n | all | an unbroken chain from 0 |
| sliding | entries of the window, and the sinks | the same | the window before the boundary, and the sinks |
| sparse | rows and index keys of all n | index keys and top-k rows | an unbroken chain |
| linear | a fixed state | the state at exactly n | a stored state at the boundary, nothing in between |

A hit is a boundary at which *every* group can be made whole; `hit_boundary` finds the longest by letting each group
shorten it until none does. Does not decide what to load and knows no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b
from typing import Protocol

from kvpool.errors import RequestError


class AttentionKind(Enum):
    """What a layer keeps of the past."""

    FULL = "full"  # MHA / GQA / MQA
    LATENT = "latent"  # MLA
    SLIDING = "sliding"  # SWA
    SPARSE = "sparse"  # DSA, NSA, MoBA: whole prefix kept, read in part
    LINEAR = "linear"  # state-space, linear attention: a fixed state


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share one attention kind.

    Attributes:
        kind: attention kind.
        layers: number of layers.
        entry_bytes: bytes of one entry of one layer; every KV head is counted once.
        entry_tokens: tokens per entry (above 1 for compressed entries).
        window: tokens of the window, None when everything is kept.
        sinks: first tokens that are kept besides the window.
        fixed_bytes: bytes of all layers that do not grow with tokens (states).
        selector_bytes: bytes per entry and layer of index keys that choose what is read.
        top_k: entries read per step, None for all.

    Raises:
        RequestError: a number is out of range or does not belong to the kind.
    """

    kind: AttentionKind
    layers: int
    entry_bytes: int
    entry_tokens: int = 1
    window: int | None = None
    sinks: int = 0
    fixed_bytes: int = 0
    selector_bytes: int = 0
    top_k: int | None = None

    def __post_init__(self) -> None:
        if self.layers < 1 or self.entry_tokens < 1:
            raise RequestError(
                f"a KV group needs at least one layer and one token per entry, got {self.layers} and "
                f"{self.entry_tokens}",
                field="layers",
            )
        if min(self.entry_bytes, self.sinks, self.fixed_bytes, self.selector_bytes) < 0:
            raise RequestError("sizes of a KV group must not be negative", field="entry_bytes")
        if (self.window is None) == (self.kind is AttentionKind.SLIDING):
            raise RequestError(f"a window belongs to sliding groups only, got {self.window}", field="window")
        if self.window is not None and self.window < 1:
            raise RequestError(f"window must be at least 1 token, got {self.window}", field="window")

    def kept_tokens(self, tokens: int) -> int:
        """Tokens of a prefix whose entries are kept: all, or the sinks and the window."""
        if self.window is None:
            return tokens
        return min(tokens, self.window + self.sinks)

    def prefix_bytes(self, tokens: int) -> int:
        """Bytes of all layers for a prefix of ``tokens``, a last partial entry not counted."""
        entries = self.kept_tokens(tokens) // self.entry_tokens
        return self._fixed(tokens) + self.layers * (self.entry_bytes + self.selector_bytes) * entries

    def start_bytes(self, tokens: int) -> int:
        """The least that must be here before the next token; sparse groups fetch other rows when they are chosen."""
        entries = self.kept_tokens(tokens) // self.entry_tokens
        rows = entries if self.top_k is None else min(entries, self.top_k)
        return self._fixed(tokens) + self.layers * (self.entry_bytes * rows + self.selector_bytes * entries)

    def move_bytes(self, start: int, stop: int) -> int:
        """Bytes to move so that a reader that is whole at ``start`` tokens is whole at ``stop``."""
        if stop <= start:
            return 0
        if self.window is None:
            moved = stop // self.entry_tokens - start // self.entry_tokens
            return self._fixed(stop) + self.layers * (self.entry_bytes + self.selector_bytes) * moved
        sinks = max(0, min(self.sinks, stop) - start)
        window = stop - max(start, min(self.sinks, stop), stop - self.window)
        entries = (sinks + window) // self.entry_tokens
        return self._fixed(stop) + self.layers * (self.entry_bytes + self.selector_bytes) * entries

    def _fixed(self, tokens: int) -> int:
        return self.fixed_bytes if tokens > 0 else 0


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The layout of a model's KV in blocks.

    Attributes:
        model: name and revision.
        dtype: element type of the KV.
        block_tokens: tokens per block, a multiple of every group's ``entry_tokens``.
        groups: at least one.

    Raises:
        RequestError: there is no group, or blocks would cut entries.
    """

    model: str
    dtype: str
    block_tokens: int
    groups: tuple[KVGroup, ...]

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise RequestError(f"block_tokens must be at least 1, got {self.block_tokens}", field="block_tokens")
        if not self.groups:
            raise RequestError("a layout needs at least one KV group", field="groups")
        for group in self.groups:
            if self.block_tokens % group.entry_tokens:
                raise RequestError(
                    f"block_tokens must be a multiple of {group.entry_tokens}, the tokens of one {group.kind.value} "
                    f"entry, got {self.block_tokens}",
                    field="block_tokens",
                )

    @property
    def block_bytes(self) -> int:
        """Bytes of one full block over all groups."""
        return sum(
            group.layers * (group.entry_bytes + group.selector_bytes) * self.block_tokens // group.entry_tokens
            for group in self.groups
        )

    @property
    def growing_block_bytes(self) -> int:
        """Bytes by which a long prefix grows per block: groups that keep everything."""
        return sum(
            group.layers * (group.entry_bytes + group.selector_bytes) * self.block_tokens // group.entry_tokens
            for group in self.groups
            if group.window is None
        )

    @property
    def fixed_bytes(self) -> int:
        """Bytes of a long prefix that do not grow: states, windows and sinks."""
        return sum(
            group.fixed_bytes + (0 if group.window is None else group.prefix_bytes(group.window + group.sinks))
            for group in self.groups
        )

    def prefix_bytes(self, tokens: int) -> int:
        """Bytes of the KV of ``tokens`` tokens."""
        return sum(group.prefix_bytes(tokens) for group in self.groups)

    def start_bytes(self, tokens: int) -> int:
        """The least a node must hold of ``tokens`` tokens before it can decode the next one."""
        return sum(group.start_bytes(tokens) for group in self.groups)

    def move_bytes(self, start: int, stop: int) -> int:
        """Bytes to move so that a reader that is whole at ``start`` tokens is whole at ``stop``."""
        return sum(group.move_bytes(start, stop) for group in self.groups)

    def fingerprint(self) -> str:
        """Digest of everything that decides whether two workers can exchange blocks, 16 hex digits."""
        return blake2b(repr(self).encode(), digest_size=8).hexdigest()


class GroupHolding(Protocol):
    """What somebody holds of one group of a chain."""

    def longest(self, blocks: int) -> int:
        """Largest boundary ≤ ``blocks`` at which this group can be made whole; 0 always can."""


@dataclass(frozen=True, slots=True)
class ChainHeld:
    """Full, latent and sparse groups: the first ``blocks`` blocks without a gap."""

    blocks: int

    def longest(self, blocks: int) -> int:
        """See `GroupHolding`."""
        return min(blocks, self.blocks)


@dataclass(frozen=True, slots=True)
class WindowHeld:
    """Sliding groups: blocks that may have gaps.

    Attributes:
        present: for every block of the chain whether it is held.
        window_blocks: blocks before a boundary that must be there (`window_blocks`).
        sink_blocks: first blocks that must be there too.
    """

    present: Sequence[bool]
    window_blocks: int
    sink_blocks: int = 0

    def longest(self, blocks: int) -> int:
        """See `GroupHolding`. One pass over the blocks up to the boundary."""
        sinks = min(self.sink_blocks, len(self.present))
        prefix = next((i for i, held in enumerate(self.present[: self.sink_blocks]) if not held), sinks)
        run, best = 0, 0
        for boundary in range(1, min(blocks, len(self.present)) + 1):
            run = run + 1 if self.present[boundary - 1] else 0
            if run >= min(boundary, self.window_blocks) and prefix >= min(boundary, self.sink_blocks):
                best = boundary
        return best


@dataclass(frozen=True, slots=True)
class StatesHeld:
    """Linear groups: boundaries, in blocks, at which a state is stored."""

    boundaries: frozenset[int]

    def longest(self, blocks: int) -> int:
        """See `GroupHolding`."""
        return max((boundary for boundary in self.boundaries if boundary <= blocks), default=0)


def window_blocks(window: int, block_tokens: int) -> int:
    """Blocks before a block boundary that hold the last ``window − 1`` tokens, which the next token attends to."""
    return -(-(window - 1) // block_tokens)


def hit_boundary(holdings: Sequence[GroupHolding], limit_blocks: int) -> int:
    """Longest boundary, in blocks, at which every group can be made whole.

    Each group may only shorten the boundary; the search ends when all agree, so at most at 0.
    """
    boundary = limit_blocks
    while True:
        shorter = boundary
        for held in holdings:
            shorter = held.longest(shorter)
        if shorter == boundary:
            return boundary
        boundary = shorter
