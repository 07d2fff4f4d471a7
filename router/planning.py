"""From a chosen price to the plan a worker carries out and the promise the ledger keeps.  (pure)"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from kvpool.plan import HolderRef, LoadSlice, Plan, PlanKind
from kvpool.types import Tier, WorkerKey
from router.cost import Costs, Price
from router.signals import Holding, RequestView, Snapshot
from router.striping import Stripes, deal, first_block
from router.waiting import Hold

MAX_ALTERNATES = 3
_REDO = PlanKind.REDO  # looking a member up takes longer than comparing with it


@dataclass(frozen=True, slots=True)
class Harm:
    """What a plan costs others, beside its own time: with g ns of prefill, and e blocks that must leave the cache,

        g' · (base + follow · rate · wait + beside · requests + shared) + keep · e · redo · pressure,  g' = min(g, cap),

    and ``several`` of its own time for each holder of a load beyond the first: more holders, more that can fail.

    Whoever arrives at the worker before its queue has drained waits g longer; their number is the worker's recent
    arrival rate times the wait. So while nobody waits only ``base`` counts, and a queue makes long prefills gather on
    workers to which few requests go, where they stand in nobody's way. The cap keeps the very longest from yielding
    to everybody else. ``shared`` is a part of the mean of the middle term over all workers: when queues stand
    everywhere, capacity is scarce everywhere, and loads that spare it are worth waiting for.

    Every request that is in flight on the worker decodes there, or soon will, and waits for its next token as long as a
    prefill takes: ``beside`` is what that counts against waiting for a first token. And a cache that is full gives
    something up for what comes: ``keep`` is the chance that it would have been used again, on a worker whose cache
    turns over as fast as the mean; ``redo`` is the time to compute a block, ``pressure`` is
    `router.fleet.Fleet.pressure`.

    Attributes:
        base: harm that is always there: capacity used is gone.
        follow: weight of those who follow.
        cap_ns: prefill time beyond which a request is not made to yield any further.
        beside: weight of each request in flight on the worker.
        keep: weight of what must leave the cache.
        several: what each further holder of a load counts, as a share of the time to the first token.
        share: part of the mean crowd of all workers that counts on each; ``share_limit`` bounds it.
    """

    base: float = 0.0
    follow: float = 0.0
    cap_ns: float = 1e9
    share: float = 0.0
    share_limit: float = 3.0
    beside: float = 0.0
    keep: float = 0.0
    several: float = 0.0


DEFAULT_HARM = Harm(follow=6.0, cap_ns=4e9, beside=0.03, keep=1.0, share=0.3, several=0.2)
"""Found by replaying parts of the conversation trace on two models, from light load to overload."""


@dataclass(frozen=True, slots=True)
class Params:
    """Free parameters of the policy.

    Attributes:
        costs: what pricing assumes.
        loads: False prices redo only.
        harm: how a plan's prefill time counts for the requests behind it.
        hold: from when on requests wait at the router.
        deadline_factor: budget of loads in units of their predicted time.
        min_deadline_ns, min_stall_ns: floors of the load deadline and of the stall bound.
        priced_pairs: (worker, holder) pairs that are priced even when they cannot win, so that the record shows them.
    """

    costs: Costs = field(default_factory=Costs)
    loads: bool = True
    harm: Harm = DEFAULT_HARM
    hold: Hold = field(default_factory=Hold)
    deadline_factor: float = 3.0
    min_deadline_ns: float = 1e9
    min_stall_ns: float = 1e9
    priced_pairs: int = 0


class Transfer(NamedTuple):
    """Link time that a decision promises: ``busy_ns`` on the holder's way out; on the reader's way in the same, or
    ``reader_ns`` when others load at the same time."""

    holder: WorkerKey
    num_bytes: int
    busy_ns: float
    reader_ns: float | None = None

    @property
    def in_ns(self) -> float:
        """Time on the reader's way in."""
        return self.busy_ns if self.reader_ns is None else self.reader_ns


class Promise(NamedTuple):
    """What a decision reserves with its worker and its links, until the worker reports it."""

    worker: WorkerKey
    gpu_ns: float
    tokens: int
    transfers: tuple[Transfer, ...] = ()

    def scaled(self, factor: float) -> Promise:
        """The same with so many times the GPU time."""
        return Promise(self.worker, self.gpu_ns * factor, self.tokens, self.transfers)


