"""The arithmetic of prices and of the search: scalars in loops, which `router.compiled` makes machine code of.  (pure)

Everything here is plain Python that numba understands, and gives the same numbers either way. Prices of one worker and
one holder are called by whoever prices one pair, and inlined by the loops over all workers. With ``W`` the wait for the
GPU, ``P(u|c)`` the prefill curve, ``L(m)`` the moment at which the prefix is whole up to block ``m``:

    redo            W + P(n−o | o)                             o = own prefix
    load up to m    max(W, L(m)) + P(n−m | m)                  L(m) = start + (m−o)·block
    split           front [o, o+k) computed while the tail loads, k* where W + C(k) = L

Beyond the block that arrives while the GPU is busy anyway (L(m) = W), the price of a load is concave in m: each
further token costs s/β and saves a + b·m, which grows. So the best boundary is one of two: about the last block that
is free, or everything the holder has. With probability p a load fails, is noticed, and what is missing is redone; a
split that fails costs its help only.

All in one file: numba keeps compiled code by the file of the compiled function, and would not notice another's change.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Rows of the table of all workers; see `router.signals.Columns`.
CLOSED, HOLDER, RANK, REPORTED, GPU_FREE, IN_FREE, OUT_FREE, REQUESTS = range(8)
QUEUED, EMPTY, ARRIVALS, TURNOVER, PRESSURE, T0, TOKEN, PAIR = range(8, 16)

# Rows of what a decision works with, and of what its record keeps; see `score_redo`.
READ, READ_REDO, FILL, CROWD, KEEP = range(5)
WAIT, REDO, OWN = range(3)

# Columns of a holder in the sheet; see `score_redo`.
POSITION, BLOCKS, TIER, BOUND = range(4)
TABLE_ROWS, WORK_ROWS, KEPT_ROWS, HELD_COLUMNS = 16, 5, 3, 4
DEVICE, HOST, DISK = 0.0, 1.0, 2.0

TERMS = 25  # numbers in `Terms`
ROUNDING = 1.0 + 1e-12  # bounds and prices are computed in different orders


class Terms(NamedTuple):
    """What is the same for every worker in one decision; the loops get it as the beginning of the sheet.

    The moment, and since when a report is missing and ``unknown_ns`` of queue are assumed; the prompt's length; the
    bytes that move (`router.signals.Footprint`); the time to notice that a load died; what turns the order of equal
    workers; `router.planning.Harm`, with ``follow`` per arrival counted and ``keep_ns`` per block that must leave under
    a pressure of 1; 1 when workers can split; a prefill curve no worker's is below; links no link of a tier is better
    than.
    """

    now_ns: float
    oldest_ns: float
    unknown_ns: float
    total_tokens: float
    chain_blocks: float
    block_tokens: float
    block_bytes: float
    fixed_bytes: float
    notice_ns: float
    ticket: float
    base: float
    follow: float
    cap_ns: float
    share: float
    share_limit: float
    beside: float
    keep_ns: float
    split: float
    t0_ns: float
    token_ns: float
    pair_ns: float
    device_alpha_ns: float
    device_byte_ns: float
    host_alpha_ns: float
    host_byte_ns: float


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


Link = tuple[float, float]  # α, and time per byte
LoadCost = tuple[float, float, float, int, float]  # as in `router.cost.Price`, from ``ttft_ns`` to ``load_ns``
SplitCost = tuple[float, float, float, int, float, int]  # and the tokens of the front

# -- one pair


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
    return free + 1 if (free + 1) * pair.block_ns - slack < redo_next else free


def _load_to(pair: Pair, notice_ns: float, boundary: int, arrival_ns: float) -> LoadCost:
    rest = prefill_ns(pair.t0_ns, pair.token_ns, pair.pair_ns, pair.total_tokens, boundary * pair.block_tokens)
    happy = max(pair.wait_ns, arrival_ns) + rest
    failed = max(pair.wait_ns, arrival_ns + notice_ns) + max(pair.redo_ns, rest)
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
    happy = max(pair.wait_ns + front_ns, arrival_ns) + rest
    failed = max(happy, pair.wait_ns + pair.redo_ns)
    ttft = happy + pair.failure * (failed - happy)
    return ttft, happy, front_ns + rest, pair.held_blocks, arrival_ns, int(front)


def least_ns(pair: Pair, split: bool) -> float:
    """No plan that loads costs less, whatever its boundary, over this link or a worse one; failures are left out.

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


