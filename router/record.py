"""Why a request went where it went: one record per decision, joined with what became of it.  (pure)

A record keeps what the decision saw and every price it computed, by reference to arrays no one writes again; nothing
is formatted until someone asks. The store is bounded in records and bytes; the oldest leave first and are counted.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from kvpool.errors import RequestError
from kvpool.plan import PlanKind
from kvpool.reports import RequestOutcome
from kvpool.types import RequestId, WorkerKey
from router.admission import Admission
from router.decide import Decision
from router.signals import RequestView

MAX_RECORD_BYTES = 256 * 1024 * 1024
_RECORD_OVERHEAD_BYTES = 1024
_BYTES_PER_WORKER = 3 * 8
_BYTES_PER_PRICE = 500
_CANDIDATES_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Candidate:
    """Price of one plan on one worker; ``source`` is the holder of a load, the first of several ``holders``."""

    worker: WorkerKey
    kind: PlanKind
    price_ns: int
    wait_ns: int
    own_blocks: int
    source: WorkerKey | None = None
    boundary_blocks: int = 0
    load_ns: int = 0
    holders: int = 0

    @property
    def what(self) -> tuple[WorkerKey, PlanKind, int]:
        """Two candidates of one worker and source that differ in it are different plans."""
        return self.worker, self.kind, self.holders


class DecisionRecord(NamedTuple):
    """One decision.

    Attributes:
        decision_id: name of the decision; a retry of a request makes a new one.
        at_ns: moment, router's clock.
        policy: name of the policy that decided.
        request: what was known of the request.
        workers: candidates, in the order of all columns.
        decision: verdict and prices.
        outcome: what became of it, None until reported.
        admission: admitted, degraded (started although a limit will be missed) or shed (not started).
        decoder: who goes on after the first token, when that is somebody else (`router.roles`).
        followed: False when a client said that it follows another router's decision, or has given up.
        elapsed_ns: time from the user's call to the decision.
        waited_ns: of that, what it waited at this router (`router.waiting`).
    """

    decision_id: str
    at_ns: int
    policy: str
    request: RequestView
    workers: tuple[WorkerKey, ...]
    decision: Decision
    outcome: RequestOutcome | None = None
    admission: Admission = Admission.ADMIT
    decoder: WorkerKey | None = None
    followed: bool = True
    elapsed_ns: int = 0
    waited_ns: int = 0

    def candidates(self) -> list[Candidate]:
        """Every eligible worker with redo, and every load that was priced, cheapest first. Loads that are absent were
        bounded away: they could not have been chosen."""
        decision = self.decision
        found = []
        for position, worker in enumerate(self.workers):
            price = float(decision.wait[position] + decision.redo[position])
            if math.isfinite(price):
                found.append(self._candidate(worker, position, PlanKind.REDO, price))
        for position, holding, priced, holders in decision.loads:
            source, load_ns = self.workers[holding.position], round(priced.load_ns)
            item = self._candidate(self.workers[position], position, priced.kind, priced.ttft_ns)
            item = replace(item, source=source, boundary_blocks=priced.boundary, load_ns=load_ns, holders=holders)
            found.append(item)
        found.sort(key=lambda item: (item.price_ns, str(item.worker), item.kind.value, str(item.source)))
        return found

    def _candidate(self, worker: WorkerKey, position: int, kind: PlanKind, price: float) -> Candidate:
        decision = self.decision
        own = int(decision.own[position])
        return Candidate(worker, kind, round(price), round(float(decision.wait[position])), own, None, own)

    def runner_up(self) -> Candidate | None:
        """Cheapest candidate that differs from the choice in worker or plan."""
        chosen = self.chosen()
        return next((item for item in self.candidates() if item.what != chosen), None)

    def chosen(self) -> tuple[WorkerKey, PlanKind, int]:
        """`Candidate.what` of the choice."""
        plan = self.decision.plan
        return self.decision.worker, plan.kind, len({piece.holder for piece in plan.loads})

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable form, all candidates included."""
        plan = self.decision.plan
        runner_up = self.runner_up()
        return {
            "decision_id": self.decision_id,
            "request_id": self.request.request_id,
            "at_ns": self.at_ns,
            "policy": self.policy,
            "prompt_tokens": self.request.prompt_tokens,
            "chain_blocks": self.request.chain_blocks,
            "excluded": sorted(str(key) for key in self.request.exclude),
            "worker": str(self.decision.worker),
            "plan": plan.kind.value,
            "loads": [
                {
                    "start": piece.start,
                    "stop": piece.stop,
                    "holder": str(piece.holder),
                    "tier": piece.tier.name.lower(),
                    "alternates": [str(ref.holder) for ref in piece.alternates],
                }
                for piece in plan.loads
            ],
            "split_tokens": plan.split_tokens,
            "load_deadline_ns": plan.load_deadline_ns,
            "stall_ns": plan.stall_ns,
            "own_blocks": self.decision.own_blocks,
            "price_ns": self.decision.price_ns,
            "predicted_ttft_ns": plan.predicted_ttft_ns,
            "holders": self.decision.holders,
            "load_floor_ns": None if self.decision.load_floor_ns is None else round(self.decision.load_floor_ns),
            "candidates": [_candidate_dict(item) for item in self.candidates()],
            "runner_up": None if runner_up is None else _candidate_dict(runner_up),
            "admission": self.admission.value,
            "decoder": None if self.decoder is None else str(self.decoder),
            "followed": self.followed,
            "elapsed_ns": self.elapsed_ns,
            "waited_ns": self.waited_ns,
            "outcome": None if self.outcome is None else asdict(self.outcome),
        }

    def num_bytes(self) -> int:
        """Roughly what the record occupies."""
        priced = len(self.decision.tried) + len(self.decision.priced)
        return _RECORD_OVERHEAD_BYTES + _BYTES_PER_WORKER * len(self.workers) + _BYTES_PER_PRICE * priced


