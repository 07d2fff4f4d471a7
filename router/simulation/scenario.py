"""What a simulated run assumes and what it yields: faults, delays, and what became of each request.  (pure)"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong.

    Attributes:
        load_death: chance that a load stops part-way and is noticed after ``notice_ns``.
        straggler: chance that a load runs at ``straggler_factor`` of its rate.
        stale: chance that a holder no longer has what the index says.
        outages: (start, length, node): the node dies with its cache and comes back.
    """

    load_death: float = 0.0
    straggler: float = 0.0
    stale: float = 0.0
    straggler_factor: float = 0.1
    notice_ns: int = 250_000_000
    outages: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Timing:
    """Delays between the parts."""

    dispatch_ns: int = 1_000_000
    report_ns: int = 10_000_000
    index_ns: int = 20_000_000
    lease_ns: int = 3_000_000_000


@dataclass(slots=True)
class Served:
    """What became of one request.

    Attributes:
        decided_ns: moment of its last decision; before it, it waited at the router.
        predicted_ns: what was expected then, from that moment to its first token.
    """

    arrival_ns: int
    prompt_tokens: int
    output_tokens: int
    node: int = -1
    plan: str = "none"
    ttft_ns: int | None = None
    decided_ns: int = 0
    predicted_ns: int = 0
    finished_ns: int | None = None
    tokens_cached: int = 0
    tokens_promoted: int = 0
    tokens_loaded: int = 0
    tokens_redone: int = 0
    load_failures: int = 0
    attempts: int = 0

    @property
    def waited_ns(self) -> int:
        """Time before its last decision."""
        return self.decided_ns - self.arrival_ns

    @property
    def tpot_ns(self) -> float:
        """Mean gap between output tokens; 0 for a single one or when unfinished."""
        if self.finished_ns is None or self.ttft_ns is None or self.output_tokens < 2:
            return 0.0
        return (self.finished_ns - self.arrival_ns - self.ttft_ns) / (self.output_tokens - 1)