def build_plan(
    snapshot: Snapshot,
    params: Params,
    held: list[Holding],
    price: Price,
    source: Holding | None,
    position: int,
    own_blocks: int,
) -> Plan:
    """The plan of the worker at ``position``; other holders of the first missing block stand behind the source."""
    if source is None:
        return Plan(_REDO, predicted_ttft_ns=round(price.happy_ns))
    start = first_block(price, own_blocks, snapshot.footprint.block_tokens)
    others = _others(snapshot, held, position, start) if len(held) > 1 else []
    return _plan_of(params, price, (_slice(snapshot, others, source, start, price.boundary),))


def build_striped_plan(
    snapshot: Snapshot, params: Params, held: list[Holding], stripes: Stripes, position: int, own_blocks: int
) -> tuple[Plan, tuple[Transfer, ...]]:
    """The plan of the worker at ``position`` over several holders, and the link time it takes of each."""
    price, footprint = stripes.price, snapshot.footprint
    start = first_block(price, own_blocks, footprint.block_tokens)
    others = _others(snapshot, held, position, start)
    pieces = tuple(
        _slice(snapshot, others, stripes.ways[who].holding, low, high)
        for low, high, who in deal(start, price.boundary, stripes.blocks)
    )
    transfers = []
    for number, (way, blocks) in enumerate(zip(stripes.ways, stripes.blocks, strict=True)):
        num_bytes = blocks * footprint.block_bytes + (0 if number else footprint.fixed_bytes)
        key = snapshot.workers[way.holding.position].key
        transfers.append(Transfer(key, num_bytes, num_bytes * way.byte_ns, num_bytes * stripes.byte_ns))
    return _plan_of(params, price, pieces), tuple(transfers)


_Other = tuple[int, float, float, int, Tier]


def _slice(snapshot: Snapshot, others: list[_Other], source: Holding, start: int, stop: int) -> LoadSlice:
    holder = snapshot.workers[source.position]
    alternates = _alternates(snapshot, others, source, start)
    return LoadSlice(start, stop, holder.key, holder.transport, holder.data_address, source.tier, alternates)


def _plan_of(params: Params, price: Price, loads: tuple[LoadSlice, ...]) -> Plan:
    deadline_ns = round(max(params.min_deadline_ns, params.deadline_factor * price.load_ns))
    stall_ns = round(max(params.min_stall_ns, price.load_ns))
    return Plan(
        price.kind, loads, price.front_tokens, deadline_ns, stall_ns, round(price.happy_ns), round(price.load_ns)
    )


def build_promise(
    request: RequestView,
    snapshot: Snapshot,
    plan: Plan,
    price: Price,
    position: int,
    own_blocks: int,
    byte_ns: float,
) -> Promise:
    """GPU time the plan takes, and link time at ``byte_ns`` per byte."""
    footprint = snapshot.footprint
    worker = snapshot.workers[position].key
    transfers, blocks = [], own_blocks
    for piece in plan.loads:
        moved = piece.stop - piece.start
        num_bytes = footprint.fixed_bytes + moved * footprint.block_bytes
        transfers.append(Transfer(piece.holder, num_bytes, num_bytes * byte_ns))
        blocks += moved
    return Promise(worker, price.gpu_ns, request.prompt_tokens - blocks * footprint.block_tokens, tuple(transfers))


def _others(snapshot: Snapshot, held: list[Holding], reader: int, start: int) -> list[_Other]:
    """Whom a reader may load from beside a source, with more than ``start`` blocks: longest prefix first, then least
    busy link, then key."""
    columns = snapshot.columns
    readable, out_free_ns, rank = columns.holder.item, columns.out_free_ns.item, columns.rank.item
    others = [
        (-blocks, out_free_ns(position), rank(position), position, tier)
        for position, blocks, tier in held
        if blocks > start and position != reader and readable(position)
    ]
    others.sort()  # ranks differ
    return others


def _alternates(snapshot: Snapshot, others: list[_Other], source: Holding, start: int) -> tuple[HolderRef, ...]:
    """The first of ``others`` that hold at least the first block to load and are not the source."""
    refs: list[HolderRef] = []
    for blocks, _, _, position, tier in others:
        if -blocks <= start or len(refs) == MAX_ALTERNATES:
            break
        if position != source.position:
            view = snapshot.workers[position]
            refs.append(HolderRef(view.key, view.data_address, tier, -blocks))
    return tuple(refs)
