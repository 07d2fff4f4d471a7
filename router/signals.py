"""What one decision sees: the request and a snapshot of the cluster.  (pure)

Facts about a worker that change rarely live in `WorkerView`; numbers that change with every report or promise live in
`Columns`, one numpy array per number with one entry per worker, so that a thousand workers are priced at once. The
owner of the columns (`router.fleet`) writes them; a decision only reads them, and a `Snapshot` is valid until the
next write. `Columns.copy` freezes one for a record.

Moments are nanoseconds of the router's clock, kept as float64: exact to 1 ns for 104 days of uptime.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvpool.reports import WorkerLoad
from kvpool.types import BlockHash, MemberState, RequestId, Role, Tier, WorkerId, WorkerKey
from router.estimators import LinkCurve, PrefillCurve

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

Column = list[float] | Floats
"""One number for every worker, in the order of the snapshot."""

NO_ARRIVALS = 1e-200
"""Least of ``Columns.arrivals``: nothing, and yet times an endless wait it is endless and not undefined."""

LEAST_PREFILL_NS = 1e-200
"""Least of the fixed time of a prefill, for the same reason."""

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


@dataclass(frozen=True, slots=True)
class Columns:
    """Numbers of all workers, in the order of ``Snapshot.workers``.

    Attributes:
        closed_ns: 0 where a new request may go (alive, and prefills), inf elsewhere: a wait that never ends.
        holder: may be read from (alive).
        rank: position of the key in sorted order; makes ties independent of the order of workers.
        reported_ns: moment since which a report is due: that of the newest report, `NEVER_NS` before the first, inf
            for a worker that reported to be idle and got no work since.
        gpu_free_ns: moment when reported and promised prefill work ends.
        in_free_ns, out_free_ns: moment when promised loads into and out of the worker end.
        requests: requests admitted or promised and not finished.
        queued_tokens: prompt tokens to compute, reported and promised.
        empty_blocks: blocks that can come without anything leaving.
        arrivals: decayed count of requests routed to the worker; `arrival_scale` turns it into a rate.
        curves: prefill curves (`router.estimators.PrefillCurve`), one row per coefficient: t0 (at least
            `LEAST_PREFILL_NS`), per token, per pair.
    """

    closed_ns: Floats
    holder: Bools
    rank: Ints
    reported_ns: Floats
    gpu_free_ns: Floats
    in_free_ns: Floats
    out_free_ns: Floats
    requests: Floats
    queued_tokens: Floats
    empty_blocks: Floats
    arrivals: Floats
    curves: Floats

    @property
    def t0_ns(self) -> Floats:
        """Fixed time of a prefill; a view."""
        view: Floats = self.curves[0]
        return view

    @property
    def token_ns(self) -> Floats:
        """Time per new token; a view."""
        view: Floats = self.curves[1]
        return view

    @property
    def pair_ns(self) -> Floats:
        """Time per pair; a view."""
        view: Floats = self.curves[2]
        return view

    @classmethod
    def zeros(cls, size: int) -> Columns:
        """Columns of ``size`` workers that are not eligible for anything yet."""
        kinds = {"holder": np.bool_, "rank": np.int64}
        made: dict[str, Any] = {
            item.name: np.zeros(size, dtype=kinds.get(item.name, np.float64)) for item in fields(cls)
        }
        made["curves"] = np.zeros((3, size))
        made["reported_ns"].fill(NEVER_NS)
        made["closed_ns"].fill(np.inf)
        made["arrivals"].fill(NO_ARRIVALS)
        return cls(**made)

    def copy(self) -> Columns:
        """Columns nobody else writes."""
        return Columns(*(getattr(self, item.name).copy() for item in fields(self)))

    def chosen(self, positions: list[int], added: int = 0) -> Columns:
        """The numbers of some workers, in this order, and of ``added`` new ones behind them."""
        made = Columns.zeros(len(positions) + added)
        for item in fields(self):
            getattr(made, item.name)[..., : len(positions)] = getattr(self, item.name)[..., positions]
        return made

    def __len__(self) -> int:
        return len(self.rank)


class LinkRow(NamedTuple):
    """Curves of the links from one holder's tier to every worker, in the order of ``Snapshot.workers``."""

    alpha_ns: list[float]
    byte_ns: list[float]


class LinkView(Protocol):
    """What is known about links. Pure reads."""

    def curve(self, holder: WorkerId, reader: WorkerId, tier: Tier, now_ns: int) -> LinkCurve:
        """What to expect of one link now."""

    def row(self, holder: WorkerId, tier: Tier, now_ns: int) -> LinkRow:
        """Curves from the holder to every worker of the snapshot, in its order."""

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
        oldest_report_ns: least of ``columns.reported_ns``.
        features: what the workers can execute.
        arrival_scale: ``columns.arrivals * arrival_scale`` is the recent rate of requests per ns of each worker.
        together: share of the sum of single links that a reader takes from several holders at once; 1 where unknown.
        fills: time per byte from host memory to where the worker computes, of workers with a device tier.
        pressure: how soon what leaves each worker's cache would have been wanted again, against the mean of all.
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
    oldest_report_ns: float
    features: Features = Features()
    arrival_scale: float = 0.0
    pressure: Floats | None = None
    together: Mapping[WorkerKey, float] = MappingProxyType({})
    fills: Mapping[WorkerKey, float] = MappingProxyType({})


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
    position_of = snapshot.positions.get
    for key, tiers in snapshot.prefixes.items():
        position = position_of(key)
        if position is None:
            continue
        blocks, best_tier = 0, Tier.DEVICE
        for tier, held in tiers.items():
            clipped = held if held < limit else limit
            if clipped > blocks or (clipped == blocks and tier < best_tier):
                blocks, best_tier = clipped, tier
        if blocks > 0:
            found.append(Holding(position, blocks, _read_from(best_tier, key, snapshot)))
    return found


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
