"""The search for a load from several holders at once, as loops that `router.compiled` makes machine code of.  (pure)

`stripes_reach` bounds what such a load could score on every worker and for every length that several holders have;
`best_stripes` then prices every set of holders where that might win, and finds the optimum. So a further holder adds
sets and takes none away, and no plan gets dearer by it. What a set is worth depends on the set alone:

- every holder of it could start before the load has ended, or the set without it is better;
- there are `MIN_STRIPE_BLOCKS` of the prefix for each of its holders. Not of what is missing: then a reader that has
  more could use fewer holders, and having more would make it dearer.

A holder to which as many others are preferable as one load may have (sooner, faster and less likely to fail) is in no
best set and is left out. Bounds on the work, which large clusters reach: `LENGTHS`, `POOL`, `WAYS`, and the rows of
``found``.
"""

from __future__ import annotations

import math

import numpy as np

from router.kernel import (
    BLOCKS,
    CROWD,
    DISK,
    FILL_BLOCK,
    HOLDER,
    IN_FREE,
    KEEP,
    OWN,
    PAIR,
    POSITION,
    RANK,
    REDO,
    REQUESTS,
    ROUNDING,
    T0,
    TIER,
    TOKEN,
    WAIT,
    Floats,
    Terms,
    _backlog,
    _before,
    _pair_of,
    _turn,
    held_of,
    terms_of,
)
from router.prices import LoadCost, Pair, SplitCost, cost_of_split, cost_of_whole_load, least_ns, prefill_ns

MIN_STRIPE_BLOCKS = 8
LENGTHS = 16
"""Longest lengths that are looked at."""
POOL = 16
"""Holders that may take part: those whose way out is free first, of them the longest."""
WAYS = 8
"""Holders whose sets are tried, once those are left out to which others are preferable."""

LEAST_BYTE_NS = 1e-12
"""Of a link: rates are finite."""

Best = tuple[float, float, int, bool, LoadCost, SplitCost, float, float]
"""A plan over several holders: score and prefill time, the number of holders, whether it splits, what a load and a
split cost; and start and time per byte of the link they are together, without what moves in any case."""

# Columns of a way.
WAY_BLOCKS, WAY_BACKLOG, WAY_FAILURE, WAY_RANK = range(4)
# Columns of a candidate: first byte, time per byte, and its place among the ways.
START, BYTE, FAILURE, PLACE = range(4)


def stripes_reach(
    table: Floats, work: Floats, kept: Floats, sheet: Floats, found: Floats, pool: Floats, limit: float, most: int
) -> tuple[int, int, float]:
    """Where loads from several holders might score less than ``limit``.

    Args:
        table, work, kept, sheet: as `router.kernel.score_redo` left them.
        found: rows of worker, blocks and bound, written: what plans for so many blocks score there at least, the least
            first.
        pool: written: holders in the sheet that might take part.
        limit, most: the score to beat, and the holders of one load.

    Returns:
        How many rows and holders were written, and the least that plans elsewhere could score.
    """
    terms, held, size = terms_of(sheet), held_of(sheet), table.shape[1]
    assert work.shape[1] == kept.shape[1] == size
    lengths = np.empty((LENGTHS, 2))
    number, left = _lengths(table, held, terms, lengths)
    rows = 0
    for i in range(size if number else 0):
        if kept[WAIT, i] > limit * ROUNDING:  # mostly
            left = min(left, kept[WAIT, i])
            continue
        for n in range(number):
            blocks = int(lengths[n, 0])
            if blocks <= kept[OWN, i]:
                break
            bound = _stripes_floor(table, work, kept, terms, i, blocks, lengths[n, 1], most, limit)
            if bound >= limit:
                left = min(left, bound)
                continue
            rows, dropped = _insert(table, terms, found, rows, i, blocks, bound)
            left = min(left, dropped)
    return rows, _fill_pool(table, held, terms, found, rows, pool), left


