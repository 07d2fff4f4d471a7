"""Whatever workers report and however clusters change, a decision ends with a plan that holds or a typed error."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from random import Random

import pytest

from kvpool.errors import KVPoolError
from kvpool.plan import PlanKind
from kvpool.reports import (
    DECODE_NS,
    DECODE_REQUESTS,
    DECODE_STEPS,
    LoadSample,
    PrefillSample,
    RequestOutcome,
    WorkerLoad,
    WorkerReport,
)
from kvpool.request import Limits
from kvpool.types import MemberState, RequestId, Role, Tier, WorkerId, WorkerKey
from router.core import RouterCore
from router.decide import Decision, decide
from router.door import RequestMeta
from router.estimators import LinkCurve, PrefillCurve
from router.planning import Harm, Params
from router.signals import Features, Footprint, RequestView
from tests.unit.router_kit import FakeDirectory, FixedFailures, Worker, chain, key, member, snapshot

MOST = (1 << 64) - 1
"""The largest number that a message carries."""
STEPS = 300


def number(rng: Random) -> int:
    return rng.choice([0, 0, 1, 2, rng.randrange(100), rng.randrange(10**6), rng.randrange(1 << 40), 1 << 63, MOST])


def time_ns(rng: Random) -> int:
    return rng.choice([0, 1, rng.randrange(10**6), rng.randrange(10**9), rng.randrange(10**11), 10**18, MOST])


def worker(rng: Random) -> WorkerKey:
    """One of eight, or the same of another life."""
    return key(rng.randrange(8), rng.choice([1, 1, 1, 2]))


class Wild:
    """A router, and a world in which nothing is too large and nobody keeps to an order."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = Random(seed)
        self.now_ns = rng.choice([0, 10**9, 10**15, 10**17])
        self.directory = FakeDirectory()
        features = Features(split=rng.random() < 0.7, stripes=rng.choice([1, 4]))
        self.core = RouterCore(self.directory, lambda: self.now_ns, features=features, max_records=50)
        self.sequence = 0
        self.decided = 0

    def step(self) -> None:
        rng = self.rng
        self.now_ns += rng.choice([0, 1, 10**6, 10**9, 10**11, 10**15 if rng.random() < 0.05 else 0])
        rng.choices([self.join, self.report, self.hold, self.restore, self.route], [20, 35, 7, 2, 36])[0]()

    def join(self) -> None:
        rng, who = self.rng, worker(self.rng)
        state = rng.choice([MemberState.ALIVE, MemberState.ALIVE, MemberState.ALIVE, *MemberState, None])
        samples = tuple(PrefillSample(number(rng), number(rng), time_ns(rng)) for _ in range(rng.randrange(4)))
        capacity = (rng.choice([0, 1024, MOST]), rng.choice([0, 10, MOST]), rng.choice([0, MOST]))
        info = member(int(who.worker_id[1:]), who.worker_epoch, role=rng.choice(list(Role)))
        self.core.on_member_change(replace(info, calibration=samples, capacity_blocks=capacity), state)

    def report(self) -> None:
        rng = self.rng
        self.sequence += 1
        served = tuple(RequestId(f"q{rng.randrange(40)}") for _ in range(rng.randrange(3)))
        load = WorkerLoad(
            *(number(rng) for _ in range(4)), time_ns(rng), *(number(rng) for _ in range(3)), time_ns(rng),
            number(rng), time_ns(rng), served,
        )  # fmt: skip
        totals = tuple((name, number(rng)) for name in (DECODE_STEPS, DECODE_REQUESTS, DECODE_NS))
        made = WorkerReport(
            worker(rng),
            self.sequence,
            load if rng.random() < 0.7 else WorkerLoad(),
            tuple(PrefillSample(number(rng), number(rng), time_ns(rng)) for _ in range(rng.randrange(3))),
            tuple(self.sample() for _ in range(rng.randrange(3))),
            tuple(self.outcomes()),
            totals if rng.random() < 0.5 else (),
        )
        self.core.on_report(made)

    def sample(self) -> LoadSample:
        rng = self.rng
        failure = rng.choice([None, None, "stall", "transfer_cancelled"])
        return LoadSample(worker(rng), number(rng), number(rng), time_ns(rng), failure, rng.choice([None, *Tier]))

    def outcomes(self) -> list[RequestOutcome]:
        rng, kept = self.rng, self.core.records()
        if not kept or rng.random() < 0.5:
            return []
        about = rng.choice(kept)
        name = rng.choice([about.decision_id, f"{about.decision_id}+", "another router's"])
        moved = [number(rng) for _ in range(4)]
        times = (time_ns(rng), time_ns(rng))
        return [RequestOutcome(about.request.request_id, name, WorkerId("w"), time_ns(rng), *moved, *times)]

    def hold(self) -> None:
        tiers = self.rng.sample(list(Tier), self.rng.randrange(4))
        self.directory.held[worker(self.rng)] = {tier: self.rng.choice([1, 5, 40, 10**6]) for tier in tiers}

    def restore(self) -> None:
        _, data = self.core.learned()
        assert self.core.restore(json.loads(json.dumps(data, allow_nan=False)), self.rng.choice([0, 10**9, 10**12]))

    def route(self) -> None:
        rng = self.rng
        tokens = rng.choice([1, 2, 15, 16, 17, 32, 1600, 1601, rng.randrange(1, 5000)])
        limits = Limits(ttft_ns=rng.choice([None, 1, 10**9]), tpot_ns=rng.choice([None, 1, 10**9]))
        meta = RequestMeta(
            RequestId(f"q{rng.randrange(40)}"),
            rng.choice([tokens, tokens, tokens, (1 << 31) + 5, 1 << 40]),
            chain(tokens),
            rng.choice([1, 2, 10**6]),
            frozenset(worker(rng) for _ in range(rng.randrange(3))),
            replace(limits, priority=rng.randrange(-1, 2), may_degrade=rng.random() < 0.5),
        )
        try:
            route = self.core.route(meta)
        except KVPoolError:
            return
        record = self.core.record(meta.request_id)
        assert record is not None
        assert route.worker in self.core.members()
        assert {piece.holder for piece in route.plan.loads} <= self.core.members()
        check(record.decision, meta.prompt_tokens, 16)
        json.dumps(record.to_dict(), allow_nan=False)
        assert self.core.explain(meta.request_id)
        self.decided += 1


