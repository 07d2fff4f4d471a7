"""Lower bounds on the score of loads, for all workers at once: what lets `router.decide` price few pairs.  (pure)

For one holder, the bound of a worker is the price of its best load over the *best* link of the tier, without failures;
the harm is that of the prefill that is left in any case. With equal links and no failures bound and score agree, so
the search ends after the first pair. Arrays are columns in the order of the workers, times in ns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from kvpool.types import Tier
from router.cost import prefill_ns
from router.estimators import LinkCurve
from router.scores import Case
from router.signals import Bools, Columns, Floats, Footprint, Holding, LinkRow


class Fleetwide(NamedTuple):
    """What all bounds of one decision share.

    Attributes:
        owners: blocks each worker has, by position, without zeros.
        wait: W of each worker; inf where the request may not go.
        crowd, keep: what each ns of prefill, and what leaves the cache, costs others; None when that is nothing.
        backlog_in: how long each worker's way in is promised, negative once that has passed.
        total_tokens: length of the prompt.
    """

    columns: Columns
    owners: Mapping[int, int]
    wait: Floats
    crowd: Floats | None
    keep: Floats | None
    backlog_in: Floats
    total_tokens: int
    footprint: Footprint

    def own(self) -> Floats:
        """``owners`` as a column."""
        own = np.zeros(len(self.wait))
        for position, blocks in self.owners.items():
            own[position] = blocks
        return own


class Ahead(NamedTuple):
    """What any worker can hope for from a holder of ``blocks`` in ``tier``: the fastest prefill curve, the best link,
    and the longest prefix that is shorter as its own. Times of the GPU include the harm that is always there.

    Attributes:
        latency_ns: until a load's first byte.
        block_ns: of each block from there on; ``span`` of them are missing.
        rest_ns: what the GPU computes behind the holder's prefix; ``redo_ns`` behind the first missing block.
        t0_ns, token_ns, pair_ns: of the missing part.
    """

    blocks: int
    tier: Tier
    latency_ns: float
    block_ns: float
    span: int
    block_tokens: int
    rest_ns: float
    redo_ns: float
    t0_ns: float
    token_ns: float
    pair_ns: float


def rest_behind(case: Case, blocks: int) -> tuple[float, float]:
    """The least that any worker computes behind a prefix of so many blocks, and the harm of it that is always there."""
    harm, total, curve = case.params.harm, case.request.prompt_tokens, case.snapshot.fastest
    cached = blocks * case.snapshot.footprint.block_tokens
    rest = curve.t0_ns + (total - cached) * (curve.token_ns + 0.5 * curve.pair_ns * (total + cached))
    return rest, (rest if rest < harm.cap_ns else harm.cap_ns) * harm.base


def look_ahead(case: Case, holding: Holding, own: int, rest_ns: float, always_ns: float) -> Ahead:
    """For holders of as many blocks in this tier; ``own`` is the longest prefix that is shorter, the times are what
    `rest_behind` gives."""
    snapshot, total = case.snapshot, case.request.prompt_tokens
    footprint, curve, link = snapshot.footprint, snapshot.fastest, snapshot.links.best(holding.tier)
    block_tokens, byte_ns, pair_ns = footprint.block_tokens, link.byte_ns, curve.pair_ns
    first = (own + 1) * block_tokens
    redo = curve.t0_ns + (total - first) * (curve.token_ns + 0.5 * pair_ns * (total + first))
    return Ahead(
        holding.blocks,
        holding.tier,
        link.alpha_ns + footprint.fixed_bytes * byte_ns,
        footprint.block_bytes * byte_ns,
        holding.blocks - own,
        block_tokens,
        rest_ns + always_ns,
        redo + always_ns,
        curve.t0_ns,
        curve.token_ns + pair_ns * own * block_tokens,
        pair_ns,
    )


def best_case(ahead: Ahead, wait: float, backlog: float, *, split: bool) -> float:
    """No load from such a holder scores less on any worker, its way out being promised for ``backlog``.

    A load is whole or, since the price of a partial one lies above the chord between its ends, the redo that starts
    when the load does, less one block.
    """
    start = backlog + ahead.latency_ns
    arrival = start + ahead.span * ahead.block_ns
    rest = ahead.rest_ns
    bound = min((arrival if arrival > wait else wait) + rest, (start if start > wait else wait) + ahead.redo_ns)
    if not split:
        return bound
    token_ns = ahead.block_ns / ahead.block_tokens
    front = _split_front(ahead.t0_ns, ahead.token_ns, ahead.pair_ns, token_ns, arrival - wait)
    return min(bound, max(wait, min(wait + front, arrival)) + rest)


def whole_ns(ahead: Ahead, backlog: float) -> float:
    """No plan makes the prefix of such a holder whole sooner than this on any worker, whatever its wait.

    Computing and loading at once from now on is the soonest; the fixed time of a pass is left out, because a plan that
    only goes on computing pays it once.
    """
    arrival = backlog + ahead.latency_ns + ahead.span * ahead.block_ns
    token_ns = ahead.block_ns / ahead.block_tokens
    met = _split_front(ahead.t0_ns, ahead.token_ns, ahead.pair_ns, token_ns, arrival)
    return max(0.0, min(arrival, met) - ahead.t0_ns)


def pairs_in_reach(
    case: Case, ahead: Ahead, backlog_out: float, row: LinkRow, best: float
) -> list[tuple[float, float, int, int]]:
    """(bound, requests, turn, position) of every worker that could score below ``best`` by loading from one holder,
    best first. The bound is `load_bound`'s loose one over the pair's own link, one worker at a time; for few workers,
    whose scores are lists."""
    scores, snapshot, columns, owners = case.scores, case.snapshot, case.snapshot.columns, case.owners
    footprint, total, blocks, cap_ns = (
        snapshot.footprint,
        case.request.prompt_tokens,
        ahead.blocks,
        case.params.harm.cap_ns,
    )
    crowd, keep = scores.crowd, scores.keep
    assert isinstance(crowd, list)
    assert isinstance(keep, list)
    t0s, slopes, pairs = scores.curves
    cached = blocks * footprint.block_tokens
    new, half, highest = total - cached, 0.5 * (total + cached), best - ahead.rest_ns
    cap_ns = case.params.harm.cap_ns
    found: list[tuple[float, float, int, int]] = []
    for position, wait in enumerate(scores.wait):
        if wait >= highest:
            continue
        pair = pairs[position]
        rest = t0s[position] + new * (slopes[position] + pair * half)
        score = rest + (rest if rest < cap_ns else cap_ns) * crowd[position] + keep[position]
        own = owners.get(position, 0)
        if wait + score >= best or own >= blocks:
            continue
        byte_ns, backlog_in = row.byte_ns[position], columns.in_free_ns.item(position) - snapshot.now_ns
        start = backlog_out if backlog_out > backlog_in else backlog_in
        start += row.alpha_ns[position] + footprint.fixed_bytes * byte_ns
        block_ns = footprint.block_bytes * byte_ns
        arrival = start + (blocks - own) * block_ns
        whole = wait if start < wait else arrival
        bound = score + whole
        if bound >= best and snapshot.features.split:
            token_ns = slopes[position] + pair * own * footprint.block_tokens
            front = _split_front(t0s[position], token_ns, pair, block_ns / footprint.block_tokens, arrival - wait)
            bound = score + max(wait, min(front + wait, whole))
        if bound < best:
            turn = (columns.rank.item(position) - case.ticket) % len(columns)
            found.append((bound, columns.requests.item(position), turn, position))
    found.sort()
    return found


def _split_front(t0_ns: float, token_ns: float, pair_ns: float, load_ns: float, gap_ns: float) -> float:
    """C(k*): compute time of a split's front when the whole load would end ``gap_ns`` after the GPU is free."""
    slack = gap_ns - t0_ns
    if slack <= 0.0:
        return gap_ns
    linear = token_ns + load_ns
    front = 2.0 * slack / max(linear + math.sqrt(linear * linear + 2.0 * pair_ns * slack), 1e-300)
    return t0_ns + front * (token_ns + 0.5 * pair_ns * front)