# -- all workers


def terms_of(sheet: Floats) -> Terms:
    """The beginning of the sheet by its names."""
    return Terms(
        sheet[0], sheet[1], sheet[2], sheet[3], sheet[4], sheet[5], sheet[6], sheet[7], sheet[8], sheet[9],
        sheet[10], sheet[11], sheet[12], sheet[13], sheet[14], sheet[15], sheet[16], sheet[17], sheet[18], sheet[19],
        sheet[20], sheet[21], sheet[22], sheet[23], sheet[24],
    )  # fmt: skip


def held_of(sheet: Floats) -> Floats:
    """The rest of the sheet: a row for every holder; a view."""
    return sheet[TERMS:].reshape((sheet.size - TERMS) // HELD_COLUMNS, HELD_COLUMNS)


def score_redo(
    table: Floats, work: Floats, kept: Floats, sheet: Floats
) -> tuple[float, float, float, int, int, int, float]:
    """Wait, prefill and score of redo on every worker; and for every holder a bound on what loads from it score.

    Args:
        table: the workers, by column; rows as named above.
        work: rows of the same width. Read: what lies on a worker's own disk takes ``READ`` to be read and ``READ_REDO``
            to be computed; it waits ``FILL`` longer in any case. Written: what each ns of prefill costs others there
            (``CROWD``), and what must leave its cache (``KEEP``).
        kept: written: W, P(n−o | o) and o, in blocks.
        sheet: `Terms`; then for every holder its position, blocks, tier, and room for its bound, which is written.
            Longest first, disks included, which nobody else may read but which make a worker's own prefix longer.

    Returns:
        The least score; its prefill time, its worker's requests and turn, which decide between equals; that worker;
        the holder to try first, or -1, and its bound.
    """
    terms, held, size = terms_of(sheet), held_of(sheet), table.shape[1]
    assert work.shape[1] == kept.shape[1] == size  # compiled code would read beyond an array without a word
    for i in range(size):
        kept[OWN, i] = 0.0
    for j in range(held.shape[0]):
        position = int(held[j, POSITION])
        assert 0 <= position < size
        kept[OWN, position] = max(kept[OWN, position], held[j, BLOCKS])
    least_wait = _score_waits(table, work, kept, terms)
    best, best_gpu, best_requests, best_turn, position = math.inf, math.inf, math.inf, 0, 0
    for i in range(size):
        wait, gpu = kept[WAIT, i], kept[REDO, i]
        score = wait + gpu + min(gpu, terms.cap_ns) * work[CROWD, i] + work[KEEP, i] if wait < math.inf else math.inf
        if score > best:
            continue
        requests, turn = table[REQUESTS, i], _turn(table, i, terms)
        if score < best or _before(gpu, requests, turn, best_gpu, best_requests, best_turn):
            best, best_gpu, best_requests, best_turn, position = score, gpu, requests, turn, i
    _bound_holders(table, held, terms, least_wait)
    at, bound = _next_holder(table, held)
    return best, best_gpu, best_requests, best_turn, position, at, bound


def _score_waits(table: Floats, work: Floats, kept: Floats, terms: Terms) -> float:
    """Fills waits, prefills, crowds and keeps; returns the least wait."""
    size = table.shape[1]
    queued, reachable, least = 0.0, 0, math.inf
    for i in range(size):
        wait = max(table[GPU_FREE, i] - terms.now_ns, table[CLOSED, i])
        if table[REPORTED, i] < terms.oldest_ns:
            wait += terms.unknown_ns
        wait = max(wait, min(work[READ, i], wait + work[READ_REDO, i])) + work[FILL, i]
        kept[WAIT, i] = wait
        if wait < math.inf:
            queued += table[ARRIVALS, i] * wait
            reachable += 1
        least = min(least, wait)
    common = terms.base
    if terms.share > 0.0 and reachable:
        common += min(terms.share_limit, terms.share * (queued * terms.follow) / reachable)
    total = terms.total_tokens
    for i in range(size):
        t0, token, pair, wait = table[T0, i], table[TOKEN, i], table[PAIR, i], kept[WAIT, i]
        cached = kept[OWN, i] * terms.block_tokens
        kept[REDO, i] = (pair * (0.5 * total) + token) * total + t0 - cached * (token + 0.5 * cached * pair)
        crowd = table[ARRIVALS, i] * wait * terms.follow if wait < math.inf else 0.0
        work[CROWD, i] = crowd + common + table[REQUESTS, i] * terms.beside
        leaving = terms.chain_blocks - table[EMPTY, i] - kept[OWN, i]
        work[KEEP, i] = leaving * table[PRESSURE, i] * terms.keep_ns if leaving > 0.0 else 0.0
    return least


def _bound_holders(table: Floats, held: Floats, terms: Terms, least_wait: float) -> None:
    """The bound of a holder is that of a worker with the least wait, the fastest prefill, and the longest prefix that
    is shorter, over the best link."""
    count, total, block_tokens, shorter = held.shape[0], int(terms.total_tokens), int(terms.block_tokens), 0
    for j in range(count - 1, -1, -1):
        position, blocks = int(held[j, POSITION]), int(held[j, BLOCKS])
        if j + 1 < count and int(held[j + 1, BLOCKS]) < blocks:
            shorter = int(held[j + 1, BLOCKS])
        alpha, byte = _best_link(held[j, TIER], terms)
        start = _backlog(table, position, terms) + alpha + terms.fixed_bytes * byte
        pair = Pair(
            least_wait, 0.0, shorter, blocks, total, block_tokens, start, terms.block_bytes * byte, 0.0,
            terms.t0_ns, terms.token_ns, terms.pair_ns,
        )  # fmt: skip
        rest = prefill_ns(terms.t0_ns, terms.token_ns, terms.pair_ns, total, blocks * block_tokens)
        bound = least_ns(pair, terms.split > 0.0) + min(rest, terms.cap_ns) * terms.base
        held[j, BOUND] = bound if table[HOLDER, position] > 0.0 and held[j, TIER] < DISK else math.inf


def _best_link(tier: float, terms: Terms) -> Link:
    if tier == DEVICE:
        return terms.device_alpha_ns, terms.device_byte_ns
    return terms.host_alpha_ns, terms.host_byte_ns


def _backlog(table: Floats, position: int, terms: Terms) -> float:
    """For how long a worker's way out is promised."""
    free_ns: float = table[OUT_FREE, position]
    return max(0.0, free_ns - terms.now_ns)


def _next_holder(table: Floats, held: Floats) -> tuple[int, float]:
    """The holder of least bound, then of least backlog, then the first in key order; -1 when none is left."""
    at, bound, backlog, rank = -1, math.inf, math.inf, math.inf
    for j in range(held.shape[0]):
        if held[j, BOUND] > bound or held[j, BOUND] == math.inf:
            continue
        busy, other = table[OUT_FREE, int(held[j, POSITION])], table[RANK, int(held[j, POSITION])]
        if _before(held[j, BOUND], busy, other, bound, backlog, rank):
            at, bound, backlog, rank = j, held[j, BOUND], busy, other
    return at, bound


def _raise_bounds(table: Floats, held: Floats, terms: Terms, at: int, floor: float) -> None:
    """A holder was tried; another one as long whose link is no sooner free gives no less than ``floor`` either."""
    busy = _backlog(table, int(held[at, POSITION]), terms)
    for j in range(held.shape[0]):
        alike = held[j, BLOCKS] == held[at, BLOCKS] and held[j, TIER] == held[at, TIER]
        if alike and _backlog(table, int(held[j, POSITION]), terms) >= busy:
            held[j, BOUND] = max(held[j, BOUND], floor)
    held[at, BOUND] = math.inf


def _before(a: float, b: float, c: float, other_a: float, other_b: float, other_c: float) -> bool:
    """(a, b, c) comes before the others."""
    return (a, b, c) < (other_a, other_b, other_c)


def _turn(table: Floats, position: int, terms: Terms) -> int:
    """Place of the worker in this request's order: key order, rotated by the ticket."""
    size = int(table.shape[1])
    return (int(table[RANK, position]) - int(terms.ticket)) % size


def best_load(
    table: Floats, work: Floats, kept: Floats, sheet: Floats, row: Floats, at: int, failure: float, limit: float
) -> tuple[float, float, float, int, int, bool, LoadCost, SplitCost, float, int, float]:
    """The best plan that loads from one holder, over all workers. What can neither win nor score ``limit`` is passed
    over.

    Args:
        table, work, kept, sheet: as `score_redo` left them. The bounds of holders that are as long get better.
        row: α and time per byte of the links from the holder to every worker.
        at: the holder.
        failure: chance that a load from it fails.

    Returns:
        Score, prefill time, requests and turn as for `score_redo`; the worker, -1 when no plan is left; whether the
        plan splits; the load and the split of that worker; the least that plans of other workers could score; and the
        holder to try next, or -1, and its bound.
    """
    terms, held = terms_of(sheet), held_of(sheet)
    assert work.shape[1] == kept.shape[1] == row.shape[1] == table.shape[1]
    assert 0 <= at < held.shape[0]
    total, split = int(terms.total_tokens), terms.split > 0.0
    blocks, out_ns = int(held[at, BLOCKS]), _backlog(table, int(held[at, POSITION]), terms)
    best_link = _best_link(held[at, TIER], terms)
    best, best_gpu, best_requests, best_turn, position, splits = math.inf, math.inf, math.inf, 0, -1, False
    others, group = math.inf, math.inf  # the least of other workers; of what any holder as long could give
    for i in range(table.shape[1]):
        wait, ceiling = kept[WAIT, i], min(limit, best) * ROUNDING
        if kept[OWN, i] >= blocks:
            continue
        if wait > ceiling:  # mostly; nothing else is looked at
            others, group = min(others, wait), min(group, wait)
            continue
        crowd, keep = work[CROWD, i], work[KEEP, i]
        rest = prefill_ns(table[T0, i], table[TOKEN, i], table[PAIR, i], total, blocks * int(terms.block_tokens))
        harm = min(rest, terms.cap_ns) * crowd + keep
        bound = wait + rest + harm
        if bound <= ceiling:
            bound = least_ns(_pair_of(table, kept, terms, i, blocks, out_ns, best_link, 0.0), split) + harm
        group = min(group, bound)
        if bound > ceiling:
            others = min(others, bound)
            continue
        pair = _pair_of(table, kept, terms, i, blocks, out_ns, (row[0, i], row[1, i]), failure)
        load = cost_of_load(pair, terms.notice_ns)
        score, gpu, this_splits = load[0] + min(load[2], terms.cap_ns) * crowd + keep, load[2], False
        if split:
            tail = cost_of_split(pair)
            other = tail[0] + min(tail[2], terms.cap_ns) * crowd + keep
            if other < score or (other == score and tail[2] < gpu):
                score, gpu, this_splits = other, tail[2], True
        requests, turn = table[REQUESTS, i], _turn(table, i, terms)
        if score < best or (score == best and _before(gpu, requests, turn, best_gpu, best_requests, best_turn)):
            others = min(others, best)
            best, best_gpu, best_requests, best_turn, position, splits = score, gpu, requests, turn, i, this_splits
        else:
            others = min(others, score)
    _raise_bounds(table, held, terms, at, group)
    following, bound = _next_holder(table, held)
    load, tail = (math.inf, math.inf, 0.0, 0, 0.0), (math.inf, math.inf, 0.0, 0, 0.0, 0)
    if position >= 0:
        link = (row[0, position], row[1, position])
        pair = _pair_of(table, kept, terms, position, blocks, out_ns, link, failure)
        load = cost_of_load(pair, terms.notice_ns)
        if split:
            tail = cost_of_split(pair)
    return best, best_gpu, best_requests, best_turn, position, splits, load, tail, others, following, bound


def stripes_reach(
    table: Floats, work: Floats, kept: Floats, sheet: Floats, found: Floats, chosen: int, most: int
) -> tuple[int, float]:
    """Where loads from several holders might pay: on a worker, and on the one whose GPU and way in are free first.

    Args:
        table, work, kept, sheet: as `score_redo` left them.
        found: rows of worker, blocks and bound, written: for each worker the longest lengths that several holders
            have, less than ``most``, and what plans over so many of the best links score there at least.
        chosen, most: the worker, and the holders of one load.

    Returns:
        How many rows were written, and the least of these bounds.
    """
    terms, held, size = terms_of(sheet), held_of(sheet), table.shape[1]
    assert work.shape[1] == kept.shape[1] == size
    assert found.shape[0] >= 2 * (most - 1)
    free, least, turn = chosen, math.inf, 0
    for i in range(size):
        ready = max(kept[WAIT, i], table[IN_FREE, i] - terms.now_ns)
        if ready < least or (ready == least and _turn(table, i, terms) < turn):
            free, least, turn = i, ready, _turn(table, i, terms)
    count, bound = 0, math.inf
    for i in (chosen, free):
        lengths, last, several = 0, 0, False
        for j in range(held.shape[0] if count == 0 or i != chosen else 0):
            other, blocks = int(held[j, POSITION]), int(held[j, BLOCKS])
            if blocks <= kept[OWN, i] or lengths == most - 1:
                break
            if other == i or table[HOLDER, other] == 0.0 or held[j, TIER] == DISK:
                continue
            if several and blocks != last:
                found[count, 0], found[count, 1] = i, blocks
                found[count, 2] = _stripes_floor(table, work, kept, terms, i, blocks, most)
                bound = min(bound, found[count, 2])
                count, lengths, last = count + 1, lengths + 1, blocks
            several = True
    return count, bound


def _stripes_floor(table: Floats, work: Floats, kept: Floats, terms: Terms, i: int, blocks: int, most: int) -> float:
    """No plan over ``most`` holders scores less; what moves in any case is not counted for them."""
    byte = min(terms.device_byte_ns, terms.host_byte_ns) / most
    alpha = min(terms.device_alpha_ns, terms.host_alpha_ns) - terms.fixed_bytes * byte
    pair = _pair_of(table, kept, terms, i, blocks, 0.0, (alpha, byte), 0.0)
    rest = prefill_ns(pair.t0_ns, pair.token_ns, pair.pair_ns, pair.total_tokens, blocks * pair.block_tokens)
    harm: float = min(rest, terms.cap_ns) * work[CROWD, i] + work[KEEP, i]
    return least_ns(pair, terms.split > 0.0) + harm


def _pair_of(
    table: Floats, kept: Floats, terms: Terms, i: int, blocks: int, out_ns: float, link: Link, failure: float
) -> Pair:
    """The worker ``i`` and a holder of so many blocks whose way out is promised for ``out_ns``."""
    backlog = max(out_ns, table[IN_FREE, i] - terms.now_ns)
    start_ns, block_ns = backlog + link[0] + terms.fixed_bytes * link[1], terms.block_bytes * link[1]
    total, block_tokens, own = int(terms.total_tokens), int(terms.block_tokens), int(kept[OWN, i])
    wait, redo, t0, token, pair = kept[WAIT, i], kept[REDO, i], table[T0, i], table[TOKEN, i], table[PAIR, i]
    return Pair(wait, redo, own, blocks, total, block_tokens, start_ns, block_ns, failure, t0, token, pair)
