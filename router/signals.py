"""What one decision sees: the request and a snapshot of the cluster.  (pure)

Facts about a worker that change rarely live in `WorkerView`; numbers that change with every report or promise live in
`Columns`, one row per number with one entry per worker, so that a thousand workers are priced at once. The owner of the
columns (`router.fleet`) writes them; a decision only reads them, and a `Snapshot` is valid until the next write.

Moments are nanoseconds of the router's clock, kept as float64: exact to 1 ns for 104 days of uptime.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np

from kvpool.reports import WorkerLoad
from kvpool.types import BlockHash, MemberState, RequestId, Role, Tier, WorkerId, WorkerKey
from router import kernel
from router.estimators import LinkCurve, PrefillCurve
from router.kernel import Floats, Places

NO_ARRIVALS = 1e-200
"""Least of ``Columns.arrivals``: a share of all of them is always defined."""

NEVER_NS = -np.inf
"""``Columns.reported_ns`` of a worker that has not reported yet."""


class RequestView(NamedTuple):
    """What the router knows of a request when it decides.

    Attributes:
        request_id: identity; also breaks ties, so that several routers do not agree on one of many equal workers.
        prompt_tokens: length of the prompt, at least 1.
        chain_blocks: full blocks of the prompt.
        max_tokens: tokens to generate at most.
        exclude: incarnations that just failed this request.
        chain: hashes of the full blocks, for rules that keep a tree of their own.
    """

    request_id: RequestId
    prompt_tokens: int
    chain_blocks: int
    max_tokens: int = 1
    exclude: frozenset[WorkerKey] = frozenset()
    chain: tuple[BlockHash, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerView:
    """Facts about one worker; ``load`` is None before its first report."""

    key: WorkerKey
    role: Role
    state: MemberState
    transport: str = ""
    data_address: bytes = b""
    control_address: str = ""
    load: WorkerLoad | None = None


class Columns:
    """Numbers of all workers, in the order of ``Snapshot.workers``: views of the rows of one table.

    Attributes:
        table: all of them, as the compiled loops read it.
        closed_ns: 0 where a new request may go (alive, and prefills), inf elsewhere: a wait that never ends.
        holder: 1 for one that may be read from (alive), else 0.
        rank: position of the key in sorted order; makes ties independent of the order of workers.
        reported_ns: moment since which a report is due: that of the newest report, `NEVER_NS` before the first, inf
            for a worker that reported to be idle and got no work since.
        gpu_free_ns: moment when reported and promised prefill work ends.
        in_free_ns, out_free_ns: moment when promised loads into and out of the worker end.
        requests: requests admitted or promised and not finished.
        queued_tokens: prompt tokens to compute, reported and promised.
        empty_blocks: blocks that can come without anything leaving.
        arrivals: decayed count of requests routed to the worker; ``arrival_scale`` turns it into a rate.
        turnover: one over the time for which the block that would leave the worker's cache next has been idle, 0 where
            none must leave; `router.fleet.Fleet.settle` makes ``pressure`` of it.
        pressure: how soon what leaves the worker's cache would have been wanted again, against the mean of all; 0
            where nobody knows.
        t0_ns, token_ns, pair_ns: prefill curves (`router.estimators.PrefillCurve`); ``curves`` are all three rows.
        linked_ns: until when what is kept of the links from a worker counts, by tier: its device, its host's memory.
    """

    __slots__ = (
        "arrivals",
        "closed_ns",
        "curves",
        "empty_blocks",
        "gpu_free_ns",
        "holder",
        "in_free_ns",
        "linked_ns",
        "out_free_ns",
        "pair_ns",
        "pressure",
        "queued_tokens",
        "rank",
        "reported_ns",
        "requests",
        "t0_ns",
        "table",
        "token_ns",
        "turnover",
    )

    def __init__(self, table: Floats) -> None:
        self.table = table
        self.closed_ns: Floats = table[kernel.CLOSED]
        self.holder: Floats = table[kernel.HOLDER]
        self.rank: Floats = table[kernel.RANK]
        self.reported_ns: Floats = table[kernel.REPORTED]
        self.gpu_free_ns: Floats = table[kernel.GPU_FREE]
        self.in_free_ns: Floats = table[kernel.IN_FREE]
        self.out_free_ns: Floats = table[kernel.OUT_FREE]
        self.requests: Floats = table[kernel.REQUESTS]
        self.queued_tokens: Floats = table[kernel.QUEUED]
        self.empty_blocks: Floats = table[kernel.EMPTY]
        self.arrivals: Floats = table[kernel.ARRIVALS]
        self.turnover: Floats = table[kernel.TURNOVER]
        self.pressure: Floats = table[kernel.PRESSURE]
        self.t0_ns: Floats = table[kernel.T0]
        self.token_ns: Floats = table[kernel.TOKEN]
        self.pair_ns: Floats = table[kernel.PAIR]
        self.curves: Floats = table[kernel.T0 : kernel.PAIR + 1]
        self.linked_ns: Floats = table[kernel.LINKED :]

    @classmethod
    def zeros(cls, size: int) -> Columns:
        """Columns of ``size`` workers that are not eligible for anything yet."""
        made = cls(np.zeros((kernel.TABLE_ROWS, size)))
        made.reported_ns.fill(NEVER_NS)
        made.closed_ns.fill(np.inf)
        made.arrivals.fill(NO_ARRIVALS)
        return made

    def curve(self, position: int) -> PrefillCurve:
        """The prefill curve of one worker."""
        return PrefillCurve(self.t0_ns.item(position), self.token_ns.item(position), self.pair_ns.item(position))

    def copy(self) -> Columns:
        """Columns nobody else writes."""
        return Columns(self.table.copy())

    def chosen(self, positions: list[int], added: int = 0) -> Columns:
        """The numbers of some workers, in this order, and of ``added`` new ones behind them."""
        made = Columns.zeros(len(positions) + added)
        made.table[:, : len(positions)] = self.table[:, positions]
        return made

    def __len__(self) -> int:
        return len(self.rank)


class LinkView(Protocol):
    """What is known about links. Pure reads."""

    def curve(self, holder: WorkerId, reader: WorkerId, tier: Tier, now_ns: int) -> LinkCurve:
        """What to expect of one link now."""

    def row(self, holder: WorkerId, tier: Tier, now_ns: int) -> Floats:
        """Links from the holder to every worker of the snapshot, in its order: a row of α, a row of times per byte."""

    def best(self, tier: Tier) -> LinkCurve:
        """A curve no link of the tier is better than."""


class FailureView(Protocol):
    """What is known about the reliability of holders. Pure reads."""

    def probability(self, holder: WorkerKey, now_ns: int) -> float:
        """Chance in [0, 1) that a load from this holder fails."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that must move for a prefix: ``fixed_bytes`` (windows, states) and ``block_bytes`` for every block."""

    block_tokens: int
    block_bytes: int
    fixed_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Features:
    """Plans the workers can execute besides redo; ``stripes`` is how many holders one load may come from at once."""

    load: bool = True
    split: bool = False
    stripes: int = 1