class RecordStore:
    """The newest records, by decision and by request. Not thread-safe.

    Args:
        max_records: bound on their number.
        max_bytes: bound on their size.
    """

    def __init__(self, max_records: int = 10_000, max_bytes: int = MAX_RECORD_BYTES) -> None:
        self._max_records = max_records
        self._max_bytes = max_bytes
        self._records: OrderedDict[str, DecisionRecord] = OrderedDict()
        self._latest: dict[RequestId, str] = {}
        self._bytes = 0
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[DecisionRecord]:
        return iter(tuple(self._records.values()))

    def add(self, record: DecisionRecord) -> None:
        """Keep a record; the oldest leave when a bound is passed."""
        self._records[record.decision_id] = record
        self._latest[record.request.request_id] = record.decision_id
        self._bytes += record.num_bytes()
        while len(self._records) > self._max_records or (self._bytes > self._max_bytes and len(self._records) > 1):
            _, oldest = self._records.popitem(last=False)
            self._bytes -= oldest.num_bytes()
            self.dropped += 1
            if self._latest.get(oldest.request.request_id) == oldest.decision_id:
                del self._latest[oldest.request.request_id]

    def join(self, outcome: RequestOutcome) -> DecisionRecord | None:
        """Attach an outcome to its decision; None when the record has left already."""
        record = self._records.get(outcome.decision_id)
        if record is None:
            return None
        joined = self._records[outcome.decision_id] = record._replace(outcome=outcome)
        return joined

    def unfollow(self, request_id: RequestId) -> DecisionRecord | None:
        """Nobody follows the newest decision about a request; None when that is known, or plainly not so."""
        record = self.newest(request_id)
        if record is None or not record.followed or record.outcome is not None or record.admission is Admission.SHED:
            return None
        self._records[record.decision_id] = record._replace(followed=False)
        return record

    def newest(self, request_id: RequestId) -> DecisionRecord | None:
        """The newest decision about a request, None when none is kept."""
        latest = self._latest.get(request_id)
        return None if latest is None else self._records[latest]

    def of_request(self, request_id: RequestId) -> list[DecisionRecord]:
        """Decisions about a request that are still kept, oldest first (several after retries)."""
        newest = self.newest(request_id)
        if newest is None:
            return []
        earlier = [
            item for item in self._records.values() if item.request.request_id == request_id and item is not newest
        ]
        return [*earlier, newest]


def explain(records: RecordStore, request_id: RequestId, waited_ns: int | None) -> list[str]:
    """All decisions about a request for a reader, one line an entry.

    Args:
        records: those of this router.
        request_id: whose.
        waited_ns: for how long it has been waiting at this router; None when it does not.

    Raises:
        RequestError: there is none; ``waiting_s`` in the details says that it waits for one.
    """
    found = records.of_request(request_id)
    if not found and waited_ns is not None:
        raise RequestError(
            f"request {request_id!r} has been waiting at the router for {_seconds(waited_ns)} and has no decision yet; "
            "it gets one when its turn comes, so ask again then ('kvpool status' shows how many wait)",
            request_id=request_id,
            waiting_s=round(waited_ns / 1e9, 3),
        )
    if not found:
        raise RequestError(
            f"no decision about request {request_id!r} is kept. Either none was made: the id is mistyped, the gateway "
            "refused it (gateway.max_requests), or it was given up or ran out of time while it waited. Or its record "
            f"is gone: the router was restarted, or has made more decisions since than it keeps (now {len(records):,})",
            request_id=request_id,
        )
    lines = [line for record in found for line in explain_lines(record)]
    if waited_ns is not None:
        lines.append(f"now: it has been waiting at the router again for {_seconds(waited_ns)}, for its next decision")
    return lines


