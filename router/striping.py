"""One load from several holders at once: what it is, and who brings which blocks.  (pure)

Holder i can start at sᵢ (backlog of both ends, α) and then moves rᵢ blocks per ns. Until T all of them together bring
Σ rᵢ·(T − sᵢ), which is a link that starts at S = Σ rᵢ·sᵢ / R and moves R = Σ rᵢ: so load and split over several holders
are priced like over one, and each brings its share rᵢ·(T − sᵢ). The rates are those of single links times what the
reader was seen to take from several at once (``together``). `router.kernel_stripes` finds the best of them.

The blocks are dealt out in rounds, front to back, so that the prefix grows without gaps while it loads and a holder
that fails leaves holes of a round's size; its rest moves to the others, who stand behind every slice as alternates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from router.cost import Price
from router.kernel_stripes import LEAST_BYTE_NS, MIN_STRIPE_BLOCKS
from router.signals import Footprint, Holding

MAX_ROUNDS = 4


class Way(NamedTuple):
    """One holder as a source: when its first byte could come, from now, and its time per byte."""

    holding: Holding
    start_ns: float
    byte_ns: float


class Stripes(NamedTuple):
    """A load over several holders.

    Attributes:
        price: of the plan.
        ways: the holders.
        blocks: how many each brings.
        start_ns, byte_ns: the link they are together.
    """

    price: Price
    ways: tuple[Way, ...]
    blocks: tuple[int, ...]
    start_ns: float
    byte_ns: float


def share_out(
    price: Price, ways: Sequence[Way], own_blocks: int, footprint: Footprint, start_ns: float, byte_ns: float
) -> Stripes:
    """A priced load over several holders, with what each of them brings; one that would not bring a whole block is left
    out.

    Args:
        price: of the plan; its boundary is what all of them have.
        ways: the holders.
        own_blocks: what the reader has.
        footprint: bytes that move.
        start_ns, byte_ns: the link they are together.
    """
    loaded = price.boundary - first_block(price, own_blocks, footprint.block_tokens)
    shares = [max(0.0, price.load_ns - way.start_ns) / max(way.byte_ns, LEAST_BYTE_NS) for way in ways]
    blocks = _apportion(loaded, shares)
    bringing = [(way, count) for way, count in zip(ways, blocks, strict=True) if count]
    return Stripes(price, tuple(way for way, _ in bringing), tuple(count for _, count in bringing), start_ns, byte_ns)


def first_block(price: Price, own_blocks: int, block_tokens: int) -> int:
    """Where the loads of a plan begin."""
    if price.front_tokens is None:
        return own_blocks
    return min(price.boundary - 1, own_blocks + price.front_tokens // block_tokens)


def _apportion(count: int, shares: Sequence[float]) -> list[int]:
    """Whole numbers that add up to ``count``, in proportion to ``shares``."""
    total, given, reached, made = sum(shares), 0, 0.0, []
    for share in shares:
        reached += share
        until = round(count * reached / total) if total > 0.0 else count
        made.append(until - given)
        given = until
    return made


def deal(start: int, stop: int, blocks: Sequence[int]) -> list[tuple[int, int, int]]:
    """(start, stop, number of the holder) of every slice of ``[start, stop)``, in order, dealt out in rounds."""
    rounds = max(1, min(MAX_ROUNDS, min(blocks) // MIN_STRIPE_BLOCKS))
    parts, place = [], start
    for number in range(rounds):
        for who, count in enumerate(blocks):
            share = count * (number + 1) // rounds - count * number // rounds
            if share:
                parts.append((place, place + share, who))
                place += share
    assert place == stop, "the shares do not add up to the slice"
    return parts
