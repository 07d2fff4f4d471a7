"""The router without a network: watches members and reports, decides, reserves, records.  (no Ray, no gRPC)

    directory ──prefixes──▶ route ──▶ Route          one decision: snapshot → policy → reserve → record
    on_member_change, on_report ──▶ fleet, ledger, estimators, records

Not thread-safe: the shell calls it from one thread or event loop. The clock is handed in. Losing reports loses
accuracy, never correctness.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random
from typing import Any, Protocol

from kvpool.errors import CapacityError, OverloadError, RequestError, TransferCancelledError, UnavailableError
from kvpool.plan import HandOver, Route
from kvpool.reports import LoadSample, RequestOutcome, WorkerReport
from kvpool.request import Limits
from kvpool.types import BlockHash, MemberInfo, MemberState, RequestId, Role, Tier, WorkerKey
from router import cost, roles
from router.admission import Admission, Ruling, doubt, gap_ns, queue_message, shed_message
from router.decide import Decision
from router.door import ADMITTED, Door, RequestMeta
from router.fleet import Fleet
from router.learned import Learned
from router.ledger import Ledger
from router.peers import Peers
from router.planning import Params
from router.policies import Policy, make_policy
from router.record import DecisionRecord, RecordStore, explain
from router.signals import Features, Footprint, RequestView, Snapshot, WorkerView
from router.sizes import Sizes
from router.status import Vitals, goodput, link_rows, vitals, worker_rows
from router.tally import Tally

NOT_THE_HOLDERS_FAULT = frozenset({TransferCancelledError.code, CapacityError.code})

SECOND_PART = "+"
"""Behind the id of a decision, or of a request in the ledger: the part that goes on after a hand-over."""


class Directory(Protocol):
    """The router's own copy of the index, as the metadata watcher keeps it."""

    def prefixes(self, chain: Sequence[BlockHash]) -> Mapping[WorkerKey, Mapping[Tier, int]]:
        """Leading blocks of the chain each worker holds, by tier; workers that hold none may be absent."""


