"""Late binding: when requests wait at the router, in which order they leave it, and what they tell who asks."""

from __future__ import annotations

import math

import pytest

from kvpool.errors import CapacityError, OverloadError, RequestError
from kvpool.reports import PrefillSample, WorkerLoad
from kvpool.request import MAX_PRIORITY, Limits
from kvpool.types import MemberState, RequestId
from router.core import RouterCore
from router.waiting import (
    GRACE_NS,
    MAX_POLL_NS,
    MAX_WAITING,
    MAX_YIELD_NS,
    POLL_NS,
    Ahead,
    Hold,
    Turn,
    WaitingRoom,
    poll_ns,
)
from tests.unit.router_kit import MS, FakeDirectory, S, key, member, report
from tests.unit.test_admission import slow_core
from tests.unit.test_router_core import Clock, meta

A, B, C = RequestId("a"), RequestId("b"), RequestId("c")
HOLD = Hold()


def test_the_waiting_room_forgets_who_stops_asking_and_is_bounded() -> None:
    room = WaitingRoom()
    room.enter(A, 0, POLL_NS, None, blocking=5)
    room.expire(POLL_NS + GRACE_NS - 1)
    assert room.outranks(0)
    assert not room.outranks(5)
    room.expire(POLL_NS + GRACE_NS)
    assert len(room) == 0
    for number in range(MAX_WAITING + 5):
        room.enter(RequestId(str(number)), 0, 0, Turn(number, 1.0))
    assert len(room) == MAX_WAITING
    room.leave(RequestId("3"))
    assert len(room) == MAX_WAITING - 1
    late = RequestId(str(MAX_WAITING + 1))
    assert room.ahead(late, Turn(MAX_WAITING + 1, 1.0)).number == MAX_WAITING - 1  # who found no place has its turn
    room.enter(late, 0, 0, Turn(MAX_WAITING + 1, 1.0))
    assert room.ahead(A, Turn(math.inf, 1.0)).work_ns == MAX_WAITING
    room.expire(GRACE_NS)
    assert len(room) == 0
    assert room.ahead(A, Turn(math.inf, 1.0)).work_ns == 0.0


def test_only_work_whose_turn_is_earlier_is_ahead_of_a_request() -> None:
    room = WaitingRoom()
    room.enter(A, 0, S, Turn(1.0, 10.0, 0))
    room.enter(B, 0, S, Turn(2.0, 20.0, 1))
    room.enter(C, 0, S, None)  # waits for something else
    assert room.ahead(RequestId("d"), Turn(3.0, 1.0, 1)) == (2, 30.0, 20.0)
    assert room.ahead(B, Turn(2.0, 20.0, 1)) == (1, 10.0, 0.0)
    assert room.ahead(A, Turn(1.0, 10.0, 0)) == (0, 0.0, 0.0)
    room.enter(A, 0, S, Turn(5.0, 10.0, 0))  # asked again: it has aged differently
    assert room.ahead(B, Turn(2.0, 20.0, 0)) == (0, 0.0, 0.0)
    assert room.ahead(A, Turn(5.0, 10.0, 1)) == (1, 20.0, 20.0)  # never behind itself


def test_short_requests_pass_long_ones_but_only_those_that_came_shortly_before() -> None:
    long_one = HOLD.due_ns(0.0, 2.0 * S, 0)
    assert HOLD.due_ns(1.0 * S, 0.1 * S, 0) < long_one
    assert HOLD.due_ns(0.0 + HOLD.age * 2.0 * S, 0.1 * S, 0) > long_one
    lead_ns = HOLD.due_ns(1.0 * S, 2.0 * S, 0) - HOLD.due_ns(1.0 * S, 2.0 * S, 1)
    assert 0.9 * MAX_YIELD_NS < lead_ns <= MAX_YIELD_NS


def test_every_priority_is_due_before_lower_ones_and_none_before_those_who_came_a_minute_earlier() -> None:
    dues = [HOLD.due_ns(0.0, S, priority) for priority in range(-MAX_PRIORITY, MAX_PRIORITY + 1)]
    assert dues == sorted(set(dues), reverse=True)
    assert dues[0] < HOLD.due_ns(60.0 * S, S, MAX_PRIORITY)


def test_of_several_routers_a_request_stands_behind_the_first_of_every_other_one_too() -> None:
    ahead = Ahead(2, 3.0 * S, 1.0 * S)
    assert ahead.of_all(1.0) == ahead
    assert ahead.of_all(3.0) == Ahead(8, 9.0 * S, 1.0 * S)
    assert Ahead(0, 0.0, 0.0).of_all(3.0) == Ahead(2, 0.0, 0.0)


def test_who_waits_asks_again_half_way() -> None:
    assert poll_ns(4.0 * S) == 2 * S
    assert poll_ns(1.0) == POLL_NS
    later = [poll_ns(10.0 * S + number * 0.1 * S) for number in range(100)]  # a burst that comes back spread
    assert len(set(later)) > 10
    assert 0.7 * MAX_POLL_NS <= min(later) <= max(later) <= MAX_POLL_NS
    assert poll_ns(math.inf) == MAX_POLL_NS