def _lengths(table: Floats, held: Floats, terms: Terms, lengths: Floats) -> tuple[int, float]:
    """Lengths that several holders have, with a mean wait for the ways out that no set of them is below; their number,
    and 0 when there are more, else inf."""
    number, first, second = 0, math.inf, math.inf
    for j in range(held.shape[0]):
        position = int(held[j, POSITION])
        if table[HOLDER, position] == 0.0 or held[j, TIER] == DISK:
            continue
        busy = _backlog(table, position, terms)
        first, second = min(first, busy), min(second, max(first, busy))
        if second == math.inf:
            continue
        if number == 0 or lengths[number - 1, 0] != held[j, BLOCKS]:
            if number == lengths.shape[0]:
                return number, 0.0
            lengths[number, 0] = held[j, BLOCKS]
            number += 1
        lengths[number - 1, 1] = 0.5 * (first + second)
    return number, math.inf


def _stripes_floor(
    table: Floats,
    work: Floats,
    kept: Floats,
    terms: Terms,
    i: int,
    blocks: int,
    out_ns: float,
    most: int,
    limit: float,
) -> float:
    """No plan over several holders scores less, nor one over ``most`` of the best links."""
    total, cached = int(terms.total_tokens), blocks * int(terms.block_tokens)
    rest = prefill_ns(table[T0, i], table[TOKEN, i], table[PAIR, i], total, cached)
    harm = min(rest, terms.cap_ns) * work[CROWD, i] + work[KEEP, i]
    dearer = 1.0 + terms.several
    bound: float = (kept[WAIT, i] + rest) * dearer + harm
    if bound > limit * ROUNDING:
        return bound
    byte = min(terms.device_byte_ns, terms.host_byte_ns) / most
    alpha = min(terms.device_alpha_ns, terms.host_alpha_ns)
    pair = _pair_of(table, work, kept, terms, i, blocks, out_ns, (alpha, byte), 0.0)
    bound = least_ns(pair, terms.split > 0.0) * dearer + harm
    return bound / ROUNDING


def _insert(
    table: Floats, terms: Terms, found: Floats, rows: int, i: int, blocks: int, bound: float
) -> tuple[int, float]:
    """Put a row where it belongs: least bound first, then the worker's turn, then the longest. Returns how many there
    are, and the bound of the one that had to leave, or inf."""
    dropped, place = math.inf, rows
    if rows == found.shape[0]:
        dropped, place = found[rows - 1, 2], rows - 1
        turn = _turn(table, int(found[place, 0]), terms)
        if not _before(bound, _turn(table, i, terms), -blocks, dropped, turn, -found[place, 1]):
            return rows, bound
    while place > 0:
        turn = _turn(table, int(found[place - 1, 0]), terms)
        before = found[place - 1, 2], turn, -found[place - 1, 1]
        if not _before(bound, _turn(table, i, terms), -blocks, before[0], before[1], before[2]):
            break
        for column in range(3):
            found[place, column] = found[place - 1, column]
        place -= 1
    found[place, 0], found[place, 1], found[place, 2] = i, blocks, bound
    return min(rows + 1, found.shape[0]), dropped


def _fill_pool(table: Floats, held: Floats, terms: Terms, found: Floats, rows: int, pool: Floats) -> int:
    """Who might take part in one of the rows: the way out that is free first, then the longest, then in key order."""
    least, number = math.inf, 0
    for row in range(rows):
        least = min(least, found[row, 1])
    for j in range(held.shape[0]):
        position = int(held[j, POSITION])
        if held[j, BLOCKS] < least:
            break
        if table[HOLDER, position] == 0.0 or held[j, TIER] == DISK:
            continue
        place = number
        while place > 0:
            other = int(pool[place - 1])
            who, busy = int(held[other, POSITION]), _backlog(table, position, terms)
            if not _before(
                busy, -held[j, BLOCKS], table[RANK, position],
                _backlog(table, who, terms), -held[other, BLOCKS], table[RANK, who],
            ):  # fmt: skip
                break
            if place < pool.shape[0]:
                pool[place] = pool[place - 1]
            place -= 1
        if place < pool.shape[0]:
            pool[place] = j
            number = min(number + 1, pool.shape[0])
    return number