class RouterCore:
    """One router's state.

    Args:
        directory: index of who holds what.
        clock_ns: monotonic nanoseconds.
        policy: routing policy or its name.
        features: plans the workers can execute.
        max_records: bound on decision records.
        router_id: prefix of decision ids; keeps those of several routers apart.
        rng: for policies that are random by definition.
        footprint: bytes of the model's KV; None takes them from the first member, without fixed bytes.
        routers: how many the cluster has, this one included.
    """

    def __init__(
        self,
        directory: Directory,
        clock_ns: Callable[[], int],
        *,
        policy: Policy | str = "kvpool",
        features: Features | None = None,
        max_records: int = 10_000,
        router_id: str = "r0",
        rng: Random | None = None,
        footprint: Footprint | None = None,
        routers: int = 1,
    ) -> None:
        self._directory = directory
        self._clock_ns = clock_ns
        self._policy = make_policy(policy) if isinstance(policy, str) else policy
        self._features = features or Features()
        self._rng = rng or Random(0)
        self._router_id = router_id
        self._learned = Learned()
        self._fleet = Fleet(self._learned.links)
        self._ledger = Ledger()
        self._records = RecordStore(max_records)
        self._keys: tuple[WorkerKey, ...] = ()
        self._given_footprint = footprint
        self._footprint = footprint
        self._sequences: dict[WorkerKey, int] = {}
        self._sizes = Sizes()
        self._tiers: dict[WorkerKey, Tier] = {}
        self._fills: dict[WorkerKey, float] = {}
        self._worker_counters: dict[WorkerKey, dict[str, int]] = {}
        self._measured_ns: dict[WorkerKey, int] = {}  # when a request last told of the worker's speed
        self._decided = 0
        self.tally = Tally()
        self._peers = Peers(routers)
        self._door = Door(self._policy.hold, self._peers)

    # ---- deciding

    def route(self, meta: RequestMeta) -> Route:
        """Decide a request and reserve what the decision takes.

        Raises:
            RequestError: the prompt is empty.
            UnavailableError: no worker can take it now.
            OverloadError: its limits cannot be met; see `router.admission`.
            CapacityError: it should ask again after ``details["retry_after_s"]``.
        """
        if meta.prompt_tokens < 1:
            raise RequestError("the prompt is empty; give at least one token", field="prompt")
        now_ns = self._clock_ns()
        self._expire(now_ns)
        snapshot = self.snapshot(meta.chain, now_ns)
        needed_blocks = (meta.prompt_tokens + meta.max_tokens) // snapshot.footprint.block_tokens
        request = RequestView(
            meta.request_id,
            meta.prompt_tokens,
            len(meta.chain),
            max_tokens=meta.max_tokens,
            exclude=meta.exclude | self._sizes.too_small(needed_blocks),
            chain=meta.chain,
        )
        decoders = self._fleet.decoders()
        if decoders:
            snapshot = roles.narrow(request, snapshot, decoders)
        decision = self._choose(request, snapshot, meta.limits)
        self._decided += 1
        decision_id = f"{self._router_id}-{self._decided}"
        part = None
        if decoders:
            tpot_ns = meta.limits.tpot_ns
            able = roles.paced(request, snapshot, decoders, tpot_ns, lambda key: self._tpot_ns(key, now_ns))
            part = roles.hand_over(request, snapshot, Params(), decision, able, f"{decision_id}{SECOND_PART}")
        ruling = self._admit(meta, decision_id, request, snapshot, decision, part)
        decoder = None if part is None else part.worker
        self._remember(meta, decision_id, request, snapshot, decision, ruling, decoder)
        scale = self._peers.scale
        promise = decision.promise if scale == 1.0 else decision.promise.scaled(scale)
        self._retotal(self._ledger.reserve(meta.request_id, promise, now_ns))
        self._fleet.note_arrival(decision.position, now_ns)
        if decoders:
            self._hand_over(_second(meta.request_id), snapshot, decision, part)
        self.tally.decided[decision.plan.kind.value] += 1
        if meta.exclude:
            self.tally.failovers["worker"] += 1
        if decision.together:
            self.tally.events["striped_loads"] += 1
            self._learned.together.begin(decision.worker, now_ns + decision.plan.load_deadline_ns)
        view = snapshot.workers[decision.position]
        return Route(
            request_id=meta.request_id,
            decision_id=decision_id,
            worker_id=view.key.worker_id,
            worker=view.key,
            control_address=view.control_address,
            plan=decision.plan,
            hand_over=part,
        )

    def _hand_over(self, promised: RequestId, snapshot: Snapshot, decision: Decision, part: HandOver | None) -> None:
        """Reserve what the second part takes; without one, give back what an earlier attempt promised for it."""
        if part is None:
            self._retotal(self._ledger.release(promised, snapshot.now_ns))
        else:
            self.tally.events["hand_overs"] += 1
            promise = roles.promise_of(snapshot, decision.position, part)
            self._retotal(self._ledger.reserve(promised, promise, snapshot.now_ns))

    def snapshot(self, chain: Sequence[BlockHash], now_ns: int) -> Snapshot:
        """What a decision about this chain would see now. Valid until the next call of any method.

        Raises:
            UnavailableError: no worker has joined yet.
        """
        if self._footprint is None or not len(self._fleet):
            raise UnavailableError("no worker has joined the pool yet; start workers or retry later", workers=0)
        return Snapshot(
            now_ns=now_ns,
            workers=self._fleet.workers,
            positions=self._fleet.index,
            columns=self._fleet.settle(),
            prefixes=self._directory.prefixes(chain) if chain else {},
            footprint=self._footprint,
            links=self._fleet,
            failures=self._learned.failures,
            fastest=self._fleet.fastest(),
            features=self._features,
            arrival_scale=self._fleet.arrival_scale(now_ns),
            together=self._learned.together.shares,
            fills=self._fills,
            places=self._fleet.places,
        )

    def give_back(self, request_id: RequestId) -> None:
        """Nobody follows the newest decision about a request, as another router's answer came first or the user gave
        up: drop its promises, and do not count it. May be repeated; fine when there is none."""
        record = self._records.unfollow(request_id)
        if record is not None:
            self.tally.unfollowed[record.decision.plan.kind.value] += 1
        self.release(request_id)

    def release(self, request_id: RequestId) -> None:
        """The request will not run, or no longer: drop its promises and its place at the door."""
        self._door.leave(request_id)
        for promised in (request_id, _second(request_id)):
            self._retotal(self._ledger.release(promised, self._clock_ns()))

    def _choose(self, request: RequestView, snapshot: Snapshot, limits: Limits) -> Decision:
        """The policy's choice among the workers that decode fast enough, or among all when none does."""
        slow, now_ns = request.exclude, snapshot.now_ns
        if limits.tpot_ns is not None:
            slow |= {key for key in self._decoding_keys() if (self._tpot_ns(key, now_ns) or 0.0) > limits.tpot_ns}
        if len(slow) > len(request.exclude):
            try:
                return self._policy.choose(request._replace(exclude=slow), snapshot, self._rng)
            except UnavailableError:
                self.tally.events["all_workers_decode_too_slowly"] += 1
        return self._policy.choose(request, snapshot, self._rng)

    def _decoding_keys(self) -> list[WorkerKey]:
        """Workers that decode what they prefilled."""
        hands_over = bool(self._fleet.decoders())
        return [view.key for view in self._fleet.workers if not (hands_over and view.role is Role.PREFILL)]

    def _tpot_ns(self, key: WorkerKey, now_ns: int) -> float | None:
        """Expected gap between tokens on a worker that takes one more request."""
        return self._learned.decodes.tpot_ns(key.worker_id, self._requests(key) + 1.0, now_ns)

    def _requests(self, key: WorkerKey) -> float:
        return self._fleet.columns.requests.item(self._fleet.index[key])

    def _admit(
        self,
        meta: RequestMeta,
        decision_id: str,
        request: RequestView,
        snapshot: Snapshot,
        decision: Decision,
        part: HandOver | None,
    ) -> Ruling:
        """Rule on a decided request; raises when it does not start now. Its gaps are those of whoever decodes it."""
        decoder = decision.worker if part is None else part.worker
        tpot_ns = None if meta.limits.tpot_ns is None else self._tpot_ns(decoder, snapshot.now_ns)
        expected_ns = None if tpot_ns is None else gap_ns(meta.limits, tpot_ns, self._requests(decoder))
        hurried = meta.limits.ttft_ns is not None
        unsure = doubt(self._measured_ns.get(decision.worker), snapshot.now_ns) if hurried else 1.0
        ruling = self._door.rule(meta, request.exclude, snapshot, decision, expected_ns, unsure)
        if ruling is ADMITTED:
            return ruling
        self.tally.admissions[ruling.admission.value] += 1
        if ruling.admission is Admission.QUEUE:
            raise CapacityError(queue_message(ruling), retry_after_s=ruling.retry_after_ns / 1e9)
        if ruling.admission is Admission.SHED:
            self.release(meta.request_id)  # of an attempt before this one
            self._remember(meta, decision_id, request, snapshot, decision, ruling)
            forecast_ns = meta.elapsed_ns + decision.price_ns if ruling.missed == "ttft" else tpot_ns or 0.0
            raise OverloadError(
                shed_message(meta.limits, ruling, forecast_ns, decision.promise.gpu_ns),
                retry_after_s=ruling.retry_after_ns / 1e9,
                missed=ruling.missed,
            )
        return ruling

    def _expire(self, now_ns: int) -> None:
        self._retotal(self._ledger.expire(now_ns))
        self.tally.lapsed = self._ledger.lapsed

    # ---- hearing

    def on_member_change(self, info: MemberInfo, state: MemberState | None) -> None:
        """A member joined, changed state, or left (``None``)."""
        key = info.key
        if state is None:
            self._forget(key)
            return
        if self._given_footprint is None and not len(self._fleet):
            self._footprint = Footprint(info.block_tokens, info.block_bytes)
        view = WorkerView(
            key=key,
            role=info.role,
            state=state,
            transport=info.transport,
            data_address=info.data_address,
            control_address=info.control_address,
        )
        self._sizes.put(info)
        self._tiers[key] = next((tier for tier in Tier if info.capacity_blocks[tier]), Tier.HOST)
        self._learned.member(info)
        prefills = self._learned.prefills
        self._fleet.put(view, prefills.curve(key.worker_id), own=prefills.samples(key.worker_id) > 0)
        if info.calibration:
            self._fleet.lend(prefills.shared)
        self._retotal((key,))
        self._keys = tuple(view.key for view in self._fleet.workers)

    def on_report(self, report: WorkerReport) -> None:
        """A worker's report. Unknown members, repeated and overtaken reports are counted and dropped."""
        key = report.key
        if self._fleet.get(key) is None:
            self.tally.events["reports_of_strangers"] += 1
            return
        if report.sequence <= self._sequences.get(key, -1):
            self.tally.events["reports_repeated"] += 1
            return
        self._sequences[key] = report.sequence
        now_ns = self._clock_ns()
        self._expire(now_ns)
        served = report.load.served_request_ids
        for request in served:  # before the outcomes, which end promises: a short request is both in one report
            own = request in self._ledger or _second(request) in self._ledger
            self._peers.accepted(own=own)
            if not own:
                self._fleet.note_arrival(self._fleet.index[key], now_ns)
        running, prefills = report.load.running_requests, self._learned.prefills
        for done in report.prefills:
            self._learned.prefill(key.worker_id, done.new_tokens, done.context_tokens, done.elapsed_ns, running)
        if report.prefills:
            self._measured_ns[key] = now_ns
            self._fleet.lend(prefills.shared)
        self._learned.together.fade(key, now_ns)
        for load in report.loads:
            self._learn_load(key, load, now_ns)
        for outcome in report.outcomes:
            self.outcome(outcome)
        curve = prefills.curve(key.worker_id).beside(running)
        work_ns = cost.queue_ns(report.load, curve)
        if len(self._ledger):
            served += tuple(_second(request) for request in served)
        self._ledger.on_report(key, work_ns, served, now_ns)
        self._fleet.set_load(key, report.load, now_ns)
        if report.load.fill_mib_ns:
            self._fills[key] = report.load.fill_mib_ns / (1 << 20)
        self._fleet.set_curve(key, curve, own=prefills.samples(key.worker_id) > 0)
        self._retotal((key,))
        if report.counters:
            counters = dict(report.counters)
            self._learned.decodes.observe(key.worker_id, self._worker_counters.get(key, {}), counters, now_ns)
            self._worker_counters[key] = counters

    def outcome(self, outcome: RequestOutcome) -> None:
        """What became of a routed request. Outcomes of other routers' decisions are ignored."""
        if not outcome.decision_id.startswith(f"{self._router_id}-"):
            return
        second = outcome.decision_id.endswith(SECOND_PART)
        promised = _second(outcome.request_id) if second else outcome.request_id
        self._retotal(self._ledger.release(promised, self._clock_ns()))
        if second:
            return  # the record is about the first token
        record = self._records.join(outcome)
        if record is None:
            self.tally.events["outcomes_without_record"] += 1
            return
        if record.decision.together and outcome.bytes_loaded and not outcome.load_failures:
            start_ns, byte_ns = record.decision.together
            expected_ns = start_ns + outcome.bytes_loaded * byte_ns
            worker = record.decision.worker
            self._learned.together.observe(worker, expected_ns, outcome.load_ns, self._clock_ns())
        self.tally.events["outcomes"] += 1
        self.tally.first_token(outcome.ttft_ns, record.decision.price_ns)

    # ---- telling

    def members(self) -> frozenset[WorkerKey]:
        """Incarnations known now."""
        return frozenset(self._fleet.index)

    def record(self, request_id: RequestId) -> DecisionRecord | None:
        """Newest decision about a request, None when unknown or dropped."""
        return self._records.newest(request_id)

    def records(self) -> list[DecisionRecord]:
        """All kept records, oldest first."""
        return list(self._records)

    def explain(self, request_id: RequestId) -> list[str]:
        """Why a request went where it went, for a reader; every decision after retries.

        Raises:
            RequestError: none is kept; see `router.record.explain`.
        """
        return explain(self._records, request_id, self._door.waited_ns(request_id, self._clock_ns()))

    def status(self) -> dict[str, Any]:
        """JSON-serialisable summary: members, learned curves in human units, decisions and failures by kind."""
        now_ns, tally = self._clock_ns(), self.tally.to_dict()
        return {
            "router_id": self._router_id,
            "policy": self._policy.name,
            "workers": worker_rows(self._fleet, self._learned, self._worker_counters, now_ns),
            "links": link_rows(self._learned.links),
            **tally,
            "admissions": {**tally["admissions"], "queued_now": self._door.waiting(now_ns)},
            "goodput": {**goodput(self._worker_counters.values()), "shed": self.tally.shed},
            "records": len(self._records),
            "records_dropped": self._records.dropped,
            "promises": len(self._ledger),
            "share_of_the_traffic": 1.0 / self._peers.scale,
        }

    def vitals(self) -> Vitals:
        """What metrics show of this moment."""
        now_ns = self._clock_ns()
        return vitals(self._fleet, self._door.waiting(now_ns), len(self._ledger), now_ns)

    def learned(self) -> tuple[int, dict[str, Any]]:
        """A number that grows with everything learned, and what to keep across a restart, JSON-serialisable."""
        return self._learned.observations, self._learned.to_dict(self._clock_ns())

    def restore(self, data: Mapping[str, Any], age_ns: int = 0) -> bool:
        """Take over what `learned` gave ``age_ns`` ago; False (and nothing changes) when it cannot be used."""
        made = Learned.from_dict(data, self._clock_ns(), age_ns)
        if made is None:
            return False
        self._learned = made
        self._fleet.use_links(made.links)
        for view in self._fleet.workers:
            name = view.key.worker_id
            self._fleet.set_curve(view.key, made.prefills.curve(name), own=made.prefills.samples(name) > 0)
        return True

    # ---- private

    def _retotal(self, workers: Iterable[WorkerKey]) -> None:
        """What is promised with these workers has changed."""
        for key in workers:
            self._fleet.set_totals(key, self._ledger.totals(key))

    def _remember(
        self,
        meta: RequestMeta,
        decision_id: str,
        request: RequestView,
        snapshot: Snapshot,
        decision: Decision,
        ruling: Ruling,
        decoder: WorkerKey | None = None,
    ) -> None:
        at_ns, policy, keys = snapshot.now_ns, self._policy.name, self._keys
        self._records.add(
            DecisionRecord(
                decision_id,
                at_ns,
                policy,
                request,
                keys,
                decision,
                None,
                ruling.admission,
                decoder,
                True,
                meta.elapsed_ns,
                ruling.waited_ns,
            )
        )

    def _learn_load(self, reader: WorkerKey, load: LoadSample, now_ns: int) -> None:
        holder = load.holder
        tier = self._tiers.get(holder) if load.tier is None else load.tier
        if self._learned.load(reader, load, tier, now_ns):
            self._fleet.links_changed(holder.worker_id)
        if holder == reader:
            return  # its own disk: says nothing about reading from it over a link
        if load.failure is None:
            self._learned.failures.observe(holder, False, now_ns)
            return
        self.tally.count_failed_load(holder.worker_id, reader.worker_id, load.failure)
        if load.failure not in NOT_THE_HOLDERS_FAULT:
            self._learned.failures.observe(holder, True, now_ns)

    def _forget(self, key: WorkerKey) -> None:
        self._ledger.forget(key, self._clock_ns())
        self._learned.forget(key)
        self._sequences.pop(key, None)
        self._sizes.forget(key)
        self._tiers.pop(key, None)
        self._fills.pop(key, None)
        self._worker_counters.pop(key, None)
        self._measured_ns.pop(key, None)
        if self._fleet.remove(key):
            self._keys = tuple(view.key for view in self._fleet.workers)
            self._retotal(self._keys)


def _second(request_id: RequestId) -> RequestId:
    """The name under which the ledger keeps what a hand-over promises."""
    return RequestId(f"{request_id}{SECOND_PART}")
