"""The decision: which worker, which plan, at what price.  (pure)

`decide` takes the plan of least score over all eligible workers: its expected time to the first token plus its harm,
what its prefill time costs the requests behind it (`router.planning.Harm`). Ties go to the least prefill time, then
to the worker with the fewest requests, then by a hash of the request id over the workers in key order: independent of
the order of candidates, and different for different requests, so that several routers do not agree on one of many
equal workers.

Redo is scored for all workers at once, and so is every load from one holder (`router.kernel`). Holders are tried in the
order of a lower bound, until none is below the best score found: the optimum is not lost, and of many holders a few
are tried, at most `MAX_HOLDERS`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from kvpool.plan import Plan, PlanKind
from kvpool.types import RequestId, WorkerKey
from router import cost
from router.compiled import kernels
from router.cost import Pair, Price
from router.kernel import OWN, REDO, WAIT, Floats, LoadCost, SplitCost
from router.planning import Params, Promise, build_plan, build_promise, build_striped_plan
from router.scores import Case, open_case
from router.signals import Holding, RequestView, Snapshot
from router.striping import MIN_GAIN, Stripes, Way, best_stripes

MAX_HOLDERS = 16
"""Bounds the time of a decision when hundreds of workers hold a hot prefix and their links differ a little."""


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
        load_floor_ns: no load that is not in `loads` could have had a lower score; None when there was none.
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

    def ttft_ns(self, case: Case) -> float:
        """Expected time to the first token."""
        return self.cost[0] if self.source is not None else case.wait_ns(self.position) + self.gpu_ns

    def price(self, case: Case) -> Price:
        """What it costs."""
        if self.source is None:
            return cost.price_redo(case.wait_ns(self.position), self.gpu_ns, case.own_blocks(self.position))
        return Price(self.kind, *self.cost)


def decide(request: RequestView, snapshot: Snapshot, params: Params) -> Decision:
    """Choose worker and plan for a request.

    Raises:
        UnavailableError: no worker can take it.
    """
    case = open_case(request, snapshot, params)
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
    position = choice.position
    own, price = case.own_blocks(position), choice.price(case)
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
        len(case.held),
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
    at, bound = case.redo[5:]
    floor, left = math.inf, MAX_HOLDERS
    while at >= 0 and bound < choice.score and left:
        left -= 1
        source = case.sources[at]
        key = snapshot.workers[source.position].key
        row = snapshot.links.row(key.worker_id, source.tier, now_ns)
        failure = snapshot.failures.probability(key, now_ns)
        score, gpu_ns, requests, turn, position, splits, load, split, others, at, bound = best_load(
            table, case.work, case.kept, case.sheet, row, at, failure, choice.score
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
    """The better of a choice and loading from several holders, on the worker that is best without that and on the one
    that is free first; appends what was priced, and returns the least score of what was not."""
    columns, most = case.snapshot.columns, case.snapshot.features.stripes
    reach = np.empty((2 * (most - 1), 3))
    count, least = kernels().stripes_reach(
        columns.table, case.work, case.kept, case.sheet, reach, choice.position, most
    )
    best: Stripes | None = None
    if least >= _worth(case, choice):  # mostly
        return choice, best, least
    floor = math.inf
    for place, length, bound in reach[:count].tolist():
        if bound >= _worth(case, choice):
            floor = min(floor, bound)
            continue
        position, blocks = int(place), int(length)
        others = [item for item in case.held if item.blocks >= blocks and item.position != position]
        sources = [item for item in others if columns.holder.item(item.position)]
        if len(sources) > MAX_HOLDERS:
            sources = _least_busy(case, sources, choice.source)
        found = _stripes_on(case, position, sources, case.pair(position, sources[0])._replace(held_blocks=blocks))
        if found is None:
            continue
        price, first = found.price, found.ways[0].holding
        priced.append(LoadPrice(position, first, price, len(found.ways)))
        score = case.score_ns(position, price.ttft_ns, price.gpu_ns)
        if score < _worth(case, choice):
            requests, turn, cost = columns.requests.item(position), case.turn(position), _cost(price)
            choice = _Choice(score, price.gpu_ns, requests, turn, position, first, price.kind, cost, found.byte_ns)
            best = found
    return choice, best, floor


def _worth(case: Case, choice: _Choice) -> float:
    """What a load from several holders must stay below to be taken."""
    return choice.score - MIN_GAIN * choice.ttft_ns(case)


def _least_busy(case: Case, sources: list[Holding], best: Holding | None) -> list[Holding]:
    """The best single source and those whose way out is free first, `MAX_HOLDERS` in all."""
    columns = case.snapshot.columns
    positions = np.array([item.position for item in sources])
    order = np.lexsort((columns.rank[positions], columns.out_free_ns[positions]))[:MAX_HOLDERS]
    chosen = [sources[at] for at in order.tolist()]
    return chosen if best is None or best in chosen or best not in sources else [best, *chosen[:-1]]


def _stripes_on(case: Case, position: int, sources: list[Holding], pair: Pair) -> Stripes | None:
    """The best plan over several of these holders on a worker."""
    snapshot = case.snapshot
    return best_stripes(
        pair,
        [_way(case, position, item) for item in sources],
        snapshot.footprint,
        case.params.costs,
        split=snapshot.features.split,
        most=snapshot.features.stripes,
        together=snapshot.together.get(snapshot.workers[position].key, 1.0),
    )


def _way(case: Case, position: int, source: Holding) -> Way:
    snapshot, now_ns = case.snapshot, case.snapshot.now_ns
    key = snapshot.workers[source.position].key
    link = snapshot.links.curve(key.worker_id, snapshot.workers[position].key.worker_id, source.tier, now_ns)
    start_ns = case.backlog_ns(position, source) + link.alpha_ns
    rank = snapshot.columns.rank.item(source.position)
    return Way(source, start_ns, link.byte_ns, snapshot.failures.probability(key, now_ns), rank)


def _cost(price: Price) -> LoadCost | SplitCost:
    common = (price.ttft_ns, price.happy_ns, price.gpu_ns, price.boundary, price.load_ns)
    return common if price.front_tokens is None else (*common, price.front_tokens)
