"""One request inside a worker: its tokens, how far they are computed, and how it was served so far.  (pure)

Mutable, owned by the worker's engine thread. Decides nothing: `workers.scheduler` changes phases and pages,
`workers.core` appends tokens. Invariant: ``0 <= computed_tokens <= len(tokens)``, and it is 0 while no view is open.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from kvpool.plan import Plan, PlanKind
from kvpool.request import GenerateRequest, RequestStats
from kvpool.types import RequestId, WorkerId
from workers.block_table import BlockTable


class Phase(Enum):
    """Where a sequence is. A preempted one is waiting again."""

    WAITING = "waiting"
    RUNNING = "running"
    GONE = "gone"


@dataclass(slots=True)
class Tally:
    """How the prompt was made whole, for `RequestStats`."""

    tokens_cached: int = 0
    tokens_loaded: int = 0
    bytes_loaded: int = 0
    load_ns: int = 0
    load_started_ns: int | None = None
    first_scheduled_ns: int | None = None
    first_token_ns: int | None = None
    preemptions: int = 0
    load_failures: tuple[str, ...] = ()


@dataclass(slots=True)
class Sequence:
    """State of one request.

    Attributes:
        request, plan, decision_id: as submitted.
        table: chain and pages.
        arrival_ns, deadline_ns: on the worker's monotonic clock.
        tokens: prompt and everything generated, by earlier attempts too.
        computed_tokens: tokens whose KV is in the view.
        slot: engine handle, None while no view is open.
        flight: number of the load that still may write pages of this sequence.
        load_due: the plan has a load that found no pages yet.
        loaded: blocks whose content came over the data plane for this request.
        offers: sealed blocks that lie in the view as in their pages and were not offered to the device tier yet, and
            whether they came from there (a promotion) or were computed or loaded for this request.
        unsealed_fills: blocks that lie in the view as in their pages, which were not sealed when they were copied.
    """

    request: GenerateRequest
    plan: Plan
    decision_id: str
    table: BlockTable
    arrival_ns: int
    deadline_ns: int
    tokens: list[int] = field(default_factory=list)
    computed_tokens: int = 0
    slot: int | None = None
    phase: Phase = Phase.WAITING
    flight: int | None = None
    load_due: bool = False
    loaded: set[int] = field(default_factory=set)
    offers: dict[int, bool] = field(default_factory=dict)
    unsealed_fills: set[int] = field(default_factory=set)
    tally: Tally = field(default_factory=Tally)

    def __post_init__(self) -> None:
        self.tokens = [*self.request.prompt, *self.request.generated]
        self.table.extend_chain(self.tokens)

    @property
    def request_id(self) -> RequestId:
        """Identity of the request."""
        return self.request.request_id

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.request.prompt)

    @property
    def generated_tokens(self) -> int:
        """Tokens after the prompt so far, those of earlier attempts included."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def pending_tokens(self) -> int:
        """Tokens still to compute before the next one can be sampled, at least 1 for a live sequence."""
        return len(self.tokens) - self.computed_tokens

    @property
    def decoding(self) -> bool:
        """Runs one token a step now: it sampled here, and only that token is left to compute."""
        return self.tally.first_token_ns is not None and self.computed_tokens > 0 and self.pending_tokens == 1

    @property
    def full_blocks(self) -> int:
        """Full blocks of all tokens known now."""
        return len(self.tokens) // self.table.block_tokens

    @property
    def view_capacity_tokens(self) -> int:
        """Longest view this request can need."""
        return self.prompt_tokens + self.request.sampling.max_tokens

    def append(self, token: int) -> None:
        """Add a sampled token."""
        self.tokens.append(token)
        self.table.extend_chain(self.tokens)

    def filled(self, first_block: int, blocks: int, block_bytes: int) -> None:
        """Count pages that went into the view, until the first token."""
        if self.tally.first_token_ns is not None:
            return
        loaded = sum(index in self.loaded for index in range(first_block, first_block + blocks))
        self.tally.tokens_loaded += loaded * self.table.block_tokens
        self.tally.bytes_loaded += loaded * block_bytes
        self.tally.tokens_cached += (blocks - loaded) * self.table.block_tokens

    def leave_view(self) -> int | None:
        """Forget the view and what was to be copied from it; returns its slot, None without one."""
        slot, self.slot = self.slot, None
        self.offers.clear()
        self.unsealed_fills.clear()
        return slot

    def restart(self) -> None:
        """Forget the view after a preemption; what was generated stays."""
        self.computed_tokens = 0
        self.leave_view()
        self.phase = Phase.WAITING
        self.loaded.clear()
        self.tally.preemptions += 1
        if self.tally.first_token_ns is None:
            self.tally.tokens_cached = self.tally.tokens_loaded = self.tally.bytes_loaded = 0

    def stats(self, worker_id: WorkerId) -> RequestStats:
        """How it was served, as far as it got. The token before the first sampled one is always computed here."""
        tally = self.tally
        context = self.prompt_tokens + len(self.request.generated)
        here = min(context - 1, tally.tokens_cached + tally.tokens_loaded)
        loaded = min(tally.tokens_loaded, here)
        started = tally.first_scheduled_ns
        first = tally.first_token_ns
        return RequestStats(
            worker_id=worker_id,
            plan=(self.plan.kind if loaded else PlanKind.REDO).value,
            prompt_tokens=self.prompt_tokens,
            tokens_cached=here - loaded,
            tokens_loaded=loaded,
            tokens_redone=context - here,
            bytes_loaded=tally.bytes_loaded,
            queue_ns=0 if started is None else started - self.arrival_ns,
            load_ns=tally.load_ns,
            ttft_ns=0 if first is None else first - self.arrival_ns,
            preemptions=tally.preemptions,
            load_failures=tally.load_failures,
        )