def explain_lines(record: DecisionRecord) -> list[str]:
    """The record for a reader, one line an entry."""
    decision, plan = record.decision, record.decision.plan
    chosen = "the best it could have had" if record.admission is Admission.SHED else "chosen"
    lines = [
        f"request {record.request.request_id} · decision {record.decision_id} · policy {record.policy}",
        f"prompt: {record.request.prompt_tokens:,} tokens, {record.request.chain_blocks} full blocks",
        f"{chosen}: {decision.worker} · {_plan_text(record)} · expected {_seconds(decision.price_ns)}",
    ]
    if record.waited_ns:
        lines.append(f"waited: {_seconds(record.waited_ns)} at the router, until its turn came")
    if record.decoder is not None:
        lines.append(f"handed over: after the first token to {record.decoder}")
    if record.admission is Admission.DEGRADE:
        lines.append("degraded: a limit of the request will not be met, and it may be")
    if record.admission is Admission.SHED:
        lines.append(
            "shed: a limit of the request could not be met, so it was refused (429 over HTTP) and not started; come "
            "again later, raise the limit, or set may_degrade"
        )
    if record.request.exclude:
        lines.append("excluded: " + ", ".join(sorted(str(key) for key in record.request.exclude)))
    if plan.loads:
        lines.append(f"deadline: loads {_seconds(plan.load_deadline_ns)}, stall {_seconds(plan.stall_ns)}")
    candidates = record.candidates()
    lines.append(f"prices of {len(candidates)} candidates (worker, plan):")
    for item in candidates[:_CANDIDATES_SHOWN]:
        taken = item.what == record.chosen()
        source = "" if item.source is None else f" {item.boundary_blocks} blocks from {item.source}"
        if item.holders > 1:
            source += f" and {item.holders - 1} more"
        lines.append(
            f"  {'→' if taken else ' '} {item.worker!s:<16} {item.kind.value}{source}: {_seconds(item.price_ns)}"
            f" (wait {_seconds(item.wait_ns)}, {item.own_blocks} blocks cached)"
        )
    if len(candidates) > _CANDIDATES_SHOWN:
        lines.append(f"    … and {len(candidates) - _CANDIDATES_SHOWN} dearer ones")
    if decision.holders:
        lines.append(
            f"  loads not listed (from {decision.holders} holders) could not have been chosen{_floor(decision)}"
        )
    lines.extend(_outcome_lines(record))
    return lines


def _floor(decision: Decision) -> str:
    floor = decision.load_floor_ns
    return "" if floor is None else f": with their harm to others all cost {_seconds(floor)} or more"


def _outcome_lines(record: DecisionRecord) -> list[str]:
    outcome = record.outcome
    if outcome is None and record.admission is Admission.SHED:
        return ["outcome: none, as it was refused"]
    if outcome is None and not record.followed:
        return ["outcome: none, as nobody followed this decision"]
    if outcome is None:
        return ["outcome: not reported yet; of a request that ended before its first token none will be"]
    predicted = max(1, record.decision.price_ns)
    off = 100.0 * (outcome.ttft_ns - predicted) / predicted
    lines = [
        f"outcome: first token after {_seconds(outcome.ttft_ns)} ({off:+.0f} % against the prediction), "
        f"{_seconds(record.elapsed_ns + outcome.ttft_ns)} after the call; "
        f"tokens cached {outcome.tokens_cached:,}, loaded {outcome.tokens_loaded:,}, redone {outcome.tokens_redone:,}"
    ]
    if outcome.load_failures:
        lines.append("load failures: " + ", ".join(outcome.load_failures))
    runner_up = record.runner_up()
    if runner_up is not None:
        lines.append(
            f"runner-up: {runner_up.worker} {runner_up.kind.value} would have cost {_seconds(runner_up.price_ns)}"
        )
    return lines


def _plan_text(record: DecisionRecord) -> str:
    decision = record.decision
    redone = decision.promise.tokens
    own = f"{decision.own_blocks} blocks cached, " if decision.own_blocks else ""
    if not decision.plan.loads:
        return f"{own}redo {redone:,} tokens"
    loads = ", ".join(
        f"load blocks {piece.start}–{piece.stop} from {piece.holder} ({piece.tier.name.lower()})"
        for piece in decision.plan.loads
    )
    if decision.plan.split_tokens is not None:
        return (
            f"{own}split: compute the first {decision.plan.split_tokens:,} missing tokens while the rest loads "
            f"({loads}), redo {redone:,} tokens in all"
        )
    return f"{own}{loads}, redo {redone:,} tokens"


def _candidate_dict(item: Candidate) -> dict[str, Any]:
    return {
        "worker": str(item.worker),
        "plan": item.kind.value,
        "price_ns": item.price_ns,
        "wait_ns": item.wait_ns,
        "own_blocks": item.own_blocks,
        "source": None if item.source is None else str(item.source),
        "boundary_blocks": item.boundary_blocks,
        "load_ns": item.load_ns,
        "holders": item.holders,
    }


def _seconds(value_ns: float) -> str:
    if value_ns >= 1e9:
        return f"{value_ns / 1e9:.2f} s"
    return f"{value_ns / 1e6:.1f} ms" if value_ns >= 1e6 else f"{value_ns / 1e3:.0f} µs"
