"""The decision on stated snapshots."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from kvpool.errors import UnavailableError
from kvpool.plan import PlanKind
from kvpool.types import MemberState, Role, Tier, WorkerId
from router.decide import decide
from router.estimators import LinkCurve, LinkEstimators, PrefillCurve
from router.fleet import Fleet
from router.kernel import MAX_HOLDERS, Floats
from router.planning import Harm, Params
from router.signals import NO_ARRIVALS, Features, WorkerView
from tests.unit.router_kit import CURVE, MS, FixedFailures, FixedLinks, S, Worker, key, request, snapshot

PARAMS = Params()
PARAMS_WITHOUT_HARM = Params(harm=Harm())


def test_an_idle_fleet_redoes_on_the_worker_with_the_longest_prefix() -> None:
    made = decide(request(), snapshot([Worker(0), Worker(1, blocks=50), Worker(2, blocks=80)]), PARAMS)
    assert made.worker == key(2)
    assert made.plan.kind is PlanKind.REDO
    assert made.plan.loads == ()
    assert made.own_blocks == 80
    assert made.promise.tokens == 1600 - 80 * 16


DISK = Worker(0, blocks=80, tier=Tier.DISK, in_memory=30)
DISK_READ_NS = 2 * MS + 50 * 16 * 40_000 * 1.0
"""Of what is on disk only, over the link below."""


def with_own_disk(worker: Worker, byte_ns: float) -> float:
    made = decide(request(), snapshot([worker], links=LinkCurve(2.0 * MS, byte_ns)), PARAMS)
    assert made.own_blocks == worker.blocks
    return made.price_ns


def test_a_request_waits_for_its_blocks_on_the_own_disk() -> None:
    in_memory = with_own_disk(replace(DISK, tier=Tier.HOST, in_memory=0), 1.0)
    assert with_own_disk(DISK, 1.0) == pytest.approx(in_memory + DISK_READ_NS, rel=1e-6)


def test_reading_from_the_own_disk_costs_nothing_while_the_worker_is_busy_anyway() -> None:
    busy = replace(DISK, wait_ns=1.0 * S)
    assert with_own_disk(busy, 1.0) == with_own_disk(replace(busy, tier=Tier.HOST, in_memory=0), 1.0)


def test_a_slow_own_disk_costs_no_more_than_computing_what_lies_there() -> None:
    assert with_own_disk(DISK, 1e6) == pytest.approx(_redo(30))


def test_a_worker_leaves_its_own_disk_alone_where_a_peer_brings_the_same_sooner() -> None:
    workers = [DISK, Worker(1, blocks=80, wait_ns=10.0 * S)]
    for disk_byte_ns, own_disk, start in ((20.0, False, 30), (0.01, True, 80)):
        pairs = {(key(0).worker_id, key(0).worker_id): LinkCurve(2.0 * MS, disk_byte_ns)}
        made = decide(request(), snapshot(workers, pairs=pairs), PARAMS)
        assert (made.worker, made.plan.own_disk, made.own_blocks) == (key(0), own_disk, start)
        assert [(piece.start, piece.stop) for piece in made.plan.loads] == ([] if own_disk else [(30, 80)])


FILLED = Worker(0, blocks=80, tier=Tier.HOST, in_device=50, fill_byte_ns=0.2)


def test_what_peers_send_is_filled_as_well() -> None:
    holder, prices = Worker(1, blocks=80, wait_ns=10.0 * S), []
    for byte_ns in (None, 0.2):
        made = decide(request(), snapshot([replace(FILLED, blocks=0, fill_byte_ns=byte_ns), holder]), PARAMS)
        assert made.plan.kind is PlanKind.LOAD
        prices.append(made.price_ns)
    assert prices[1] == pytest.approx(prices[0] + 80 * 16 * 40_000 * 0.2, rel=1e-6)


def test_hits_in_the_device_tier_are_free_and_those_in_host_memory_are_filled_behind_the_wait() -> None:
    plain = replace(FILLED, fill_byte_ns=None)
    fill_ns = 30 * 16 * 40_000 * 0.2
    for wait_ns in (0.0, 1.0 * S):
        free, filled = (replace(worker, wait_ns=wait_ns) for worker in (plain, FILLED))
        assert with_own_disk(filled, 1.0) == pytest.approx(with_own_disk(free, 1.0) + fill_ns, rel=1e-6)
    whole = replace(FILLED, in_device=80)
    assert with_own_disk(whole, 1.0) == with_own_disk(plain, 1.0)


def test_a_slow_fill_costs_no_more_than_computing_what_lies_in_host_memory() -> None:
    assert with_own_disk(replace(FILLED, fill_byte_ns=1e6), 1.0) == pytest.approx(_redo(50))


def test_of_two_equal_holders_the_one_with_the_prefix_in_its_device_tier_is_chosen() -> None:
    for first, second in ((80, 0), (0, 80)):
        workers = [replace(FILLED, in_device=first), replace(FILLED, number=1, in_device=second)]
        assert decide(request(), snapshot(workers), PARAMS).position == (0 if first else 1)


def test_peers_read_the_pages_under_a_device_tier() -> None:
    shot = snapshot([Worker(0), replace(FILLED, number=1, wait_ns=10.0 * S, in_device=80)])
    plan = decide(request(), shot._replace(prefixes={key(1): {Tier.DEVICE: 80}}), PARAMS_WITHOUT_HARM).plan
    assert [(piece.stop, piece.tier) for piece in plan.loads] == [(80, Tier.HOST)]


def _redo(blocks: int) -> float:
    return decide(request(), snapshot([Worker(0, blocks=blocks)]), PARAMS).price_ns


def test_blocks_in_anothers_memory_beat_those_on_a_slow_own_disk() -> None:
    shot = snapshot([replace(DISK, in_memory=0), Worker(1, blocks=80)], links=LinkCurve(1.0 * MS, 50.0))
    assert decide(request(), shot, PARAMS).worker == key(1)


def test_a_busy_holder_is_read_by_an_idle_worker() -> None:
    made = decide(request(), snapshot([Worker(0), Worker(1, blocks=80, wait_ns=1.0 * S)]), PARAMS)
    assert made.worker == key(0)
    assert made.plan.kind is PlanKind.LOAD
    (piece,) = made.plan.loads
    assert (piece.start, piece.stop, piece.holder, piece.tier) == (0, 80, key(1), Tier.DEVICE)
    (transfer,) = made.promise.transfers
    assert transfer.num_bytes == 80 * 16 * 40_000


def test_a_load_continues_the_readers_own_prefix_without_a_gap() -> None:
    made = decide(request(), snapshot([Worker(0, blocks=30), Worker(1, blocks=80, wait_ns=1.0 * S)]), PARAMS)
    assert made.worker == key(0)
    assert [(piece.start, piece.stop) for piece in made.plan.loads] == [(30, 80)]


def test_a_slow_link_is_not_used() -> None:
    slow = LinkCurve(1.0 * MS, 100.0)
    made = decide(request(), snapshot([Worker(0), Worker(1, blocks=80, wait_ns=1.0 * S)], links=slow), PARAMS)
    assert (made.worker, made.plan.kind) == (key(0), PlanKind.REDO)


def test_a_holder_with_a_busy_link_is_passed_over_for_another_copy() -> None:
    workers = [Worker(0), Worker(1, blocks=80, wait_ns=S, out_ns=1.0 * S), Worker(2, blocks=80, wait_ns=S)]
    made = decide(request(), snapshot(workers), PARAMS)
    (piece,) = made.plan.loads
    assert piece.holder == key(2)
    assert [ref.holder for ref in piece.alternates] == [key(1)]
    assert piece.alternates[0].stop == 80


def test_an_unreliable_holder_is_passed_over_for_another_copy() -> None:
    workers = [Worker(0), Worker(1, blocks=80, wait_ns=S), Worker(2, blocks=78, wait_ns=S)]
    failures = FixedFailures(holders={key(1): 0.5})
    (piece,) = decide(request(), snapshot(workers, failures=failures), PARAMS).plan.loads
    assert piece.holder == key(2)


def test_alternates_hold_at_least_the_first_missing_block_and_are_not_the_reader() -> None:
    workers = [
        Worker(0, blocks=20),
        Worker(1, blocks=80, wait_ns=S),
        Worker(2, blocks=10, wait_ns=S),
        Worker(3, blocks=40, wait_ns=S),
        Worker(4, blocks=60, wait_ns=S, state=MemberState.SUSPECT),
    ]
    (piece,) = decide(request(), snapshot(workers), PARAMS).plan.loads
    assert [ref.holder for ref in piece.alternates] == [key(3)]


@pytest.mark.parametrize(("tokens", "stop"), [(1600, 99), (1601, 100), (1615, 100)])
def test_the_last_token_is_always_computed(tokens: int, stop: int) -> None:
    made = decide(request(tokens), snapshot([Worker(0), Worker(1, blocks=200, wait_ns=S)]), PARAMS)
    assert made.plan.loads[0].stop == stop
    assert made.promise.tokens == tokens - 16 * stop


def test_a_prompt_shorter_than_a_block_is_redone() -> None:
    made = decide(request(5), snapshot([Worker(0), Worker(1, wait_ns=S)]), PARAMS)
    assert (made.worker, made.plan.kind) == (key(0), PlanKind.REDO)


def test_the_fastest_tier_with_the_longest_prefix_is_named() -> None:
    made = decide(request(), snapshot([Worker(0), Worker(1, blocks=80, wait_ns=S, tier=Tier.HOST)]), PARAMS)
    assert made.plan.loads[0].tier is Tier.HOST


def test_a_decode_worker_may_be_read_from_but_takes_no_prompt() -> None:
    made = decide(request(), snapshot([Worker(0), Worker(1, blocks=80, role=Role.DECODE)]), PARAMS)
    assert made.worker == key(0)
    assert made.plan.loads[0].holder == key(1)


def test_no_eligible_worker_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(UnavailableError, match="start workers or retry"):
        decide(request(), snapshot([Worker(0, state=MemberState.SUSPECT)]), PARAMS)
    with pytest.raises(UnavailableError):
        decide(request(exclude=frozenset({key(0)})), snapshot([Worker(0)]), PARAMS)
    shot = snapshot([Worker(0, wait_ns=S, state=MemberState.DRAINING)])._replace(arrival_scale=1e-9)
    with pytest.raises(UnavailableError):
        decide(request(), shot, PARAMS)


def test_a_worker_that_may_not_be_taken_is_not_even_when_it_learned_that_prefill_costs_nothing() -> None:
    fleet = Fleet(LinkEstimators())
    fleet.put(WorkerView(key(0), Role.MIXED, MemberState.ALIVE), PrefillCurve(0.0, 0.0, 0.0))
    shot = snapshot([Worker(0), Worker(1, wait_ns=50 * MS)])._replace(arrival_scale=1e-9)
    shot.columns.curves[:, 0] = fleet.columns.curves[:, 0]
    assert decide(request(exclude=frozenset({key(0)})), shot, PARAMS).worker == key(1)


def test_a_silent_worker_is_taken_only_when_nothing_known_is_better() -> None:
    silent = Worker(0, wait_ns=None)
    assert decide(request(), snapshot([silent, Worker(1, wait_ns=1.5 * S)]), PARAMS).worker == key(1)
    assert decide(request(), snapshot([silent]), PARAMS).worker == key(0)


def test_equal_workers_are_taken_in_turn_by_different_requests() -> None:
    shot = snapshot([Worker(i) for i in range(8)])
    counts = Counter(decide(request(name=f"r{i}"), shot, PARAMS).worker for i in range(400))
    assert len(counts) == 8
    assert max(counts.values()) <= 2 * 400 / 8


def test_among_equal_prices_the_one_with_fewer_requests_wins() -> None:
    shot = snapshot([Worker(0, requests=3), Worker(1, requests=1), Worker(2, requests=3)])
    assert {decide(request(name=f"r{i}"), shot, PARAMS).worker for i in range(20)} == {key(1)}


def test_a_split_is_offered_only_when_the_workers_can_execute_it() -> None:
    around_b_star = LinkCurve(1.0 * MS, 3.0)
    workers = [Worker(0), Worker(1, blocks=99, wait_ns=S)]
    plain = decide(request(), snapshot(workers, links=around_b_star), PARAMS)
    able = snapshot(workers, links=around_b_star, features=Features(split=True))
    made = decide(request(), able, PARAMS)
    assert plain.plan.kind is not PlanKind.SPLIT
    assert made.plan.kind is PlanKind.SPLIT
    assert made.price_ns < 0.75 * plain.price_ns
    assert made.plan.split_tokens is not None
    assert made.plan.loads[0].start == made.plan.split_tokens // 16


def test_deadlines_grow_with_the_predicted_load_and_have_a_floor() -> None:
    short = decide(request(), snapshot([Worker(0), Worker(1, blocks=80, wait_ns=S)]), PARAMS).plan
    assert short.load_deadline_ns == S
    behind = [Worker(0, wait_ns=20.0 * S), Worker(1, blocks=80, wait_ns=30.0 * S, out_ns=10.0 * S)]
    long = decide(request(), snapshot(behind), PARAMS).plan
    assert long.load_deadline_ns > 30 * S
    assert long.stall_ns > 10 * S


def test_only_pairs_that_might_win_are_priced() -> None:
    workers = [Worker(i, blocks=10 + i) for i in range(50)]
    made = decide(request(), snapshot(workers), Params(priced_pairs=0))
    assert made.worker == key(49)
    assert made.holders == 50
    assert made.loads == []
    beside = decide(
        request(), snapshot([Worker(0), Worker(1, blocks=5, wait_ns=S)], links=LinkCurve(1.0 * S, 1.0)), PARAMS
    )
    assert beside.plan.kind is PlanKind.REDO
    assert beside.loads == []
    assert beside.load_floor_ns is not None
    assert beside.load_floor_ns > beside.price_ns  # what loading would have cost at the very least
    shown = decide(request(), snapshot(workers), Params(priced_pairs=4))
    assert len(shown.loads) == 4
    assert shown.worker == key(49)


def test_links_from_a_holder_that_no_worker_would_load_from_are_looked_up_when_that_is_due_only() -> None:
    asked = []

    class Asked(FixedLinks):
        def row(self, holder: WorkerId, tier: Tier, now_ns: int) -> Floats:
            asked.append(holder)
            return FixedLinks.row(self, holder, tier, now_ns)

    slow = replace(CURVE, token_ns=1.0 * MS)  # it is free, others are fast: together the bound of the holder
    shot = snapshot([Worker(0, curve=slow), Worker(1, wait_ns=3.0 * S), Worker(2, blocks=50, wait_ns=9.0 * S)])
    keys = tuple(view.key for view in shot.workers)
    shot = shot._replace(links=Asked(keys, LinkCurve(1.0 * S, 0.25)))
    due = decide(request(), shot, PARAMS)
    assert asked == [key(2).worker_id]
    shot.columns.linked_ns[Tier.DEVICE, 2] = shot.now_ns + 1
    kept = decide(request(), shot, PARAMS)
    assert asked == [key(2).worker_id]
    assert (kept.worker, kept.plan, kept.load_floor_ns) == (due.worker, due.plan, due.load_floor_ns)
    shot.columns.linked_ns[Tier.DEVICE, 2] = shot.now_ns
    decide(request(), shot, PARAMS)
    assert asked == [key(2).worker_id] * 2


def test_of_many_holders_of_a_hot_prefix_a_few_are_tried() -> None:
    workers = [Worker(0), *(Worker(i, blocks=99, wait_ns=3.0 * S, out_ns=i * 0.01 * MS) for i in range(1, 200))]
    alike = decide(request(), snapshot(workers), PARAMS)
    assert alike.plan.loads[0].holder == key(1)
    assert len(alike.tried) == 1
    assert len(alike.plan.loads[0].alternates) == 3
    speeds = {(key(i).worker_id, key(0).worker_id): LinkCurve(1.0 * MS, 0.25 + 1 / i) for i in range(1, 200)}
    unlike = decide(request(), snapshot(workers, pairs=speeds), PARAMS)
    assert len(unlike.tried) == MAX_HOLDERS


def test_harm_sends_a_long_prefill_where_few_others_follow() -> None:
    shot = snapshot([Worker(0, wait_ns=0.3 * S), Worker(1, wait_ns=0.4 * S), Worker(2, state=MemberState.SUSPECT)])
    shot.columns.arrivals[:] = (20.0, NO_ARRIVALS, NO_ARRIVALS)  # per second
    shot = shot._replace(arrival_scale=1e-9)
    assert decide(request(), shot, PARAMS_WITHOUT_HARM).worker == key(0)
    follow = Params(harm=Harm(base=0.0, follow=10.0))
    assert decide(request(), shot, follow).worker == key(1)


def test_harm_prefers_a_load_that_costs_a_little_more_time_and_much_less_prefill() -> None:
    workers = [Worker(0), Worker(1, blocks=90, wait_ns=10.0 * S)]
    link = LinkCurve(1.0 * MS, 5.2)
    assert decide(request(), snapshot(workers, links=link), PARAMS_WITHOUT_HARM).plan.kind is PlanKind.REDO
    careful = Params(harm=Harm(base=1.0))
    assert decide(request(), snapshot(workers, links=link), careful).plan.kind is PlanKind.LOAD


def test_what_is_new_goes_where_nothing_must_leave_for_it() -> None:
    shot = snapshot([Worker(0), Worker(1, wait_ns=0.01 * S), Worker(2, state=MemberState.SUSPECT)])
    shot.columns.empty_blocks[:] = (0.0, 100.0, 0.0)
    shot.columns.pressure[:] = 1.0
    assert decide(request(), shot, PARAMS_WITHOUT_HARM).worker == key(0)
    assert decide(request(), shot, Params(harm=Harm(keep=0.5))).worker == key(1)


def test_what_is_new_goes_where_the_cache_turns_over_slowly() -> None:
    shot = snapshot([Worker(0), Worker(1, wait_ns=0.01 * S)])
    shot.columns.empty_blocks[:] = 0.0
    keep = Params(harm=Harm(keep=0.5))
    shot.columns.pressure[:] = 1.0
    assert decide(request(), shot, keep).worker == key(0)
    shot.columns.pressure[:] = (1.5, 0.5)
    assert decide(request(), shot, keep).worker == key(1)


def test_what_a_worker_holds_already_makes_nothing_leave() -> None:
    shot = snapshot([Worker(0, blocks=99, wait_ns=0.2 * S), Worker(1, wait_ns=0.01 * S)], links=LinkCurve(1e12, 1e6))
    shot.columns.empty_blocks[:] = (0.0, 50.0)
    shot.columns.pressure[:] = (16.0, 1.0)
    assert decide(request(), shot, Params(harm=Harm(keep=1.0))).worker == key(0)


def test_what_lies_on_another_workers_disk_is_not_loaded_from_there() -> None:
    shot = snapshot([Worker(0), Worker(1, blocks=90, wait_ns=10.0 * S, tier=Tier.DISK)])
    assert decide(request(), shot, PARAMS_WITHOUT_HARM).plan.kind is PlanKind.REDO
    both = shot._replace(prefixes={key(1): {Tier.DISK: 90, Tier.HOST: 60}})
    plan = decide(request(), both, PARAMS_WITHOUT_HARM).plan
    assert [(piece.start, piece.stop, piece.tier) for piece in plan.loads] == [(0, 60, Tier.HOST)]


def test_a_prefill_goes_where_it_holds_up_fewer_requests_that_decode() -> None:
    shot = snapshot([Worker(0, requests=9), Worker(1, wait_ns=0.01 * S, requests=1)])
    assert decide(request(), shot, PARAMS_WITHOUT_HARM).worker == key(0)
    assert decide(request(), shot, Params(harm=Harm(beside=0.03))).worker == key(1)
    assert decide(request(), shot, PARAMS).worker == key(1)


def test_requests_that_decode_do_not_drive_a_prompt_from_its_prefix() -> None:
    workers = [Worker(0, blocks=80, requests=30), Worker(1, requests=1)]
    assert decide(request(), snapshot(workers, links=LinkCurve(1e12, 1e6)), PARAMS).worker == key(0)
    made = decide(request(), snapshot(workers), PARAMS)  # over a fast link it takes the prefix along
    assert (made.worker, made.plan.kind) == (key(1), PlanKind.LOAD)


def test_queues_everywhere_make_a_load_that_spares_prefill_worth_waiting_for() -> None:
    workers = [Worker(0, wait_ns=1.0 * S), Worker(1, blocks=90, wait_ns=10.0 * S), Worker(2, state=MemberState.SUSPECT)]
    shot = snapshot(workers, links=LinkCurve(1.0 * S, 6.0))
    shot.columns.arrivals[:] = (NO_ARRIVALS, 1.0, NO_ARRIVALS)  # the others queue where none of this is asked
    shot = shot._replace(arrival_scale=1e-9)
    alone, everywhere = Params(harm=Harm(follow=1.0)), Params(harm=Harm(follow=1.0, share=1.0))
    assert decide(request(), shot, alone).plan.kind is PlanKind.REDO
    assert decide(request(), shot, everywhere).plan.kind is PlanKind.LOAD