class Snapshot(NamedTuple):
    """The cluster as one decision sees it.

    Attributes:
        now_ns: moment of the decision.
        workers: facts, one per worker.
        positions: of the workers in ``workers`` and in the columns.
        columns: numbers.
        prefixes: for holders of a part of this prompt's chain, the leading blocks by tier. Workers that hold nothing
            may be absent.
        footprint: bytes of the model's KV.
        links, failures: learned curves and rates.
        fastest: a prefill curve no worker's is below.
        features: what the workers can execute.
        arrival_scale: ``columns.arrivals * arrival_scale`` is the recent rate of requests per ns of each worker.
        together: share of the sum of single links that a reader takes from several holders at once; 1 where unknown.
        fills: time per byte from host memory to where the worker computes, of workers with a device tier.
        places: positions of many workers at once; None leaves it to ``positions``.
    """

    now_ns: int
    workers: tuple[WorkerView, ...]
    positions: Mapping[WorkerKey, int]
    columns: Columns
    prefixes: Mapping[WorkerKey, Mapping[Tier, int]]
    footprint: Footprint
    links: LinkView
    failures: FailureView
    fastest: PrefillCurve
    features: Features = Features()
    arrival_scale: float = 0.0
    together: Mapping[WorkerKey, float] = MappingProxyType({})
    fills: Mapping[WorkerKey, float] = MappingProxyType({})
    places: Callable[[tuple[WorkerKey, ...]], Places] | None = None