def rest_ns(fleet: Fleetwide, blocks: int) -> Floats:
    """P(n − c | c) behind a prefix of ``blocks``; inf for workers that have as much themselves."""
    rest = prefill_ns(fleet.columns, fleet.total_tokens, blocks * fleet.footprint.block_tokens)
    for position, own in fleet.owners.items():
        if own >= blocks:
            rest[position] = np.inf
    return rest


def load_bound(
    fleet: Fleetwide, rest: Floats, blocks: int, backlog_out: float, link: LinkCurve, *, split: bool, tight: bool
) -> Floats:
    """Least time to the first token by any plan that loads from a holder of ``blocks``; inf where ``rest`` is.

    ``tight`` takes half the time more and is better for workers whose wait lies between start and end of the load.
    """
    wait = fleet.wait
    block_ns = fleet.footprint.block_bytes * link.byte_ns
    start = np.maximum(fleet.backlog_in, backlog_out)
    start += link.alpha_ns + fleet.footprint.fixed_bytes * link.byte_ns
    arrival = start + blocks * block_ns
    for position, own in fleet.owners.items():
        arrival[position] -= own * block_ns
    bound = np.maximum(wait, arrival)
    partial = start < wait
    if not tight:
        bound = np.where(partial, wait, bound) + rest
    else:
        bound += rest
        partial &= wait < arrival
        if partial[partial.argmax()]:
            bound = np.minimum(bound, _partial_bound(fleet, rest, start, block_ns, blocks, partial))
    return np.minimum(bound, _split_bound(fleet, rest, arrival, blocks, block_ns)) if split else bound


def _partial_bound(
    fleet: Fleetwide, rest: Floats, start: Floats, block_ns: float, blocks: int, partial: Bools
) -> Floats:
    """W + P(n − m | m) at a boundary no plan that fills the wait for the GPU passes."""
    columns, total = fleet.columns, fleet.total_tokens
    reach = np.minimum(fleet.own() + (fleet.wait - start) / block_ns + 1.0, float(blocks))
    cached = reach * fleet.footprint.block_tokens
    redo = columns.t0_ns + (total - cached) * (columns.token_ns + 0.5 * (total + cached) * columns.pair_ns)
    return np.where(partial & (rest < np.inf), fleet.wait + redo, np.inf)


def _split_bound(fleet: Fleetwide, rest: Floats, arrival: Floats, blocks: int, block_ns: float) -> Floats:
    """W + C(k*) + rest, with k* in closed form (see `router.cost.split_tokens`)."""
    columns, block_tokens, own = fleet.columns, fleet.footprint.block_tokens, fleet.own()
    token_ns = block_ns / block_tokens
    slack = np.maximum(arrival - fleet.wait - columns.t0_ns, 0.0)
    base = columns.token_ns + columns.pair_ns * (block_tokens * own)
    linear = base + token_ns
    root = np.sqrt(linear * linear + 2.0 * columns.pair_ns * slack)
    front = np.minimum(2.0 * slack / np.maximum(linear + root, 1e-300), np.maximum(blocks - own, 0.0) * block_tokens)
    compute = columns.t0_ns + front * (base + 0.5 * columns.pair_ns * front)
    met = arrival - front * token_ns
    return np.asarray(np.maximum(fleet.wait, np.minimum(fleet.wait + compute, met)) + rest, dtype=np.float64)
