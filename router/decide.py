"""The decision: which worker, which plan, at what price.  (pure)

`decide` takes the plan of least score over all eligible workers: its expected time to the first token plus its harm,
what its prefill time costs the requests behind it (`router.planning.Harm`). Ties go to the least prefill time, then
to the worker with the fewest requests, then by a hash of the request id over the workers in key order: independent of
the order of candidates, and different for different requests, so that several routers do not agree on one of many
equal workers.

Redo is scored for all workers at once. Loads are priced pair by pair (worker, holder) in the order of a lower bound
(`router.bounds`), until no bound is below the best score found: the optimum is not lost, and of workers × holders
pairs a few are priced. Of holders that could still win, at most `MAX_HOLDERS` are tried.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from kvpool.errors import UnavailableError
from kvpool.plan import Plan
from kvpool.types import RequestId, Tier, WorkerKey
from router import cost
from router.bounds import Fleetwide, load_bound, rest_ns
from router.cost import Costs, Pair, Price
from router.planning import Harm, Params, Promise, build_plan, build_promise
from router.signals import Floats, Holding, RequestView, Snapshot, holdings

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
        holders: workers that hold a part of the prompt and may be read.
    """

    request_id: RequestId
    worker: WorkerKey
    position: int
    plan: Plan
    price_ns: int
    owners: Mapping[int, int]
    wait: Floats
    redo: Floats
    loads: tuple[LoadPrice, ...]
    promise: Promise
    own_blocks: int
    holders: int = 0


class _Choice(NamedTuple):
    """Best so far. Compared by score, then harm to others: prefill time, requests, and the turn of the worker."""

    score: float
    gpu_ns: float
    requests: float
    turn: int
    position: int
    price: Price
    source: Holding | None


class _Source(NamedTuple):
    """A holder that may be read; ordered as holders are tried."""

    bound: float
    backlog_ns: float
    rank: int
    holding: Holding


@dataclass(slots=True)
class _Case:
    """Everything the parts of one decision share."""

    request: RequestView
    snapshot: Snapshot
    params: Params
    held: list[Holding]
    owners: dict[int, int]
    wait: Floats
    redo: Floats
    crowd: Floats | None
    keep: Floats | None
    ticket: int


def decide(request: RequestView, snapshot: Snapshot, params: Params) -> Decision:
    """Choose worker and plan for a request.

    Raises:
        UnavailableError: no worker can take it.
    """
    case = _open_case(request, snapshot, params)
    choice = _best_redo(case)
    loads: list[LoadPrice] = []
    if params.loads and snapshot.features.load and case.held:
        choice = _best_load(case, choice, loads)
    position = choice.position
    own = case.owners.get(position, 0)
    plan = build_plan(snapshot, params, case.held, choice.price, choice.source, position, own)
    return Decision(
        request_id=request.request_id,
        worker=snapshot.workers[position].key,
        position=position,
        plan=plan,
        price_ns=round(choice.price.ttft_ns),
        owners=case.owners,
        wait=case.wait,
        redo=case.redo,
        loads=tuple(loads),
        promise=build_promise(request, snapshot, plan, choice.price, position, own),
        own_blocks=own,
        holders=len(case.held),
    )


def open_waits(request: RequestView, snapshot: Snapshot, costs: Costs) -> Floats:
    """W of every worker, inf for those that may not take the request."""
    wait = cost.wait_ns(snapshot, costs)
    for key in request.exclude:
        position = snapshot.index.get(key)
        if position is not None:
            wait[position] = math.inf
    return wait


def nobody(request: RequestView, snapshot: Snapshot) -> UnavailableError:
    """The error for a request no worker may take."""
    return UnavailableError(
        "no worker can take the request: none is alive, prefills and has not just failed it; "
        "start workers or retry later",
        workers=len(snapshot.workers),
        excluded=len(request.exclude),
    )


