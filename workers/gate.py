"""Wait for a load in flight, or compute?  (pure)

A load is never needed. The question is only whether the next block arrives sooner than it can be computed. The rest
of a load is judged from what is visible: blocks that came and the time they took; before the first block, from the
router's expectation, stretched for as long as nothing comes, so that a dead source costs at most about as much again
as it was expected to take. The prefill speed is learned from this worker's own steps.

    the tail comes first (split) and nobody else can use the GPU
                    → COMPUTE the front's share, missing · L/(L+R), so that both ends meet
    otherwise       → WAIT while L ≤ 1.1 × R (2 × R when others can use the GPU), else COMPUTE a chunk of half of L
                      and look again
    past the load's deadline → GIVE UP

with L the rest of the load and R the redo of what is missing. Source: ``docs/science.md``, two-way split and failure.
A load for another request (a twin) is priced like an own one, from the two counts of `Rest`: the twin may lack only a
part of it, and other blocks may come first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from math import ceil
from typing import NamedTuple

from kvpool.plan import Plan, PlanKind

PATIENCE = 1.1
BUSY_PATIENCE = 2.0
"""While others can use the GPU: computing would hold them up, waiting holds up only this one."""
DEFAULT_DEADLINE_NS = 5_000_000_000
DEADLINE_FACTOR = 3
"""The router budgets loads at this multiple of their expected time."""
MIN_REVIEW_NS = 1_000_000
_ROUNDING = 1e-6
_FORGETTING = 0.95
_MIN_RELATIVE_VARIANCE = 0.01


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


class Rest(NamedTuple):
    """What a load still has to do for one sequence, in blocks.

    Attributes:
        missing: that the sequence lacks, from its next one on; it would have to compute them.
        coming: that the load brings until the last of those is there. More when others come before, or fewer.
    """

    missing: int
    coming: int


@dataclass(frozen=True, slots=True)
class LoadView:
    """A load as the scheduler sees it.

    Attributes:
        started_ns, deadline_ns: when it began and when it is given up.
        expected_ns: how long the router thought it would take.
        total_blocks: what it brings in all.
        tail_first: blocks come from the end of the chain, to meet the computed front.
        arrived_blocks: what is verified and in place.
    """

    started_ns: int
    deadline_ns: int
    expected_ns: int
    total_blocks: int
    tail_first: bool = False
    arrived_blocks: int = 0

    @classmethod
    def starting(cls, plan: Plan, now_ns: int, total_blocks: int) -> LoadView:
        """A load of so many blocks that begins now."""
        budget_ns = plan.load_deadline_ns or DEFAULT_DEADLINE_NS
        expected_ns = budget_ns // DEADLINE_FACTOR
        if plan.predicted_ttft_ns:
            expected_ns = min(expected_ns, plan.predicted_ttft_ns)
        if plan.predicted_load_ns:
            expected_ns = plan.predicted_load_ns
        return cls(now_ns, now_ns + budget_ns, expected_ns, total_blocks, plan.kind is PlanKind.SPLIT)

    def with_arrived(self, blocks: int) -> LoadView:
        """The same load after ``blocks`` blocks arrived."""
        return replace(self, arrived_blocks=blocks)

    def rest_ns(self, coming_blocks: int, now_ns: int) -> int:
        """Estimated time until ``coming_blocks`` more are there."""
        elapsed_ns = now_ns - self.started_ns
        if self.arrived_blocks == 0:
            return max(self.expected_ns * coming_blocks // max(1, self.total_blocks) - elapsed_ns, elapsed_ns)
        return elapsed_ns * coming_blocks // self.arrived_blocks


class PrefillSpeed:
    """Time of a prefill pass of some tokens, ``t0 + a · tokens``, by least squares with forgetting; both stay ≥ 0.

    A constant per token would not do: a pass of one token (a cached prompt) costs almost a whole ``t0``.
    """

    def __init__(self) -> None:
        self._weight = self._tokens = self._ns = self._tokens2 = self._tokens_ns = 0.0

    @property
    def known(self) -> bool:
        """At least one pass was seen."""
        return self._weight > 0

    def observe(self, tokens: int, elapsed_ns: int) -> None:
        """A pass of ``tokens`` tokens, at least 1, took ``elapsed_ns``."""
        self._weight = self._weight * _FORGETTING + 1
        self._tokens = self._tokens * _FORGETTING + tokens
        self._ns = self._ns * _FORGETTING + elapsed_ns
        self._tokens2 = self._tokens2 * _FORGETTING + tokens * tokens
        self._tokens_ns = self._tokens_ns * _FORGETTING + tokens * elapsed_ns

    def fit(self) -> tuple[float, float]:
        """(t0, a) in nanoseconds and nanoseconds per token, for a speed that is known."""
        mean_tokens, mean_ns = self._tokens / self._weight, self._ns / self._weight
        variance = self._tokens2 / self._weight - mean_tokens * mean_tokens
        covariance = self._tokens_ns / self._weight - mean_tokens * mean_ns
        through_zero = mean_ns / mean_tokens
        if variance < _MIN_RELATIVE_VARIANCE * mean_tokens * mean_tokens:
            return 0.0, through_zero  # passes of one size say nothing about t0
        slope = min(max(0.0, covariance / variance), through_zero)
        return mean_ns - slope * mean_tokens, slope


class Gate:
    """Rules on sequences whose next block is in flight; learns the prefill speed.

    Args:
        block_tokens: tokens per block.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._speed = PrefillSpeed()
        self.fill_block_ns: int | None = None
        """What copying a block into a view takes, None before anybody said so."""

    def observe(self, tokens: int, elapsed_ns: int) -> None:
        """A step that only prefilled computed ``tokens`` tokens in ``elapsed_ns``."""
        self._speed.observe(tokens, elapsed_ns)

    def prefill_ns(self, tokens: int) -> int | None:
        """Expected time of one pass of ``tokens`` tokens, None before the first sample."""
        if not self._speed.known:
            return None
        t0_ns, token_ns = self._speed.fit()
        return int(t0_ns + token_ns * tokens)

    def fill_blocks(self, tokens: int) -> int:
        """How many blocks can be filled in in the time of a pass of ``tokens`` tokens, at least 1."""
        return max(1, int(tokens / self._fill_block_tokens(tokens)))

    def fill_tokens(self, blocks: int, tokens: int) -> int:
        """How many of ``tokens`` tokens a pass computes less in the same time when it fills in so many blocks."""
        return ceil(blocks * self._fill_block_tokens(tokens) - _ROUNDING)

    def _fill_block_tokens(self, tokens: int) -> float:
        """At most those of the block: to copy it is no dearer than to compute it, while nobody knows better."""
        pass_ns = self.prefill_ns(tokens)
        if self.fill_block_ns is None or not pass_ns:
            return self._block_tokens
        return min(self._block_tokens, tokens * self.fill_block_ns / pass_ns)

    def rule(self, view: LoadView, rest: Rest, now_ns: int, *, idle: bool) -> Ruling:
        """Rule on a sequence whose next block is in flight.

        Args:
            view: the load that brings it.
            rest: what that still has to do for this sequence.
            now_ns: now.
            idle: no other prefill could use the GPU in this step.
        """
        if now_ns >= view.deadline_ns:
            return Ruling(Verdict.GIVE_UP)
        if not self._speed.known:
            late = idle and now_ns - view.started_ns > view.expected_ns
            return Ruling(Verdict.COMPUTE, self._block_tokens) if late else Ruling(Verdict.WAIT)
        rest_ns = view.rest_ns(rest.coming, now_ns)
        t0_ns, token_ns = self._speed.fit()
        missing_tokens = rest.missing * self._block_tokens
        redo_ns = t0_ns + token_ns * missing_tokens
        meets = idle and view.tail_first
        share = missing_tokens * rest_ns / (rest_ns + redo_ns) if meets else 0.0
        patience = PATIENCE if idle else BUSY_PATIENCE
        if share < self._block_tokens and rest_ns <= patience * redo_ns:
            return Ruling(Verdict.WAIT)
        tokens = share if meets else (rest_ns / 2 - t0_ns) / max(1.0, token_ns)
        return Ruling(Verdict.COMPUTE, max(1, int(tokens) // self._block_tokens) * self._block_tokens)

    def review_ns(self, view: LoadView, coming_blocks: int, now_ns: int) -> int:
        """When a sequence that waits for ``coming_blocks`` of a load should be looked at again without any event."""
        rest_ns = view.rest_ns(1 if view.arrived_blocks else coming_blocks, now_ns)
        return min(view.deadline_ns, now_ns + max(MIN_REVIEW_NS, rest_ns // 4))
