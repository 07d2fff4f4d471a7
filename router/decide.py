"""The decision: which worker, which plan, at what price.  (pure)

`decide` takes the plan of least score over all eligible workers: its expected time to the first token plus its harm,
what its prefill time costs the requests behind it (`router.planning.Harm`). Ties go to the least prefill time, then
to the worker with the fewest requests, then by a hash of the request id over the workers in key order: independent of
the order of candidates, and different for different requests, so that several routers do not agree on one of many
equal workers.

Redo is scored for all workers at once (`router.scores`). Loads are priced pair by pair (worker, holder) as far as a
lower bound (`router.bounds`) is below the best score found: the optimum is not lost, and of workers × holders pairs a
few are priced. Of holders that could still win, at most `MAX_HOLDERS` are tried when there are many workers.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from kvpool.plan import Plan
from kvpool.types import RequestId, Tier, WorkerKey
from router import cost
from router.bounds import (
    Ahead,
    Fleetwide,
    best_case,
    load_bound,
    look_ahead,
    pairs_in_reach,
    rest_behind,
    rest_ns,
    whole_ns,
)
from router.cost import Pair, Price
from router.planning import Params, Promise, build_plan, build_promise, build_striped_plan
from router.scores import FEW_WORKERS, Case, harm_ns, score_redo
from router.signals import Column, Floats, Holding, RequestView, Snapshot, holdings, readable
from router.striping import MIN_GAIN, Stripes, Way, best_stripes

LOOSE_PAIRS = 3
"""With more pairs than this below the best score, a tighter bound is cheaper than pricing them all."""

MAX_HOLDERS = 16
"""Bounds the time of a decision when hundreds of workers hold a hot prefix and their links differ a little."""


class LoadPrice(NamedTuple):
    """A plan with a load, priced for one worker and one holder."""

    position: int
    source: Holding
    price: Price


class Decision(NamedTuple):
    """The verdict. Columns are in the order of the snapshot's workers; nobody writes them any more.

    Attributes:
        position: index of the chosen worker.
        price_ns: expected time to the first token.
        owners: blocks of the prompt each worker holds, by position, without zeros.
        wait, redo: wait for each GPU, and prefill of what the worker lacks.
        loads: plans with loads that were priced; all others could not have been chosen.
        own_blocks: what the chosen worker itself has of the prompt.
        holders: workers that hold a part of the prompt.
        together: for a load from several holders, when it starts and its time per byte as the plan expects them.
        load_floor_ns: no load that was not priced could have had a lower score; None when there was none.
    """

    request_id: RequestId
    worker: WorkerKey
    position: int
    plan: Plan
    price_ns: int
    owners: Mapping[int, int]
    wait: Column
    redo: Column
    loads: tuple[LoadPrice, ...]
    promise: Promise
    own_blocks: int
    holders: int = 0
    load_floor_ns: float | None = None
    together: tuple[float, float] | None = None


class _Choice(NamedTuple):
    """Best so far. Compared by score, then harm to others: prefill time, requests, and the turn of the worker."""

    score: float
    gpu_ns: float
    requests: float
    turn: int
    position: int
    price: Price
    source: Holding | None
    byte_ns: float = 0.0


class _Source(NamedTuple):
    """A holder that may be read; ordered as holders are tried."""

    bound: float
    backlog_ns: float
    rank: int
    holding: Holding
    ahead: Ahead


def decide(request: RequestView, snapshot: Snapshot, params: Params, few: int = FEW_WORKERS) -> Decision:
    """Choose worker and plan for a request; ``few`` as in `router.scores.score_redo`.

    Raises:
        UnavailableError: no worker can take it.
    """
    case = _open_case(request, snapshot, params, few)
    choice, floor = _best_redo(case), None
    loads: list[LoadPrice] = []
    if params.loads and snapshot.features.load and case.held:
        choice, floor = _best_load(case, choice, loads)
    stripes = None
    if params.loads and snapshot.features.stripes > 1 and len(case.held) > 1:
        choice, stripes = _best_stripes(case, choice, loads)
    position = choice.position
    own = case.owners.get(position, 0)
    if stripes is None:
        plan = build_plan(snapshot, params, case.held, choice.price, choice.source, position, own)
        promise = build_promise(request, snapshot, plan, choice.price, position, own, choice.byte_ns)
    else:
        plan, transfers = build_striped_plan(snapshot, params, case.held, stripes, position, own)
        promise = build_promise(request, snapshot, plan, choice.price, position, own, 0.0)
        promise = promise._replace(transfers=transfers)
    return Decision(
        request_id=request.request_id,
        worker=snapshot.workers[position].key,
        position=position,
        plan=plan,
        price_ns=round(choice.price.ttft_ns),
        together=None if stripes is None else (stripes.start_ns, stripes.byte_ns),
        owners=case.owners,
        wait=case.scores.wait,
        redo=case.scores.redo,
        loads=tuple(loads),
        promise=promise,
        own_blocks=own,
        holders=len(case.held),
        load_floor_ns=floor,
    )


def _open_case(request: RequestView, snapshot: Snapshot, params: Params, few: int) -> Case:
    held = holdings(request, snapshot)
    owners = {holding.position: holding.blocks for holding in held}
    ticket = zlib.crc32(request.request_id.encode())
    scores = score_redo(request, snapshot, params, owners, ticket, few)
    return Case(request, snapshot, params, readable(held, request, snapshot), owners, ticket, scores)


def _best_redo(case: Case) -> _Choice:
    scores, position = case.scores, case.scores.position
    wait, redo = float(scores.wait[position]), float(scores.redo[position])
    price = cost.price_redo(wait, redo, case.owners.get(position, 0))
    requests = case.snapshot.columns.requests.item(position)
    return _Choice(scores.least, redo, requests, _turn(case, position), position, price, None)


def _turn(case: Case, position: int) -> int:
    """Place of the worker in this request's order: key order, rotated by the ticket."""
    size = len(case.snapshot.workers)
    return (case.snapshot.columns.rank.item(position) - case.ticket) % size