def harm_ns(harm: Harm, gpu_ns: float, crowd: float) -> float:
    """What ``gpu_ns`` of prefill on a worker cost the requests behind it; ``crowd`` as in `crowds`."""
    return min(gpu_ns, harm.cap_ns) * crowd


def crowds(snapshot: Snapshot, harm: Harm, wait: Floats) -> Floats:
    """For every worker what each ns of prefill costs others: see `router.planning.Harm`."""
    arrivals, size = snapshot.columns.arrivals, len(wait)
    weight = harm.follow * snapshot.arrival_scale
    if weight == 0.0:
        crowd = np.full(size, harm.base)
    else:
        crowd = arrivals * wait
        crowd *= weight
        common = harm.base
        if harm.share:
            total = float(crowd.sum())
            if total == math.inf:  # some worker is closed
                reachable = crowd[crowd < math.inf]
                total, size = float(reachable.sum()), max(1, len(reachable))
            common += min(harm.share_limit, harm.share * total / size)
        crowd += common
    if harm.linger:
        crowd += arrivals * (harm.linger * len(wait) / float(arrivals.sum()))
    return crowd


def keep_ns(request: RequestView, snapshot: Snapshot, harm: Harm, owners: Mapping[int, int]) -> Floats | None:
    """For every worker what it costs others that blocks must leave for the request's; None when none must."""
    empty = snapshot.columns.empty_blocks
    if not harm.keep or snapshot.pressure is None or request.chain_blocks <= empty.item(empty.argmin()):
        return None
    leaving = request.chain_blocks - empty
    for position, blocks in owners.items():
        leaving[position] -= blocks
    np.maximum(leaving, 0.0, out=leaving)
    leaving *= snapshot.pressure
    leaving *= harm.keep * snapshot.footprint.block_tokens * snapshot.fastest.token_ns
    return leaving


def _with_harm(case: _Case, times: Floats, gpu: Floats) -> Floats:
    """Times plus the harm of ``gpu`` and of what must leave, for every worker. Overwrites ``times``."""
    if case.crowd is not None:
        harm = np.minimum(gpu, case.params.harm.cap_ns)
        harm *= case.crowd
        times += harm
    if case.keep is not None:
        times += case.keep
    return times


def _open_case(request: RequestView, snapshot: Snapshot, params: Params) -> _Case:
    columns = snapshot.columns
    held = holdings(request, snapshot)
    owners = {holding.position: holding.blocks for holding in held}
    wait = open_waits(request, snapshot, params.costs)
    return _Case(
        request=request,
        snapshot=snapshot,
        params=params,
        held=held,
        owners=owners,
        wait=wait,
        redo=cost.redo_ns(columns, request.prompt_tokens, owners, snapshot.footprint.block_tokens),
        crowd=None if params.harm.zero else crowds(snapshot, params.harm, wait),
        keep=keep_ns(request, snapshot, params.harm, owners),
        ticket=zlib.crc32(request.request_id.encode()),
    )


def _best_redo(case: _Case) -> _Choice:
    columns = case.snapshot.columns
    score = _with_harm(case, case.wait + case.redo, case.redo)
    least = score.item(score.argmin())
    if least == math.inf:
        raise nobody(case.request, case.snapshot)
    tied = (score == least).nonzero()[0]
    for values in (case.redo, columns.requests):
        if len(tied) > 1:
            seen = values[tied]
            tied = tied[seen == seen.min()]
    if len(tied) > 1:
        tied = tied[np.argmin((columns.rank[tied] - case.ticket) % len(columns))][None]
    position = int(tied[0])
    wait, redo = case.wait.item(position), case.redo.item(position)
    price = cost.price_redo(wait, redo, case.owners.get(position, 0))
    return _Choice(least, redo, columns.requests.item(position), _turn(case, position), position, price, None)


def _turn(case: _Case, position: int) -> int:
    """Place of the worker in this request's order: key order, rotated by the ticket."""
    size = len(case.snapshot.workers)
    return (case.snapshot.columns.rank.item(position) - case.ticket) % size