def best_stripes(
    table: Floats,
    work: Floats,
    kept: Floats,
    sheet: Floats,
    found: Floats,
    ways: Floats,
    alphas: Floats,
    bytes_ns: Floats,
    shares: Floats,
    chosen: Floats,
    limit: float,
) -> tuple[float, float, float, int, int, Best, float]:
    """The best plan over several holders, as many as ``chosen`` has room for at most; what can neither win nor score
    ``limit`` is passed over.

    Args:
        table, work, kept, sheet: as `router.kernel.score_redo` left them.
        found: the rows that `stripes_reach` wrote.
        ways: of each holder its blocks, for how long its way out is promised, the chance that a load from it fails, and
            its place in key order.
        alphas, bytes_ns: of each holder α and time per byte of the links to the workers of the rows.
        shares: of the sum of single rates, what these workers take from several holders at once.
        chosen: written: the holders, by their place among the ways.
        limit: the score to beat.

    Returns:
        Score, prefill time, requests and turn as for `router.kernel.score_redo`; the row, -1 without any plan; the
        plan; and the least that other plans could score.
    """
    terms, rows, most = terms_of(sheet), found.shape[0], chosen.shape[0]
    assert work.shape[1] == kept.shape[1] == table.shape[1]
    assert ways.shape[0] == alphas.shape[0] == bytes_ns.shape[0]
    assert alphas.shape[1] == bytes_ns.shape[1] == shares.shape[0] == rows
    candidates, pick, picked = np.empty((ways.shape[0], 4)), np.empty(most), np.empty(most)
    best, best_gpu, best_requests, best_turn, at, others = math.inf, math.inf, math.inf, 0, -1, math.inf
    plan = _no_plan()
    for row in range(rows):
        i, blocks = int(found[row, 0]), int(found[row, 1])
        assert 0 <= i < table.shape[1]
        if found[row, 2] > min(limit, best) * ROUNDING:
            others = min(others, found[row, 2])
            continue
        number = _candidates(ways, alphas, bytes_ns, row, blocks, table[IN_FREE, i] - terms.now_ns, candidates)
        number = _preferable(candidates, number, most, ways, (blocks - kept[OWN, i]) * terms.block_bytes)
        this, left = _best_set(table, work, kept, terms, i, blocks, candidates[:number], shares[row], pick, picked)
        others = min(others, left)
        if this[0] == math.inf:
            continue
        requests, turn = table[REQUESTS, i], _turn(table, i, terms)
        if this[0] < best or (this[0] == best and _before(this[1], requests, turn, best_gpu, best_requests, best_turn)):
            others = min(others, best)
            best, best_gpu, best_requests, best_turn, at, plan = this[0], this[1], requests, turn, row, this
            for t in range(this[2]):
                chosen[t] = picked[t]
        else:
            others = min(others, this[0])
    return best, best_gpu, best_requests, best_turn, at, plan, others


def _no_plan() -> Best:
    load, split = (math.inf, math.inf, 0.0, 0, 0.0), (math.inf, math.inf, 0.0, 0, 0.0, 0)
    return math.inf, math.inf, 0, False, load, split, 0.0, 0.0


def _candidates(
    ways: Floats, alphas: Floats, bytes_ns: Floats, row: int, blocks: int, in_ns: float, candidates: Floats
) -> int:
    """Write the holders of so many blocks, as they look to the worker of a row; returns how many."""
    number = 0
    for n in range(ways.shape[0]):
        if ways[n, WAY_BLOCKS] >= blocks:
            candidates[number, START] = max(ways[n, WAY_BACKLOG], in_ns) + alphas[n, row]
            candidates[number, BYTE] = max(bytes_ns[n, row], LEAST_BYTE_NS)
            candidates[number, FAILURE] = ways[n, WAY_FAILURE]
            candidates[number, PLACE] = n
            number += 1
    return number


def _preferable(candidates: Floats, number: int, most: int, ways: Floats, missing_bytes: float) -> int:
    """Keep, in their order, those to which fewer than ``most`` others are preferable; of more than `WAYS` those that
    would bring everything first. Returns how many."""
    if number <= most:
        return number
    kept, worse = 0, np.empty(number)
    for n in range(number):
        better = 0
        for m in range(number):
            if _preferred(candidates, m, n, ways):
                better += 1
        worse[n] = better
    for n in range(number):
        if worse[n] < most:
            for column in range(4):
                candidates[kept, column] = candidates[n, column]
            kept += 1
    while kept > WAYS:
        last, latest = 0, -math.inf
        for n in range(kept):
            end = candidates[n, START] + missing_bytes * candidates[n, BYTE]
            if end >= latest:
                last, latest = n, end
        for n in range(last, kept - 1):
            for column in range(4):
                candidates[n, column] = candidates[n + 1, column]
        kept -= 1
    return kept


