"""Times and rates of a run, from its story: goodput, recovery, detection, stalls.  (pure)

A request is *good* when it ended with its tokens, its first token came within the run's TTFT limit (fixed before the
faults from the reference run) and the rest within its deadline. Goodput is the share of good requests among those that
arrived in a window: arrivals are an open loop at a set rate, so a share is a rate.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvpool.errors import DeadlineError
from kvpool.faults.story import Fault, Request, Story

S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the law allows.

    Attributes:
        deadline_grace_ns: how late an ending may be seen after the request's deadline.
        recovery_ns: from healing until goodput is back.
        recovery_share: of the goodput before the faults.
        window_ns: over which goodput is measured.
        settle_ns: from a fault's line until it is in force everywhere.
        detect_ns: from the first failed load until a dead holder is off every decision.
    """

    deadline_grace_ns: int = 2 * S
    recovery_ns: int = 5 * S
    recovery_share: float = 0.9
    window_ns: int = 4 * S
    detect_ns: int = 1 * S
    settle_ns: int = S // 2


@dataclass(frozen=True, slots=True)
class Recovery:
    """How service came back after the faults that ended with one healing; ``took_ns`` is None when it did not."""

    names: str
    fault_ns: int
    heal_ns: int
    heal_line: int
    took_ns: int | None


def is_good(request: Request, ttft_limit_ns: int) -> bool:
    """Whether it counts towards goodput. A cancelled request is good when it ended as asked."""
    end = request.end
    if end is None or end.code is not None or end.at_ns > request.at_ns + request.timeout_ns:
        return False
    return request.ttft_ns is not None and request.ttft_ns <= ttft_limit_ns


def recoveries(story: Story, bounds: Bounds) -> tuple[Recovery, ...]:
    """One for every group of faults that overlap or leave no room to measure between them."""
    limit_ns = int(story.run.get("ttft_limit_ns", 0))
    requests = sorted(story.requests.values(), key=lambda request: request.at_ns)
    found = []
    for group in _groups(story, bounds):
        first, last = group[0], max(group, key=lambda fault: fault.heal_ns or 0)
        assert last.heal_ns is not None
        assert last.heal_line is not None
        took_ns = _recovery_ns(requests, limit_ns, last.heal_ns, bounds, _baseline(story, requests, limit_ns))
        names = ", ".join(dict.fromkeys(fault.name for fault in group))
        found.append(Recovery(names, first.at_ns, last.heal_ns, last.heal_line, took_ns))
    return tuple(found)


def _groups(story: Story, bounds: Bounds) -> list[list[Fault]]:
    """Healed faults, those together that lie closer than it takes to recover and to measure it."""
    room_ns = bounds.recovery_ns + bounds.window_ns
    groups: list[list[Fault]] = []
    until_ns = 0
    for fault in sorted(story.faults.values(), key=lambda item: item.at_ns):
        if fault.heal_ns is None:
            continue
        if groups and fault.at_ns < until_ns + room_ns:
            groups[-1].append(fault)
        else:
            groups.append([fault])
        until_ns = max(until_ns, fault.heal_ns)
    return groups


def _baseline(story: Story, requests: Sequence[Request], limit_ns: int) -> float:
    """Share of good requests among those that had ended before the first fault."""
    first_ns = min((fault.at_ns for fault in story.faults.values()), default=story.last_ns)
    before = [
        request for request in requests if request.end is not None and request.end.at_ns < first_ns and _counts(request)
    ]
    return _share(before, limit_ns) if before else 1.0


def _counts(request: Request) -> bool:
    """Requests with a deadline too short to be kept say nothing about recovery."""
    return not request.may_expire and request.prompt is not None


def _share(requests: Sequence[Request], limit_ns: int) -> float:
    return sum(is_good(request, limit_ns) for request in requests) / len(requests)


def _recovery_ns(
    requests: Sequence[Request], limit_ns: int, heal_ns: int, bounds: Bounds, baseline: float
) -> int | None:
    """From healing to the first arrival from which on a whole window of arrivals is good enough."""
    counted = [request for request in requests if _counts(request)]
    arrivals = [request.at_ns for request in counted]
    for start in range(bisect_left(arrivals, heal_ns), len(counted)):
        stop = bisect_left(arrivals, arrivals[start] + bounds.window_ns)
        if stop == len(counted) and arrivals[-1] < arrivals[start] + bounds.window_ns * 3 // 4:
            return None  # the run ended before a window was full
        if _share(counted[start:stop], limit_ns) >= bounds.recovery_share * baseline:
            began_at_once = start == bisect_left(arrivals, heal_ns)
            return 0 if began_at_once else arrivals[start] - heal_ns
    return None


def detection_ns(story: Story, fault: Fault) -> int | None:
    """From the fault until the router was first seen not to offer its victim; None when that was never seen."""
    if fault.key is None:
        return None
    until_ns = fault.heal_ns or story.last_ns
    for state in story.states:
        if fault.at_ns < state.at_ns <= until_ns and state.error is None and fault.key not in state.alive:
            return state.at_ns - fault.at_ns
    return None


def summary(story: Story) -> dict[str, Any]:
    """The numbers of a run's row in the report. Times in milliseconds, absent ones None.

    A request is counted as ``ok``, ``cancelled`` (by its client, as planned), ``expired`` (its deadline was too short
    on purpose), or it is lost, which the checker says.
    """
    requests = list(story.requests.values())
    ended = [(request, request.end) for request in requests if request.end is not None]
    answered = [(request, end) for request, end in ended if end.code is None and end.finish != "cancelled"]
    ttfts = [request.ttft_ns for request in requests if request.ttft_ns is not None]
    limit_ns = int(story.run.get("ttft_limit_ns", 0))
    detections = [took for fault in story.faults.values() if (took := detection_ns(story, fault)) is not None]
    span_ns = (story.rest_ns or story.last_ns) - (story.start_ns or story.last_ns)
    return {
        "requests": len(requests),
        "ok": len(answered),
        "cancelled": sum(end.finish == "cancelled" and request.cancelled for request, end in ended),
        "expired": sum(end.code == DeadlineError.code and request.may_expire for request, end in ended),
        "retried": sum(len(request.attempts) > 1 for request in requests),
        "loaded": sum(bool(end.stats.get("tokens_loaded")) for _, end in answered),
        "loads_redone": sum(bool(end.stats.get("load_failures")) for _, end in answered),
        "faults": len(story.faults),
        "max_stall_ms": max((request.max_gap_ns for request in requests), default=0) / 1e6,
        "ttft_p50_ms": statistics.median(ttfts) / 1e6 if ttfts else None,
        "ttft_max_ms": max(ttfts) / 1e6 if ttfts else None,
        "goodput_rps": sum(is_good(request, limit_ns) for request in requests) / (span_ns / S) if span_ns else None,
        "detect_ms_max": max(detections) / 1e6 if detections else None,
    }
