"""The ledger against a naive model that recomputes everything from its list of live promises."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvpool.types import RequestId
from router.ledger import PROMISE_BOUND_NS, Ledger
from router.planning import Promise, Transfer
from tests.unit.router_kit import key

WORKERS = [key(i) for i in range(3)]
workers = st.sampled_from(WORKERS)
requests = st.sampled_from([RequestId(name) for name in "abcdef"])
amounts = st.integers(0, 10**9)


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.now_ns = 0
        self.live: dict[RequestId, Promise] = {}

    @rule(request=requests, worker=workers, holder=workers, gpu=amounts, link=amounts, load=st.booleans())
    def reserve(self, request: RequestId, worker: object, holder: object, gpu: int, link: int, load: bool) -> None:
        transfers = (Transfer(holder, link, float(link)),) if load else ()  # type: ignore[arg-type]
        promise = Promise(worker, float(gpu), 7, transfers)  # type: ignore[arg-type]
        changed = self.ledger.reserve(request, promise, self.now_ns)
        assert worker in changed
        self.live[request] = promise
        assert self.ledger.totals(promise.worker).gpu_free_ns >= self.now_ns + gpu

    @rule(worker=workers, work=amounts, accepted=st.lists(requests, max_size=3))
    def report(self, worker: object, work: int, accepted: list[RequestId]) -> None:
        self.ledger.on_report(worker, float(work), tuple(accepted), self.now_ns)  # type: ignore[arg-type]
        for request in accepted:
            if request in self.live and self.live[request].worker == worker:
                del self.live[request]
        rest = sum(promise.gpu_ns for promise in self.live.values() if promise.worker == worker)
        assert self.ledger.totals(worker).gpu_free_ns == self.now_ns + work + rest  # type: ignore[arg-type]

    @rule(request=requests)
    def release(self, request: RequestId) -> None:
        self.ledger.release(request, self.now_ns)
        self.live.pop(request, None)

    @rule(worker=workers)
    def forget(self, worker: object) -> None:
        self.ledger.forget(worker, self.now_ns)  # type: ignore[arg-type]
        self.live = {name: promise for name, promise in self.live.items() if promise.worker != worker}

    @rule(step=st.integers(0, 10**9))
    def time_passes(self, step: int) -> None:
        self.now_ns += step

    @rule()
    def silence_ends_everything(self) -> None:
        self.now_ns += 20 * 10**9 + PROMISE_BOUND_NS
        self.ledger.expire(self.now_ns)
        self.live.clear()

    @invariant()
    def live_promises_are_those_of_the_model(self) -> None:
        for worker in WORKERS:
            totals = self.ledger.totals(worker)
            mine = [promise for promise in self.live.values() if promise.worker == worker]
            assert totals.requests == len(mine)
            assert totals.tokens == 7 * len(mine)
            assert min(totals.gpu_free_ns, totals.in_free_ns, totals.out_free_ns) >= 0.0


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLedger = LedgerMachine.TestCase