def _best_load(case: _Case, choice: _Choice, loads: list[LoadPrice]) -> _Choice:
    """Price pairs in the order of their bounds until none can beat the choice; appends what was priced."""
    sources = _sources(case, choice.score)
    floors: dict[tuple[int, Tier], float] = {}
    fleet: Fleetwide | None = None
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
        fleet = fleet or _fleetwide(case)
        choice, floor = _best_from(case, fleet, source, choice, loads)
        floors.setdefault(group, floor)
    if sources and not loads:
        _show_load(case, choice.position, sources[0], loads)
    return choice


def _show_load(case: _Case, position: int, source: _Source, loads: list[LoadPrice]) -> None:
    """For the record: what loading to the chosen worker would have cost."""
    pair = _make_pair(case, position, source.holding, source.backlog_ns)
    price = cost.price_load(pair, case.snapshot.footprint, case.params.costs)
    if price is not None:
        loads.append(LoadPrice(position, source.holding, price))


def _best_from(
    case: _Case, fleet: Fleetwide, source: _Source, choice: _Choice, loads: list[LoadPrice]
) -> tuple[_Choice, float]:
    """The best of a choice and all plans over one holder, and the least bound of any of these."""
    snapshot, params = case.snapshot, case.params
    holding = source.holding
    link = snapshot.links.best(holding.tier)
    rest = rest_ns(fleet, holding.blocks)
    split = snapshot.features.split
    loose = load_bound(fleet, rest, holding.blocks, source.backlog_ns, link, split=split, tight=False)
    bounds = _with_harm(case, loose, rest)
    if np.count_nonzero(bounds < choice.score) > LOOSE_PAIRS:
        tight = load_bound(fleet, rest, holding.blocks, source.backlog_ns, link, split=split, tight=True)
        bounds = _with_harm(case, tight, rest)
    floor = bound = bounds.item(bounds.argmin())
    while bound < math.inf and (bound < choice.score or len(loads) < params.priced_pairs):
        position = _first(case, bounds, bound)
        bounds[position] = math.inf
        pair = _make_pair(case, position, holding, source.backlog_ns)
        for price in _plans(pair, snapshot, params):
            loads.append(LoadPrice(position, holding, price))
            offer = _offer(case, position, holding, price)
            if offer[:4] < choice[:4]:
                choice = offer
        bound = bounds.item(bounds.argmin())
    return choice, floor


def _plans(pair: Pair, snapshot: Snapshot, params: Params) -> list[Price]:
    found = [cost.price_load(pair, snapshot.footprint, params.costs)]
    if snapshot.features.split:
        found.append(cost.price_split(pair, snapshot.footprint))
    return [price for price in found if price is not None]


def _first(case: _Case, bounds: Floats, least: float) -> int:
    """Position of the least bound; among equals the fewest requests, then the turn."""
    tied = (bounds == least).nonzero()[0]
    if len(tied) == 1:
        return int(tied[0])
    columns = case.snapshot.columns
    seen = columns.requests[tied]
    tied = tied[seen == seen.min()]
    return int(tied[np.argmin((columns.rank[tied] - case.ticket) % len(columns))])


def _offer(case: _Case, position: int, source: Holding, price: Price) -> _Choice:
    score = price.ttft_ns
    if case.crowd is not None:
        score += harm_ns(case.params.harm, price.gpu_ns, case.crowd.item(position))
    if case.keep is not None:
        score += case.keep.item(position)
    requests = case.snapshot.columns.requests.item(position)
    return _Choice(score, price.gpu_ns, requests, _turn(case, position), position, price, source)


def _fleetwide(case: _Case) -> Fleetwide:
    columns = case.snapshot.columns
    return Fleetwide(
        columns=columns,
        owners=case.owners,
        wait=case.wait,
        backlog_in=columns.in_free_ns - case.snapshot.now_ns,
        total_tokens=case.request.prompt_tokens,
        footprint=case.snapshot.footprint,
    )


