"""Admission: what a request with limits is told, from the rule itself up to the router that asks it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kvpool.errors import CapacityError, OverloadError
from kvpool.reports import PrefillSample, WorkerLoad
from kvpool.request import NO_LIMITS, Limits
from kvpool.types import MemberState, RequestId
from router.admission import (
    MAX_DEGRADABLE_QUEUE_NS,
    MAX_HOLD_NS,
    MAX_QUEUE_NS,
    STAYS_SLOW_NS,
    WORKERS_BUSY,
    Admission,
    Forecast,
    admit,
)
from router.core import RouterCore
from router.decoding import FADE_NS, DecodeEstimators
from router.waiting import POLL_NS
from tests.unit.router_kit import MS, S, key, member, report
from tests.unit.test_router_core import Clock, make_core, meta

A = RequestId("a")


def test_a_request_without_limits_is_admitted_whatever_is_expected() -> None:
    assert admit(NO_LIMITS, Forecast(3600.0 * S, 10.0 * S)).admission is Admission.ADMIT


def test_a_late_first_token_sheds_and_says_when_to_come_again() -> None:
    ruling = admit(Limits(ttft_ns=2 * S), Forecast(ttft_ns=4.0 * S, elapsed_ns=1 * S))
    assert (ruling.admission, ruling.missed, ruling.retry_after_ns) == (Admission.SHED, "ttft", 3 * S)


def test_time_already_spent_counts_against_the_first_token() -> None:
    limits = Limits(ttft_ns=2 * S)
    assert admit(limits, Forecast(1.9 * S)).admission is Admission.ADMIT
    assert admit(limits, Forecast(1.9 * S, elapsed_ns=S)).admission is Admission.SHED


def test_a_request_that_may_degrade_is_started_late() -> None:
    ruling = admit(Limits(ttft_ns=S, may_degrade=True), Forecast(9.0 * S))
    assert (ruling.admission, ruling.missed) == (Admission.DEGRADE, "ttft")


def test_slow_decoding_is_waited_out_while_the_first_token_is_not_due() -> None:
    limits = Limits(ttft_ns=5 * S, tpot_ns=50 * MS)
    early, late = (Forecast(1.0 * S, tpot_ns=80.0 * MS, elapsed_ns=elapsed) for elapsed in (0, 3_950 * MS))
    assert admit(limits, early).admission is Admission.QUEUE
    assert admit(limits, late).admission is Admission.SHED
    assert admit(Limits(tpot_ns=50 * MS), Forecast(1.0, 80.0 * MS, MAX_QUEUE_NS)).admission is Admission.SHED


def test_who_may_degrade_waits_a_moment_for_faster_decoding_and_then_starts() -> None:
    for limits in (Limits(tpot_ns=1, may_degrade=True), Limits(60 * S, tpot_ns=1, may_degrade=True)):
        waited = [admit(limits, Forecast(1.0, 2.0, elapsed)) for elapsed in (0, MAX_DEGRADABLE_QUEUE_NS)]
        assert [ruling.admission for ruling in waited] == [Admission.QUEUE, Admission.DEGRADE]


def test_who_may_degrade_does_not_pass_those_that_wait_for_their_turn_because_decoding_is_slow() -> None:
    late = Forecast(1.0, 2.0, MAX_DEGRADABLE_QUEUE_NS, hold_ns=4.0 * S)
    ruling = admit(Limits(tpot_ns=1, may_degrade=True), late)
    assert (ruling.admission, ruling.missed) == (Admission.QUEUE, WORKERS_BUSY)
    assert admit(Limits(60 * S, tpot_ns=1, may_degrade=True), late).admission is Admission.DEGRADE


def test_slow_decoding_that_no_end_of_others_makes_faster_is_not_waited_out() -> None:
    ruling = admit(Limits(tpot_ns=1), Forecast(1.0, STAYS_SLOW_NS))
    assert (ruling.admission, ruling.missed, ruling.retry_after_ns) == (Admission.SHED, "tpot", FADE_NS)
    assert admit(Limits(tpot_ns=1, may_degrade=True), Forecast(1.0, STAYS_SLOW_NS)).admission is Admission.DEGRADE


def test_an_unknown_decode_speed_refuses_nobody() -> None:
    assert admit(Limits(tpot_ns=1), Forecast(1.0 * S, tpot_ns=None)).admission is Admission.ADMIT


def test_who_is_outranked_yields_for_a_bounded_time() -> None:
    assert admit(NO_LIMITS, Forecast(1.0, outranked=True)).admission is Admission.QUEUE
    assert admit(NO_LIMITS, Forecast(1.0, elapsed_ns=2 * S, outranked=True)).admission is Admission.ADMIT
    hurried = Limits(ttft_ns=S)
    assert admit(hurried, Forecast(0.95 * S, outranked=True)).admission is Admission.ADMIT


def test_who_is_held_waits_half_of_the_time_and_no_longer_than_a_bound() -> None:
    ruling = admit(NO_LIMITS, Forecast(9.0 * S, hold_ns=4.0 * S))
    assert (ruling.admission, ruling.missed, ruling.retry_after_ns) == (Admission.QUEUE, WORKERS_BUSY, 2 * S)
    assert admit(NO_LIMITS, Forecast(9.0 * S, hold_ns=-1.0 * S)).admission is Admission.ADMIT
    assert admit(NO_LIMITS, Forecast(9.0 * S, elapsed_ns=MAX_HOLD_NS, hold_ns=4.0 * S)).admission is Admission.ADMIT
    assert admit(Limits(ttft_ns=10 * S), Forecast(9.0 * S, hold_ns=4.0 * S)).admission is Admission.ADMIT


def steps_of(step_ms: int, running: int) -> dict[str, int]:
    return {"decode_steps": 10, "decode_requests": 10 * running, "decode_ns": 10 * step_ms * MS}


def test_decode_speed_is_learned_from_running_totals() -> None:
    decodes = DecodeEstimators()
    worker = key(0).worker_id
    assert decodes.tpot_ns(worker, 4, S) is None
    totals = {"decode_steps": 0, "decode_requests": 0, "decode_ns": 0}
    for number in range(60):
        batch = 1 + number % 8
        after = {
            "decode_steps": totals["decode_steps"] + 10,
            "decode_requests": totals["decode_requests"] + 10 * batch,
            "decode_ns": totals["decode_ns"] + 10 * (20 + 3 * batch) * MS,
        }
        decodes.observe(worker, totals, after, S)
        totals = after
    for batch in (1, 8):
        assert decodes.tpot_ns(worker, batch, S) == pytest.approx((20 + 3 * batch) * MS, rel=0.05)
    assert decodes.tpot_ns(key(1).worker_id, 1, S) is None  # nobody is refused for what others show
    decodes.observe(worker, totals, totals, 2 * S)  # no steps
    decodes.observe(worker, totals, {}, 2 * S)  # a new incarnation begins at nothing
    assert decodes.tpot_ns(worker, 1, S + FADE_NS - 1) is not None
    assert decodes.tpot_ns(worker, 1, S + FADE_NS) is None


def test_after_a_silence_a_decode_speed_is_learned_from_nothing() -> None:
    decodes, worker = DecodeEstimators(), key(0).worker_id
    for number in range(50):
        decodes.observe(worker, {}, steps_of(353, 16), number * S)
    after_ns = 49 * S + FADE_NS
    decodes.observe(worker, {}, steps_of(70, 1), after_ns)
    assert decodes.tpot_ns(worker, 1, after_ns) == pytest.approx(70 * MS)


# -- the router


def slow_core(workers: int = 2, policy: str = "kvpool") -> tuple[RouterCore, Clock]:
    """Workers that need about 0.16 s for 1,600 tokens."""
    core, _, clock = make_core(workers, policy)
    for number in range(workers):
        core.on_report(report(number, 1, prefills=(PrefillSample(1600, 0, 160 * MS),)))
    return core, clock


def busy(core: RouterCore, number: int, sequence: int, tokens: int = 100_000) -> None:
    core.on_report(report(number, sequence, WorkerLoad(waiting_requests=4, queued_prefill_tokens=tokens)))


def test_without_limits_nothing_is_ever_shed() -> None:
    core, _ = slow_core()
    for number in range(2):
        busy(core, number, 2)
    with pytest.raises(CapacityError, match="more than enough to do"):
        core.route(meta("r"))
    assert core.route(meta("r", elapsed_ns=MAX_HOLD_NS)).worker in {key(0), key(1)}
    assert core.status()["goodput"]["shed"] == 0


def test_an_overloaded_router_sheds_a_request_with_a_limit_and_reserves_nothing() -> None:
    core, _ = slow_core()
    for number in range(2):
        busy(core, number, 2)
    with pytest.raises(OverloadError, match=r"limit on the first token is 1\.000 s") as caught:
        core.route(meta("r", limits=Limits(ttft_ns=S)))
    assert caught.value.details["retry_after_s"] > 1.0
    status = core.status()
    assert status["promises"] == 0
    assert (status["goodput"]["shed"], status["admissions"]["shed"]) == (1, 1)
    told = "\n".join(core.explain(RequestId("r")))
    assert "shed: a limit" in told
    assert "raise the limit" in told
    assert "chosen:" not in told
    assert told.endswith("outcome: none, as it was refused")
    record = core.record(RequestId("r"))
    assert record is not None
    assert json.loads(json.dumps(record.to_dict()))["admission"] == "shed"


def test_a_prompt_whose_prefill_alone_takes_too_long_is_told_so() -> None:
    core, _ = slow_core()
    with pytest.raises(OverloadError, match="its prefill alone takes longer"):
        core.route(meta("r", limits=Limits(ttft_ns=MS)))


def test_what_the_refusal_says_is_expected_counts_from_the_call_and_is_beyond_the_limit() -> None:
    core, _ = slow_core()
    with pytest.raises(OverloadError, match=r"is 0\.200 s and 0\.2[0-9]+ s are expected; come again later"):
        core.route(meta("r", limits=Limits(ttft_ns=200 * MS), elapsed_ns=60 * MS))
    with pytest.raises(OverloadError, match=r"is 0\.1 ms and 0\.1[0-9]+ s are expected; its prefill alone") as alone:
        core.route(meta("r", limits=Limits(ttft_ns=MS // 10)))
    assert alone.value.details["retry_after_s"] == FADE_NS / S  # by then its speed is measured anew


def test_the_benefit_of_the_doubt_is_about_prefill_and_not_about_loads() -> None:
    limits = Limits(ttft_ns=2 * S)
    assert admit(limits, Forecast(8.0 * S, prefill_ns=7.0 * S, doubt=10.0)).admission is Admission.ADMIT
    assert admit(limits, Forecast(8.0 * S, prefill_ns=1.0 * S, doubt=10.0)).admission is Admission.SHED


def test_a_speed_that_no_request_has_shown_refuses_one_at_a_time_at_most() -> None:
    core, _, clock = make_core(workers=1)
    core.on_member_change(replace(member(0), calibration=(PrefillSample(1600, 0, 8 * S),)), MemberState.ALIVE)
    expected_ns = int(core.route(meta("r")).plan.predicted_ttft_ns)
    core.release(RequestId("r"))
    tight, hopeless = Limits(ttft_ns=expected_ns // 8), Limits(ttft_ns=expected_ns // 12)

    def refused(limits: Limits) -> bool:
        try:
            core.route(meta("l", limits=limits))
        except OverloadError:
            return True
        return False

    assert refused(hopeless)
    assert not refused(tight)  # it is the one that shows how fast the worker is
    with pytest.raises(OverloadError):
        core.route(meta("behind it", limits=tight))
    core.release(RequestId("l"))
    core.on_report(report(0, 1, prefills=(PrefillSample(1600, 0, expected_ns),)))
    half = Limits(ttft_ns=int(0.6 * expected_ns))
    assert refused(half)  # it was as slow as it was thought to be
    clock.now_ns += FADE_NS
    core.on_report(report(0, 2))
    assert refused(tight)
    assert not refused(half)


def test_the_limit_is_kept_by_whoever_still_has_room() -> None:
    core, _ = slow_core()
    busy(core, 0, 2)
    assert core.route(meta("r", limits=Limits(ttft_ns=S))).worker == key(1)
    assert core.status()["admissions"]["admit"] == 1


def test_a_burst_with_limits_is_admitted_as_far_as_it_can_be_served_in_time() -> None:
    core, _ = slow_core(workers=2)
    admitted = 0
    for number in range(40):
        try:
            core.route(meta(f"r{number}", salt=bytes([number]), limits=Limits(ttft_ns=S)))
            admitted += 1
        except OverloadError:
            continue
    assert 2 * 1.0 / 0.17 - 2 <= admitted <= 2 * 1.0 / 0.15


def _decoding(core: RouterCore, number: int, step_ms: int, running: int, sequence: int) -> None:
    """A worker that has decoded ``running`` requests in steps of ``step_ms`` and still does."""
    totals = (("decode_ns", sequence * 10 * step_ms * MS), ("decode_requests", sequence * 10 * running))
    counters = (*totals, ("decode_steps", sequence * 10))
    core.on_report(report(number, sequence, WorkerLoad(running_requests=running), counters=counters))


def test_the_tpot_limit_enters_the_choice_of_the_worker() -> None:
    core, directory, _ = make_core(2)
    for sequence in (1, 2, 3):
        _decoding(core, 0, 200, 4, sequence)
        _decoding(core, 1, 20, 4, sequence)
    directory.held[key(0)] = {0: 90}  # type: ignore[dict-item]
    assert core.route(meta("any")).worker == key(0)
    assert core.route(meta("quick", limits=Limits(tpot_ns=100 * MS))).worker == key(1)


def test_when_every_worker_decodes_too_slowly_the_request_queues_then_is_shed_and_outranks_others() -> None:
    core, _, clock = make_core(1)
    for sequence in (1, 2, 3):
        _decoding(core, 0, 200, 4, sequence)
    picky = Limits(tpot_ns=100 * MS, priority=3)
    with pytest.raises(CapacityError, match="decodes more slowly") as queued:
        core.route(meta("picky", limits=picky))
    assert not isinstance(queued.value, OverloadError)
    assert queued.value.details["retry_after_s"] == POLL_NS / 1e9
    with pytest.raises(CapacityError, match="higher priority"):
        core.route(meta("plain"))
    assert core.route(meta("plain", elapsed_ns=3 * S)).worker == key(0)  # it has yielded long enough
    with pytest.raises(OverloadError, match="gap between tokens"):
        core.route(meta("picky", limits=picky, elapsed_ns=MAX_QUEUE_NS))
    clock.now_ns += S
    assert core.route(meta("later")).worker == key(0)
    assert core.status()["admissions"] == {"queue": 2, "admit": 1, "shed": 1, "queued_now": 0}


def test_a_worker_that_was_slow_in_a_past_overload_is_probed_once_it_has_been_silent() -> None:
    core, _, clock = make_core(1)
    for sequence in (1, 2, 3):
        _decoding(core, 0, 353, 16, sequence)
    core.on_report(report(0, 4))  # it is over
    picky = Limits(tpot_ns=150 * MS)
    with pytest.raises(OverloadError, match="gap between tokens") as shed:
        core.route(meta("now", limits=picky))
    assert core.route(meta("any", limits=replace(picky, may_degrade=True))).worker == key(0)
    core.release(RequestId("any"))
    clock.now_ns += round(shed.value.details["retry_after_s"] * S)
    assert core.status()["workers"][0]["tpot_ms"] is None
    assert core.route(meta("again", limits=picky)).worker == key(0)
    assert core.status()["admissions"] == {"shed": 1, "degrade": 1, "admit": 1, "queued_now": 0}


def test_finished_requests_are_counted_by_the_limits_they_met() -> None:
    core, _, _ = make_core(2)
    core.on_report(report(0, 1, counters=(("goodput_met", 5), ("goodput_missed_ttft", 1))))
    core.on_report(report(1, 1, counters=(("goodput_met", 2), ("goodput_missed_tpot", 3))))
    assert core.status()["goodput"] == {"met": 7, "missed_ttft": 1, "missed_tpot": 3, "shed": 0}
