"""Prices of one worker and one holder, as scalars that `router.compiled` makes machine code of.  (pure)

Plain Python that numba understands, and gives the same numbers either way. Called by whoever prices one pair, and
inlined by the loops over all workers (`router.kernel`, `router.kernel_stripes`). With ``W`` the wait for the GPU,
``P(u|c)`` the prefill curve, ``L(m)`` the moment at which the prefix is whole up to block ``m``, ``f`` the time that a
block takes from host memory to where the worker computes:

    redo            W + P(n−o | o)                             o = own prefix
    load up to m    max(W, L(m)) + (m−o)·f + P(n−m | m)        L(m) = start + (m−o)·block
    split           front [o, o+k) computed while the tail loads, k* where W + C(k) = L

Beyond the block that arrives while the GPU is busy anyway (L(m) = W), the price of a load is concave in m: each
further token costs s/β and saves a + b·m, which grows. So the best boundary is one of two: about the last block that
is free, or everything the holder has. With probability p a load fails, is noticed, and what is missing is redone; a
split that fails costs its help only.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Pair(NamedTuple):
    """One worker that might load from one holder.

    Attributes:
        wait_ns, redo_ns: W and P(n−o|o) of the worker.
        own_blocks, held_blocks: what the worker and the holder have, in blocks of ``block_tokens``.
        total_tokens: n.
        start_ns, block_ns: when both ends of the link are free, α and what moves in any case are over, and the time of
            each block from there on.
        failure: chance that the load fails.
        t0_ns, token_ns, pair_ns: the worker's prefill curve.
        fill_ns: what each loaded block takes from host memory to where the worker computes.
    """

    wait_ns: float
    redo_ns: float
    own_blocks: int
    held_blocks: int
    total_tokens: int
    block_tokens: int
    start_ns: float
    block_ns: float
    failure: float
    t0_ns: float
    token_ns: float
    pair_ns: float
    fill_ns: float = 0.0


Link = tuple[float, float]  # α, and time per byte
LoadCost = tuple[float, float, float, int, float]  # as in `router.cost.Price`, from ``ttft_ns`` to ``load_ns``
SplitCost = tuple[float, float, float, int, float, int]  # and the tokens of the front


def prefill_ns(t0_ns: float, token_ns: float, pair_ns: float, total: float, cached: float) -> float:
    """P(n − c | c)."""
    return t0_ns + (total - cached) * (token_ns + pair_ns * 0.5 * (total + cached))


def cost_of_load(pair: Pair, notice_ns: float) -> LoadCost:
    """Load front-first to the better of the two boundaries, then redo the rest. There must be something to load."""
    whole = cost_of_whole_load(pair, notice_ns)
    free = pair.own_blocks + _free_blocks(pair)
    if not pair.own_blocks < free < pair.held_blocks:
        return whole
    part = _load_to(pair, notice_ns, free, pair.start_ns + (free - pair.own_blocks) * pair.block_ns)
    return part if part[0] < whole[0] else whole


def cost_of_whole_load(pair: Pair, notice_ns: float) -> LoadCost:
    """Load everything the holder has, front-first, then redo the rest. There must be something to load."""
    arrival_ns = pair.start_ns + (pair.held_blocks - pair.own_blocks) * pair.block_ns
    return _load_to(pair, notice_ns, pair.held_blocks, arrival_ns)


def _free_blocks(pair: Pair) -> int:
    """Blocks that arrive while the GPU is busy anyway, and the next one too when waiting for it beats redoing it."""
    slack = pair.wait_ns - pair.start_ns
    if slack <= 0.0:
        return 0
    span = pair.held_blocks - pair.own_blocks
    if span * pair.block_ns <= slack:
        return span
    free = int(slack / pair.block_ns)
    cached = (pair.own_blocks + free) * pair.block_tokens
    redo_next = pair.block_tokens * (pair.token_ns + pair.pair_ns * (cached + 0.5 * pair.block_tokens))
    return free + 1 if (free + 1) * pair.block_ns - slack + pair.fill_ns < redo_next else free


def _load_to(pair: Pair, notice_ns: float, boundary: int, arrival_ns: float) -> LoadCost:
    rest = prefill_ns(pair.t0_ns, pair.token_ns, pair.pair_ns, pair.total_tokens, boundary * pair.block_tokens)
    happy = max(pair.wait_ns, arrival_ns) + (boundary - pair.own_blocks) * pair.fill_ns + rest
    failed = max(happy, max(pair.wait_ns, arrival_ns + notice_ns) + max(pair.redo_ns, rest))
    return happy + pair.failure * (failed - happy), happy, rest, boundary, arrival_ns


def split_tokens(pair: Pair) -> float:
    """k*: tokens of the missing prefix to compute from the front while its tail loads, in [0, span].

    Solves t0 + (a + b·o)·k + b·k²/2 + W = start + (span−k)·s/β.
    """
    own = pair.own_blocks * pair.block_tokens
    span = max(0, pair.held_blocks * pair.block_tokens - own)
    token_ns = pair.block_ns / pair.block_tokens
    slack = pair.start_ns + span * token_ns - pair.wait_ns - pair.t0_ns
    if slack <= 0.0:
        return 0.0
    linear = pair.token_ns + pair.pair_ns * own + token_ns
    root = math.sqrt(linear * linear + 2.0 * pair.pair_ns * slack)
    if linear + root <= 0.0:
        return float(span)
    return min(float(span), 2.0 * slack / (linear + root))  # the stable form of the root, right for b = 0 too


def cost_of_split(pair: Pair) -> SplitCost:
    """Compute the front while the tail loads; infinite when there is no tail to load.

    The front is at least one token: however fast the link, a split does not wait for a load that died.
    """
    front = max(1.0, split_tokens(pair))
    own, held = pair.own_blocks * pair.block_tokens, pair.held_blocks * pair.block_tokens
    if front >= held - own:
        return math.inf, math.inf, 0.0, 0, 0.0, 0
    front_ns = pair.t0_ns + front * (pair.token_ns + pair.pair_ns * (own + 0.5 * front))
    arrival_ns = pair.start_ns + (held - own - front) * pair.block_ns / pair.block_tokens
    rest = prefill_ns(pair.t0_ns, pair.token_ns, pair.pair_ns, pair.total_tokens, held)
    happy = max(pair.wait_ns + front_ns, arrival_ns) + (held - own - front) / pair.block_tokens * pair.fill_ns + rest
    failed = max(happy, pair.wait_ns + pair.redo_ns)
    ttft = happy + pair.failure * (failed - happy)
    return ttft, happy, front_ns + rest, pair.held_blocks, arrival_ns, int(front)


def least_ns(pair: Pair, split: bool) -> float:
    """No plan that loads costs less, whatever its boundary, over this link or a worse one; without failures and fills.

    A load is whole, or ends about where the GPU is free: no plan that fills the wait for the GPU passes one block
    more. If the first block comes later than that, the price of a part lies above the chord between both ends.
    """
    own, held = pair.own_blocks * pair.block_tokens, pair.held_blocks * pair.block_tokens
    rest = prefill_ns(pair.t0_ns, pair.token_ns, pair.pair_ns, pair.total_tokens, held)
    wait, start = pair.wait_ns, pair.start_ns
    arrival = start + (pair.held_blocks - pair.own_blocks) * pair.block_ns
    if arrival <= wait:
        return wait + rest
    blocks = (wait - start) / pair.block_ns + 1.0 if start < wait else 1.0
    reach = min(float(held), own + blocks * pair.block_tokens)
    part = max(wait, start) + prefill_ns(pair.t0_ns, pair.token_ns, pair.pair_ns, pair.total_tokens, reach)
    bound = min(arrival + rest, part)
    if split:
        front = split_tokens(pair)
        front_ns = pair.t0_ns + front * (pair.token_ns + pair.pair_ns * (own + 0.5 * front))
        met = arrival - front * pair.block_ns / pair.block_tokens
        bound = min(bound, max(wait, min(wait + front_ns, met)) + rest)
    return bound
