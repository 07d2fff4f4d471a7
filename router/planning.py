"""From a chosen price to the plan a worker carries out and the promise the ledger keeps.  (pure)"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvpool.plan import HolderRef, LoadSlice, Plan, PlanKind
from kvpool.types import WorkerKey
from router.cost import Costs, Priced
from router.signals import Holding, RequestView, Snapshot

MAX_ALTERNATES = 3


@dataclass(frozen=True, slots=True)
class Params:
    """Free parameters of the policy.

    Attributes:
        costs: what pricing assumes.
        loads: False prices redo only.
        harm_weight: weight of a plan's prefill time in the score, for the requests that queue behind it.
        deadline_factor: budget of loads in units of their predicted time.
        min_deadline_ns, min_stall_ns: floors of the load deadline and of the stall bound.
        priced_holders: holders that are priced even when they cannot win, so that the record shows them.
    """

    costs: Costs = field(default_factory=Costs)
    loads: bool = True
    harm_weight: float = 0.0
    deadline_factor: float = 3.0
    min_deadline_ns: float = 1e9
    min_stall_ns: float = 1e9
    priced_holders: int = 1


@dataclass(frozen=True, slots=True)
class Transfer:
    """Link time that a decision promises: ``busy_ns`` on the holder's way out and on the reader's way in."""

    holder: WorkerKey
    num_bytes: int
    busy_ns: float


@dataclass(frozen=True, slots=True)
class Promise:
    """What a decision reserves with its worker and its links, until the worker reports it."""

    worker: WorkerKey
    gpu_ns: float
    tokens: int
    transfers: tuple[Transfer, ...] = ()


@dataclass(frozen=True, slots=True)
class PlanPrices:
    """Prices of one plan over one source for every worker; ``source`` is None for redo."""

    kind: PlanKind
    source: Holding | None
    priced: Priced


def build_plan(
    snapshot: Snapshot, params: Params, held: list[Holding], chosen: PlanPrices, position: int, own_blocks: int
) -> Plan:
    """The plan of the worker at ``position``; other holders of the first missing block stand behind the source."""
    predicted_ns = round(float(chosen.priced.happy_ns[position]))
    source = chosen.source
    if source is None:
        return Plan(kind=PlanKind.REDO, predicted_ttft_ns=predicted_ns)
    stop = int(chosen.priced.boundary[position])
    start, split = own_blocks, None
    if chosen.priced.front_tokens is not None:
        split = round(float(chosen.priced.front_tokens[position]))
        start = min(stop - 1, own_blocks + split // snapshot.footprint.block_tokens)
    holder = snapshot.workers[source.position]
    piece = LoadSlice(
        start=start,
        stop=stop,
        holder=holder.key,
        transport=holder.transport,
        data_address=holder.data_address,
        tier=source.tier,
        alternates=_alternates(snapshot, held, source, position, start),
    )
    arrival_ns = float(chosen.priced.load_ns[position])
    return Plan(
        kind=chosen.kind,
        loads=(piece,),
        split_tokens=split,
        load_deadline_ns=round(max(params.min_deadline_ns, params.deadline_factor * arrival_ns)),
        stall_ns=round(max(params.min_stall_ns, arrival_ns)),
        predicted_ttft_ns=predicted_ns,
    )


def build_promise(
    request: RequestView, snapshot: Snapshot, plan: Plan, chosen: PlanPrices, position: int, own_blocks: int
) -> Promise:
    """GPU and link time the plan takes."""
    footprint = snapshot.footprint
    worker = snapshot.workers[position].key
    transfers = []
    for piece in plan.loads:
        row = snapshot.links.row(piece.holder.worker_id, piece.tier, snapshot.now_ns)
        num_bytes = footprint.fixed_bytes + (piece.stop - piece.start) * footprint.block_bytes
        transfers.append(Transfer(piece.holder, num_bytes, num_bytes * float(row.byte_ns[position])))
    loaded = sum(piece.stop - piece.start for piece in plan.loads)
    tokens = request.prompt_tokens - (own_blocks + loaded) * footprint.block_tokens
    return Promise(worker, float(chosen.priced.gpu_ns[position]), tokens, tuple(transfers))


def _alternates(
    snapshot: Snapshot, held: list[Holding], source: Holding, reader: int, start: int
) -> tuple[HolderRef, ...]:
    """Other holders of at least the first block to load, longest prefix first, then least busy link, then key."""
    columns = snapshot.columns
    others = [
        item
        for item in held
        if item.blocks > start and item.position not in (source.position, reader) and columns.holder[item.position]
    ]
    others.sort(key=lambda item: (-item.blocks, columns.out_free_ns[item.position], columns.rank[item.position]))
    refs = []
    for item in others[:MAX_ALTERNATES]:
        view = snapshot.workers[item.position]
        refs.append(HolderRef(view.key, view.data_address, item.tier, item.blocks))
    return tuple(refs)
