"""One load from several holders at once: when it pays, and who brings which blocks.  (pure)

Holder i can start at sᵢ (backlog of both ends, α) and then moves rᵢ blocks per ns. Until T all of them together bring
Σ rᵢ·(T − sᵢ), which is a link that starts at S = Σ rᵢ·sᵢ / R and moves R = Σ rᵢ: so load and split over several holders
are priced like over one, and each brings its share rᵢ·(T − sᵢ). The rates are those of single links times what the
reader was seen to take from several at once (``together``).

The blocks are dealt out in rounds, front to back, so that the prefix grows without gaps while it loads and a holder
that fails leaves holes of a round's size; its rest moves to the others, who stand behind every slice as alternates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from router.cost import Costs, Pair, Price, price_split, price_whole_load
from router.kernel import cost_of_whole_load
from router.signals import Footprint, Holding

MIN_GAIN = 0.05
"""Share of the time to the first token that each further holder must save: more holders, more that can fail."""

MIN_STRIPE_BLOCKS = 8
MAX_ROUNDS = 4


class Way(NamedTuple):
    """One holder as a source: when its first byte could come, from now, time per byte, chance to fail; ``rank`` is its
    place in key order, which decides between equals."""

    holding: Holding
    start_ns: float
    byte_ns: float
    failure: float
    rank: float


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


def best_stripes(
    pair: Pair, ways: Sequence[Way], footprint: Footprint, costs: Costs, *, split: bool, most: int, together: float
) -> Stripes | None:
    """The cheapest plan over two to ``most`` holders; None when none is a load.

    Args:
        pair: the reader; what it says of the link is not used.
        ways: holders of at least ``pair.held_blocks``.
        footprint, costs: what pricing assumes.
        split: the worker can split.
        together: share of the sum of the single rates that the reader takes from several at once.
    """
    ordered = sorted(ways, key=lambda way: (_alone_ns(pair, way, footprint, costs), way.rank))
    best: Stripes | None = None
    for count in range(2, min(most, len(ordered)) + 1):
        found = _over(pair, ordered[:count], footprint, costs, split=split, together=together)
        if found is None or (best is not None and found.price.ttft_ns > (1 - MIN_GAIN) * best.price.ttft_ns):
            break
        best = found
    return best


def _alone_ns(pair: Pair, way: Way, footprint: Footprint, costs: Costs) -> float:
    """What everything from one holder costs, its failures included: a fast one that often fails stands behind."""
    block_ns = footprint.block_bytes * way.byte_ns
    alone = pair._replace(start_ns=way.start_ns, block_ns=block_ns, failure=way.failure)
    return cost_of_whole_load(alone, costs.notice_ns)[0]


def _over(
    pair: Pair, ways: Sequence[Way], footprint: Footprint, costs: Costs, *, split: bool, together: float
) -> Stripes | None:
    rates = [together / max(way.byte_ns, 1e-12) for way in ways]
    rate = sum(rates)
    start_ns = sum(r * way.start_ns for r, way in zip(rates, ways, strict=True)) / rate
    byte_ns, survives = 1.0 / rate, 1.0
    for way in ways:
        survives *= 1.0 - way.failure
    alone = pair._replace(start_ns=start_ns, block_ns=footprint.block_bytes * byte_ns, failure=1.0 - survives)
    prices = [price_whole_load(alone, costs), price_split(alone) if split else None]
    price = min((item for item in prices if item is not None), key=lambda item: item.ttft_ns, default=None)
    if price is None:
        return None
    loaded = pair.held_blocks - first_block(price, pair.own_blocks, footprint.block_tokens)
    end_ns = start_ns + loaded * footprint.block_bytes * byte_ns
    shares = [r * max(0.0, end_ns - way.start_ns) for r, way in zip(rates, ways, strict=True)]
    blocks = _apportion(loaded, shares)
    if min(blocks) < MIN_STRIPE_BLOCKS:
        return None  # one of them starts too late to help
    return Stripes(price, tuple(ways), tuple(blocks), start_ns, byte_ns)


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
