"""What a router tells Prometheus, from a core without a network."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvpool.metadata.watcher import MetadataWatcher
from kvpool.reports import LoadSample, RequestOutcome, WorkerLoad
from kvpool.request import Limits
from kvpool.types import MemberState, RequestId, WorkerId
from router.core import RequestMeta, RouterCore
from router.metrics import RouterCollector
from router.tally import Histogram
from tests.unit.router_kit import MS, FakeDirectory, S, chain, key, member, report


class _Told:
    """A core, and what is scraped of it."""

    def __init__(self, workers: int = 3) -> None:
        self.now_ns = 100 * S
        self.core = RouterCore(FakeDirectory(), lambda: self.now_ns)
        for number in range(workers):
            self.core.on_member_change(member(number), MemberState.ALIVE)
            self.core.on_report(report(number, 0))

    def route(self, name: str, **more: Any) -> Any:
        return self.core.route(RequestMeta(RequestId(name), 1600, chain(1600), **more))

    def scrape(self) -> dict[str, float]:
        """Samples by name and labels, as Prometheus reads them."""
        registry = CollectorRegistry(auto_describe=False)
        watcher = MetadataWatcher(["127.0.0.1:1"])
        registry.register(RouterCollector(self.core, threading.Lock(), watcher))
        families = text_string_to_metric_families(generate_latest(registry).decode())
        samples = [sample for family in families for sample in family.samples]
        assert all(sample.name.startswith("kvpool_router_") for sample in samples)
        return {f"{sample.name}{''.join(f'.{v}' for v in sample.labels.values())}": sample.value for sample in samples}


def test_decisions_failovers_and_what_nobody_followed_are_counted() -> None:
    told = _Told()
    told.route("r1")
    told.route("r2", exclude=frozenset({key(0)}))
    told.route("r3")
    told.core.give_back(RequestId("r3"))
    scraped = told.scrape()
    assert scraped["kvpool_router_decisions_total.redo"] == 3
    assert scraped["kvpool_router_decisions_total.load"] == 0
    assert scraped["kvpool_router_unfollowed_total.redo"] == 1
    assert scraped["kvpool_router_failovers_total.worker"] == 1
    assert (scraped["kvpool_router_promises"], scraped["kvpool_router_lapsed_promises_total"]) == (2, 0)


def test_a_promise_that_no_worker_ever_named_is_counted_when_it_runs_out() -> None:
    told = _Told(1)
    told.route("lost")
    told.route("taken")
    told.now_ns += MS
    told.core.on_report(report(0, 1, WorkerLoad(served_request_ids=(RequestId("taken"),))))
    told.now_ns += 60 * S
    told.core.on_report(report(0, 2))
    assert told.scrape()["kvpool_router_lapsed_promises_total"] == 1


def test_the_error_of_a_prediction_is_told_in_seconds_and_as_a_ratio() -> None:
    told = _Told(1)
    route = told.route("r")
    real_ns = 3 * (predicted_ns := route.plan.predicted_ttft_ns)
    told.core.outcome(RequestOutcome(RequestId("r"), route.decision_id, WorkerId("w000"), real_ns, 0, 0, 0, 0, 0, 0))
    scraped = told.scrape()
    assert scraped["kvpool_router_ttft_error_seconds_sum"] == pytest.approx(2 * predicted_ns / 1e9)
    assert scraped["kvpool_router_ttft_ratio_bucket.2.0"] == 0
    assert scraped["kvpool_router_ttft_ratio_bucket.4.0"] == scraped["kvpool_router_ttft_ratio_count"] == 1


def test_a_request_with_a_limit_that_cannot_be_met_is_degraded_in_the_metrics_as_well() -> None:
    told = _Told(1)
    told.route("r", limits=Limits(ttft_ns=1, may_degrade=True))
    assert told.scrape()["kvpool_router_rulings_total.degrade"] == 1


def test_load_failures_have_our_codes_and_what_is_made_up_is_other() -> None:
    told = _Told(2)
    for sequence, code in enumerate(("stall", "stall", "nonsense-1", "nonsense-2"), start=1):
        told.core.on_report(report(0, sequence, loads=(LoadSample(key(1), 1, 1, 1, code),)))
    scraped = told.scrape()
    assert scraped["kvpool_router_load_failures_total.stall"] == 2
    assert scraped["kvpool_router_load_failures_total.other"] == 2


def test_workers_are_counted_by_state_and_only_reports_that_are_due_have_an_age() -> None:
    told = _Told(3)
    told.core.on_member_change(member(2), MemberState.SUSPECT)
    told.now_ns += 5 * S
    scraped = told.scrape()
    assert (scraped["kvpool_router_workers.alive"], scraped["kvpool_router_workers.suspect"]) == (2, 1)
    assert scraped["kvpool_router_report_age_seconds"] == 0  # all are idle
    told.core.on_report(report(0, 1, WorkerLoad(running_requests=1)))
    told.now_ns += 2 * S
    scraped = told.scrape()
    assert scraped["kvpool_router_report_age_seconds"] == 2
    assert scraped["kvpool_router_index_connected"] == 0
    assert "kvpool_router_index_age_seconds" not in scraped  # nobody has ever been heard


def test_a_histogram_counts_values_up_to_each_bound_and_keeps_their_sum() -> None:
    values = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        values.add(value)
    assert values.cumulative() == [("1.0", 2), ("2.0", 3), ("+Inf", 4)]
    assert values.total == 12.0
