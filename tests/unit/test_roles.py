"""Prefill and decode workers: who prefills, who goes on, and when nothing is handed over."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.errors import CapacityError, OverloadError, UnavailableError
from kvpool.plan import PlanKind
from kvpool.reports import RequestOutcome, WorkerLoad
from kvpool.request import NO_LIMITS, Limits
from kvpool.types import MemberState, RequestId, Role, Tier, WorkerId
from router.core import RouterCore
from router.door import RequestMeta
from router.roles import paced
from tests.unit.router_kit import MS, FakeDirectory, S, Worker, chain, key, member, report, request, snapshot
from tests.unit.test_admission import _decoding
from tests.unit.test_router_core import Clock, meta

PREFILL, DECODE, MIXED = Role.PREFILL, Role.DECODE, Role.MIXED


def core_of(*roles: Role) -> tuple[RouterCore, FakeDirectory, Clock]:
    directory, clock = FakeDirectory(), Clock()
    core = RouterCore(directory, clock)
    for number, role in enumerate(roles):
        core.on_member_change(member(number, role=role), MemberState.ALIVE)
        core.on_report(report(number, 0))
    return core, directory, clock


def asks(name: str = "r", tokens: int = 1610, **more: object) -> RequestMeta:
    return RequestMeta(meta(name).request_id, tokens, chain(tokens), **{"max_tokens": 50, **more})  # type: ignore[arg-type]


def test_a_long_prompt_is_prefilled_by_one_and_decoded_by_another_that_loads_it_meanwhile() -> None:
    core, _, _ = core_of(PREFILL, DECODE)
    route = core.route(asks())
    assert route.worker == key(0)
    part = route.hand_over
    assert part is not None
    assert (part.worker, part.control_address) == (key(1), "actor-1")
    assert part.decision_id != route.decision_id
    (piece,) = part.plan.loads
    assert (piece.start, piece.stop, piece.holder, piece.data_address) == (0, 100, key(0), b"addr-0")
    assert part.plan.patient
    assert part.plan.load_deadline_ns > route.plan.predicted_ttft_ns
    assert part.plan.stall_ns > 0


@pytest.mark.parametrize("roles", [(MIXED, MIXED), (PREFILL, MIXED), (PREFILL, PREFILL)])
def test_without_a_decode_worker_nothing_is_handed_over(roles: tuple[Role, ...]) -> None:
    core, _, _ = core_of(*roles)
    assert core.route(asks()).hand_over is None


def test_a_mixed_worker_keeps_what_it_prefilled() -> None:
    core, directory, _ = core_of(MIXED, PREFILL, DECODE)
    directory.held[key(0)] = {Tier.HOST: 90}
    route = core.route(asks())
    assert (route.worker, route.hand_over) == (key(0), None)


def test_a_single_token_needs_no_decode_worker() -> None:
    core, _, _ = core_of(PREFILL, DECODE)
    route = core.route(asks(max_tokens=1))
    assert (route.worker, route.hand_over) == (key(0), None)


def test_short_prompts_and_prompts_that_the_decode_worker_holds_go_there_alone() -> None:
    core, directory, _ = core_of(PREFILL, DECODE)
    short = core.route(asks("short", tokens=9))
    assert (short.worker, short.hand_over) == (key(1), None)
    directory.held[key(1)] = {Tier.HOST: 100}
    cached = core.route(asks("cached"))
    assert (cached.worker, cached.hand_over) == (key(1), None)
    assert cached.plan.kind is PlanKind.REDO


def test_the_decode_worker_with_the_fewest_requests_goes_on_and_a_burst_spreads() -> None:
    core, _, _ = core_of(PREFILL, PREFILL, DECODE, DECODE, DECODE)
    core.on_report(report(2, 1, WorkerLoad(running_requests=2)))
    chosen = []
    for number in range(7):
        part = core.route(asks(f"r{number}")).hand_over
        assert part is not None
        chosen.append(part.worker)
    assert {worker: chosen.count(worker) for worker in chosen} == {key(2): 1, key(3): 3, key(4): 3}


def test_what_a_hand_over_promised_is_settled_when_the_decode_worker_reports_it() -> None:
    core, _, clock = core_of(PREFILL, DECODE)
    request = asks()
    core.route(request)
    before = core.snapshot((), clock.now_ns).columns
    assert before.requests.tolist() == [1, 1]
    assert before.in_free_ns[1] > clock.now_ns
    assert before.out_free_ns[0] > clock.now_ns
    core.on_report(report(1, 1, WorkerLoad(running_requests=1, served_request_ids=(request.request_id,))))
    assert core.snapshot((), clock.now_ns).columns.requests.tolist() == [1, 1]
    core.on_report(report(1, 2, WorkerLoad(served_request_ids=())))
    assert core.snapshot((), clock.now_ns).columns.requests.tolist() == [1, 0]
    core.release(request.request_id)
    assert core.snapshot((), clock.now_ns).columns.requests.tolist() == [0, 0]


@pytest.mark.parametrize("limits", [None, Limits(ttft_ns=1)], ids=["alone", "shed"])
def test_a_retry_that_is_not_handed_over_gives_back_what_the_first_attempt_promised_for_it(
    limits: Limits | None,
) -> None:
    core, _, clock = core_of(PREFILL, DECODE)
    core.route(asks())
    again = asks(exclude=frozenset({key(1)}))
    if limits is None:
        assert core.route(again).hand_over is None
    else:
        with pytest.raises(OverloadError):
            core.route(replace(again, limits=limits))
    columns = core.snapshot((), clock.now_ns).columns
    assert columns.requests.tolist() == [1 if limits is None else 0, 0]
    assert columns.in_free_ns[1] <= clock.now_ns
    assert columns.out_free_ns[0] <= clock.now_ns
    assert core.status()["promises"] == (1 if limits is None else 0)


def test_the_outcome_of_the_second_part_is_not_taken_for_that_of_the_decision() -> None:
    core, _, _ = core_of(PREFILL, DECODE)
    route = core.route(asks())
    assert route.hand_over is not None
    outcome = RequestOutcome(route.request_id, route.hand_over.decision_id, WorkerId("w1"), S, 0, 0, 17, 0, 0, 0)
    core.outcome(outcome)
    record = core.record(route.request_id)
    assert record is not None
    assert record.outcome is None
    assert record.to_dict()["decoder"] == str(key(1))
    assert any("after the first token to w001@1" in line for line in core.explain(route.request_id))
    core.outcome(replace(outcome, decision_id=route.decision_id, tokens_redone=1610))
    record = core.record(route.request_id)
    assert record is not None
    assert record.outcome is not None
    assert record.outcome.tokens_redone == 1610


def test_decode_workers_do_everything_when_nobody_else_can() -> None:
    core, _, _ = core_of(PREFILL, DECODE)
    failed = core.route(asks(exclude=frozenset({key(0)})))
    assert (failed.worker, failed.hand_over) == (key(1), None)
    core.on_member_change(member(0, role=PREFILL), MemberState.SUSPECT)
    assert core.route(asks("again")).worker == key(1)


def test_prefill_workers_do_everything_when_nobody_else_can() -> None:
    core, _, _ = core_of(PREFILL, DECODE)
    failed = core.route(asks(exclude=frozenset({key(1)})))
    assert (failed.worker, failed.hand_over) == (key(0), None)
    core.on_member_change(member(1, role=DECODE), MemberState.DRAINING)
    assert core.route(asks("again")).hand_over is None


def test_nobody_left_is_a_typed_error() -> None:
    core, _, _ = core_of(PREFILL, DECODE)
    with pytest.raises(UnavailableError):
        core.route(asks(exclude=frozenset({key(0), key(1)})))


def test_the_limit_on_the_gap_between_tokens_is_about_the_worker_that_decodes() -> None:
    core, _, _ = core_of(PREFILL, DECODE)
    for sequence in (1, 2, 3):
        _decoding(core, 0, 20, 4, sequence)
        _decoding(core, 1, 200, 4, sequence)
    with pytest.raises(CapacityError, match="decodes more slowly"):
        core.route(asks(limits=Limits(tpot_ns=100 * MS)))
    core, _, _ = core_of(PREFILL, DECODE)
    for sequence in (1, 2, 3):
        _decoding(core, 0, 200, 4, sequence)
        _decoding(core, 1, 20, 4, sequence)
    part = core.route(asks(limits=Limits(tpot_ns=100 * MS))).hand_over
    assert part is not None
    assert part.worker == key(1)
    assert core.status()["counters"].get("all_workers_decode_too_slowly", 0) == 0


def test_a_request_with_a_limit_on_its_gaps_goes_to_a_decode_worker_that_keeps_it_though_it_has_more_to_do() -> None:
    core, _, _ = core_of(PREFILL, DECODE, DECODE, DECODE)
    for sequence in (1, 2, 3):
        _decoding(core, 1, 200, 1, sequence)
        _decoding(core, 2, 20, 8, sequence)
        _decoding(core, 3, 60, 1, sequence)
    chosen = {}
    for gap_ms in (None, 250, 100, 50):
        limits = NO_LIMITS if gap_ms is None else Limits(tpot_ns=gap_ms * MS)
        part = core.route(asks("r", limits=limits)).hand_over
        core.release(RequestId("r"))
        assert part is not None
        chosen[gap_ms] = part.worker
    assert chosen[None] in {key(1), key(3)}
    assert chosen[250] in {key(1), key(3)}
    assert (chosen[100], chosen[50]) == (key(3), key(2))
    degraded = core.route(asks("d", limits=Limits(tpot_ns=10 * MS, may_degrade=True), elapsed_ns=3 * S)).hand_over
    assert degraded is not None
    assert degraded.worker == key(2)  # none keeps it: the fastest
    with pytest.raises(CapacityError, match="decodes more slowly"):
        core.route(asks("w", limits=Limits(tpot_ns=10 * MS)))


@settings(deadline=None)
@given(
    gaps_ns=st.lists(st.none() | st.integers(1, 100), min_size=1, max_size=6),
    limit_ns=st.none() | st.integers(1, 100),
    failed=st.sets(st.integers(0, 5)),
)
def test_no_decode_worker_is_preferred_to_a_faster_one_that_keeps_the_limit_and_failed_ones_never(
    gaps_ns: list[int | None], limit_ns: int | None, failed: set[int]
) -> None:
    made = snapshot([Worker(number, role=DECODE) for number in range(len(gaps_ns))])
    asked = request(exclude=frozenset(map(key, failed)))
    gap_of = {key(number): gap for number, gap in enumerate(gaps_ns)}
    found = paced(asked, made, range(len(gaps_ns)), limit_ns, gap_of.__getitem__)
    if limit_ns is None:
        assert list(found) == list(range(len(gaps_ns)))
        return
    able = {number: gap or 0 for number, gap in enumerate(gaps_ns) if number not in failed}
    keeping = [number for number, gap in able.items() if gap <= limit_ns]
    if keeping or not able:
        assert list(found) == keeping
    else:
        assert [able[number] for number in found] == [min(able.values())]