def _best_load(case: Case, choice: _Choice, loads: list[LoadPrice]) -> tuple[_Choice, float | None]:
    """The best of a choice and all loads; appends what was priced.

    Returns:
        The best choice, and the least score that a load could have had that was not priced.
    """
    if isinstance(case.scores.wait, list) and not case.params.priced_pairs:
        return _search_lists(case, choice, loads)
    return _search_arrays(case, choice, loads)


def _search_lists(case: Case, choice: _Choice, loads: list[LoadPrice]) -> tuple[_Choice, float | None]:
    """For few workers: the longest holders first, each at once with every worker."""
    snapshot, split, floor = case.snapshot, case.snapshot.features.split, math.inf
    wait, held = case.scores.least_wait_ns(), _longest_first(case)
    readable, out_free_ns = snapshot.columns.holder.item, snapshot.columns.out_free_ns.item
    ahead: Ahead | None = None
    for place, holding in enumerate(held):
        position, blocks, tier = holding
        if not readable(position):
            continue
        if ahead is None or ahead.blocks != blocks or ahead.tier is not tier:
            rest, always = rest_behind(case, blocks)
            if wait + (rest + always) >= choice.score:
                floor = min(floor, wait + (rest + always))
                break
            ahead = look_ahead(case, holding, _shorter(held, place), rest, always)
        backlog = max(0.0, out_free_ns(position) - snapshot.now_ns)
        bound = best_case(ahead, wait, backlog, split=split)
        if bound >= choice.score:
            floor = min(floor, bound)
            continue
        row = snapshot.links.row(snapshot.workers[position].key.worker_id, tier, snapshot.now_ns)
        for bound, _, _, reader in pairs_in_reach(case, ahead, backlog, row, choice.score):
            if bound >= choice.score:
                break
            link = (row.alpha_ns[reader], row.byte_ns[reader])
            choice = _price_pair(case, reader, holding, backlog, link, choice, loads)
    return choice, floor if floor < math.inf else None


def _search_arrays(case: Case, choice: _Choice, loads: list[LoadPrice]) -> tuple[_Choice, float | None]:
    """For many workers: pairs in the order of their bounds, until none can beat the choice."""
    sources, least = _sources(case, choice.score)
    if not sources:
        return choice, least
    floors: dict[tuple[int, Tier], float] = {}
    fleet = _fleetwide(case)
    tried = 0
    for source in sources:
        enough = len(loads) >= case.params.priced_pairs
        if enough and (source.bound >= choice.score or tried == MAX_HOLDERS):
            break
        # equally long holders follow in the order of their backlog, so the first one's least bound holds for all
        group = (source.holding.blocks, source.holding.tier)
        if enough and floors.get(group, 0.0) >= choice.score:
            continue
        tried += 1
        choice, floor = _best_from(case, fleet, source, choice, loads)
        floors.setdefault(group, floor)
    return choice, least


