"""Small builders shared by the router's tests: snapshots with stated numbers, fixed links and failure rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvpool.reports import WorkerLoad, WorkerReport
from kvpool.types import (
    BlockHash,
    MemberInfo,
    MemberState,
    RequestId,
    Role,
    Tier,
    WorkerEpoch,
    WorkerId,
    WorkerKey,
)
from router.estimators import LinkCurve, PrefillCurve
from router.kernel import Floats
from router.signals import Columns, Features, Footprint, RequestView, Snapshot, WorkerView

MS = 1_000_000
S = 1_000_000_000
BLOCK = 16
CURVE = PrefillCurve(t0_ns=5 * MS, token_ns=100_000.0, pair_ns=20.0)
FAST_LINK = LinkCurve(alpha_ns=1.0 * MS, byte_ns=0.25)  # 4 GB/s
FOOTPRINT = Footprint(block_tokens=BLOCK, block_bytes=BLOCK * 40_000)


def key(number: int, epoch: int = 1) -> WorkerKey:
    return WorkerKey(WorkerId(f"w{number:03d}"), WorkerEpoch(epoch))


@dataclass(frozen=True)
class FixedLinks:
    """The same curve everywhere, except where a (holder, reader) pair has its own."""

    workers: tuple[WorkerKey, ...]
    default: LinkCurve = FAST_LINK
    pairs: Mapping[tuple[WorkerId, WorkerId], LinkCurve] = field(default_factory=dict)

    def curve(self, holder: WorkerId, reader: WorkerId, tier: Tier, now_ns: int) -> LinkCurve:
        return self.pairs.get((holder, reader), self.default)

    def row(self, holder: WorkerId, tier: Tier, now_ns: int) -> Floats:
        curves = [self.curve(holder, reader.worker_id, tier, now_ns) for reader in self.workers]
        return np.array([[c.alpha_ns for c in curves], [c.byte_ns for c in curves]], dtype=np.float64)

    def best(self, tier: Tier) -> LinkCurve:
        curves = [self.default, *self.pairs.values()]
        return LinkCurve(min(c.alpha_ns for c in curves), min(c.byte_ns for c in curves))


@dataclass(frozen=True)
class FixedFailures:
    rate: float = 0.0
    holders: Mapping[WorkerKey, float] = field(default_factory=dict)

    def probability(self, holder: WorkerKey, now_ns: int) -> float:
        return self.holders.get(holder, self.rate)


@dataclass(frozen=True)
class Worker:
    """One worker of a stated snapshot. Waits are from now; ``wait_ns`` None has never reported."""

    number: int
    blocks: int = 0
    wait_ns: float | None = 0.0
    in_ns: float = 0.0
    out_ns: float = 0.0
    requests: int = 0
    state: MemberState = MemberState.ALIVE
    role: Role = Role.MIXED
    curve: PrefillCurve = CURVE
    tier: Tier = Tier.DEVICE
    in_memory: int = 0  # of ``blocks``, when the tier is the disk
    in_device: int = 0  # of ``blocks`` again, with ``fill_byte_ns``
    fill_byte_ns: float | None = None  # of a worker with a device tier over its host memory
    load: WorkerLoad | None = None


def snapshot(
    workers: Sequence[Worker],
    *,
    now_ns: int = 10 * S,
    links: LinkCurve = FAST_LINK,
    pairs: Mapping[tuple[WorkerId, WorkerId], LinkCurve] | None = None,
    failures: FixedFailures | None = None,
    features: Features | None = None,
    footprint: Footprint = FOOTPRINT,
) -> Snapshot:
    keys = tuple(key(worker.number) for worker in workers)
    columns = Columns.zeros(len(workers))
    for i, worker in enumerate(workers):
        alive = worker.state is MemberState.ALIVE
        columns.holder[i] = alive
        columns.closed_ns[i] = 0.0 if alive and worker.role is not Role.DECODE else np.inf
        if worker.wait_ns is not None:
            columns.reported_ns[i] = now_ns
            columns.gpu_free_ns[i] = now_ns + worker.wait_ns
        columns.in_free_ns[i] = now_ns + worker.in_ns
        columns.out_free_ns[i] = now_ns + worker.out_ns
        columns.requests[i] = worker.requests
        columns.t0_ns[i] = worker.curve.t0_ns
        columns.token_ns[i] = worker.curve.token_ns
        columns.pair_ns[i] = worker.curve.pair_ns
    for rank, i in enumerate(sorted(range(len(keys)), key=lambda i: keys[i].worker_id)):
        columns.rank[i] = rank
    return Snapshot(
        now_ns=now_ns,
        workers=tuple(
            WorkerView(keys[i], worker.role, worker.state, "memory", b"addr", f"actor-{worker.number}", worker.load)
            for i, worker in enumerate(workers)
        ),
        positions={name: i for i, name in enumerate(keys)},
        columns=columns,
        prefixes={keys[i]: _tiers(worker) for i, worker in enumerate(workers) if worker.blocks},
        footprint=footprint,
        links=FixedLinks(keys, links, pairs or {}),
        failures=failures or FixedFailures(),
        fastest=PrefillCurve(*(float(column.min()) for column in (columns.t0_ns, columns.token_ns, columns.pair_ns))),
        features=features or Features(),
        fills={keys[i]: worker.fill_byte_ns for i, worker in enumerate(workers) if worker.fill_byte_ns is not None},
    )


def _tiers(worker: Worker) -> dict[Tier, int]:
    """Leading blocks by tier, as the directory says it."""
    below = {Tier.HOST: worker.in_memory} if worker.in_memory else {}
    device = {Tier.DEVICE: worker.in_device} if worker.in_device and worker.fill_byte_ns is not None else {}
    return {**device, **below, worker.tier: worker.blocks}


def request(tokens: int = 1600, name: str = "r", exclude: frozenset[WorkerKey] = frozenset()) -> RequestView:
    return RequestView(RequestId(name), tokens, tokens // BLOCK, exclude=exclude)


def member(number: int, epoch: int = 1, role: Role = Role.MIXED) -> MemberInfo:
    return MemberInfo(
        key=key(number, epoch),
        role=role,
        transport="memory",
        data_address=f"addr-{number}".encode(),
        layout_fingerprint="layout",
        hash_scheme="scheme",
        block_tokens=BLOCK,
        block_bytes=FOOTPRINT.block_bytes,
        capacity_blocks=(1024, 0, 0),
        control_address=f"actor-{number}",
    )


@dataclass
class FakeDirectory:
    """Who holds how many leading blocks of any chain."""

    held: dict[WorkerKey, dict[Tier, int]] = field(default_factory=dict)

    def prefixes(self, chain: Sequence[BlockHash]) -> dict[WorkerKey, dict[Tier, int]]:
        return {
            worker: {tier: min(blocks, len(chain)) for tier, blocks in tiers.items()}
            for worker, tiers in self.held.items()
        }


def chain(tokens: int, salt: bytes = b"c") -> tuple[BlockHash, ...]:
    return tuple(BlockHash(salt * 14 + i.to_bytes(2, "big")) for i in range(tokens // BLOCK))


def report(number: int, sequence: int, load: WorkerLoad | None = None, epoch: int = 1, **more: object) -> WorkerReport:
    return WorkerReport(key(number, epoch), sequence, load or WorkerLoad(), **more)  # type: ignore[arg-type]
