"""The decision: which worker, which plan, at what price.  (pure)

`decide` takes the plan of least score over all eligible workers: its expected time to the first token plus its harm,
what its prefill time costs the requests behind it (`router.planning.Harm`). Ties go to the least prefill time, then
to the worker with the fewest requests, then by a hash of the request id over the workers in key order: independent of
the order of candidates, and different for different requests, so that several routers do not agree on one of many
equal workers.

Redo is scored for all workers at once, and so is every load from one holder (`router.kernel`). Holders are tried in the
order of a lower bound, until none is below the best score found: the optimum is not lost, and of many holders a few
are tried, at most `router.kernel.MAX_HOLDERS`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from kvpool.plan import Plan, PlanKind
from kvpool.types import RequestId, WorkerKey
from router import cost
from router.compiled import kernels
from router.cost import Price
from router.kernel import OWN, REDO, WAIT, Floats
from router.kernel_stripes import POOL
from router.planning import Params, Promise, build_plan, build_promise, build_striped_plan
from router.prices import LoadCost, SplitCost
from router.scores import Case, open_case
from router.signals import Holding, RequestView, Snapshot
from router.striping import Stripes, Way, share_out

MAX_REACHES = 64
"""Workers and lengths at which loads from several holders are looked for, the most promising ones."""

_LOAD, _SPLIT = PlanKind.LOAD, PlanKind.SPLIT  # looking a member up takes longer than comparing with it


class LoadPrice(NamedTuple):
    """A plan with a load, priced for one worker and one holder, or several of which ``source`` is the first."""

    position: int
    source: Holding
    price: Price
    holders: int = 1


Tried = tuple[Holding, int, LoadCost, SplitCost]
"""A holder, the worker that would best load from it, and what a load and a split would cost there."""


class Decision(NamedTuple):
    """The verdict.

    Attributes:
        position: index of the chosen worker.
        price_ns: expected time to the first token.
        kept: rows in the order of the snapshot's workers, which nobody writes any more: `wait`, `redo`, `own`.
        tried: of each holder that was tried, the best worker with its load and its split.
        priced: further plans with loads that were priced.
        own_blocks: what the chosen worker itself has of the prompt.
        holders: workers that hold a part of the prompt.
        together: for a load from several holders, when it starts and its time per byte as the plan expects them.
        load_floor_ns: no load that is not in `loads` could have had a lower score, among plans that use own disks as
            this one does; None when there was none.
    """

    request_id: RequestId
    worker: WorkerKey
    position: int
    plan: Plan
    price_ns: int
    kept: Floats
    tried: tuple[Tried, ...]
    priced: tuple[LoadPrice, ...]
    promise: Promise
    own_blocks: int
    holders: int = 0
    load_floor_ns: float | None = None
    together: tuple[float, float] | None = None

    @property
    def wait(self) -> Floats:
        """Wait for each GPU."""
        row: Floats = self.kept[WAIT]
        return row

    @property
    def redo(self) -> Floats:
        """Prefill of what each worker lacks."""
        row: Floats = self.kept[REDO]
        return row

    @property
    def own(self) -> Floats:
        """Blocks of the prompt each worker has."""
        row: Floats = self.kept[OWN]
        return row

    @property
    def loads(self) -> list[LoadPrice]:
        """Plans with loads that were priced; all others could not have been chosen."""
        found = []
        for source, position, load, split in self.tried:
            found.append(LoadPrice(position, source, Price(_LOAD, *load)))
            if split[0] < math.inf:
                found.append(LoadPrice(position, source, Price(_SPLIT, *split)))
        return [*found, *self.priced]


class _Choice(NamedTuple):
    """Best so far. Compared by score, then harm to others: prefill time, requests, and the turn of the worker. Without
    a source it is redo; ``cost`` is the rest of its `Price`."""

    score: float
    gpu_ns: float
    requests: float
    turn: int
    position: int
    source: Holding | None = None
    kind: PlanKind = PlanKind.REDO
    cost: LoadCost | SplitCost = (0.0, 0.0, 0.0, 0, 0.0)
    byte_ns: float = 0.0

    def price(self, case: Case, own_blocks: int) -> Price:
        """What it costs a worker that has so much of the prompt."""
        if self.source is None:
            return cost.price_redo(case.wait_ns(self.position), self.gpu_ns, own_blocks)
        return Price(self.kind, *self.cost)


class _Verdict(NamedTuple):
    """The best plan of one case, and what was priced on the way."""

    case: Case
    choice: _Choice
    stripes: Stripes | None
    tried: list[Tried]
    priced: list[LoadPrice]
    floor: float


def decide(request: RequestView, snapshot: Snapshot, params: Params) -> Decision:
    """Choose worker and plan for a request.

    Raises:
        UnavailableError: no worker can take it.
    """
    verdict = _search(open_case(request, snapshot, params))
    if not verdict.case.on_disk:
        return _decision(verdict)
    # what lies on the own disk of a worker may come sooner from peers
    other = _search(open_case(request, snapshot, params, own_disk=False))
    if other.choice[:4] >= verdict.choice[:4]:
        return _decision(verdict)
    made = _decision(other)
    return made._replace(plan=made.plan._replace(own_disk=False))


def _search(case: Case) -> _Verdict:
    snapshot, params = case.snapshot, case.params
    choice, floor, stripes = _Choice(*case.redo[:5]), math.inf, None
    tried: list[Tried] = []
    priced: list[LoadPrice] = []
    if params.loads and case.held and snapshot.features.load:
        choice, floor = _best_load(case, choice, tried)
        if snapshot.features.stripes > 1 and len(case.held) > 1:
            choice, stripes, left = _best_stripes(case, choice, priced)
            floor = min(floor, left)
        if params.priced_pairs:
            _price_more(case, tried, priced)
    return _Verdict(case, choice, stripes, tried, priced, floor)


def _decision(verdict: _Verdict) -> Decision:
    case, choice, stripes, tried, priced, floor = verdict
    request, snapshot, params, position = case.request, case.snapshot, case.params, choice.position
    own = case.own_blocks(position)
    price = choice.price(case, own)
    if stripes is None:
        plan = build_plan(snapshot, params, case.held, price, choice.source, position, own)
        promise = build_promise(request, snapshot, plan, price, position, own, choice.byte_ns)
    else:
        plan, transfers = build_striped_plan(snapshot, params, case.held, stripes, position, own)
        promise = build_promise(request, snapshot, plan, price, position, own, 0.0)
        promise = promise._replace(transfers=transfers)
    return Decision(
        request.request_id,
        snapshot.workers[position].key,
        position,
        plan,
        round(price.ttft_ns),
        case.kept,
        tuple(tried),
        tuple(priced),
        promise,
        own,
        case.holders,
        floor if floor < math.inf else None,
        None if stripes is None else (stripes.start_ns, stripes.byte_ns),
    )


def _best_load(case: Case, choice: _Choice, tried: list[Tried]) -> tuple[_Choice, float]:
    """The best of a choice and all loads; appends every holder that was tried.

    Returns:
        The best choice, and the least score that any other load could have had, inf without any.
    """
    snapshot, best_load = case.snapshot, kernels().best_load
    now_ns, table = snapshot.now_ns, snapshot.columns.table
    at, bound, left, floor = case.redo[5:]
    while at >= 0 and bound < choice.score and left:
        source = case.sources[at]
        key = snapshot.workers[source.position].key
        row = snapshot.links.row(key.worker_id, source.tier, now_ns)
        failure = snapshot.failures.probability(key, now_ns)
        score, gpu_ns, requests, turn, position, splits, load, split, others, at, bound, left = best_load(
            table, case.work, case.kept, case.sheet, row, at, failure, choice.score, left
        )
        floor = min(floor, others)
        if position < 0:
            continue
        tried.append((source, position, load, split))
        if (score, gpu_ns, requests, turn) < choice[:4]:
            kind, price = (_SPLIT, split) if splits else (_LOAD, load)
            byte_ns = row.item(1, position)
            choice = _Choice(score, gpu_ns, requests, turn, position, source, kind, price, byte_ns)
    if at >= 0:
        floor = min(floor, bound)
    return choice, floor


def _price_more(case: Case, tried: list[Tried], priced: list[LoadPrice]) -> None:
    """Price further pairs that cannot win, for the record: holder by holder, longest first."""
    snapshot, holder = case.snapshot, case.snapshot.columns.holder
    known = {(source, position) for source, position, _, _ in tried}
    for source in sorted(case.held, key=lambda item: -item.blocks):
        missing = case.params.priced_pairs - len(tried) - len(priced)
        if missing <= 0:
            return
        found: list[tuple[float, LoadPrice]] = []
        for position in range(len(snapshot.workers) if holder.item(source.position) else 0):
            if (source, position) in known or case.wait_ns(position) == math.inf:
                continue
            price = cost.price_load(case.pair(position, source), case.params.costs)
            if price is not None:
                found.append((case.score_ns(position, price.ttft_ns, price.gpu_ns), LoadPrice(position, source, price)))
        found.sort(key=lambda item: item[0])
        priced += [item for _, item in found[:missing]]


def _best_stripes(case: Case, choice: _Choice, priced: list[LoadPrice]) -> tuple[_Choice, Stripes | None, float]:
    """The better of a choice and loading from several holders; appends what was priced, and returns the least score of
    what was not."""
    table, most = case.snapshot.columns.table, case.snapshot.features.stripes
    found, pool = np.empty((MAX_REACHES, 3)), np.empty(POOL)
    rows, number, left = kernels().stripes_reach(
        table, case.work, case.kept, case.sheet, found, pool, choice.score, most
    )
    if not rows:  # mostly
        return choice, None, left
    found = found[:rows]
    sources = [case.sources[int(at)] for at in pool[:number].tolist()]
    sources.sort(key=lambda item: case.snapshot.columns.rank.item(item.position))
    ways, alphas, bytes_ns, shares = _ways(case, sources, found)
    chosen = np.empty(most)
    score, gpu_ns, requests, turn, at, best, others = kernels().best_stripes(
        table, case.work, case.kept, case.sheet, found, ways, alphas, bytes_ns, shares, chosen, choice.score
    )
    left = min(left, others)
    if at < 0:
        return choice, None, left
    _, _, count, splits, load, split, start_ns, byte_ns = best
    position, places = int(found[at, 0]), [int(place) for place in chosen[:count].tolist()]
    price = Price(_SPLIT, *split) if splits else Price(_LOAD, *load)
    priced.append(LoadPrice(position, sources[places[0]], price, count))
    if score >= choice.score:  # as cheap over one holder
        return choice, None, left
    used = [
        Way(
            sources[place],
            case.backlog_ns(position, sources[place]) + alphas.item(place, at),
            bytes_ns.item(place, at),
        )
        for place in places
    ]
    stripes = share_out(price, used, case.own_blocks(position), case.snapshot.footprint, start_ns, byte_ns)
    first = stripes.ways[0].holding
    kept = split if splits else load
    return _Choice(score, gpu_ns, requests, turn, position, first, price.kind, kept, byte_ns), stripes, left


def _ways(case: Case, sources: list[Holding], found: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """The holders, and their links to the workers of the rows, as `router.kernel_stripes.best_stripes` reads them."""
    snapshot, readers = case.snapshot, found[:, 0].astype(np.int64)
    now_ns, columns = snapshot.now_ns, snapshot.columns
    ways = np.empty((len(sources), 4))
    alphas, bytes_ns = np.empty((len(sources), len(found))), np.empty((len(sources), len(found)))
    for place, source in enumerate(sources):
        key = snapshot.workers[source.position].key
        row = snapshot.links.row(key.worker_id, source.tier, now_ns)
        alphas[place], bytes_ns[place] = row[:, readers]
        busy_ns = max(0.0, columns.out_free_ns.item(source.position) - now_ns)
        failure = snapshot.failures.probability(key, now_ns)
        ways[place] = source.blocks, busy_ns, failure, columns.rank.item(source.position)
    shares = np.ones(len(found))
    if snapshot.together:
        shares[:] = [snapshot.together.get(snapshot.workers[at].key, 1.0) for at in readers.tolist()]
    return ways, alphas, bytes_ns, shares
