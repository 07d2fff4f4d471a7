"""The rules of other routers, pinned quirk by quirk."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from kvpool.errors import ConfigError, UnavailableError
from kvpool.plan import PlanKind
from kvpool.reports import WorkerLoad
from kvpool.types import MemberState, Tier, WorkerKey
from router.policies import NEVER_LOADS, POLICIES, Policy, make_policy
from router.policies.timed import PREBLE_WINDOW_NS
from router.signals import RequestView, Snapshot
from tests.unit.router_kit import BLOCK, MS, S, Worker, chain, key, request, snapshot

FLEET = [Worker(0), Worker(1, blocks=80, wait_ns=S, requests=3), Worker(2, blocks=20, requests=1)]


def with_chain(tokens: int = 1600, name: str = "r", salt: bytes = b"c") -> RequestView:
    return request(tokens, name)._replace(chain=chain(tokens, salt))


def queued(shot: Snapshot, *tokens: int) -> Snapshot:
    shot.columns.queued_tokens[:] = tokens
    return shot


def pick(policy: Policy | str, workers: list[Worker], view: RequestView | None = None, seed: int = 0) -> WorkerKey:
    made = make_policy(policy) if isinstance(policy, str) else policy
    return made.choose(view or with_chain(), snapshot(workers), Random(seed)).worker


def used(number: int, used_blocks: int, waiting: int = 0, **more: object) -> Worker:
    load = WorkerLoad(waiting_requests=waiting, free_blocks=1000 - used_blocks, total_blocks=1000)
    return Worker(number, load=load, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_decides_and_refuses_an_empty_fleet(name: str) -> None:
    made = make_policy(name).choose(with_chain(), snapshot(FLEET), Random(0))
    assert made.price_ns > 0
    assert made.promise.gpu_ns > 0
    assert made.worker in {key(0), key(1), key(2)}
    if name in NEVER_LOADS:
        assert made.plan.kind is PlanKind.REDO
    with pytest.raises(UnavailableError):
        make_policy(name).choose(with_chain(), snapshot([Worker(0, state=MemberState.DRAINING)]), Random(0))


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_no_policy_chooses_a_suspect_or_excluded_worker(name: str) -> None:
    workers = [Worker(0, state=MemberState.SUSPECT), Worker(1, blocks=90), Worker(2, wait_ns=5.0 * S, requests=9)]
    view = with_chain()._replace(exclude=frozenset({key(1)}))
    assert {pick(name, workers, view, seed) for seed in range(5)} == {key(2)}


@pytest.mark.parametrize("name", sorted(set(POLICIES) - {"random", "round_robin"}))
def test_no_policy_depends_on_the_order_of_workers(name: str) -> None:
    first = make_policy(name).choose(with_chain(), snapshot(FLEET), Random(1))
    second = make_policy(name).choose(with_chain(), snapshot(FLEET[::-1]), Random(1))
    assert (first.worker, first.plan) == (second.worker, second.plan)


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'mooncake'"):
        make_policy("moncake")


def test_random_reaches_everybody_and_round_robin_takes_turns() -> None:
    counts = Counter(pick("random", FLEET, seed=seed) for seed in range(300))
    assert min(counts[key(number)] for number in range(3)) > 60
    turns = make_policy("round_robin")
    assert [pick(turns, FLEET) for _ in range(4)] == [key(0), key(1), key(2), key(0)]


def test_least_loaded_looks_at_requests_only() -> None:
    assert pick("least_loaded", [Worker(0, requests=1), Worker(1, blocks=90, requests=2)]) == key(0)


def test_affinity_follows_the_longest_prefix_however_busy_it_is() -> None:
    assert pick("affinity", [Worker(0), Worker(1, blocks=1, wait_ns=900.0 * S, requests=99)]) == key(1)
    assert pick("affinity", [Worker(0, requests=1), Worker(1)]) == key(1)


def test_plain_adds_queue_and_uncached_over_speed() -> None:
    assert pick("plain", FLEET) == key(2)  # 80 ms saved beats nothing, and no queue
    assert pick("plain", [Worker(0), Worker(1, blocks=80, wait_ns=0.1 * S)]) == key(1)


def test_lmetric_multiplies_prefill_tokens_by_batch_size() -> None:
    view = with_chain()
    shot = queued(snapshot([Worker(0, requests=1), Worker(1, requests=4, blocks=70)]), 0, 0)
    assert make_policy("lmetric").choose(view, shot, Random(0)).worker == key(1)  # 480·5 < 1600·2
    shot = queued(snapshot([Worker(0, requests=1), Worker(1, requests=4, blocks=70)]), 0, 200)
    assert make_policy("lmetric").choose(view, shot, Random(0)).worker == key(0)  # 680·5 > 1600·2


def test_gorgo_weighs_queued_and_uncached_tokens_alike_and_knows_no_quadratic_term() -> None:
    shot = queued(snapshot([Worker(0), Worker(1, blocks=50)]), 0, 801)
    assert make_policy("gorgo").choose(with_chain(), shot, Random(0)).worker == key(0)
    shot = queued(snapshot([Worker(0), Worker(1, blocks=50)]), 0, 799)
    assert make_policy("gorgo").choose(with_chain(), shot, Random(0)).worker == key(1)


def test_sglang_balances_only_past_both_of_its_thresholds() -> None:
    policy = make_policy("sglang")
    assert pick(policy, [Worker(0), Worker(1)]) == key(0)
    assert pick(policy, [Worker(0, requests=64), Worker(1)]) == key(0)  # 64 apart is not more than 64
    assert pick(policy, [Worker(0, requests=65), Worker(1)]) == key(1)
    assert pick(make_policy("sglang"), [Worker(0, requests=300), Worker(1, requests=210)]) == key(0)  # 300 < 1.5 · 210


def test_sglang_sends_what_matches_little_to_the_smallest_tree() -> None:
    policy = make_policy("sglang")
    assert pick(policy, FLEET, with_chain(salt=b"a")) == key(0)
    assert pick(policy, FLEET, with_chain(salt=b"b")) == key(1)
    assert pick(policy, FLEET, with_chain(salt=b"a")) == key(0)
    shared = with_chain()._replace(chain=chain(1600, b"a")[:30] + chain(1600, b"z")[30:])
    assert pick(policy, FLEET, shared) == key(2)  # 30 of 100 blocks is not above the threshold


def test_dynamo_counts_blocks_and_gives_credit_by_tier() -> None:
    assert pick("dynamo", [used(0, 0), used(1, 70, blocks=80)]) == key(1)
    assert pick("dynamo", [used(0, 0), used(1, 90, blocks=80)]) == key(0)
    assert pick("dynamo", [used(0, 0), used(1, 70, blocks=80, tier=Tier.HOST)]) == key(0)


def test_dynamo_breaks_ties_at_random() -> None:
    assert len({pick("dynamo", [used(0, 0), used(1, 0)], seed=seed) for seed in range(20)}) == 2


def test_llm_d_prefers_the_prefix_over_queue_and_use() -> None:
    assert pick("llm-d", [used(0, 0), used(1, 500, waiting=64, blocks=75)]) == key(1)  # 2.25+0.5+1 > 0+1+2
    assert pick("llm-d", [used(0, 0), used(1, 900, waiting=64, blocks=40)]) == key(0)


def test_llm_d_sticks_to_a_match_of_four_fifths_until_it_costs_eighteen_seconds() -> None:
    assert pick("llm-d", [used(0, 0), used(1, 1000, waiting=200, blocks=80, wait_ns=17.0 * S)]) == key(1)
    late = [used(0, 0), used(1, 1000, waiting=200, blocks=80, wait_ns=19.0 * S)]
    assert pick("llm-d", late) == key(0)


def test_llm_d_pulls_from_a_peer_that_leads_by_a_fixed_number_of_tokens() -> None:
    workers = [used(0, 0), used(1, 1000, waiting=200, blocks=130, wait_ns=20.0 * S)]
    view = with_chain(16 * 200)
    pulled = make_policy("llm-d-pull").choose(view, snapshot(workers), Random(0))
    assert (pulled.worker, pulled.plan.kind) == (key(0), PlanKind.LOAD)
    assert pulled.plan.loads[0].holder == key(1)
    workers[1] = replace(workers[1], blocks=127)
    assert make_policy("llm-d-pull").choose(view, snapshot(workers), Random(0)).plan.kind is PlanKind.REDO


def test_mooncake_fetches_only_past_its_ratio_and_adds_transfer_to_queue() -> None:
    near = [Worker(0, blocks=60), Worker(1, blocks=80, wait_ns=S)]
    made = make_policy("mooncake").choose(with_chain(), snapshot(near), Random(0))
    assert (made.worker, made.plan.kind) == (key(0), PlanKind.REDO)  # 80 is less than 1.5 · 60
    far = [Worker(0, blocks=40), Worker(1, blocks=80, wait_ns=S)]
    made = make_policy("mooncake").choose(with_chain(), snapshot(far), Random(0))
    assert (made.worker, made.plan.kind) == (key(0), PlanKind.LOAD)
    assert made.plan.loads[0].stop == 80


def test_mooncake_assumes_a_fetch_even_where_a_redo_would_be_faster() -> None:
    from router.estimators import LinkCurve

    slow = LinkCurve(1.0 * MS, 1000.0)
    shot = snapshot([Worker(0), Worker(1, blocks=80, wait_ns=100.0 * S)], links=slow)
    assert make_policy("mooncake").choose(with_chain(), shot, Random(0)).plan.kind is PlanKind.LOAD


def test_preble_exploits_a_match_longer_than_the_rest_until_the_holder_is_overloaded() -> None:
    policy = make_policy("preble")
    workers = [used(0, 0, blocks=60), used(1, 0)]
    assert pick(policy, workers) == key(0)
    assert pick(policy, [used(0, 0, blocks=40), used(1, 0)]) == key(1)  # now the window speaks against worker 0
    picks = [pick(policy, workers) for _ in range(30)]
    assert key(1) in picks  # beyond 1.5 times the least load it explores again


def test_preble_forgets_after_its_window() -> None:
    policy = make_policy("preble")
    policy.choose(with_chain(), snapshot([Worker(0), Worker(1)]), Random(0))
    later = snapshot([Worker(0), Worker(1)], now_ns=10 * S + PREBLE_WINDOW_NS + 1)
    assert policy.choose(with_chain(), later, Random(0)).worker == key(0)


def test_redo_only_equals_ours_when_nobody_else_holds_anything() -> None:
    workers = [Worker(0, wait_ns=0.3 * S), Worker(1, wait_ns=0.1 * S)]
    assert pick("redo_only", workers) == pick("kvpool", workers) == key(1)
    assert BLOCK == 16
