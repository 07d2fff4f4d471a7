"""Prices of plans: expected time to the first token.  (pure)

Redo is priced for all workers at once, as columns; loads for one (worker, holder) pair at a time, since bounds leave
few pairs that can win (`router.decide`). Nothing here knows a clock or mutates its arguments. With ``W`` the wait for
the GPU, ``P(u|c)`` the prefill curve, ``L(m)`` the moment at which the prefix is whole up to block ``m``:

    redo            W + P(n−o | o)                             o = own prefix
    load up to m    max(W, L(m)) + P(n−m | m)                  L(m) = backlog of both ends + α + (F + (m−o)·s)/β
    split           front [o, o+k) computed while the tail loads, k* where W + C(k) = L

Beyond the block that arrives while the GPU is busy anyway (L(m) = W), the price of a load is concave in m: each
further token costs s/β and saves a + b·m, which grows. So the best boundary is one of two: about the last block that
is free, or everything the holder has. With probability p a load fails, is noticed, and what is missing is redone; a
split that fails costs its help only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvpool.plan import PlanKind
from kvpool.reports import WorkerLoad
from router.estimators import PrefillCurve
from router.signals import Columns, Floats, Footprint, Snapshot

FEW = 8
"""Up to so many entries one by one are faster than an array."""


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


class Pair(NamedTuple):
    """One worker that might load from one holder.

    Attributes:
        wait_ns, redo_ns: W and P(n−o|o) of the worker.
        own_blocks, held_blocks: what the worker and the holder have, in blocks.
        total_tokens: n.
        backlog_ns: wait for the later of both ends of the link.
        alpha_ns, byte_ns: the link.
        failure: chance that the load fails.
        t0_ns, token_ns, pair_ns: the worker's prefill curve.
    """

    wait_ns: float
    redo_ns: float
    own_blocks: int
    held_blocks: int
    total_tokens: int
    backlog_ns: float
    alpha_ns: float
    byte_ns: float
    failure: float
    t0_ns: float
    token_ns: float
    pair_ns: float

    def prefill_ns(self, cached_tokens: int) -> float:
        """P(n − c | c)."""
        total = self.total_tokens
        return self.t0_ns + (total - cached_tokens) * (self.token_ns + self.pair_ns * 0.5 * (total + cached_tokens))


def queue_ns(load: WorkerLoad, curve: PrefillCurve) -> float:
    """Prefill work a worker reports: rest of its step plus the admitted queue, whose requests are taken as equal."""
    tokens = load.queued_prefill_tokens
    if tokens <= 0:
        return float(load.step_remaining_ns)
    requests = max(1, load.waiting_requests)
    pairs = tokens * (load.queued_context_tokens + 0.5 * tokens) / requests
    return load.step_remaining_ns + requests * curve.t0_ns + curve.token_ns * tokens + curve.pair_ns * pairs


def wait_ns(snapshot: Snapshot, costs: Costs) -> Floats:
    """W: how long each worker's GPU is promised; inf for workers that are closed. One that does not report is assumed
    busy."""
    columns, now_ns = snapshot.columns, snapshot.now_ns
    wait = np.maximum(columns.gpu_free_ns - now_ns, columns.closed_ns)
    oldest_ns = now_ns - costs.stale_report_ns
    if snapshot.oldest_report_ns < oldest_ns:
        wait += (columns.reported_ns < oldest_ns) * costs.unknown_wait_ns
    return wait


def prefill_ns(columns: Columns, total_tokens: int, cached_tokens: int = 0) -> Floats:
    """P(n − c | c) for every worker, with the same c < n."""
    new = total_tokens - cached_tokens
    t0_ns, token_ns, pair_ns = columns.curves
    time: Floats = pair_ns * (cached_tokens + 0.5 * new)
    time += token_ns
    time *= new
    time += t0_ns
    return time


def redo_ns(columns: Columns, total_tokens: int, owners: Mapping[int, int], block_tokens: int) -> Floats:
    """P(n − o | o) for every worker, with o from ``owners`` (position → blocks) and 0 elsewhere."""
    redo = prefill_ns(columns, total_tokens)
    if len(owners) <= FEW:
        _, token_ns, pair_ns = columns.curves
        for position, blocks in owners.items():
            cached = blocks * block_tokens
            redo[position] -= cached * (token_ns.item(position) + 0.5 * cached * pair_ns.item(position))
        return redo
    positions = list(owners)
    own = np.array([owners[i] * block_tokens for i in positions], dtype=np.float64)
    _, slopes, pairs = columns.curves[:, positions]
    redo[positions] -= own * (slopes + (0.5 * own) * pairs)
    return redo


def price_redo(wait: float, redo: float, own_blocks: int) -> Price:
    """Everything that is not cached here is computed here."""
    return Price(PlanKind.REDO, wait + redo, wait + redo, redo, own_blocks)


def price_load(pair: Pair, footprint: Footprint, costs: Costs) -> Price | None:
    """Load front-first to the better of the two boundaries, then redo the rest; None when there is nothing to load."""
    whole = price_whole_load(pair, footprint, costs)
    if whole is None:
        return None
    start_ns, block_ns = _link_times(pair, footprint)
    free = pair.own_blocks + _free_blocks(pair, footprint, start_ns, block_ns)
    if not pair.own_blocks < free < pair.held_blocks:
        return whole
    part = _load_to(pair, footprint, costs, free, start_ns + (free - pair.own_blocks) * block_ns)
    return part if part.ttft_ns < whole.ttft_ns else whole


def price_whole_load(pair: Pair, footprint: Footprint, costs: Costs) -> Price | None:
    """Load everything the holder has, front-first, then redo the rest; None when it has nothing more."""
    if pair.held_blocks <= pair.own_blocks:
        return None
    start_ns, block_ns = _link_times(pair, footprint)
    arrival_ns = start_ns + (pair.held_blocks - pair.own_blocks) * block_ns
    return _load_to(pair, footprint, costs, pair.held_blocks, arrival_ns)


def _link_times(pair: Pair, footprint: Footprint) -> tuple[float, float]:
    """When the first block could arrive, and the time of each."""
    start_ns = pair.backlog_ns + pair.alpha_ns + footprint.fixed_bytes * pair.byte_ns
    return start_ns, footprint.block_bytes * pair.byte_ns


def _free_blocks(pair: Pair, footprint: Footprint, start_ns: float, block_ns: float) -> int:
    """Blocks that arrive while the GPU is busy anyway, and the next one too when waiting for it beats redoing it."""
    slack = pair.wait_ns - start_ns
    if slack <= 0.0:
        return 0
    span = pair.held_blocks - pair.own_blocks
    if span * block_ns <= slack:
        return span
    free = int(slack / block_ns)
    cached = (pair.own_blocks + free) * footprint.block_tokens
    redo_next = footprint.block_tokens * (pair.token_ns + pair.pair_ns * (cached + 0.5 * footprint.block_tokens))
    return free + 1 if (free + 1) * block_ns - slack < redo_next else free


def _load_to(pair: Pair, footprint: Footprint, costs: Costs, boundary: int, arrival_ns: float) -> Price:
    rest = pair.prefill_ns(boundary * footprint.block_tokens)
    happy = max(pair.wait_ns, arrival_ns) + rest
    failed = max(pair.wait_ns, arrival_ns + costs.notice_ns) + max(pair.redo_ns, rest)
    return Price(PlanKind.LOAD, happy + pair.failure * (failed - happy), happy, rest, boundary, arrival_ns)


def split_tokens(pair: Pair, footprint: Footprint) -> float:
    """k*: tokens of the missing prefix to compute from the front while its tail loads, in [0, span].

    Solves t0 + (a + b·o)·k + b·k²/2 + W = backlog + α + (F + (span−k)·s)/β.
    """
    own = pair.own_blocks * footprint.block_tokens
    span = max(0, pair.held_blocks * footprint.block_tokens - own)
    start_ns, block_ns = _link_times(pair, footprint)
    token_ns = block_ns / footprint.block_tokens
    slack = start_ns + span * token_ns - pair.wait_ns - pair.t0_ns
    if slack <= 0.0:
        return 0.0
    linear = pair.token_ns + pair.pair_ns * own + token_ns
    root = math.sqrt(linear * linear + 2.0 * pair.pair_ns * slack)
    if linear + root <= 0.0:
        return float(span)
    return min(float(span), 2.0 * slack / (linear + root))  # the stable form of the root, right for b = 0 too


def price_split(pair: Pair, footprint: Footprint) -> Price | None:
    """Compute the front while the tail loads; None when there is no tail to load.

    The front is at least one token: however fast the link, a split does not wait for a load that died.
    """
    front = max(1.0, split_tokens(pair, footprint))
    own, held = pair.own_blocks * footprint.block_tokens, pair.held_blocks * footprint.block_tokens
    if front >= held - own:
        return None
    front_ns = pair.t0_ns + front * (pair.token_ns + pair.pair_ns * (own + 0.5 * front))
    start_ns, block_ns = _link_times(pair, footprint)
    arrival_ns = start_ns + (held - own - front) * block_ns / footprint.block_tokens
    rest = pair.prefill_ns(held)
    happy = max(pair.wait_ns + front_ns, arrival_ns) + rest
    failed = max(happy, pair.wait_ns + pair.redo_ns)
    return Price(
        PlanKind.SPLIT,
        happy + pair.failure * (failed - happy),
        happy,
        front_ns + rest,
        pair.held_blocks,
        arrival_ns,
        int(front),
    )
