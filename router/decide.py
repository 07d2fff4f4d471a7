"""The decision: which worker, which plan, at what price.  (pure)

`decide` prices every plan for every eligible worker and takes the least expected time to the first token, plus what
the plan's prefill time costs the requests behind it. Ties go to the least prefill time, then to the worker with the
fewest requests, then by a hash of the request id over the workers in key order: independent of the order of
candidates, and different for different requests, so that several routers do not agree on one of many equal workers.

Holders are tried best bound first, until no plan over the rest can beat the best found; so the optimum is not lost.
`MAX_HOLDERS` ends the search anyway, to bound the time of a decision.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvpool.errors import UnavailableError
from kvpool.plan import Plan, PlanKind
from kvpool.types import RequestId, WorkerKey
from router import cost
from router.cost import LoadInputs, Priced
from router.planning import Params, PlanPrices, Promise, build_plan, build_promise
from router.signals import Bools, Floats, Holding, RequestView, Snapshot, holdings

MAX_HOLDERS = 16
Positions = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Decision:
    """The verdict. The columns of ``prices`` are in the order of the snapshot's workers.

    Attributes:
        position: index of the chosen worker.
        price_ns: expected time to the first token.
        prices: every plan and source priced; plans over holders that were pruned are absent.
        own_blocks: what the chosen worker itself has of the prompt.
        pruned_holders: holders that were not priced because they could not have been chosen.
    """

    request_id: RequestId
    worker: WorkerKey
    position: int
    plan: Plan
    price_ns: int
    prices: tuple[PlanPrices, ...]
    promise: Promise
    own_blocks: int
    pruned_holders: int = 0


@dataclass(frozen=True, slots=True)
class _Case:
    """Everything the parts of one decision share."""

    request: RequestView
    snapshot: Snapshot
    params: Params
    eligible: Bools
    held: list[Holding]
    own: Floats
    wait: Floats
    redo: Floats

    def least(self, priced: Priced) -> float:
        """Least score of any eligible worker."""
        return float(np.where(self.eligible, self.score(priced), np.inf).min())

    def score(self, priced: Priced) -> Floats:
        """What the choice minimises."""
        harm = self.params.harm_weight
        return priced.ttft_ns + harm * priced.gpu_ns if harm else priced.ttft_ns


def decide(request: RequestView, snapshot: Snapshot, params: Params) -> Decision:
    """Choose worker and plan for a request.

    Raises:
        UnavailableError: no worker can take it.
    """
    case = _open_case(request, snapshot, params)
    prices = [PlanPrices(PlanKind.REDO, None, cost.price_redo(case.wait, case.redo, case.own))]
    pruned = 0
    if params.loads and snapshot.features.load and case.held:
        pruned = _price_loads(case, prices)
    chosen, position = _choose(case, prices)
    own = int(case.own[position])
    plan = build_plan(snapshot, params, case.held, chosen, position, own)
    return Decision(
        request_id=request.request_id,
        worker=snapshot.workers[position].key,
        position=position,
        plan=plan,
        price_ns=round(float(chosen.priced.ttft_ns[position])),
        prices=tuple(prices),
        promise=build_promise(request, snapshot, plan, chosen, position, own),
        own_blocks=own,
        pruned_holders=pruned,
    )


def eligible_workers(request: RequestView, snapshot: Snapshot) -> Bools:
    """Mask of workers that may take the request.

    Raises:
        UnavailableError: there is none.
    """
    eligible = snapshot.columns.eligible
    excluded = [snapshot.index[key] for key in request.exclude if key in snapshot.index]
    if excluded:
        eligible = eligible.copy()
        eligible[excluded] = False
    if not eligible.any():
        raise UnavailableError(
            "no worker can take the request: none is alive, prefills and has not just failed it; "
            "start workers or retry later",
            workers=len(snapshot.workers),
            excluded=len(excluded),
        )
    return eligible


def _open_case(request: RequestView, snapshot: Snapshot, params: Params) -> _Case:
    columns = snapshot.columns
    held = holdings(request, snapshot)
    own = np.zeros(len(columns))
    for holding in held:
        own[holding.position] = holding.blocks
    return _Case(
        request=request,
        snapshot=snapshot,
        params=params,
        eligible=eligible_workers(request, snapshot),
        held=held,
        own=own,
        wait=cost.wait_ns(columns, snapshot.now_ns, params.costs),
        redo=cost.prefill_ns(columns, request.prompt_tokens, own * snapshot.footprint.block_tokens),
    )


def _price_loads(case: _Case, prices: list[PlanPrices]) -> int:
    """Append the price of every plan over a holder that might win; returns how many holders were left out."""
    columns, snapshot = case.snapshot.columns, case.snapshot
    sources = [holding for holding in case.held if columns.holder[holding.position]]
    bounds = _bounds(case, sources)
    best = case.least(prices[0].priced)
    backlog_in = np.maximum(columns.in_free_ns - snapshot.now_ns, 0.0)
    order = sorted((bounds[i], int(columns.rank[source.position]), i) for i, source in enumerate(sources))
    done = 0
    for bound, _, i in order[:MAX_HOLDERS]:
        if bound >= best and done >= case.params.priced_holders:
            break
        done += 1
        inputs = _load_inputs(case, sources[i], backlog_in)
        load = cost.price_load(columns, inputs, snapshot.footprint, case.params.costs)
        prices.append(PlanPrices(PlanKind.LOAD, sources[i], load))
        best = min(best, case.least(load))
        if snapshot.features.split:
            front = cost.split_tokens(columns, inputs, snapshot.footprint)
            split = cost.price_split(columns, inputs, snapshot.footprint, front)
            prices.append(PlanPrices(PlanKind.SPLIT, sources[i], split))
            best = min(best, case.least(split))
    return len(sources) - done


def _load_inputs(case: _Case, source: Holding, backlog_in: Floats) -> LoadInputs:
    snapshot = case.snapshot
    key = snapshot.workers[source.position].key
    backlog_out = max(float(snapshot.columns.out_free_ns[source.position]) - snapshot.now_ns, 0.0)
    return LoadInputs(
        wait=case.wait,
        redo=case.redo,
        own_blocks=case.own,
        held_blocks=source.blocks,
        total_tokens=case.request.prompt_tokens,
        backlog=np.maximum(backlog_in, backlog_out),
        row=snapshot.links.row(key.worker_id, source.tier, snapshot.now_ns),
        failure=snapshot.failures.probability(key, snapshot.now_ns),
    )


def _bounds(case: _Case, sources: list[Holding]) -> list[float]:
    """For every source a score no plan over it can beat: the least wait and fastest curve of any eligible worker,
    the source's own backlog behind the best link of the tier, and only what the source lacks left to compute."""
    snapshot, columns, eligible = case.snapshot, case.snapshot.columns, case.eligible
    wait = float(case.wait[eligible].min())
    t0_ns = float(columns.t0_ns[eligible].min())
    token_ns = float(columns.token_ns[eligible].min())
    pair_ns = float(columns.pair_ns[eligible].min())
    total = case.request.prompt_tokens
    bounds = []
    for source in sources:
        cached = source.blocks * snapshot.footprint.block_tokens
        rest = t0_ns + (total - cached) * (token_ns + pair_ns * 0.5 * (total + cached))
        start = wait
        if not snapshot.features.split:
            backlog = max(float(columns.out_free_ns[source.position]) - snapshot.now_ns, 0.0)
            start = max(wait, backlog + snapshot.links.best(source.tier).alpha_ns)
        bounds.append(start + rest + case.params.harm_weight * rest)
    return bounds