def _best_from(
    case: Case, fleet: Fleetwide, source: _Source, choice: _Choice, loads: list[LoadPrice]
) -> tuple[_Choice, float]:
    """The best of a choice and all plans over one holder, and the least bound of any of these."""
    snapshot, params = case.snapshot, case.params
    holding, now_ns = source.holding, snapshot.now_ns
    key = snapshot.workers[holding.position].key
    link = snapshot.links.best(holding.tier)
    rest = rest_ns(fleet, holding.blocks)
    split = snapshot.features.split
    if not params.priced_pairs:
        floor = _soonest(case, fleet, source, rest)
        if floor >= choice.score:
            return choice, floor
    loose = load_bound(fleet, rest, holding.blocks, source.backlog_ns, link, split=split, tight=False)
    bounds = _with_harm(case, fleet, loose, rest)
    if np.count_nonzero(bounds < choice.score) > LOOSE_PAIRS:
        tight = load_bound(fleet, rest, holding.blocks, source.backlog_ns, link, split=split, tight=True)
        bounds = _with_harm(case, fleet, tight, rest)
    floor = bound = bounds.item(bounds.argmin())
    while bound < math.inf and (bound < choice.score or len(loads) < params.priced_pairs):
        position = _first(case, bounds, bound)
        bounds[position] = math.inf
        link = snapshot.links.curve(key.worker_id, snapshot.workers[position].key.worker_id, holding.tier, now_ns)
        times = (link.alpha_ns, link.byte_ns)
        choice = _price_pair(case, position, holding, source.backlog_ns, times, choice, loads)
        bound = bounds.item(bounds.argmin())
    return choice, floor


def _soonest(case: Case, fleet: Fleetwide, source: _Source, rest: Floats) -> float:
    """A bound for all workers in a few steps, which is mostly enough."""
    times = np.maximum(fleet.wait, whole_ns(source.ahead, source.backlog_ns))
    times += rest
    bounds = _with_harm(case, fleet, times, rest)
    return bounds.item(bounds.argmin())


def _price_pair(
    case: Case,
    position: int,
    source: Holding,
    backlog_out: float,
    link: tuple[float, float],
    choice: _Choice,
    loads: list[LoadPrice],
) -> _Choice:
    """The better of a choice and what one worker can do with one holder over ``link`` (α, time per byte); appends what
    was priced."""
    snapshot = case.snapshot
    pair = _make_pair(case, position, source, backlog_out, link)
    crowd, keep = case.scores.crowd_at(position), case.scores.keep_at(position)
    load = cost.price_load(pair, snapshot.footprint, case.params.costs)
    split = cost.price_split(pair, snapshot.footprint) if snapshot.features.split else None
    for price in (load, split):
        if price is None:
            continue
        loads.append(LoadPrice(position, source, price))
        score = price.ttft_ns + harm_ns(case.params.harm, price.gpu_ns, crowd) + keep
        if score <= choice.score:
            requests = snapshot.columns.requests.item(position)
            turn = _turn(case, position)
            if (score, price.gpu_ns, requests, turn) < choice[:4]:
                choice = _Choice(score, price.gpu_ns, requests, turn, position, price, source, link[1])
    return choice


def _with_harm(case: Case, fleet: Fleetwide, times: Floats, gpu: Floats) -> Floats:
    """Times plus the harm of ``gpu`` and of what must leave, for every worker. Overwrites ``times``."""
    if fleet.crowd is not None:
        harm = np.minimum(gpu, case.params.harm.cap_ns)
        harm *= fleet.crowd
        times += harm
    if fleet.keep is not None:
        times += fleet.keep
    return times


def _best_stripes(case: Case, choice: _Choice, loads: list[LoadPrice]) -> tuple[_Choice, Stripes | None]:
    """The better of a choice and loading from several holders, on the worker that is best without that and on the one
    that is free first; appends what was priced."""
    snapshot, params = case.snapshot, case.params
    columns, best = snapshot.columns, None
    wait = case.scores.wait
    free = wait.index(min(wait)) if isinstance(wait, list) else int(wait.argmin())
    for position in dict.fromkeys((choice.position, free)):
        own = case.owners.get(position, 0)
        longest = max((item.blocks for item in case.held if item.position != position), default=0)
        sources = [
            item
            for item in case.held
            if item.blocks == longest > own and item.position != position and columns.holder.item(item.position)
        ]
        if len(sources) < 2:
            continue
        ways = [_way(case, position, item) for item in sources]
        key = snapshot.workers[position].key
        found = best_stripes(
            _make_pair(case, position, sources[0], 0.0, (0.0, 0.0)),
            ways,
            snapshot.footprint,
            params.costs,
            split=snapshot.features.split,
            most=snapshot.features.stripes,
            together=snapshot.together.get(key, 1.0),
        )
        if found is None:
            continue
        price, first = found.price, found.ways[0]
        loads.append(LoadPrice(position, first.holding, price))
        keep = case.scores.keep_at(position)
        score = price.ttft_ns + harm_ns(params.harm, price.gpu_ns, case.scores.crowd_at(position)) + keep
        if score < choice.score - MIN_GAIN * choice.price.ttft_ns:
            requests = columns.requests.item(position)
            turn = _turn(case, position)
            choice = _Choice(score, price.gpu_ns, requests, turn, position, price, first.holding, found.byte_ns)
            best = found
    return choice, best