def _preferred(candidates: Floats, m: int, n: int, ways: Floats) -> bool:
    """Nothing about ``m`` is worse than about ``n``, and of equals it is the first in key order."""
    a, b = candidates[m], candidates[n]
    if a[START] > b[START] or a[BYTE] > b[BYTE] or a[FAILURE] > b[FAILURE]:
        return False
    equal: bool = a[START] == b[START] and a[BYTE] == b[BYTE] and a[FAILURE] == b[FAILURE]
    return not equal or ways[int(a[PLACE]), WAY_RANK] < ways[int(b[PLACE]), WAY_RANK]


def _best_set(
    table: Floats,
    work: Floats,
    kept: Floats,
    terms: Terms,
    i: int,
    blocks: int,
    candidates: Floats,
    share: float,
    pick: Floats,
    picked: Floats,
) -> tuple[Best, float]:
    """The best of all sets of candidates on a worker, the smaller of equals; and the least that others score."""
    best, others = _no_plan(), math.inf
    number = candidates.shape[0]
    for count in range(2, min(pick.shape[0], number, blocks // MIN_STRIPE_BLOCKS) + 1):
        for t in range(count):
            pick[t] = t
        more = True
        while more:
            this = _price_set(table, work, kept, terms, i, blocks, candidates, share, pick[:count])
            if this[0] < best[0]:
                others, best = min(others, best[0]), this
                for t in range(count):
                    picked[t] = candidates[int(pick[t]), PLACE]
            else:
                others = min(others, this[0])
            more = _next_set(pick[:count], number)
    return best, others


def _next_set(pick: Floats, number: int) -> bool:
    """Turn a set, as rising places among ``number``, into the next one; False after the last."""
    count = pick.shape[0]
    t = count - 1
    while t >= 0 and pick[t] >= number - count + t:
        t -= 1
    if t < 0:
        return False
    pick[t] += 1
    for u in range(t + 1, count):
        pick[u] = pick[u - 1] + 1
    return True


def _price_set(
    table: Floats,
    work: Floats,
    kept: Floats,
    terms: Terms,
    i: int,
    blocks: int,
    candidates: Floats,
    share: float,
    pick: Floats,
) -> Best:
    """The better of load and split over one set. Together they are a link that starts when their mean does, weighted
    by their rates, and is as fast as all of them."""
    rate, weighted, latest, survives, count = 0.0, 0.0, 0.0, 1.0, pick.shape[0]
    for t in range(count):
        one = candidates[int(pick[t])]
        rate += share / one[BYTE]
        weighted += share / one[BYTE] * one[START]
        latest = max(latest, one[START])
        survives *= 1.0 - one[FAILURE]
    start, byte = weighted / rate, 1.0 / rate
    own, total, block_tokens = int(kept[OWN, i]), int(terms.total_tokens), int(terms.block_tokens)
    pair = Pair(
        kept[WAIT, i], kept[REDO, i], own, blocks, total, block_tokens, start + terms.fixed_bytes * byte,
        terms.block_bytes * byte, 1.0 - survives, table[T0, i], table[TOKEN, i], table[PAIR, i], work[FILL_BLOCK, i],
    )  # fmt: skip
    load, split = cost_of_whole_load(pair, terms.notice_ns), cost_of_split(pair)
    dearer, crowd, keep = 1.0 + terms.several * (count - 1), work[CROWD, i], work[KEEP, i]
    score, gpu, splits = math.inf, math.inf, False
    if latest < load[4]:
        score, gpu = load[0] * dearer + min(load[2], terms.cap_ns) * crowd + keep, load[2]
    if terms.split > 0.0 and latest < split[4]:
        other = split[0] * dearer + min(split[2], terms.cap_ns) * crowd + keep
        if other < score or (other == score and split[2] < gpu):
            score, gpu, splits = other, split[2], True
    return score, gpu, count, splits, load, split, start, byte
