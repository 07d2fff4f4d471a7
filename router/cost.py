"""Prices of plans: expected time to the first token, for every worker at once.  (pure)

All functions take and return numpy columns, one entry per candidate worker, in nanoseconds and blocks; none knows a
clock or mutates its arguments. With ``W`` the wait for the GPU, ``P(u|c)`` the prefill curve, ``L(m)`` the moment at
which the prefix is whole up to block ``m``:

    redo            W + P(n−o | o)                             o = own prefix
    load up to m    max(W, L(m)) + P(n−m | m)                  L(m) = backlog of both ends + α + (F + (m−o)·s)/β
    split           front [o, o+k) computed while the tail loads, k* where C(k) + W = L

Beyond the block that arrives while the GPU is busy anyway (L(m) = W), the price of a load is concave in m: each
further token costs s/β and saves a + b·m, which grows. So the best boundary is one of two: the last block that is
free, or everything the holder has. With probability p a load fails, is noticed, and what is missing is redone.

Source: SCIENCE study of this project (docs/science.md); the split point solves t0 + a·k + b·(k·o + k²/2) = L.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kvpool.reports import WorkerLoad
from router.estimators import PrefillCurve
from router.signals import Columns, Floats, Footprint, LinkRow


@dataclass(frozen=True, slots=True)
class Costs:
    """What pricing assumes besides the learned curves. All are times or pure numbers.

    Attributes:
        notice_ns: time to notice that a load died.
        unknown_wait_ns: queue assumed for a worker whose load is not known.
        stale_report_ns: age from which a report no longer counts as known.
    """

    notice_ns: float = 250e6
    unknown_wait_ns: float = 2e9
    stale_report_ns: float = 10e9


@dataclass(frozen=True, slots=True)
class Priced:
    """One plan priced for every candidate.

    Attributes:
        ttft_ns: expected time to the first token, failures included; inf where the plan does not apply.
        happy_ns: the same when nothing fails.
        gpu_ns: prefill time it takes.
        boundary: blocks that are whole before the rest is computed.
        load_ns: moment, from now, when the loads have ended.
        front_tokens: for a split, tokens computed while the tail loads.
    """

    ttft_ns: Floats
    happy_ns: Floats
    gpu_ns: Floats
    boundary: Floats
    load_ns: Floats
    front_tokens: Floats | None = None


def queue_ns(load: WorkerLoad, curve: PrefillCurve) -> float:
    """Prefill work a worker reports: rest of its step plus the admitted queue, whose requests are taken as equal."""
    tokens = load.queued_prefill_tokens
    if tokens <= 0:
        return float(load.step_remaining_ns)
    requests = max(1, load.waiting_requests)
    pairs = tokens * (load.queued_context_tokens + 0.5 * tokens) / requests
    return load.step_remaining_ns + requests * curve.t0_ns + curve.token_ns * tokens + curve.pair_ns * pairs


def wait_ns(columns: Columns, now_ns: int, costs: Costs) -> Floats:
    """W: how long each worker's GPU is promised; a worker that does not report is assumed busy."""
    wait = np.maximum(columns.gpu_free_ns - now_ns, 0.0)
    unknown = columns.reported_ns < now_ns - costs.stale_report_ns
    if unknown.any():
        wait = wait + unknown * costs.unknown_wait_ns
    return wait


def prefill_ns(columns: Columns, total_tokens: int, cached_tokens: Floats) -> Floats:
    """P(n − c | c) for every worker, with c < n."""
    new = total_tokens - cached_tokens
    return columns.t0_ns + new * (columns.token_ns + columns.pair_ns * (0.5 * (total_tokens + cached_tokens)))


def price_redo(wait: Floats, redo: Floats, own_blocks: Floats) -> Priced:
    """Everything that is not cached here is computed here."""
    total = wait + redo
    return Priced(total, total, redo, own_blocks, np.zeros_like(wait))


@dataclass(frozen=True, slots=True)
class LoadInputs:
    """What pricing a load from one holder needs besides the columns.

    Attributes:
        wait, redo: W and P(n−o|o) of every candidate.
        own_blocks: o in blocks.
        held_blocks: what the holder has, in blocks.
        total_tokens: n.
        backlog: wait for the later of both ends of the link, per candidate.
        row: curves of the links.
        failure: chance that the load fails.
    """

    wait: Floats
    redo: Floats
    own_blocks: Floats
    held_blocks: int
    total_tokens: int
    backlog: Floats
    row: LinkRow
    failure: float


def price_whole_load(columns: Columns, inputs: LoadInputs, footprint: Footprint, costs: Costs) -> Priced:
    """Load everything one holder has, front-first, then redo the rest."""
    start = inputs.backlog + inputs.row.alpha_ns + footprint.fixed_bytes * inputs.row.byte_ns
    block_ns = footprint.block_bytes * inputs.row.byte_ns
    whole = np.full_like(start, inputs.held_blocks)
    arrival = start + (whole - inputs.own_blocks) * block_ns
    priced = _load_to(columns, inputs, footprint, costs, whole, arrival)
    return replace(priced, ttft_ns=np.where(whole > inputs.own_blocks, priced.ttft_ns, np.inf))