def _way(case: Case, position: int, source: Holding) -> Way:
    snapshot, columns, now_ns = case.snapshot, case.snapshot.columns, case.snapshot.now_ns
    key = snapshot.workers[source.position].key
    link = snapshot.links.curve(key.worker_id, snapshot.workers[position].key.worker_id, source.tier, now_ns)
    backlog = max(columns.out_free_ns.item(source.position), columns.in_free_ns.item(position)) - now_ns
    return Way(source, max(0.0, backlog) + link.alpha_ns, link.byte_ns, snapshot.failures.probability(key, now_ns))


def _first(case: Case, bounds: Floats, least: float) -> int:
    """Position of the least bound; among equals the fewest requests, then the turn."""
    tied = (bounds == least).nonzero()[0]
    if len(tied) == 1:
        return int(tied[0])
    columns = case.snapshot.columns
    seen = columns.requests[tied]
    tied = tied[seen == seen.min()]
    return int(tied[np.argmin((columns.rank[tied] - case.ticket) % len(columns))])


def _fleetwide(case: Case) -> Fleetwide:
    snapshot, scores = case.snapshot, case.scores
    return Fleetwide(
        columns=snapshot.columns,
        owners=case.owners,
        wait=np.asarray(scores.wait),
        crowd=None if scores.crowd is None else np.asarray(scores.crowd),
        keep=None if scores.keep is None else np.asarray(scores.keep),
        backlog_in=snapshot.columns.in_free_ns - snapshot.now_ns,
        total_tokens=case.request.prompt_tokens,
        footprint=snapshot.footprint,
    )


def _sources(case: Case, best: float) -> tuple[list[_Source], float | None]:
    """Holders that may be read and whose bound is below ``best`` (all when the record wants them), best bound first.

    Longest first, since the rough bound (the least wait and what the holder lacks, on the fastest curve) only grows
    from there; the fine one is `router.bounds.best_case`.

    Returns:
        The holders, and the least bound of any.
    """
    snapshot, columns = case.snapshot, case.snapshot.columns
    held = _longest_first(case)
    readable, out_free_ns, rank = columns.holder.item, columns.out_free_ns.item, columns.rank.item
    wait, priced_pairs, now_ns = case.scores.least_wait_ns(), case.params.priced_pairs, snapshot.now_ns
    sources: list[_Source] = []
    ahead: Ahead | None = None
    least = math.inf
    for place, holding in enumerate(held):
        position, blocks, tier = holding
        if not readable(position):
            continue
        if ahead is None or ahead.blocks != blocks or ahead.tier is not tier:
            rest, always = rest_behind(case, blocks)
            if wait + (rest + always) >= best and not priced_pairs:
                least = min(least, wait + (rest + always))
                break
            ahead = look_ahead(case, holding, _shorter(held, place), rest, always)
        backlog = max(0.0, out_free_ns(position) - now_ns)
        bound = best_case(ahead, wait, backlog, split=snapshot.features.split)
        least = min(least, bound)
        if bound < best or priced_pairs:
            sources.append(_Source(bound, backlog, rank(position), holding, ahead))
    if len(sources) > 1:
        sources.sort(key=itemgetter(0, 1, 2))
    return sources, least if least < math.inf else None


def _longest_first(case: Case) -> list[Holding]:
    """Who holds a part of the prompt; equally long ones by the least busy way out, then in key order."""
    held = case.held
    if len(held) < 2:
        return held
    out_free_ns, rank = case.snapshot.columns.out_free_ns.item, case.snapshot.columns.rank.item
    return sorted(held, key=lambda item: (-item.blocks, out_free_ns(item.position), rank(item.position)))


def _shorter(held: list[Holding], place: int) -> int:
    """Blocks of the longest prefix that is shorter than the one at ``place``, longest first."""
    blocks = held[place].blocks
    for other in held[place + 1 :]:
        if other.blocks < blocks:
            return other.blocks
    return 0


def _make_pair(case: Case, position: int, source: Holding, backlog_out: float, link: tuple[float, float]) -> Pair:
    snapshot, columns = case.snapshot, case.snapshot.columns
    backlog_in = columns.in_free_ns.item(position) - snapshot.now_ns
    t0s, slopes, pairs = case.scores.curves
    return Pair(
        float(case.scores.wait[position]),
        float(case.scores.redo[position]),
        case.owners.get(position, 0),
        source.blocks,
        case.request.prompt_tokens,
        backlog_out if backlog_out > backlog_in else backlog_in,
        *link,
        snapshot.failures.probability(snapshot.workers[source.position].key, snapshot.now_ns),
        float(t0s[position]),
        float(slopes[position]),
        float(pairs[position]),
    )
