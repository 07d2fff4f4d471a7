"""The router core without a network: members and reports in, routes out."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kvpool.errors import ConfigError, RequestError, UnavailableError
from kvpool.plan import PlanKind
from kvpool.reports import LoadSample, PrefillSample, RequestOutcome, WorkerLoad
from kvpool.types import MemberState, RequestId, Role, Tier
from router.core import RouterCore
from router.door import RequestMeta
from router.signals import RequestView, holdings, readable
from tests.unit.router_kit import MS, FakeDirectory, S, chain, key, member, report


class Clock:
    def __init__(self) -> None:
        self.now_ns = 100 * S

    def __call__(self) -> int:
        return self.now_ns


def make_core(workers: int = 3, policy: str = "kvpool") -> tuple[RouterCore, FakeDirectory, Clock]:
    directory, clock = FakeDirectory(), Clock()
    core = RouterCore(directory, clock, policy=policy)
    for number in range(workers):
        core.on_member_change(member(number), MemberState.ALIVE)
        core.on_report(report(number, 0))
    return core, directory, clock


def meta(name: str, tokens: int = 1600, salt: bytes = b"c", **more: object) -> RequestMeta:
    return RequestMeta(RequestId(name), tokens, chain(tokens, salt), **more)  # type: ignore[arg-type]


def test_a_request_without_workers_is_refused_with_a_typed_error() -> None:
    core, _, _ = make_core(workers=0)
    with pytest.raises(UnavailableError, match="no worker has joined"):
        core.route(meta("r"))


def test_an_unknown_policy_names_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="did you mean 'kvpool'"):
        RouterCore(FakeDirectory(), Clock(), policy="kvpol")


def test_an_idle_holder_serves_its_own_prefix() -> None:
    core, directory, _ = make_core()
    directory.held[key(1)] = {Tier.DEVICE: 90}
    route = core.route(meta("r"))
    assert route.worker == key(1)
    assert route.plan.kind is PlanKind.REDO
    assert route.control_address == "actor-1"


def test_a_busy_holder_is_loaded_from_even_before_the_first_sample_of_a_link() -> None:
    core, directory, _ = make_core()
    directory.held[key(1)] = {Tier.DEVICE: 90}
    core.on_report(report(1, 1, WorkerLoad(waiting_requests=8, queued_prefill_tokens=12_000)))
    route = core.route(meta("r"))
    assert route.worker != key(1)
    assert route.plan.kind is PlanKind.LOAD
    (piece,) = route.plan.loads
    assert (piece.start, piece.stop, piece.holder, piece.data_address) == (0, 90, key(1), b"addr-1")
    assert route.plan.load_deadline_ns >= S
    assert route.plan.stall_ns >= S


def test_a_fully_cached_prompt_still_computes_its_last_block() -> None:
    core, directory, _ = make_core(workers=2)
    directory.held[key(0)] = {Tier.DEVICE: 100}
    core.on_report(report(0, 1, WorkerLoad(waiting_requests=8, queued_prefill_tokens=90_000)))
    (piece,) = core.route(meta("r", tokens=1600)).plan.loads
    assert piece.stop == 99


def test_redo_only_never_loads() -> None:
    core, directory, _ = make_core(policy="redo_only")
    directory.held[key(1)] = {Tier.DEVICE: 90}
    core.on_report(report(1, 1, WorkerLoad(waiting_requests=8, queued_prefill_tokens=90_000)))
    route = core.route(meta("r"))
    assert route.worker != key(1)
    assert route.plan.kind is PlanKind.REDO


def test_a_burst_of_cold_prompts_spreads() -> None:
    core, _, _ = make_core(workers=16)
    chosen = [core.route(meta(f"r{i}", salt=bytes([i]))).worker for i in range(64)]
    counts = [chosen.count(worker) for worker in set(chosen)]
    assert len(counts) == 16
    assert max(counts) <= 2 * 64 / 16


def test_a_promise_ends_when_the_report_names_the_request() -> None:
    core, _, _ = make_core(workers=1)
    core.route(meta("r"))
    promised = core.status()["workers"][0]["wait_ms"]
    assert promised > 0
    core.on_report(report(0, 1, WorkerLoad(served_request_ids=(RequestId("r"),))))
    assert core.status()["workers"][0]["wait_ms"] == 0


def test_short_requests_that_are_accepted_and_answered_in_one_report_are_the_routers_own() -> None:
    core, _, _ = make_core(workers=1)
    for number in range(50):
        request_id = f"r{number}"
        route = core.route(meta(request_id))
        done = RequestOutcome(RequestId(request_id), route.decision_id, route.worker_id, 30 * MS, 0, 0, 32, 0, 0, 0)
        load = WorkerLoad(served_request_ids=(RequestId(request_id),))
        core.on_report(report(0, number + 1, load, outcomes=(done,)))
    assert core.status()["share_of_the_traffic"] == 1.0


def test_a_report_ends_promises_past_their_bound_though_nobody_asks_for_a_route() -> None:
    core, _, clock = make_core(workers=1)
    core.route(meta("r"))
    clock.now_ns += 3600 * S
    core.on_report(report(0, 1))
    status = core.status()
    assert (status["promises"], status["workers"][0]["wait_ms"]) == (0, 0.0)


def test_a_promise_ends_after_a_bound_without_any_report() -> None:
    core, _, clock = make_core(workers=1)
    core.route(meta("r"))
    clock.now_ns += 3600 * S
    core.route(meta("s"))
    assert core.status()["promises"] == 1


def test_excluded_suspect_and_draining_workers_are_not_chosen_and_decode_workers_last() -> None:
    core, _, _ = make_core(workers=4)
    core.on_member_change(member(1), MemberState.SUSPECT)
    core.on_member_change(member(2), MemberState.DRAINING)
    core.on_member_change(member(9, role=Role.DECODE), MemberState.ALIVE)
    routes = [core.route(meta(f"r{i}", exclude=frozenset({key(0)}))) for i in range(8)]
    assert {route.worker for route in routes} == {key(3)}
    assert core.route(meta("x", exclude=frozenset({key(0), key(3)}))).worker == key(9)
    with pytest.raises(UnavailableError, match="no worker can take"):
        core.route(meta("y", exclude=frozenset({key(0), key(3), key(9)})))


def test_an_idle_worker_may_be_silent_and_a_busy_one_may_not() -> None:
    core, _, clock = make_core(workers=2)
    core.on_report(report(1, 1, WorkerLoad(running_requests=1)))
    clock.now_ns += 60 * S
    assert {core.route(meta(f"r{i}", tokens=160)).worker for i in range(3)} == {key(0)}


def test_a_suspect_holder_is_not_offered() -> None:
    core, directory, _ = make_core()
    directory.held[key(1)] = {Tier.DEVICE: 90}
    core.on_member_change(member(1), MemberState.SUSPECT)
    assert core.route(meta("r")).plan.kind is PlanKind.REDO


def test_a_member_that_left_is_forgotten_with_its_promises() -> None:
    core, _, _ = make_core(workers=2)
    for i in range(4):
        core.route(meta(f"r{i}"))
    core.on_member_change(member(0), None)
    core.on_report(report(0, 7))
    status = core.status()
    assert [worker["worker"] for worker in status["workers"]] == ["w001@1"]
    assert status["counters"]["reports_of_strangers"] == 1


def test_repeated_reports_are_dropped() -> None:
    core, _, _ = make_core(workers=1)
    core.on_report(report(0, 0, WorkerLoad(queued_prefill_tokens=10_000, waiting_requests=1)))
    assert core.status()["workers"][0]["wait_ms"] == 0


def test_links_are_learned_and_shown_in_human_units() -> None:
    core, _, _ = make_core()
    for sequence in range(1, 40):
        size = 1_000_000 * (1 + sequence % 7)
        load = LoadSample(key(1), size, 10, round(2 * MS + size / 1.0))
        core.on_report(report(0, sequence, loads=(load,)))
    (link,) = core.status()["links"]
    assert link["alpha_ms"] == pytest.approx(2.0, rel=0.1)
    assert link["beta_gbytes_per_s"] == pytest.approx(1.0, rel=0.05)


def test_a_link_is_learned_under_the_tier_its_holder_announced_when_the_sample_names_none() -> None:
    core, directory, _ = make_core(workers=2)
    core.on_member_change(replace(member(1), capacity_blocks=(0, 1024, 0)), MemberState.ALIVE)
    directory.held[key(1)] = {Tier.HOST: 90}
    core.on_report(report(1, 1, WorkerLoad(waiting_requests=8, queued_prefill_tokens=12_000)))
    quick = core.route(meta("quick")).plan
    assert quick.kind is PlanKind.LOAD
    crawling = LoadSample(key(1), 1_000_000, 10, 10 * S)
    core.on_report(report(0, 1, loads=(crawling,)))
    (link,) = core.status()["links"]
    assert link["tier"] == "host"
    assert core.route(meta("slow")).plan.kind is PlanKind.REDO


def test_reads_from_the_own_disk_are_learned_as_its_speed_and_say_nothing_about_the_holder() -> None:
    core, directory, _ = make_core(workers=1)
    core.on_member_change(replace(member(0), capacity_blocks=(0, 1024, 1024)), MemberState.ALIVE)
    directory.held[key(0)] = {Tier.DISK: 90}
    before = core.route(meta("before")).plan.predicted_ttft_ns
    read = LoadSample(key(0), 1_000_000, 10, 1 * S, failure="cancelled", tier=Tier.DISK)
    core.on_report(report(0, 1, loads=(read, replace(read, failure="disk", bytes=0))))
    status = core.status()
    assert [(link["holder"], link["reader"], link["tier"]) for link in status["links"]] == [("w000", "w000", "disk")]
    assert status["failures"] == {}
    core.on_report(report(0, 2, WorkerLoad()))
    assert core.route(meta("after")).plan.predicted_ttft_ns > before


def test_the_fill_speed_that_a_worker_reports_prices_its_hits_in_host_memory() -> None:
    core, directory, _ = make_core(workers=1)
    core.on_member_change(replace(member(0), capacity_blocks=(64, 1024, 0)), MemberState.ALIVE)
    directory.held[key(0)] = {Tier.HOST: 90}
    core.on_report(report(0, 1, WorkerLoad()))
    before = core.route(meta("before")).plan.predicted_ttft_ns
    core.release(RequestId("before"))
    core.on_report(report(0, 2, WorkerLoad(fill_mib_ns=1_000_000)))
    after = core.route(meta("after")).plan.predicted_ttft_ns
    assert after > before
    core.release(RequestId("after"))
    directory.held[key(0)] = {Tier.DEVICE: 90}
    assert core.route(meta("device")).plan.predicted_ttft_ns == before
    core.on_member_change(member(0), None)
    assert not core._fills


def test_a_request_that_fits_the_segment_is_not_refused_for_a_small_device_tier() -> None:
    core, _, _ = make_core(workers=2)
    core.on_member_change(replace(member(0), capacity_blocks=(8, 1024, 0)), MemberState.ALIVE)
    core.on_member_change(replace(member(1), capacity_blocks=(0, 16, 0)), MemberState.ALIVE)
    assert core.route(meta("long")).worker == key(0)


def test_a_load_given_up_half_way_still_tells_how_slow_its_link_is_and_blames_nobody() -> None:
    core, _, _ = make_core()
    before = core.status()["workers"][1]["load_failure_probability"]
    for sequence in range(1, 10):
        given_up = LoadSample(key(1), 1_000_000, 10, round(100 * MS), failure="cancelled")
        core.on_report(report(0, sequence, loads=(given_up,)))
    status = core.status()
    (link,) = status["links"]
    assert 1_000_000 / (link["beta_gbytes_per_s"] * 1e9) + link["alpha_ms"] / 1e3 == pytest.approx(0.1, rel=0.1)
    assert status["workers"][1]["load_failure_probability"] == before
    assert status["failures"] == {"cancelled": 9}


def test_failures_are_counted_by_kind_and_link_and_raise_the_price_of_the_holder() -> None:
    core, _, _ = make_core()
    before = core.status()["workers"][1]["load_failure_probability"]
    core.on_report(report(0, 1, loads=(LoadSample(key(1), 0, 5, 10 * MS, failure="stall"),)))
    status = core.status()
    assert status["failures"] == {"stall": 1}
    assert status["failures_by_link"] == [{"holder": "w001", "reader": "w000", "kind": "stall", "count": 1}]
    assert status["workers"][1]["load_failure_probability"] > 10 * before


def test_explain_shows_every_price_and_later_the_outcome() -> None:
    core, directory, _ = make_core()
    directory.held[key(1)] = {Tier.DEVICE: 90}
    core.on_report(report(1, 1, WorkerLoad(waiting_requests=1, queued_prefill_tokens=100)))
    route = core.route(meta("r"))
    text = "\n".join(core.explain(RequestId("r")))
    assert "w000@1" in text
    assert "w002@1" in text
    assert "from 1 holders" in text
    assert "not reported yet" in text
    outcome = RequestOutcome(RequestId("r"), route.decision_id, route.worker_id, 30 * MS, 1440, 0, 160, 0, 0, 0)
    core.on_report(report(1, 2, outcomes=(outcome,)))
    text = "\n".join(core.explain(RequestId("r")))
    assert "first token after 30.0 ms" in text
    assert "runner-up" in text
    with pytest.raises(RequestError, match=r"no decision .* mistyped"):
        core.explain(RequestId("nope"))


def test_records_and_status_and_learned_state_are_json() -> None:
    core, directory, _ = make_core()
    directory.held[key(1)] = {Tier.DEVICE: 90}
    core.route(meta("r"))
    core.on_report(report(0, 1, prefills=(PrefillSample(512, 0, 80 * MS),)))
    record = core.record(RequestId("r"))
    assert record is not None
    data = json.loads(json.dumps(record.to_dict()))
    assert len(data["candidates"]) == 3  # redo everywhere; a load to the holder makes no sense
    assert json.loads(json.dumps(core.status()))["decisions"] == {"redo": 1}
    saved = json.loads(json.dumps(core.learned()[1]))
    fresh, _, _ = make_core()
    assert fresh.restore(saved)
    assert fresh.status()["workers"][0]["prefill_us_per_token"] == core.status()["workers"][0]["prefill_us_per_token"]
    assert not fresh.restore({"version": 0})


def test_a_worker_that_never_prefilled_is_thought_as_fast_as_the_others_have_become() -> None:
    core, _, clock = make_core(workers=3)
    prior = core.snapshot((), clock()).columns.token_ns.tolist()
    fast = tuple(PrefillSample(tokens, 0, tokens * 1000) for tokens in (512, 2048, 8192))
    core.on_report(report(0, 1, prefills=fast))
    learned = core.snapshot((), clock()).columns.token_ns.tolist()
    assert learned[1] == learned[2] < 0.1 * prior[1]
    core.on_report(report(2, 1, prefills=(PrefillSample(2048, 0, 2048 * 5000),)))
    assert core.snapshot((), clock()).columns.token_ns[2] > learned[2]  # its own curve now
    core.on_report(report(0, 2, prefills=fast))
    again = core.snapshot((), clock()).columns.token_ns.tolist()
    assert again[2] == pytest.approx(5000, rel=0.3)
    assert again[1] < again[2]


def test_what_a_joining_worker_calibrated_is_lent_to_those_that_have_never_prefilled() -> None:
    core, _, clock = make_core(workers=2)
    prior = core.snapshot((), clock()).columns.token_ns.tolist()
    fast = tuple(PrefillSample(tokens, 0, tokens * 1000) for tokens in (512, 2048, 8192))
    core.on_member_change(replace(member(2), calibration=fast), MemberState.ALIVE)
    learned = core.snapshot((), clock()).columns.token_ns.tolist()
    assert learned[0] == learned[1] < 0.1 * prior[0]


def test_an_idle_worker_gets_requests_though_all_others_were_found_fast_before_it_had_any() -> None:
    core, directory, _ = make_core(workers=2)
    directory.held[key(0)] = {Tier.DEVICE: 10}  # a part of every prompt
    fast = tuple(PrefillSample(tokens, 0, tokens * 1000) for tokens in (512, 2048, 8192))
    core.on_report(report(0, 1, prefills=fast))
    first, second = core.route(meta("a")), core.route(meta("b"))
    assert (first.worker, second.worker) == (key(0), key(1))


def test_a_retry_replaces_the_promise_and_keeps_both_decisions() -> None:
    core, _, _ = make_core(workers=2)
    first = core.route(meta("r"))
    second = core.route(meta("r", exclude=frozenset({first.worker})))
    assert second.worker != first.worker
    assert core.status()["promises"] == 1
    assert sum(line.startswith("request r") for line in core.explain(RequestId("r"))) == 2


def _with_capacity(core: RouterCore, number: int, blocks: int) -> None:
    core.on_member_change(replace(member(number), capacity_blocks=(0, blocks, 0)), MemberState.ALIVE)
    core.on_report(report(number, 1))


def test_a_worker_whose_segment_could_never_hold_the_request_is_left_out() -> None:
    core, directory, _ = make_core()
    directory.held[key(1)] = {Tier.DEVICE: 90}  # the cheapest, were it not too small for prompt and output
    _with_capacity(core, 1, 100)
    assert core.route(meta("r", 1600, max_tokens=16)).worker != key(1)
    assert core.route(meta("s", 1600, max_tokens=1)).worker == key(1)


def test_when_every_worker_is_too_small_one_is_chosen_to_say_what_it_lacks() -> None:
    core, _, _ = make_core()
    for number in range(3):
        _with_capacity(core, number, 10)
    assert core.route(meta("r", 1600)).worker in {key(number) for number in range(3)}


@pytest.mark.parametrize("below", [Tier.HOST, Tier.DISK])
def test_peers_read_a_device_tiers_copies_from_host_memory(below: Tier) -> None:
    core, directory, clock = make_core(2)
    for number in range(2):
        said = report(number, 1)
        core.on_report(replace(said, load=replace(said.load, fill_mib_ns=200_000)))
    directory.held[key(1)] = {Tier.DEVICE: 50, below: 90}
    snapshot = core.snapshot(chain(1600, b"c"), clock.now_ns)
    request = RequestView(RequestId("r"), 1600, 100)
    assert [item.tier for item in readable(holdings(request, snapshot), request, snapshot)] == [Tier.HOST]


def test_a_decision_that_nobody_follows_is_not_counted_and_told_apart() -> None:
    core, _, clock = make_core()
    served = core.route(meta("served"))
    late = core.route(meta("late"))
    clock.now_ns += MS
    taken = WorkerLoad(served_request_ids=(RequestId("late"),))  # by what another router decided, on the same worker
    core.on_report(report(int(late.worker_id[1:]), 1, taken))
    core.outcome(RequestOutcome(RequestId("served"), served.decision_id, served.worker_id, S, 0, 0, 1, 0, 0, 0))
    for name in ("late", "late", "served", "never seen"):
        core.give_back(RequestId(name))
    assert (core.status()["decisions"], core.status()["unfollowed"]) == ({"redo": 1}, {"redo": 1})
    assert core.explain(RequestId("late"))[-1] == "outcome: none, as nobody followed this decision"
    assert [record.to_dict()["followed"] for record in core.records()] == [True, False]


def test_a_decision_that_was_followed_for_a_while_stays_counted() -> None:
    core, _, _ = make_core()
    core.route(meta("r"))
    core.release(RequestId("r"))
    assert (core.status()["decisions"], core.status()["unfollowed"]) == ({"redo": 1}, {})