def price_load(columns: Columns, inputs: LoadInputs, footprint: Footprint, costs: Costs) -> Priced:
    """Load front-first from one holder, to its best boundary, then redo the rest."""
    whole = price_whole_load(columns, inputs, footprint, costs)
    start = inputs.backlog + inputs.row.alpha_ns + footprint.fixed_bytes * inputs.row.byte_ns
    block_ns = footprint.block_bytes * inputs.row.byte_ns
    free = inputs.own_blocks + _free_blocks(columns, inputs, footprint, start, block_ns)
    partial = (free > inputs.own_blocks) & (free < inputs.held_blocks)
    if not partial.any():
        return whole
    boundary = np.where(partial, free, float(inputs.held_blocks))
    arrival = start + (boundary - inputs.own_blocks) * block_ns
    part = _load_to(columns, inputs, footprint, costs, boundary, arrival)
    return _better(whole, replace(part, ttft_ns=np.where(partial, part.ttft_ns, np.inf)))


def _free_blocks(columns: Columns, inputs: LoadInputs, footprint: Footprint, start: Floats, block_ns: Floats) -> Floats:
    """Blocks that arrive while the GPU is busy anyway, and the next one too when waiting for it beats redoing it."""
    slack = inputs.wait - start
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        free = np.floor(slack / block_ns)
    free = np.clip(np.nan_to_num(free, nan=0.0), 0.0, 1e9)
    cached = (inputs.own_blocks + free) * footprint.block_tokens
    redo_next = footprint.block_tokens * (columns.token_ns + columns.pair_ns * (cached + 0.5 * footprint.block_tokens))
    worth = (slack > 0.0) & ((free + 1.0) * block_ns - slack < redo_next)
    return np.asarray(free + worth, dtype=np.float64)


def _load_to(
    columns: Columns, inputs: LoadInputs, footprint: Footprint, costs: Costs, boundary: Floats, arrival: Floats
) -> Priced:
    rest = prefill_ns(columns, inputs.total_tokens, boundary * footprint.block_tokens)
    happy = np.maximum(inputs.wait, arrival) + rest
    failed = np.maximum(inputs.wait, arrival + costs.notice_ns) + np.maximum(inputs.redo, rest)
    ttft = happy + inputs.failure * (failed - happy)
    return Priced(ttft, happy, rest, boundary, arrival)


def _better(left: Priced, right: Priced) -> Priced:
    """Entry by entry the cheaper of two; the left one among equals."""
    take = right.ttft_ns < left.ttft_ns
    return Priced(
        np.where(take, right.ttft_ns, left.ttft_ns),
        np.where(take, right.happy_ns, left.happy_ns),
        np.where(take, right.gpu_ns, left.gpu_ns),
        np.where(take, right.boundary, left.boundary),
        np.where(take, right.load_ns, left.load_ns),
    )


def split_tokens(columns: Columns, inputs: LoadInputs, footprint: Footprint) -> Floats:
    """k*: tokens of the missing prefix to compute from the front while its tail loads; 0 when loading is free.

    Solves t0 + (a + b·o)·k + b·k²/2 + W = backlog + α + (F + (m−o−k)·s)/β, clipped to [0, m−o].
    """
    token_ns = footprint.block_bytes / footprint.block_tokens * inputs.row.byte_ns
    own = inputs.own_blocks * footprint.block_tokens
    span = np.maximum(inputs.held_blocks * footprint.block_tokens - own, 0.0)
    start = inputs.backlog + inputs.row.alpha_ns + footprint.fixed_bytes * inputs.row.byte_ns
    slack = start + span * token_ns - inputs.wait - columns.t0_ns
    linear = columns.token_ns + columns.pair_ns * own + token_ns
    slack = np.maximum(slack, 0.0)
    root = np.sqrt(linear * linear + 2.0 * columns.pair_ns * slack)
    with np.errstate(divide="ignore", invalid="ignore"):
        meet = 2.0 * slack / (linear + root)  # the stable form of the quadratic's root, right for b = 0 too
    return np.clip(np.nan_to_num(meet), 0.0, span)


def price_split(columns: Columns, inputs: LoadInputs, footprint: Footprint, front_tokens: Floats) -> Priced:
    """Compute the front while the tail loads. Its worst case is the redo: a failed load only costs its help."""
    own = inputs.own_blocks * footprint.block_tokens
    held = np.full_like(own, inputs.held_blocks * footprint.block_tokens)
    front = columns.t0_ns + front_tokens * (columns.token_ns + columns.pair_ns * (own + 0.5 * front_tokens))
    token_ns = footprint.block_bytes / footprint.block_tokens * inputs.row.byte_ns
    start = inputs.backlog + inputs.row.alpha_ns + footprint.fixed_bytes * inputs.row.byte_ns
    arrival = start + np.maximum(held - own - front_tokens, 0.0) * token_ns
    rest = prefill_ns(columns, inputs.total_tokens, held)
    happy = np.maximum(inputs.wait + front, arrival) + rest
    failed = inputs.wait + inputs.redo
    ttft = happy + inputs.failure * np.maximum(failed - happy, 0.0)
    applies = (held > own) & (front_tokens > 0.0) & (front_tokens < held - own)
    return Priced(
        np.where(applies, ttft, np.inf),
        happy,
        front + rest,
        np.full_like(own, inputs.held_blocks),
        arrival,
        front_tokens,
    )