# -- the router


def load(core: RouterCore, seconds: tuple[float, ...], sequence: int) -> None:
    """Workers that need 0.16 s for a prompt of 1,600 tokens have so much to do."""
    for number, value in enumerate(seconds):
        prompts = round(value / 0.16)
        waiting = WorkerLoad(waiting_requests=prompts, queued_prefill_tokens=1600 * prompts)
        core.on_report(report(number, sequence, waiting))


def asks(core: RouterCore, name: str, **more: object) -> float | None:
    """None when the request starts, else when it is to ask again."""
    try:
        core.route(meta(name, **more))  # type: ignore[arg-type]
    except CapacityError as error:
        return float(error.details["retry_after_s"])
    return None


def overloaded() -> tuple[RouterCore, Clock]:
    core, clock = slow_core()
    load(core, (10.0, 10.0), 2)
    return core, clock


def test_requests_wait_at_the_router_while_workers_have_seconds_to_do_and_start_when_they_have_less() -> None:
    core, clock = overloaded()
    retry_s = asks(core, "r")
    assert retry_s == pytest.approx(3.5, rel=0.1)  # half of 10 s less the 3 s that workers keep
    status = core.status()
    assert (status["admissions"]["queued_now"], status["promises"], status["records"]) == (1, 0, 0)
    clock.now_ns += S
    with pytest.raises(RequestError, match=r"waiting at the router for 1\.00 s .* ask again") as caught:
        core.explain(RequestId("r"))
    assert caught.value.details["waiting_s"] == 1.0
    clock.now_ns += 6 * S + S // 2
    assert asks(core, "r") is None
    assert core.status()["admissions"]["queued_now"] == 0


def test_of_several_routers_each_expects_as_many_to_wait_at_the_others_while_those_send_requests() -> None:
    def later_s(routers: int, others_send: int) -> float | None:
        core = RouterCore(FakeDirectory(), Clock(), routers=routers)
        for number in range(2):
            core.on_member_change(member(number), MemberState.ALIVE)
            core.on_report(report(number, 1, prefills=(PrefillSample(1600, 0, 160 * MS),)))
        accepted = tuple(RequestId(f"other-{number}") for number in range(others_send))
        core.on_report(report(0, 2, WorkerLoad(served_request_ids=accepted)))
        load(core, (4.0, 4.0), 3)
        assert asks(core, "first", tokens=16_000, elapsed_ns=S) is not None
        return asks(core, "second", tokens=16_000)

    alone = later_s(1, 0)
    assert alone is not None
    assert later_s(3, 0) == alone  # they are silent
    later = later_s(3, 10)
    assert later is not None
    assert later > 1.5 * alone


def test_the_record_says_how_long_a_request_waited_before_it_was_decided() -> None:
    core, clock = overloaded()
    for second in range(7):  # it asks more often than it has to
        assert asks(core, "r", elapsed_ns=(1 + second) * S) is not None
        clock.now_ns += S
    clock.now_ns += 300 * MS
    assert asks(core, "r", elapsed_ns=8_300 * MS) is None
    record = core.record(RequestId("r"))
    assert record is not None
    assert (record.to_dict()["elapsed_ns"], record.to_dict()["waited_ns"]) == (8_300 * MS, 7_300 * MS)
    assert "waited: 7.30 s at the router" in "\n".join(core.explain(RequestId("r")))


def test_who_waits_again_after_a_worker_failed_it_is_not_explained_as_if_it_ran() -> None:
    core, clock = slow_core()
    assert asks(core, "r") is None
    load(core, (10.0, 10.0), 2)
    assert asks(core, "r") is not None
    clock.now_ns += 2 * S
    *_, last = core.explain(RequestId("r"))
    assert last.startswith("now: it has been waiting at the router again for 2.00 s")


def test_a_worker_that_is_nearly_free_takes_who_chooses_it_however_busy_the_others_are() -> None:
    core, _ = slow_core()
    load(core, (0.3, 30.0), 2)
    assert core.route(meta("r")).worker == key(0)


def test_who_waits_asks_again_before_the_worker_that_it_would_have_is_free() -> None:
    core, clock = slow_core()
    load(core, (30.0, 1.3), 2)
    retry_s = asks(core, "r")
    assert retry_s is not None
    assert retry_s < 1.3 - HOLD.free_ns / S
    second_s = asks(core, "behind it", tokens=16_000, salt=b"b")
    assert second_s is not None
    assert second_s > retry_s  # not all at once
    clock.now_ns += 801 * MS
    assert asks(core, "r", elapsed_ns=801 * MS) is None


