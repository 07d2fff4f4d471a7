"""Promises on stated sequences of events."""

from __future__ import annotations

from kvpool.types import RequestId
from router.ledger import PROMISE_BOUND_NS, Ledger
from router.planning import Promise, Transfer
from tests.unit.router_kit import S, key

A, B = key(1), key(2)
R, Q = RequestId("r"), RequestId("q")


def test_promises_queue_behind_each_other_and_drain_with_time() -> None:
    ledger = Ledger()
    ledger.reserve(R, Promise(A, 3.0 * S, 100), 10 * S)
    ledger.reserve(Q, Promise(A, 2.0 * S, 50), 11 * S)
    totals = ledger.totals(A)
    assert (totals.gpu_free_ns, totals.requests, totals.tokens) == (15.0 * S, 2, 150)


def test_an_idle_worker_starts_at_once_whatever_it_was_promised_long_ago() -> None:
    ledger = Ledger()
    ledger.reserve(R, Promise(A, 3.0 * S, 100), 10 * S)
    ledger.reserve(Q, Promise(A, 2.0 * S, 50), 100 * S)
    assert ledger.totals(A).gpu_free_ns == 102 * S


def test_a_report_replaces_what_it_contains_and_keeps_what_it_does_not() -> None:
    ledger = Ledger()
    ledger.reserve(R, Promise(A, 3.0 * S, 100), 10 * S)
    ledger.reserve(Q, Promise(A, 2.0 * S, 50), 10 * S)
    ledger.on_report(A, 7.0 * S, (R, RequestId("of another router")), 11 * S)
    assert ledger.totals(A).gpu_free_ns == (11 + 7 + 2) * S
    assert ledger.totals(A).requests == 1


def test_a_report_of_another_worker_does_not_end_a_promise() -> None:
    ledger = Ledger()
    ledger.reserve(R, Promise(A, 3.0 * S, 100), 10 * S)
    ledger.on_report(B, 0.0, (R,), 10 * S)
    assert ledger.totals(A).requests == 1


def test_both_ends_of_a_link_are_promised_and_given_back() -> None:
    ledger = Ledger()
    changed = ledger.reserve(R, Promise(A, 1.0 * S, 10, (Transfer(B, 1000, 4.0 * S),)), 10 * S)
    assert set(changed) == {A, B}
    assert ledger.totals(A).in_free_ns == ledger.totals(B).out_free_ns == 14 * S
    assert ledger.totals(A).out_free_ns == ledger.totals(B).in_free_ns == 0
    ledger.release(R, 12 * S)
    assert ledger.totals(A).in_free_ns == ledger.totals(B).out_free_ns == 12 * S


def test_link_time_outlives_the_report_that_ends_the_gpu_promise() -> None:
    ledger = Ledger()
    ledger.reserve(R, Promise(A, 1.0 * S, 10, (Transfer(B, 1000, 4.0 * S),)), 10 * S)
    ledger.on_report(A, 1.0 * S, (R,), 10 * S)
    assert ledger.totals(B).out_free_ns == 14 * S
    ledger.release(R, 11 * S)
    assert ledger.totals(B).out_free_ns == 11 * S
    assert ledger.totals(A).gpu_free_ns == 11 * S
    assert len(ledger) == 0


def test_a_finished_load_gives_nothing_back() -> None:
    ledger = Ledger()
    ledger.reserve(R, Promise(A, 1.0 * S, 10, (Transfer(B, 1000, 4.0 * S),)), 10 * S)
    ledger.release(R, 20 * S)
    assert ledger.totals(B).out_free_ns == 14 * S


def test_a_retry_moves_the_promise() -> None:
    ledger = Ledger()
    ledger.reserve(R, Promise(A, 1.0 * S, 10), 10 * S)
    ledger.reserve(R, Promise(B, 1.0 * S, 10), 10 * S)
    assert ledger.totals(A).requests == 0
    assert ledger.totals(A).gpu_free_ns == 10 * S
    assert ledger.totals(B).requests == 1


def test_promises_expire_after_their_end_plus_a_bound() -> None:
    ledger = Ledger()
    ledger.reserve(R, Promise(A, 1.0 * S, 10), 10 * S)
    assert ledger.expire(11 * S + PROMISE_BOUND_NS - 1) == ()
    assert ledger.expire(11 * S + PROMISE_BOUND_NS) == (A,)
    assert ledger.expire(99 * S) == ()


def test_a_worker_that_left_takes_its_promises_along() -> None:
    ledger = Ledger()
    ledger.reserve(R, Promise(A, 1.0 * S, 10, (Transfer(B, 1000, 4.0 * S),)), 10 * S)
    ledger.forget(A, 10 * S)
    assert len(ledger) == 0
    assert ledger.totals(B).out_free_ns == 10 * S
    ledger.forget(A, 10 * S)
    ledger.release(R, 10 * S)
