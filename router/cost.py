"""Prices of plans for one worker and one holder: expected time to the first token.  (pure)

The arithmetic is `router.prices`'; here it gets its words. Nothing here knows a clock or mutates its arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvpool.plan import PlanKind
from kvpool.reports import WorkerLoad
from router import prices
from router.estimators import LinkCurve, PrefillCurve
from router.prices import Pair
from router.signals import Footprint

__all__ = [
    "Costs",
    "Pair",
    "Price",
    "make_pair",
    "price_load",
    "price_redo",
    "price_split",
    "price_whole_load",
    "queue_ns",
]


@dataclass(frozen=True, slots=True)
class Costs:
    """What pricing assumes besides the learned curves. All are times.

    Attributes:
        notice_ns: time to notice that a load died.
        unknown_wait_ns: queue assumed for a worker whose load is not known.
        stale_report_ns: age from which a report no longer counts as known.
    """

    notice_ns: float = 250e6
    unknown_wait_ns: float = 2e9
    stale_report_ns: float = 10e9


class Price(NamedTuple):
    """One plan on one worker.

    Attributes:
        ttft_ns: expected time to the first token, failures included; inf when the plan does not apply.
        happy_ns: the same when nothing fails.
        gpu_ns: prefill time it takes.
        boundary: blocks that are whole before the rest is computed.
        load_ns: moment, from now, when the loads have ended.
        front_tokens: for a split, tokens computed while the tail loads.
    """

    kind: PlanKind
    ttft_ns: float
    happy_ns: float
    gpu_ns: float
    boundary: int
    load_ns: float = 0.0
    front_tokens: int | None = None


def queue_ns(load: WorkerLoad, curve: PrefillCurve) -> float:
    """Prefill work a worker reports: rest of its step plus the admitted queue, whose requests are taken as equal."""
    tokens = load.queued_prefill_tokens
    if tokens <= 0:
        return float(load.step_remaining_ns)
    requests = max(1, load.waiting_requests)
    pairs = tokens * (load.queued_context_tokens + 0.5 * tokens) / requests
    return load.step_remaining_ns + requests * curve.t0_ns + curve.token_ns * tokens + curve.pair_ns * pairs


def make_pair(
    wait_ns: float,
    redo_ns: float,
    own_blocks: int,
    held_blocks: int,
    total_tokens: int,
    footprint: Footprint,
    backlog_ns: float,
    link: LinkCurve,
    failure: float,
    curve: PrefillCurve,
    fill_ns: float = 0.0,
) -> Pair:
    """A pair whose link moves ``footprint``, once both ends of it are free after ``backlog_ns``; each block takes
    ``fill_ns`` more to where the reader computes."""
    start_ns = backlog_ns + link.alpha_ns + footprint.fixed_bytes * link.byte_ns
    block_ns = footprint.block_bytes * link.byte_ns
    return Pair(
        wait_ns, redo_ns, own_blocks, held_blocks, total_tokens, footprint.block_tokens, start_ns, block_ns, failure,
        curve.t0_ns, curve.token_ns, curve.pair_ns, fill_ns,
    )  # fmt: skip


def price_redo(wait: float, redo: float, own_blocks: int) -> Price:
    """Everything that is not cached here is computed here."""
    return Price(PlanKind.REDO, wait + redo, wait + redo, redo, own_blocks)


def price_load(pair: Pair, costs: Costs) -> Price | None:
    """Load front-first to the better of the two boundaries, then redo the rest; None when there is nothing to load."""
    if pair.held_blocks <= pair.own_blocks:
        return None
    return Price(PlanKind.LOAD, *prices.cost_of_load(pair, costs.notice_ns))


def price_whole_load(pair: Pair, costs: Costs) -> Price | None:
    """Load everything the holder has, front-first, then redo the rest; None when it has nothing more."""
    if pair.held_blocks <= pair.own_blocks:
        return None
    return Price(PlanKind.LOAD, *prices.cost_of_whole_load(pair, costs.notice_ns))


def price_split(pair: Pair) -> Price | None:
    """Compute the front while the tail loads; None when there is no tail to load."""
    price = Price(PlanKind.SPLIT, *prices.cost_of_split(pair))
    return price if price.boundary else None
