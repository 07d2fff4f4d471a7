"""How one worker makes a prompt's prefix whole: the value that the router decides and the worker carries out.

Pure values; named tuples, since a router makes several of them for every request and a frozen dataclass costs four
times as much. Indices count blocks of the prompt's chain from 0; intervals are half-open.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from kvpool.types import RequestId, Tier, WorkerId, WorkerKey


class PlanKind(Enum):
    """Names of plans, as records and reports show them."""

    REDO = "redo"  # prefill everything that is not cached here
    LOAD = "load"  # load front-first up to a boundary, redo the rest
    SPLIT = "split"  # redo the front while the tail loads


class LoadSlice(NamedTuple):
    """Blocks ``[start, stop)`` of the chain, to be read from one holder's tier.

    Attributes:
        holder: worker id *and* epoch; another incarnation must refuse.
        transport, data_address: how the reader's transport reaches the holder.
        tier: where the directory says the replicas lie.
        alternates: other holders of at least these blocks, best first, to try when this one fails.
    """

    start: int
    stop: int
    holder: WorkerKey
    transport: str
    data_address: bytes
    tier: Tier
    alternates: tuple[HolderRef, ...] = ()


class HolderRef(NamedTuple):
    """Another holder of a slice's blocks: ``stop`` is how far along the chain it holds them."""

    holder: WorkerKey
    data_address: bytes
    tier: Tier
    stop: int


class Plan(NamedTuple):
    """What the chosen worker should do.

    Attributes:
        kind: its name.
        loads: slices to load, disjoint, in order. Empty for `PlanKind.REDO`.
        split_tokens: for `PlanKind.SPLIT`, where compute and load are expected to meet.
        load_deadline_ns: budget for all loads, from their start. After it everything missing is redone.
        stall_ns: longest time without a byte before a source is dropped.
        predicted_ttft_ns: what the router expects, for the record and the learning loop.
        predicted_load_ns: how long it expects the loads to take from their start, 0 when it does not say. A worker
            waits no longer than this, and as long again, before it trusts only what it sees arrive.
        patient: the holder may still be computing the blocks: those that are not there yet are no failure.
        own_disk: read what lies on the worker's own disk. False where a peer brings it sooner.
    """

    kind: PlanKind
    loads: tuple[LoadSlice, ...] = ()
    split_tokens: int | None = None
    load_deadline_ns: int = 0
    stall_ns: int = 0
    predicted_ttft_ns: int = 0
    predicted_load_ns: int = 0
    patient: bool = False
    own_disk: bool = True


REDO = Plan(kind=PlanKind.REDO)
"""The plan that is always correct."""


class HandOver(NamedTuple):
    """Where a request goes on after its first token, and how its prompt's KV comes there meanwhile.

    Attributes:
        decision_id: names this part as an attempt of its own.
        plan: loads the prompt from the worker that prefills; patient.
    """

    worker: WorkerKey
    control_address: str
    decision_id: str
    plan: Plan


class Route(NamedTuple):
    """The router's answer to one request: where to go and what to do there. With ``hand_over`` this worker gives one
    token only."""

    request_id: RequestId
    decision_id: str
    worker_id: WorkerId
    worker: WorkerKey
    control_address: str
    plan: Plan
    hand_over: HandOver | None = None
