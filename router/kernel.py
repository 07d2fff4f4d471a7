"""The search over all workers: scalars in loops, which `router.compiled` makes machine code of.  (pure)

Everything here is plain Python that numba understands, and gives the same numbers either way. Prices of one worker and
one holder are those of `router.prices`, inlined. Loads from several holders are searched in `router.kernel_stripes`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from router.prices import Link, LoadCost, Pair, SplitCost, cost_of_load, cost_of_split, least_ns, prefill_ns

Floats = NDArray[np.float64]
Places = NDArray[np.int64]

# Rows of the table of all workers; see `router.signals.Columns`.
CLOSED, HOLDER, RANK, REPORTED, GPU_FREE, IN_FREE, OUT_FREE, REQUESTS = range(8)
QUEUED, EMPTY, ARRIVALS, TURNOVER, PRESSURE, T0, TOKEN, PAIR = range(8, 16)
LINKED = 16  # and 17: of a device, and of a host's memory

# Rows of what a decision works with, and of what its record keeps; see `score_redo`.
READ, READ_REDO, FILL, FILL_BLOCK, CROWD, KEEP = range(6)
WAIT, REDO, OWN = range(3)

# Columns of a holder in the sheet; see `score_redo`.
POSITION, BLOCKS, TIER, BOUND = range(4)
TABLE_ROWS, WORK_ROWS, KEPT_ROWS, HELD_COLUMNS = 18, 6, 3, 4
DEVICE, HOST, DISK = 0.0, 1.0, 2.0

TERMS = 26  # numbers in `Terms`
MAX_HOLDERS = 16
"""Holders that are tried as the only source of a load: bounds the time of a decision when hundreds of workers hold a
hot prefix and their links differ a little."""
ROUNDING = 1.0 + 1e-12  # bounds and prices are computed in different orders


class Terms(NamedTuple):
    """What is the same for every worker in one decision; the loops get it as the beginning of the sheet.

    The moment, and since when a report is missing and ``unknown_ns`` of queue are assumed; the prompt's length; the
    bytes that move (`router.signals.Footprint`); the time to notice that a load died; what turns the order of equal
    workers; `router.planning.Harm`, with ``follow`` per arrival counted and ``keep_ns`` per block that must leave under
    a pressure of 1; 1 when workers can split; a prefill curve no worker's is below; what each further holder of a
    load counts; links no link of a tier is better than.
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
    several: float
    device_alpha_ns: float
    device_byte_ns: float
    host_alpha_ns: float
    host_byte_ns: float


# -- all workers


def terms_of(sheet: Floats) -> Terms:
    """The beginning of the sheet by its names."""
    return Terms(
        sheet[0], sheet[1], sheet[2], sheet[3], sheet[4], sheet[5], sheet[6], sheet[7], sheet[8], sheet[9],
        sheet[10], sheet[11], sheet[12], sheet[13], sheet[14], sheet[15], sheet[16], sheet[17], sheet[18], sheet[19],
        sheet[20], sheet[21], sheet[22], sheet[23], sheet[24], sheet[25],
    )  # fmt: skip