def _choose(case: _Case, prices: list[PlanPrices]) -> tuple[PlanPrices, int]:
    """Least score; then least prefill time, fewest requests, and a hash of the request over the key order."""
    columns = case.snapshot.columns
    ticket = zlib.crc32(case.request.request_id.encode())
    best_score = math.inf
    ties: list[tuple[tuple[float, float, int], PlanPrices, int]] = []
    for plan in prices:
        score = np.where(case.eligible, case.score(plan.priced), np.inf)
        least = float(score.min())
        if least > best_score or least == math.inf:
            continue
        if least < best_score:
            best_score, ties = least, []
        position = _break_tie(np.flatnonzero(score == least), plan, case, ticket)
        key = (float(plan.priced.gpu_ns[position]), float(columns.requests[position]), int(columns.rank[position]))
        ties.append((key, plan, position))
    if not ties:
        raise UnavailableError("no worker has a finite price", workers=len(columns))
    _, plan, position = min(ties, key=lambda item: item[0])
    return plan, position


def _break_tie(positions: Positions, plan: PlanPrices, case: _Case, ticket: int) -> int:
    columns = case.snapshot.columns
    for values in (plan.priced.gpu_ns, columns.requests):
        if len(positions) == 1:
            return int(positions[0])
        tied = values[positions]
        positions = positions[tied == tied.min()]
    order = np.argsort(columns.rank[positions])
    return int(positions[order[ticket % len(positions)]])
