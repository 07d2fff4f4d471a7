"""Wait for a load in flight, or compute?  (pure)

A load is never needed. At the head of the queue the question is only whether the next block arrives sooner than it
can be computed. The rest of a load is judged from what is visible: blocks that came and the time they took; before
the first block, from the router's expectation, doubled for as long as nothing comes (so that a dead source costs at
most about as much again as it was expected to take). The prefill speed is learned from this worker's own steps.

    others can use the GPU                → WAIT, until the load's deadline
    rest ≤ 1.1 × redo of what is missing  → WAIT
    otherwise                             → COMPUTE a chunk of about half the rest, then look again

Source of the 1.1: the numerical study in ``docs/science.md`` (within 3 % of clairvoyant).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from kvpool.plan import Plan

PATIENCE = 1.1
DEFAULT_DEADLINE_NS = 5_000_000_000
DEADLINE_FACTOR = 3
"""The router budgets loads at this multiple of their expected time."""
_SPEED_WEIGHT = 0.3


class Verdict(Enum):
    """What a sequence with a load in flight should do now."""

    COMPUTE = "compute"
    WAIT = "wait"
    GIVE_UP = "give_up"


@dataclass(frozen=True, slots=True)
class Ruling:
    """A verdict; ``tokens`` limits the chunk, None leaves it to the budget."""

    verdict: Verdict
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class LoadView:
    """A load as the scheduler sees it.

    Attributes:
        started_ns, deadline_ns: when it began and when it is given up.
        expected_ns: how long the router thought it would take.
        total_blocks, arrived_blocks: what was ordered, and what is verified and in place.
    """

    started_ns: int
    deadline_ns: int
    expected_ns: int
    total_blocks: int
    arrived_blocks: int = 0

    @classmethod
    def starting(cls, plan: Plan, blocks: int, now_ns: int) -> LoadView:
        """A load of ``blocks`` blocks that begins now."""
        budget_ns = plan.load_deadline_ns or DEFAULT_DEADLINE_NS
        expected_ns = budget_ns // DEADLINE_FACTOR
        if plan.predicted_ttft_ns:
            expected_ns = min(expected_ns, plan.predicted_ttft_ns)
        return cls(now_ns, now_ns + budget_ns, expected_ns, blocks)

    def with_arrived(self, blocks: int) -> LoadView:
        """The same load after ``blocks`` blocks arrived."""
        return replace(self, arrived_blocks=blocks)

    def rest_ns(self, now_ns: int) -> int:
        """Estimated time until everything is there."""
        elapsed_ns = now_ns - self.started_ns
        if self.arrived_blocks == 0:
            return max(self.expected_ns - elapsed_ns, elapsed_ns)
        return elapsed_ns * (self.total_blocks - self.arrived_blocks) // self.arrived_blocks


class Gate:
    """Rules on sequences whose next block is in flight; learns the prefill speed.

    Args:
        block_tokens: tokens per block.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._token_ns: float | None = None

    @property
    def token_ns(self) -> float | None:
        """Learned time to prefill one token, None before the first sample."""
        return self._token_ns

    def observe(self, tokens: int, elapsed_ns: int) -> None:
        """A step that only prefilled computed ``tokens`` tokens in ``elapsed_ns``."""
        sample = elapsed_ns / tokens
        old = self._token_ns
        self._token_ns = sample if old is None else old + _SPEED_WEIGHT * (sample - old)

    def rule(self, view: LoadView, missing_tokens: int, now_ns: int, *, idle: bool) -> Ruling:
        """Rule on a sequence whose next block is in flight.

        Args:
            view: its load.
            missing_tokens: tokens of the blocks that are still in flight.
            now_ns: now.
            idle: no other prefill could use the GPU in this step.
        """
        if now_ns >= view.deadline_ns:
            return Ruling(Verdict.GIVE_UP)
        if not idle:
            return Ruling(Verdict.WAIT)
        rest_ns = view.rest_ns(now_ns)
        if self._token_ns is None:
            late = now_ns - view.started_ns > view.expected_ns
            return Ruling(Verdict.COMPUTE, self._block_tokens) if late else Ruling(Verdict.WAIT)
        if rest_ns <= PATIENCE * missing_tokens * self._token_ns:
            return Ruling(Verdict.WAIT)
        blocks = int(rest_ns / 2 / self._token_ns) // self._block_tokens
        return Ruling(Verdict.COMPUTE, max(1, blocks) * self._block_tokens)

    def review_ns(self, view: LoadView, now_ns: int) -> int:
        """When a sequence that waits for ``view`` should be looked at again without any event."""
        return min(view.deadline_ns, now_ns + max(1_000_000, view.rest_ns(now_ns) // 4))
