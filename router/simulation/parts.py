"""The moving parts of a simulated cluster: nodes, jobs on them, and their loads."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

from kvpool.plan import HolderRef, Route
from kvpool.reports import LoadSample, PrefillSample, RequestOutcome
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


def departed(key: WorkerKey) -> MemberInfo:
    """What is left to say of a member that is gone: its key."""
    return MemberInfo(key, Role.MIXED, "", b"", "", "", 1, 1, (), "")
