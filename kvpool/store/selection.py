"""Which blocks an administrator means.  (pure)"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvpool.errors import RequestError
from kvpool.store.worth import Block
from kvpool.types import BlockHash


@dataclass(frozen=True, slots=True)
class Selection:
    """All blocks for which every given condition holds; at least one is given.

    Attributes:
        chain: block hashes of a prefix: its own blocks and everything that continues it. One hash alone stands for
            that block and what continues it.
        tenant: blocks of this tenant.
        idle_ns: blocks that were not used for at least this long.
    """

    chain: tuple[BlockHash, ...] = ()
    tenant: str | None = None
    idle_ns: int | None = None

    def __post_init__(self) -> None:
        if not self.chain and self.tenant is None and self.idle_ns is None:
            raise RequestError("say which blocks: a prefix, a tenant or an age", field="selection")
        if self.idle_ns is not None and self.idle_ns < 0:
            raise RequestError(f"an age is at least 0, got {self.idle_ns} ns", field="idle_ns")


def select(blocks: Iterable[Block], selection: Selection, now_ns: int) -> list[BlockHash]:
    """Hashes of the selected blocks among sealed ``blocks``."""
    held = {block.block_hash: block for block in blocks if block.block_hash is not None}
    wanted: Iterable[BlockHash] = held
    if selection.chain:
        under = _continuations(held, selection.chain[-1])
        wanted = dict.fromkeys([*(item for item in selection.chain if item in held), *under])
    chosen = []
    for block_hash in wanted:
        block = held[block_hash]
        if selection.tenant is not None and block.tenant != selection.tenant:
            continue
        if selection.idle_ns is None or now_ns - block.used_ns >= selection.idle_ns:
            chosen.append(block_hash)
    return chosen


@dataclass(frozen=True, slots=True)
class HotChain:
    """A chain worth moving: its tip was asked for more than once, and ``sole_blocks`` of it live nowhere else."""

    tenant: str
    chain: tuple[BlockHash, ...]
    sole_blocks: int


def hot_hashes(blocks: Iterable[Block]) -> list[BlockHash]:
    """Blocks that were asked for again since they came, the most valuable first."""
    hot = [block for block in blocks if block.block_hash is not None and block.uses > 1]
    hot.sort(key=lambda block: block.rank, reverse=True)
    return [block.block_hash for block in hot if block.block_hash is not None]


def hot_chains(blocks: Iterable[Block], sole: Iterable[BlockHash], tip_order: Iterable[BlockHash]) -> list[HotChain]:
    """Whole chains, from the first block on, that end in the blocks of ``sole``; each block in as few as possible.

    Args:
        blocks: all sealed ones.
        sole: hot blocks that live nowhere else.
        tip_order: hot blocks, the most valuable first; gives the order of the chains.

    A chain with a hole before its tip cannot be used by anybody and is left out.
    """
    held = {block.block_hash: block for block in blocks if block.block_hash is not None}
    wanted = {item for item in sole if item in held}
    parents = {held[item].parent for item in wanted}
    chains = []
    for tip in tip_order:
        if tip not in wanted or tip in parents:
            continue
        path = [tip]
        while (parent := held[path[-1]].parent) is not None and parent in held:
            path.append(parent)
        path.reverse()
        chains.append(HotChain(held[tip].tenant, tuple(path), sum(item in wanted for item in path)))
    return chains


def _continuations(held: dict[BlockHash, Block], root: BlockHash) -> list[BlockHash]:
    """Held blocks whose chain goes through ``root``, that one included when it is held."""
    children: dict[BlockHash, list[BlockHash]] = {}
    for block_hash, block in held.items():
        if block.parent is not None:
            children.setdefault(block.parent, []).append(block_hash)
    found = [root] if root in held else []
    stack = [root]
    while stack:
        for child in children.get(stack.pop(), ()):
            found.append(child)
            stack.append(child)
    return found
