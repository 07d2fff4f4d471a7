"""The moving parts of a simulated cluster: nodes, jobs on them, and their loads."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

from kvpool.plan import HolderRef, Route
from kvpool.reports import LoadSample, PrefillSample, RequestOutcome, WorkerLoad, WorkerReport
from kvpool.types import MemberInfo, RequestId, Role, WorkerKey
from router.simulation.cache import NodeCache
from router.simulation.engine import Engine, Sequence
from router.simulation.events import EventLoop
from router.simulation.network import Flow


class TailHost(Protocol):
    """What the load of a split plan needs of its cluster."""

    @property
    def loop(self) -> EventLoop:
        """Simulated time."""

    def token_ns(self, position: int) -> float:
        """True time to compute one token at a position."""

    def end_tail(self, load: Load) -> int:
        """The computed front met the loaded tail; returns the boundary in tokens."""


@dataclass(slots=True, eq=False)
class Job:
    """One attempt of a request on a node."""

    index: int
    route: Route
    chain: tuple[int, ...]
    sequence: Sequence
    node: Node
    accepted_ns: int
    cached_blocks: int = 0
    pinned: list[int] = field(default_factory=list)
    load: Load | None = None
    load_ns: int = 0
    loaded_tokens: int = 0
    failures: list[str] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Load:
    """The running load of a job: blocks ``[start, stop)`` of its chain from one holder."""

    job: Job
    holder: Node
    start: int
    stop: int
    flow: Flow
    held: list[int]
    started_ns: int
    tail_first: bool
    dies: bool
    alternates: tuple[HolderRef, ...]
    over: bool = False
    fixed_bytes: int = 0
    block_bytes: int = 1
    block_tokens: int = 1
    cluster: TailHost | None = None

    def arrived_blocks(self, now_ns: int) -> int:
        """Whole blocks that have arrived."""
        return min(self.stop - self.start, int((self.flow.arrived(now_ns) - self.fixed_bytes) // self.block_bytes))

    # the engine's view of a split plan's load (`engine.TailLoad`)

    def frontier_tokens(self, now_ns: int) -> int:
        """Tokens before the part of the tail that has arrived."""
        return (self.stop - max(0, self.arrived_blocks(now_ns))) * self.block_tokens

    def joined(self) -> int:
        """The front reached the tail."""
        assert self.cluster is not None
        return self.cluster.end_tail(self)

    def chunk_tokens(self, position: int) -> int:
        """The share of the gap that compute covers before the tail, at the speed seen so far, has covered the rest."""
        assert self.cluster is not None
        now_ns = self.cluster.loop.now_ns
        gap = self.frontier_tokens(now_ns) - position
        arrived = max(0, self.arrived_blocks(now_ns)) * self.block_tokens
        if arrived == 0:
            planned = self.job.cached_blocks * self.block_tokens + (self.job.route.plan.split_tokens or 0) - position
            return max(1, min(gap, max(planned, self.block_tokens)))
        load_ns = (now_ns - self.started_ns) / arrived
        share = load_ns / (load_ns + self.cluster.token_ns(position))
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