def test_a_low_priority_does_not_leave_its_worker_idle_for_a_high_one_that_waits_for_another_worker() -> None:
    core, _ = slow_core()
    load(core, (8.0, 0.0), 2)
    assert asks(core, "high", exclude=frozenset({key(1)}), limits=Limits(priority=5)) is not None
    assert core.route(meta("low", salt=b"l")).worker == key(1)


def test_who_is_first_due_starts_first_though_another_asks_before_it() -> None:
    core, clock = slow_core()
    load(core, (3.5, 3.5), 2)
    assert asks(core, "long", tokens=16_000) is not None
    assert asks(core, "short", salt=b"s") is not None
    clock.now_ns += 470 * MS  # room for a little, and the short one stands before the long one
    assert asks(core, "long", tokens=16_000, elapsed_ns=470 * MS) is not None
    clock.now_ns += 70 * MS
    assert asks(core, "short", salt=b"s", elapsed_ns=540 * MS) is None
    assert asks(core, "long", tokens=16_000, elapsed_ns=540 * MS) is not None  # what was promised is work to do
    clock.now_ns += 100 * MS
    assert asks(core, "long", tokens=16_000, elapsed_ns=640 * MS) is None


def test_the_old_are_not_passed_any_more() -> None:
    core, _ = overloaded()
    assert asks(core, "long", tokens=16_000, elapsed_ns=20 * S) == asks(core, "alone", elapsed_ns=40 * S)


def test_higher_priorities_are_due_earlier_and_nobody_yields_for_long() -> None:
    core, clock = overloaded()
    high_s = asks(core, "high", limits=Limits(priority=1))
    low_s = asks(core, "low", salt=b"l")
    assert high_s is not None
    assert low_s is not None
    clock.now_ns += 8 * S
    assert asks(core, "low", salt=b"l", elapsed_ns=8 * S) is None  # its 2 s are over


def test_a_limit_on_the_first_token_is_judged_at_once() -> None:
    core, _ = overloaded()
    assert asks(core, "limited", limits=Limits(ttft_ns=60 * S)) is None
    with pytest.raises(OverloadError):
        core.route(meta("late", limits=Limits(ttft_ns=S)))


def test_who_will_miss_its_limit_and_may_waits_like_those_without_one() -> None:
    core, clock = overloaded()
    late = Limits(ttft_ns=S, may_degrade=True)
    assert asks(core, "late", limits=late) is not None
    clock.now_ns += 7 * S + S // 2
    assert asks(core, "late", limits=late, elapsed_ns=7 * S + S // 2) is None
    assert core.status()["admissions"]["degrade"] == 1


def test_those_whom_a_dead_worker_failed_do_not_flood_the_others() -> None:
    core, _ = overloaded()
    assert asks(core, "failed", exclude=frozenset({key(0)})) is not None


def test_workers_that_cannot_take_a_request_do_not_count() -> None:
    core, _ = slow_core(workers=3)
    load(core, (4.0, 4.0, 0.9), 2)
    assert asks(core, "any") is None  # 3 s are just not reached
    core, _ = slow_core(workers=3)
    load(core, (4.0, 4.0, 0.9), 2)
    assert asks(core, "not there", exclude=frozenset({key(2)})) is not None


def test_who_gives_up_holds_up_nobody() -> None:
    core, clock = overloaded()
    for number in range(20):
        asks(core, f"gone-{number}", tokens=1600, salt=bytes([number]), elapsed_ns=S)
    patient_s = asks(core, "patient", tokens=1600, salt=b"p")
    clock.now_ns += MAX_POLL_NS + GRACE_NS
    later_s = asks(core, "patient", tokens=1600, salt=b"p", elapsed_ns=MAX_POLL_NS + GRACE_NS)
    assert patient_s is not None
    assert patient_s > 3.5
    assert later_s is not None
    assert later_s < 1.0
    core.release(RequestId("patient"))
    assert core.status()["admissions"]["queued_now"] == 0


def test_who_was_decided_by_another_router_is_not_shown_as_waiting_though_nobody_asks_any_more() -> None:
    core, clock = overloaded()
    assert asks(core, "r") is not None
    clock.now_ns += MAX_POLL_NS + GRACE_NS
    with pytest.raises(RequestError, match="no decision"):
        core.explain(RequestId("r"))
    assert core.vitals().queued == core.status()["admissions"]["queued_now"] == 0


def test_rules_of_other_routers_send_every_request_at_once() -> None:
    for policy in ("mooncake", "plain", "dynamo", "least_loaded", "redo_only"):
        core, _ = slow_core(policy=policy)
        load(core, (100.0, 100.0), 2)
        assert asks(core, "r") is None, policy


def test_reports_that_stop_coming_hold_nobody_for_ever() -> None:
    core, clock = overloaded()
    waited_ns = 0
    while (retry_s := asks(core, "r", elapsed_ns=waited_ns)) is not None:
        waited_ns += round(retry_s * S)
        clock.now_ns += round(retry_s * S)
        assert waited_ns < 10 * S