def held_of(sheet: Floats) -> Floats:
    """The rest of the sheet: a row for every holder; a view."""
    return sheet[TERMS:].reshape((sheet.size - TERMS) // HELD_COLUMNS, HELD_COLUMNS)


def score_redo(
    table: Floats, work: Floats, kept: Floats, sheet: Floats
) -> tuple[float, float, float, int, int, int, float, int, float]:
    """Wait, prefill and score of redo on every worker; and for every holder a bound on what loads from it score.

    Args:
        table: the workers, by column; rows as named above.
        work: rows of the same width. Read: what lies on a worker's own disk takes ``READ`` to be read and ``READ_REDO``
            to be computed; it waits ``FILL`` longer in any case, and each block that it loads takes ``FILL_BLOCK``
            beside the link. Written: what each ns of prefill costs others there (``CROWD``), and what must leave its
            cache (``KEEP``).
        kept: written: W, P(n−o | o) and o, in blocks, where o is at least what it says before.
        sheet: `Terms`; then for every holder its position, blocks, tier, and room for its bound, which is written.
            Longest first, disks included, which nobody else may read but which make a worker's own prefix longer.

    Returns:
        The least score; its prefill time, its worker's requests and turn, which decide between equals; that worker;
        and what `_to_try` says of the holders.
    """
    terms, held, size = terms_of(sheet), held_of(sheet), table.shape[1]
    assert work.shape[1] == kept.shape[1] == size  # compiled code would read beyond an array without a word
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
    at, bound, left, floor = _to_try(table, work, kept, held, terms, best, MAX_HOLDERS)
    return best, best_gpu, best_requests, best_turn, position, at, bound, left, floor


def first_holders(table: Floats, places: Places, chosen: Floats, now_ns: float) -> int:
    """Of many workers that hold equally much, those that a search could come to: in each of the two orders in which
    holders are taken (the way out that is free first; the least promised on it) as many as half of ``chosen``.

    Args:
        table: the workers, by column.
        places: positions of those that hold equally much.
        chosen: written.

    Returns:
        How many were written.
    """
    half = chosen.shape[0] // 2
    number = _first(table, places, chosen[:half], -math.inf)
    others = np.empty(half)
    for n in range(_first(table, places, others, now_ns)):
        fresh = True
        for m in range(number):
            fresh = fresh and chosen[m] != others[n]
        if fresh:
            chosen[number] = others[n]
            number += 1
    return number


def _first(table: Floats, places: Places, chosen: Floats, since_ns: float) -> int:
    """Those whose way out is free first, from a moment on; equals in key order, those that may not be read last."""
    number = 0
    for n in range(places.shape[0]):
        position = places[n]
        assert 0 <= position < table.shape[1]
        free = max(since_ns, table[OUT_FREE, position]) if table[HOLDER, position] > 0.0 else math.inf
        place = number
        while place > 0:
            other = int(chosen[place - 1])
            busy = max(since_ns, table[OUT_FREE, other]) if table[HOLDER, other] > 0.0 else math.inf
            if free > busy or (free == busy and table[RANK, position] > table[RANK, other]):
                break
            if place < chosen.shape[0]:
                chosen[place] = chosen[place - 1]
            place -= 1
        if place < chosen.shape[0]:
            chosen[place] = position
            number = min(number + 1, chosen.shape[0])
    return number


def _score_waits(table: Floats, work: Floats, kept: Floats, terms: Terms) -> float:
    """Fills waits, prefills, crowds and keeps; returns the least wait."""
    size = table.shape[1]
    queued, reachable, least = 0.0, 0, math.inf
    for i in range(size):
        wait = max(table[GPU_FREE, i] - terms.now_ns, table[CLOSED, i])
        if table[REPORTED, i] < terms.oldest_ns:
            wait += terms.unknown_ns
        work[CROWD, i] = table[ARRIVALS, i] * wait * terms.follow  # what this request reads or fills is no queue
        kept[WAIT, i] = max(wait, min(work[READ, i], wait + work[READ_REDO, i])) + work[FILL, i]
        if kept[WAIT, i] < math.inf:
            queued += work[CROWD, i]
            reachable += 1
        least = min(least, kept[WAIT, i])
    common = terms.base
    if terms.share > 0.0 and reachable:
        common += min(terms.share_limit, terms.share * queued / reachable)
    total = terms.total_tokens
    for i in range(size):
        t0, token, pair = table[T0, i], table[TOKEN, i], table[PAIR, i]
        cached = kept[OWN, i] * terms.block_tokens
        kept[REDO, i] = (pair * (0.5 * total) + token) * total + t0 - cached * (token + 0.5 * cached * pair)
        crowd = work[CROWD, i] if kept[WAIT, i] < math.inf else 0.0
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
            terms.t0_ns, terms.token_ns, terms.pair_ns, 0.0,
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


def _to_try(
    table: Floats, work: Floats, kept: Floats, held: Floats, terms: Terms, limit: float, left: int
) -> tuple[int, float, int, float]:
    """The first holder from which some worker might load for no more than ``limit``, or whose links are due to be
    learned anew. Those before it, which count as tried, need no look at their links: no worker would load from them
    over the best one.

    Returns:
        That holder, or -1, and its bound; how many may still be tried; and the least that loads from those before it
        could score.
    """
    floor = math.inf
    at, bound = _next_holder(table, held)
    while at >= 0 and bound < limit and left > 0:
        if table[LINKED + int(held[at, TIER]), int(held[at, POSITION])] <= terms.now_ns:
            break
        least = _least_load(table, work, kept, held, terms, at, limit * ROUNDING)
        if least <= limit * ROUNDING:
            break
        left, floor = left - 1, min(floor, least)
        _raise_bounds(table, held, terms, at, least)
        at, bound = _next_holder(table, held)
    return at, bound, left, floor


def _least_load(
    table: Floats, work: Floats, kept: Floats, held: Floats, terms: Terms, at: int, ceiling: float
) -> float:
    """The least that loads from a holder could score on any worker, or something below ``ceiling``."""
    blocks, out_ns = int(held[at, BLOCKS]), _backlog(table, int(held[at, POSITION]), terms)
    total, cached = int(terms.total_tokens), blocks * int(terms.block_tokens)
    link, split, least = _best_link(held[at, TIER], terms), terms.split > 0.0, math.inf
    for i in range(table.shape[1]):
        if kept[OWN, i] >= blocks:
            continue
        if kept[WAIT, i] > ceiling:  # mostly; nothing else is looked at
            least = min(least, kept[WAIT, i])
            continue
        rest = prefill_ns(table[T0, i], table[TOKEN, i], table[PAIR, i], total, cached)
        harm = min(rest, terms.cap_ns) * work[CROWD, i] + work[KEEP, i]
        bound = kept[WAIT, i] + rest + harm
        if bound <= ceiling:
            bound = least_ns(_pair_of(table, work, kept, terms, i, blocks, out_ns, link, 0.0), split) + harm
        least = min(least, bound)
        if least <= ceiling:
            break
    return least


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
    table: Floats,
    work: Floats,
    kept: Floats,
    sheet: Floats,
    row: Floats,
    at: int,
    failure: float,
    limit: float,
    left: int,
) -> tuple[float, float, float, int, int, bool, LoadCost, SplitCost, float, int, float, int]:
    """The best plan that loads from one holder, over all workers. What can neither win nor score ``limit`` is passed
    over.

    Args:
        table, work, kept, sheet: as `score_redo` left them. The bounds of holders that are as long get better.
        row: α and time per byte of the links from the holder to every worker.
        at: the holder.
        failure: chance that a load from it fails.
        limit: the score to beat.
        left: how many holders may be tried, this one included.

    Returns:
        Score, prefill time, requests and turn as for `score_redo`; the worker, -1 when no plan is left; whether the
        plan splits; the load and the split of that worker; the least that other plans which need not be looked at any
        more could score; and the holder to try next, or -1, its bound, and how many may still be tried.
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
            bound = least_ns(_pair_of(table, work, kept, terms, i, blocks, out_ns, best_link, 0.0), split) + harm
        group = min(group, bound)
        if bound > ceiling:
            others = min(others, bound)
            continue
        pair = _pair_of(table, work, kept, terms, i, blocks, out_ns, (row[0, i], row[1, i]), failure)
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
    following, bound, left, floor = _to_try(table, work, kept, held, terms, min(limit, best), left - 1)
    others = min(others, floor)
    load, tail = (math.inf, math.inf, 0.0, 0, 0.0), (math.inf, math.inf, 0.0, 0, 0.0, 0)
    if position >= 0:
        link = (row[0, position], row[1, position])
        pair = _pair_of(table, work, kept, terms, position, blocks, out_ns, link, failure)
        load = cost_of_load(pair, terms.notice_ns)
        if split:
            tail = cost_of_split(pair)
    return best, best_gpu, best_requests, best_turn, position, splits, load, tail, others, following, bound, left


def _pair_of(
    table: Floats,
    work: Floats,
    kept: Floats,
    terms: Terms,
    i: int,
    blocks: int,
    out_ns: float,
    link: Link,
    failure: float,
) -> Pair:
    """The worker ``i`` and a holder of so many blocks whose way out is promised for ``out_ns``."""
    backlog = max(out_ns, table[IN_FREE, i] - terms.now_ns)
    start_ns, block_ns = backlog + link[0] + terms.fixed_bytes * link[1], terms.block_bytes * link[1]
    total, block_tokens, own = int(terms.total_tokens), int(terms.block_tokens), int(kept[OWN, i])
    wait, redo, t0, token, pair = kept[WAIT, i], kept[REDO, i], table[T0, i], table[TOKEN, i], table[PAIR, i]
    fill = work[FILL_BLOCK, i]
    return Pair(wait, redo, own, blocks, total, block_tokens, start_ns, block_ns, failure, t0, token, pair, fill)
