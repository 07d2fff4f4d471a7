"""The moving parts of a simulated cluster: nodes, jobs on them, and their loads."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvpool.plan import HolderRef, Route
from kvpool.reports import LoadSample, PrefillSample, RequestOutcome, WorkerLoad, WorkerReport
from kvpool.types import MemberInfo, RequestId, Role, Tier, WorkerKey
from router.simulation.cache import NodeCache
from router.simulation.engine import Engine, Sequence
from router.simulation.events import EventLoop
from router.simulation.network import Flow


class TailHost(Protocol):
    """What the loads of a split plan need of those who run them."""

    @property
    def loop(self) -> EventLoop:
        """Simulated time."""

    def token_ns(self, position: int) -> float:
        """True time to compute one token at a position."""

    def end_tail(self, job: Job) -> int:
        """The computed front met the loaded tail; returns the boundary in tokens."""


@dataclass(slots=True, eq=False)
class Job:
    """One attempt of a request on a node.

    Attributes:
        cached_blocks: leading blocks that were here when it came, the first ``device_blocks`` of them in the device.
        promotion: what brings the others from the host to the device.
        loads: all loads so far, ended ones too.
    """

    index: int
    route: Route
    chain: tuple[int, ...]
    sequence: Sequence
    node: Node
    accepted_ns: int
    cached_blocks: int = 0
    device_blocks: int = 0
    promotion: Flow | None = None
    pinned: list[int] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    load_ns: int = 0
    loaded_tokens: int = 0
    failures: list[str] = field(default_factory=list)

    def running(self) -> list[Load]:
        """Loads that have not ended."""
        return [load for load in self.loads if not load.over]

    def whole_to(self, now_ns: int) -> int:
        """Blocks that are here from the front on; every load brings its pieces in order."""
        edge = self.cached_blocks
        for piece, blocks in sorted(_arrived(self.loads, now_ns, tail_first=False), key=lambda item: item[0][:2]):
            if piece.start > edge:
                break
            edge = max(edge, piece.start + blocks)
        return edge

    def whole_from(self, now_ns: int) -> tuple[int, int]:
        """The part ``[first, stop)`` of the tail that is here; every load brings its pieces last block first."""
        parts = sorted(_arrived(self.loads, now_ns, tail_first=True), key=lambda item: item[0][:2], reverse=True)
        edge = stop = parts[0][0].stop
        for piece, blocks in parts:
            if piece.stop != edge:
                break
            edge -= blocks
            if edge > piece.start:
                break
        return edge, stop


class Piece(NamedTuple):
    """Blocks ``[start, stop)`` of a chain to load, and who else has them."""

    start: int
    stop: int
    alternates: tuple[HolderRef, ...] = ()

    @property
    def blocks(self) -> int:
        """How many."""
        return self.stop - self.start


@dataclass(slots=True, eq=False)
class Load:
    """A load of a job from one holder: its pieces of the chain, in order (in a split plan the last first)."""

    job: Job
    holder: Node
    tier: Tier
    pieces: tuple[Piece, ...]
    flow: Flow
    held: list[int]
    started_ns: int
    tail_first: bool
    dies: bool
    over: bool = False
    fixed_bytes: int = 0
    block_bytes: int = 1

    @property
    def blocks(self) -> int:
        """Blocks it is to bring."""
        return sum(piece.blocks for piece in self.pieces)

    @property
    def num_bytes(self) -> int:
        """Bytes it is to bring."""
        return self.fixed_bytes + self.blocks * self.block_bytes

    def arrived_blocks(self, now_ns: int) -> int:
        """Whole blocks that have arrived."""
        whole = int((self.flow.arrived(now_ns) - self.fixed_bytes) // self.block_bytes)
        return max(0, min(self.blocks, whole))

    def missing(self, now_ns: int) -> list[Piece]:
        """What has not arrived."""
        parts = _arrived([self], now_ns, tail_first=False)
        return [piece._replace(start=piece.start + blocks) for piece, blocks in parts if blocks < piece.blocks]


def _arrived(loads: list[Load], now_ns: int, *, tail_first: bool) -> list[tuple[Piece, int]]:
    """Every piece of the loads, and how many of its blocks have arrived."""
    parts = []
    for load in loads:
        left = load.arrived_blocks(now_ns)
        for piece in reversed(load.pieces) if tail_first else load.pieces:
            blocks = min(left, piece.blocks)
            parts.append((piece, blocks))
            left -= blocks
    return parts


@dataclass(frozen=True, slots=True)
class Tail:
    """The loads of a split plan as the engine sees them (`engine.TailLoad`)."""

    job: Job
    host: TailHost
    block_tokens: int

    def frontier_tokens(self, now_ns: int) -> int:
        """Tokens before the part of the tail that has arrived."""
        return self.job.whole_from(now_ns)[0] * self.block_tokens

    def joined(self) -> int:
        """The front reached the tail."""
        return self.host.end_tail(self.job)

    def chunk_tokens(self, position: int) -> int:
        """The share of the gap that compute covers before the tail, at the speed seen so far, has covered the rest."""
        job, now_ns = self.job, self.host.loop.now_ns
        gap = self.frontier_tokens(now_ns) - position
        arrived = sum(load.arrived_blocks(now_ns) for load in job.loads) * self.block_tokens
        if arrived == 0:
            planned = job.cached_blocks * self.block_tokens + (job.route.plan.split_tokens or 0) - position
            return max(1, min(gap, max(planned, self.block_tokens)))
        load_ns = (now_ns - job.loads[-1].started_ns) / arrived
        share = load_ns / (load_ns + self.host.token_ns(position))
        return max(1, min(gap, max(self.block_tokens, math.ceil(gap * share))))


@dataclass(slots=True, eq=False)
class Node:
    """A worker: its cache, its engine, and what it has not reported yet."""

    number: int
    key: WorkerKey
    cache: NodeCache
    engine: Engine
    alive: bool = True
    jobs: dict[int, Job] = field(default_factory=dict)
    sequence_number: int = 0
    accepted: list[RequestId] = field(default_factory=list)
    prefills: list[PrefillSample] = field(default_factory=list)
    loads: list[LoadSample] = field(default_factory=list)
    outcomes: list[RequestOutcome] = field(default_factory=list)
    in_flight_bytes: float = 0.0

    def report(self, capacity_blocks: int) -> WorkerReport:
        """What the node has to say now; what it said once it does not say again."""
        waiting = self.engine.waiting
        started = sum(1 for item in waiting if item.started_ns is not None)
        load = WorkerLoad(
            waiting_requests=len(waiting) - started,
            running_requests=self.engine.decoding + started,
            queued_prefill_tokens=sum(item.queued_tokens() for item in waiting),
            queued_context_tokens=sum(
                item.prompt_tokens - item.queued_tokens() for item in waiting if item.queued_tokens()
            ),
            step_remaining_ns=self.engine.step_remaining_ns(),
            free_blocks=max(0, capacity_blocks - self.cache.pinned),
            total_blocks=capacity_blocks,
            empty_blocks=self.cache.empty_blocks,
            idle_ns=self.cache.idle_ns(),
            in_flight_bytes=round(max(0.0, self.in_flight_bytes)),
            served_request_ids=tuple(self.accepted),
        )
        self.sequence_number += 1
        said = tuple(self.prefills), tuple(self.loads), tuple(self.outcomes)
        for told in (self.accepted, self.prefills, self.loads, self.outcomes):
            told.clear()
        return WorkerReport(self.key, self.sequence_number, load, *said)


def departed(key: WorkerKey) -> MemberInfo:
    """What is left to say of a member that is gone: its key."""
    return MemberInfo(key, Role.MIXED, "", b"", "", "", 1, 1, (), "")