_DEVICE = Tier.DEVICE  # looking a member up takes longer than comparing with it


class Holding(NamedTuple):
    """What one holder has of a prompt, after clipping to what may be used."""

    position: int
    blocks: int
    tier: Tier


def usable_blocks(request: RequestView, block_tokens: int) -> int:
    """Blocks of the chain that may come from a cache: the last token is always computed, its logits are needed."""
    return min(request.chain_blocks, (request.prompt_tokens - 1) // block_tokens)


def holdings(request: RequestView, snapshot: Snapshot) -> list[Holding]:
    """The longest usable prefix of every worker that has one and is known; the fastest tier among equals. A device tier
    that holds copies of what lies in host memory (``Snapshot.fills``) is nobody's source: peers read the latter."""
    limit = usable_blocks(request, snapshot.footprint.block_tokens)
    found = []
    position_of, fills = snapshot.positions.get, snapshot.fills
    make = tuple.__new__  # what Holding(…) calls in the end, without a call into Python for each of many holders
    seen: Mapping[Tier, int] | None = None
    blocks, best_tier = 0, _DEVICE
    for key, tiers in snapshot.prefixes.items():
        position = position_of(key)
        if position is None:
            continue
        if tiers is not seen:  # equally long ones share theirs
            if len(tiers) == 1:  # as mostly, and a call would take longer than all else here
                ((best_tier, blocks),) = tiers.items()
                blocks = blocks if blocks < limit else limit
            else:
                blocks, best_tier = longest(tiers, limit)
            seen = tiers
        if blocks > 0:
            tier = _read_from(best_tier, key, snapshot) if fills else best_tier
            found.append(make(Holding, (position, blocks, tier)))
    return found


def longest(tiers: Mapping[Tier, int], limit: int) -> tuple[int, Tier]:
    """The longest usable prefix of a worker, and the fastest tier that holds it."""
    blocks, best_tier = 0, _DEVICE
    for tier, held in tiers.items():
        clipped = held if held < limit else limit
        if clipped > blocks or (clipped == blocks and tier < best_tier):
            blocks, best_tier = clipped, tier
    return blocks, best_tier


def readable(held: list[Holding], request: RequestView, snapshot: Snapshot) -> list[Holding]:
    """What others may read of ``held``: the part in memory. Disks are read by their own worker only."""
    if Tier.DISK not in [holding.tier for holding in held]:
        return held
    limit = usable_blocks(request, snapshot.footprint.block_tokens)
    found = []
    for holding in held:
        if holding.tier is not Tier.DISK:
            found.append(holding)
            continue
        key = snapshot.workers[holding.position].key
        tiers = snapshot.prefixes[key]
        memory = [(min(blocks, limit), tier) for tier, blocks in tiers.items() if tier is not Tier.DISK and blocks]
        if memory:
            blocks, tier = max(memory, key=lambda item: (item[0], -item[1]))
            found.append(Holding(holding.position, blocks, _read_from(tier, key, snapshot)))
    return found


def _read_from(tier: Tier, key: WorkerKey, snapshot: Snapshot) -> Tier:
    """Where peers read what lies in a tier: a device tier holds copies of what is in host memory."""
    return Tier.HOST if tier is Tier.DEVICE and key in snapshot.fills else tier