def _sources(case: _Case, best: float) -> list[_Source]:
    """Holders that may be read, best bound first; what cannot get below ``best`` is bounded roughly.

    The rough bound is the least wait and what the holder lacks, on the fastest curve. The fine one adds the best link
    and the longest prefix that is shorter than the holder's: it is the whole load or, since the price of a partial
    load lies above the chord between its ends, the redo that starts when the load does, less one block.
    """
    snapshot, columns = case.snapshot, case.snapshot.columns
    total, block_tokens = case.request.prompt_tokens, snapshot.footprint.block_tokens
    t0_ns, token_ns, pair_ns = snapshot.fastest.t0_ns, snapshot.fastest.token_ns, snapshot.fastest.pair_ns
    wait = case.wait.item(case.wait.argmin())
    readable, out_free_ns, rank = columns.holder.item, columns.out_free_ns.item, columns.rank.item
    known: dict[tuple[int, Tier], _Ahead] = {}
    sources = []
    for holding in case.held:
        position, blocks, tier = holding
        if not readable(position):
            continue
        backlog = max(0.0, out_free_ns(position) - snapshot.now_ns)
        cached = blocks * block_tokens
        bound = wait + t0_ns + (total - cached) * (token_ns + pair_ns * 0.5 * (total + cached))
        if bound < best and not snapshot.features.split:
            ahead = known.get((blocks, tier))
            if ahead is None:
                ahead = known[blocks, tier] = _look_ahead(case, blocks, tier)
            start = backlog + ahead.latency
            bound = min(max(wait, start + ahead.transfer) + ahead.rest, max(wait, start) + ahead.redo)
        sources.append(_Source(bound, backlog, rank(position), holding))
    if len(sources) > 1:
        sources.sort(key=itemgetter(0, 1, 2))
    return sources


class _Ahead(NamedTuple):
    """Least times of a load of some length: until its first byte, from there to its last, and what the GPU computes
    after all of it, or after its first block only. GPU times include the harm that is always there."""

    latency: float
    transfer: float
    rest: float
    redo: float


def _look_ahead(case: _Case, blocks: int, tier: Tier) -> _Ahead:
    snapshot, harm, total = case.snapshot, case.params.harm, case.request.prompt_tokens
    footprint, link = snapshot.footprint, snapshot.links.best(tier)
    own = max((other for other in case.owners.values() if other < blocks), default=0)
    cached, first = blocks * footprint.block_tokens, min(blocks, own + 1) * footprint.block_tokens
    rest = snapshot.fastest.time_ns(total - cached, cached)
    always = min(rest, harm.cap_ns) * harm.base
    return _Ahead(
        latency=link.alpha_ns + footprint.fixed_bytes * link.byte_ns,
        transfer=(blocks - own) * footprint.block_bytes * link.byte_ns,
        rest=rest + always,
        redo=snapshot.fastest.time_ns(total - first, first) + always,
    )


def _make_pair(case: _Case, position: int, source: Holding, backlog_out: float) -> Pair:
    snapshot, columns = case.snapshot, case.snapshot.columns
    key = snapshot.workers[source.position].key
    reader = snapshot.workers[position].key.worker_id
    link = snapshot.links.curve(key.worker_id, reader, source.tier, snapshot.now_ns)
    t0_ns, token_ns, pair_ns = columns.curves[:, position].tolist()
    return Pair(
        wait_ns=case.wait.item(position),
        redo_ns=case.redo.item(position),
        own_blocks=case.owners.get(position, 0),
        held_blocks=source.blocks,
        total_tokens=case.request.prompt_tokens,
        backlog_ns=max(backlog_out, columns.in_free_ns.item(position) - snapshot.now_ns),
        alpha_ns=link.alpha_ns,
        byte_ns=link.byte_ns,
        failure=snapshot.failures.probability(key, snapshot.now_ns),
        t0_ns=t0_ns,
        token_ns=token_ns,
        pair_ns=pair_ns,
    )
