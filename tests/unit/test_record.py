"""Decision records: bounded, explained, joined with their outcome."""

from __future__ import annotations

import json

from kvpool.plan import PlanKind
from kvpool.reports import RequestOutcome
from kvpool.types import RequestId, WorkerId, WorkerKey
from router.decide import decide
from router.estimators import LinkCurve
from router.planning import Params
from router.record import DecisionRecord, RecordStore, explain_lines
from router.signals import Features
from tests.unit.router_kit import MS, S, Worker, key, request, snapshot

PARAMS = Params(priced_pairs=8)


def record(name: str, number: int = 0, exclude: frozenset[WorkerKey] = frozenset()) -> DecisionRecord:
    shot = snapshot([Worker(0), Worker(1, blocks=80, wait_ns=S), Worker(2, wait_ns=0.2 * S)])
    view = request(name=name, exclude=exclude)
    decision = decide(view, shot, PARAMS)
    return DecisionRecord(f"d{number}", 10 * S, "kvpool", view, tuple(w.key for w in shot.workers), decision)


def outcome(name: str, number: int = 0, ttft_ns: int = 40 * MS) -> RequestOutcome:
    return RequestOutcome(
        RequestId(name), f"d{number}", WorkerId("w000"), ttft_ns, 0, 1280, 320, 51_200_000, 14 * MS, 0
    )


def test_the_oldest_records_leave_first_and_are_counted() -> None:
    store = RecordStore(max_records=2)
    for number, name in enumerate("abc"):
        store.add(record(name, number))
    assert [item.request.request_id for item in store] == ["b", "c"]
    assert store.dropped == 1
    assert store.of_request(RequestId("a")) == []


def test_the_store_is_bounded_in_bytes_too() -> None:
    size = record("a").num_bytes()
    store = RecordStore(max_records=1000, max_bytes=3 * size)
    for number in range(10):
        store.add(record(f"r{number}", number))
    assert len(store) == 3
    assert store.dropped == 7


def test_an_outcome_joins_its_own_decision_and_not_a_retry() -> None:
    store = RecordStore()
    store.add(record("a", 0))
    store.add(record("a", 1, exclude=frozenset({key(0)})))
    assert store.join(outcome("a", 0)) is not None
    first, second = store.of_request(RequestId("a"))
    assert first.outcome is not None
    assert second.outcome is None
    assert store.join(outcome("gone", 7)) is None


def test_candidates_are_every_worker_with_redo_and_the_priced_loads_cheapest_first() -> None:
    found = record("a").candidates()
    assert {(item.worker, item.kind) for item in found if item.kind is PlanKind.REDO} == {
        (key(number), PlanKind.REDO) for number in range(3)
    }
    assert {item.worker for item in found if item.kind is PlanKind.LOAD} == {key(0), key(2)}
    prices = [item.price_ns for item in found]
    assert prices == sorted(prices)
    assert found[0].worker == record("a").decision.worker
    assert found[0].price_ns == record("a").decision.price_ns


def test_the_runner_up_is_the_best_other_choice() -> None:
    made = record("a")
    runner_up = made.runner_up()
    assert runner_up is not None
    assert (runner_up.worker, runner_up.kind) != (made.decision.worker, made.decision.plan.kind)
    assert runner_up.price_ns >= made.decision.price_ns


def test_a_load_from_several_holders_is_told_from_one_of_the_same_source() -> None:
    busy = [Worker(number, blocks=99, wait_ns=S) for number in (1, 2)]
    shot = snapshot([Worker(0), *busy], links=LinkCurve(1.0 * MS, 2.0), features=Features(stripes=4))
    decision = decide(request(), shot, PARAMS)
    made = DecisionRecord("d", 10 * S, "kvpool", request(), tuple(w.key for w in shot.workers), decision)
    assert len({piece.holder for piece in decision.plan.loads}) == 2
    lines = explain_lines(made)
    (arrow,) = [line for line in lines if "→" in line]
    assert "99 blocks from w001@1 and 1 more" in arrow
    runner_up = made.runner_up()
    assert runner_up is not None
    assert (runner_up.worker, runner_up.kind, runner_up.holders) == (key(0), PlanKind.LOAD, 1)
    assert [item["holders"] for item in made.to_dict()["candidates"][:2]] == [2, 1]


def test_excluded_workers_are_named_and_not_candidates() -> None:
    made = record("a", exclude=frozenset({key(0)}))
    assert all(item.worker != key(0) for item in made.candidates())
    assert any("excluded: w000@1" in line for line in explain_lines(made))


def test_the_explanation_says_what_was_chosen_and_what_became_of_it() -> None:
    store = RecordStore()
    store.add(record("a"))
    text = "\n".join(explain_lines(store.of_request(RequestId("a"))[0]))
    assert "chosen: w000@1 · load blocks 0–80 from w001@1 (device), redo 320 tokens" in text
    assert "deadline: loads 1.00 s" in text
    assert "outcome: not reported yet" in text
    joined = store.join(outcome("a", ttft_ns=2 * S))
    assert joined is not None
    text = "\n".join(explain_lines(joined))
    assert "first token after 2.00 s" in text
    assert "loaded 1,280, redone 320" in text


def test_a_record_is_json_with_its_outcome() -> None:
    store = RecordStore()
    store.add(record("a"))
    joined = store.join(outcome("a"))
    assert joined is not None
    data = json.loads(json.dumps(joined.to_dict()))
    assert data["plan"] == "load"
    assert data["loads"][0]["holder"] == "w001@1"
    assert data["outcome"]["ttft_ns"] == 40 * MS
    assert data["runner_up"]["price_ns"] >= data["price_ns"]
