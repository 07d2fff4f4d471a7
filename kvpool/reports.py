"""What workers tell routers about themselves: load, and what prefills, loads and requests really took.

Workers publish reports through the metadata service, which relays them to every watching router and keeps only the
newest load of each worker. Losing a report loses accuracy, never correctness.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.types import PrefillSample, RequestId, Tier, WorkerId, WorkerKey

__all__ = ["LoadSample", "PrefillSample", "RequestOutcome", "WorkerLoad", "WorkerReport"]


GOODPUT_MET = "goodput_met"
GOODPUT_MISSED_TTFT, GOODPUT_MISSED_TPOT = "goodput_missed_ttft", "goodput_missed_tpot"
"""Counters of finished requests: within all their limits, or the first limit that was missed."""

DECODE_STEPS, DECODE_REQUESTS, DECODE_NS = "decode_steps", "decode_requests", "decode_ns"
"""Counters of steps that decoded: how many, the requests that decoded in them, their time."""


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A worker's queue as of the report.

    Attributes:
        waiting_requests: admitted and not yet in prefill.
        running_requests: in prefill or decode.
        queued_prefill_tokens: prompt tokens still to be computed for all admitted requests.
        queued_context_tokens: Σ over admitted requests with tokens to compute of the tokens already in their context.
        step_remaining_ns: expected rest of the running step, 0 when idle.
        free_blocks: blocks that could be allocated now, evictable ones included.
        total_blocks: size of the segment.
        empty_blocks: blocks that hold nothing: so much can come without anything leaving.
        idle_ns: how long the block that would leave next has not been used; 0 when none would.
        in_flight_bytes: bytes of loads started and not terminal.
        fill_mib_ns: what copying a MiB from host memory to where the engine computes takes; 0 for a worker without a
            device tier, whose every hit takes that.
        served_request_ids: requests accepted since the last report, so that the router can drop its promises.
    """

    waiting_requests: int = 0
    running_requests: int = 0
    queued_prefill_tokens: int = 0
    queued_context_tokens: int = 0
    step_remaining_ns: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    empty_blocks: int = 0
    idle_ns: int = 0
    in_flight_bytes: int = 0
    fill_mib_ns: int = 0
    served_request_ids: tuple[RequestId, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadSample:
    """One load from one holder: how it went. ``tier`` is where the blocks lay, None when it is not said.

    A worker's reads from its own disk name the worker itself.
    """

    holder: WorkerKey
    bytes: int
    blocks: int
    elapsed_ns: int
    failure: str | None = None  # `KVPoolError.code` of the failure, None when it arrived whole
    tier: Tier | None = None


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """What became of a routed request, for the decision record."""

    request_id: RequestId
    decision_id: str
    worker_id: WorkerId
    ttft_ns: int
    tokens_cached: int
    tokens_loaded: int
    tokens_redone: int
    bytes_loaded: int
    load_ns: int
    queue_ns: int
    load_failures: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """Everything a worker has to say at one moment. ``sequence`` orders the reports of one epoch.

    ``counters`` are running totals since the worker started, by name: loads, load_failures.<code>, evictions,
    preemptions, bytes_loaded, bytes_served, bytes_saved (by compression), bad_frames, codec_ns, tokens_cached,
    tokens_loaded, tokens_redone, requests, and those named above.
    """

    key: WorkerKey
    sequence: int
    load: WorkerLoad
    prefills: tuple[PrefillSample, ...] = ()
    loads: tuple[LoadSample, ...] = ()
    outcomes: tuple[RequestOutcome, ...] = ()
    counters: tuple[tuple[str, int], ...] = ()