def check(made: Decision, tokens: int, block_tokens: int) -> None:
    """The plan can be carried out, and every number is one."""
    plan, promise, position = made.plan, made.promise, made.own_blocks
    assert made.price_ns >= 0
    assert 0 <= promise.gpu_ns < math.inf
    assert 0 < promise.tokens <= tokens
    assert (plan.kind is PlanKind.REDO) == (not plan.loads)
    for piece in plan.loads:
        assert piece.start == position or (plan.kind is PlanKind.SPLIT and piece is plan.loads[0])
        assert made.own_blocks <= piece.start < piece.stop <= (tokens - 1) // block_tokens
        assert piece.holder != made.worker
        position = piece.stop
    assert not plan.loads or (plan.load_deadline_ns > 0 and plan.stall_ns > 0)
    assert plan.split_tokens is None or 0 < plan.split_tokens <= tokens
    for transfer in promise.transfers:
        assert 0 <= transfer.busy_ns < math.inf
        assert 0 <= transfer.in_ns < math.inf
    assert all(0 <= item.price.ttft_ns < math.inf and item.price.gpu_ns >= 0 for item in made.loads)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("seed", range(12))
def test_no_report_and_no_change_of_members_breaks_a_decision(seed: int) -> None:
    wild = Wild(seed)
    for _ in range(STEPS):
        wild.step()
    assert wild.decided > 10
    wild.core.status()


def anything(rng: Random, most: float) -> float:
    """From 0 to ``most``, every order of magnitude alike."""
    return rng.choice([0.0, most, *(math.exp(rng.uniform(-10.0, math.log(most))) for _ in range(5))])


def wide_worker(rng: Random, place: int, blocks: int) -> Worker:
    return Worker(
        place,
        blocks=rng.choice([0, 1, blocks, blocks, blocks + 5]),
        wait_ns=rng.choice([None, 0.0, anything(rng, 1e18)]),
        in_ns=anything(rng, 1e18),
        out_ns=anything(rng, 1e18),
        requests=rng.choice([0, 1, 1 << 60]),
        state=rng.choice([MemberState.ALIVE, MemberState.ALIVE, MemberState.SUSPECT]),
        role=rng.choice([Role.MIXED, Role.MIXED, *Role]),
        curve=PrefillCurve(anything(rng, 1e15), anything(rng, 1e15), anything(rng, 1e12)),
        tier=rng.choice(list(Tier)),
        in_memory=rng.choice([0, 1, 40]),
        in_device=rng.choice([0, 1, 40]),
        fill_byte_ns=rng.choice([None, 0.0, anything(rng, 1e9)]),
    )


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("seed", range(8))
def test_no_order_of_magnitude_breaks_a_decision(seed: int) -> None:
    rng = Random(seed)
    for _ in range(150):
        block_tokens, blocks = rng.choice([1, 16, 16, 128]), rng.choice([0, 1, 2, 100, 1000])
        full = block_tokens * blocks
        tokens = max(1, full, rng.choice([1, full, full + 1, full + block_tokens, (1 << 31) + 3, 1 << 40, 1 << 52]))
        workers = [wide_worker(rng, place, blocks) for place in range(rng.randrange(1, 9))]
        shot = snapshot(
            workers,
            now_ns=rng.choice([0, 10**10, 1 << 60]),
            links=LinkCurve(anything(rng, 1e15), anything(rng, 1e12)),
            failures=FixedFailures(rng.choice([0.0, 0.01, 0.999999])),
            features=Features(split=rng.random() < 0.6, stripes=rng.choice([1, 2, 4])),
            footprint=Footprint(block_tokens, rng.choice([1, 640_000, 1 << 32]), rng.choice([0, 10**9])),
        )
        shot.columns.arrivals[:] = [rng.choice([1e-200, 1.0, 5e21]) for _ in workers]
        shot.columns.empty_blocks[:] = [rng.choice([0.0, 100.0, float(MOST), math.inf]) for _ in workers]
        shot.columns.pressure[:] = [rng.choice([0.0, 1.0, 16.0]) for _ in workers]
        asked = RequestView(RequestId("r"), tokens, blocks)
        params = rng.choice([Params(), Params(harm=Harm()), Params(priced_pairs=20)])
        try:
            made = decide(asked, shot._replace(arrival_scale=rng.choice([0.0, 1e-10, 1e-54])), params)
        except KVPoolError:
            assert not (shot.columns.closed_ns == 0.0).any()
            continue
        check(made, tokens, block_tokens)
        assert not (made.kept != made.kept).any()
        assert (made.redo >= 0.0).all()
