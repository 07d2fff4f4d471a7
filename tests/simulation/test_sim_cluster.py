"""Whole simulated clusters: reproducible, complete, and in order under faults."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from kvpool.errors import ConfigError, RequestError
from router.planning import Params
from router.policies import POLICIES, KVPoolPolicy, Policy, make_policy
from router.signals import Features
from router.simulation.cluster import Cluster, Faults
from router.simulation.generators import GENERATORS, Shape, generate
from router.simulation.presets import PRESETS, get_preset
from router.simulation.report import SimReport
from router.simulation.simulate import simulate
from router.simulation.trace import Trace, TraceRequest, load_trace
from router.waiting import MAX_POLL_NS, NEVER, Hold

S = 1_000_000_000
CONVERSATION = Path(__file__).parents[2] / "examples" / "traces" / "mooncake_conversation.jsonl.xz"


@pytest.fixture(scope="module")
def trace() -> Trace:
    return load_trace(CONVERSATION).spread().head(300)


def run(trace: Trace, policy: Policy | str = "kvpool", **more: object) -> SimReport:
    options: dict[str, object] = {"nodes": 4, "preset": "llama-70b", "bandwidth_bytes_per_s": 8e9, "rate": 1.5}
    return simulate(trace, policy=policy, **{**options, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_serves_every_request(trace: Trace, policy: str) -> None:
    report = run(trace.head(120), policy)
    assert report.unfinished == 0
    assert report.ttft_mean_ms > 0
    assert report.hit_share == pytest.approx(report.cached_share + report.loaded_share, abs=1e-9)


def test_the_same_seed_gives_the_same_run_to_the_bit(trace: Trace) -> None:
    faults = Faults(load_death=0.1, straggler=0.1, stale=0.1)
    first, second = (run(trace, faults=faults, seed=5) for _ in range(2))
    assert first.ttft_ms == second.ttft_ms
    assert first.events == second.events
    assert run(trace, faults=faults, seed=6).ttft_ms != first.ttft_ms


def test_the_oracle_is_told_the_truth_and_ours_stays_close(trace: Trace) -> None:
    busy = {"rate": 1.0, "bandwidth_bytes_per_s": 4e9}
    ours, oracle = run(trace, **busy), run(trace, oracle=True, **busy)
    assert oracle.unfinished == 0
    assert oracle.predicted_error < 0.8 * ours.predicted_error
    assert 0.95 * oracle.ttft_mean_ms < ours.ttft_mean_ms < 1.25 * oracle.ttft_mean_ms  # it knows no future


@pytest.mark.parametrize("part", [0, 1, 2])
def test_in_overload_waiting_at_the_router_shortens_the_mean_and_the_tail(part: int) -> None:
    whole = load_trace(CONVERSATION).spread()
    overload = replace(whole, requests=whole.requests[300 * part : 300 * (part + 1)])
    early = KVPoolPolicy(replace(Params(), hold=NEVER))
    late, at_once = (run(overload, policy=policy, rate=4.0) for policy in (KVPoolPolicy(), early))
    assert late.unfinished == 0
    assert late.ttft_mean_ms < 0.95 * at_once.ttft_mean_ms
    assert late.ttft_p99_ms < 0.9 * at_once.ttft_p99_ms


def test_no_request_waits_for_those_that_come_long_after_it() -> None:
    """Of two requests with equal prefill the one that came first is decided first, but for the time between asks."""
    cluster = Cluster(
        load_trace(CONVERSATION).spread().head(300).faster(4.0),
        get_preset("llama-70b"),
        nodes=4,
        bandwidth_bytes_per_s=8e9,
        policy=make_policy("kvpool"),
    )
    served = cluster.run()
    assert max(item.waited_ns for item in served) > 20 * S
    slack_ns = MAX_POLL_NS + 2 * S
    preset = get_preset("llama-70b")
    for item in served:
        own_ns = preset.curve.time_ns(item.tokens_redone, item.prompt_tokens - item.tokens_redone)
        passed = [
            other
            for other in served
            if other.decided_ns + slack_ns < item.decided_ns
            and other.arrival_ns > item.arrival_ns + Hold().age * 1.5 * own_ns + slack_ns
        ]
        assert not passed


def test_loads_move_the_bytes_that_are_accounted_for(trace: Trace) -> None:
    report = run(trace, features=Features())
    assert report.plans["load"] > 0
    assert report.loaded_share > 0
    layout = PRESETS["llama-70b"].layout
    token_bytes = layout.growing_block_bytes / layout.block_tokens
    assert report.gbytes_moved == pytest.approx(report.loaded_share * trace.prompt_tokens * token_bytes / 1e9, rel=0.02)


def test_a_wider_link_helps_and_redo_does_not_care() -> None:
    documents = generate("documents", Shape(requests=400, per_second=12.0))
    slow, fast = (run(documents, bandwidth_bytes_per_s=rate, rate=1.0) for rate in (0.5e9, 50e9))
    assert fast.loaded_share > slow.loaded_share
    assert fast.ttft_mean_ms < 0.9 * slow.ttft_mean_ms
    redo = [run(documents, "redo_only", bandwidth_bytes_per_s=rate).ttft_ms for rate in (1e9, 50e9)]
    assert redo[0] == redo[1]


@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_made_traces_are_equal_for_equal_seeds_and_share_prefixes(name: str) -> None:
    made = generate(name, Shape(requests=200, seed=1))
    assert made == generate(name, Shape(requests=200, seed=1))
    assert made != generate(name, Shape(requests=200, seed=2))
    parents: dict[int, int | None] = {}
    for item in made.requests:
        assert len(item.blocks) == -(-item.prompt_tokens // made.block_tokens)
        for i, block in enumerate(item.blocks):  # an id stands for a whole prefix: it always follows the same one
            assert parents.setdefault(block, item.blocks[i - 1] if i else None) == (item.blocks[i - 1] if i else None)
    assert run(made, rate=1.0).hit_share > 0.3


def test_an_unknown_generator_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'agents'"):
        generate("agent", Shape())


def test_faults_cost_time_and_no_request(trace: Trace) -> None:
    clean = run(trace)
    broken = run(trace, faults=Faults(load_death=0.2, straggler=0.2, stale=0.2), seed=1)
    assert broken.unfinished == 0
    assert broken.load_failures > 0
    assert broken.ttft_mean_ms < 1.5 * clean.ttft_mean_ms


def test_requests_of_a_node_that_dies_are_served_by_others(trace: Trace) -> None:
    preset = get_preset("llama-70b")
    outage = (5 * S, 10 * S, 1)
    cluster = Cluster(
        trace.faster(5.0),
        preset,
        nodes=4,
        bandwidth_bytes_per_s=8e9,
        policy=make_policy("kvpool"),
        faults=Faults(outages=(outage,)),
    )
    served = cluster.run()
    assert all(item.ttft_ns is not None for item in served)
    assert any(item.attempts > 1 for item in served)
    during = [item for item in served if 8.5 * S < item.decided_ns < 14.5 * S]
    assert during
    assert all(item.node != 1 for item in during)
    assert any(item.node == 1 for item in served if item.arrival_ns > 16 * S)  # it comes back, empty


def test_a_burst_of_cold_prompts_spreads() -> None:
    rng = Random(3)
    requests = []
    for i in range(2000):
        number = rng.randrange(64)  # 64 different prompts of 1,536 tokens, cold at first
        blocks = tuple(number * 10 + n for n in range(3))
        requests.append(TraceRequest(i * 4_000_000, 1536, 8, blocks))
    trace = Trace("herd", 512, tuple(requests))
    report = run(trace, nodes=16, rate=1.0)
    assert report.largest_share <= 2.0


def test_pure_affinity_sends_the_conversation_trace_to_one_node(trace: Trace) -> None:
    served = Counter[int]()
    cluster = Cluster(
        trace, get_preset("llama-70b"), nodes=4, bandwidth_bytes_per_s=8e9, policy=make_policy("affinity")
    )
    served.update(item.node for item in cluster.run())
    assert max(served.values()) > 0.9 * len(trace)


def test_a_thousand_nodes_work(trace: Trace) -> None:
    report = run(trace.head(200), nodes=1000, rate=200.0)
    assert report.unfinished == 0


def test_a_decision_is_recorded_and_joined_with_its_outcome(trace: Trace) -> None:
    cluster = Cluster(
        trace.head(50), get_preset("llama-70b"), nodes=4, bandwidth_bytes_per_s=8e9, policy=make_policy("kvpool")
    )
    cluster.run()
    records = cluster.core.records()
    assert len(records) == 50
    assert all(record.outcome is not None for record in records)
    assert cluster.core.status()["promises"] == 0


def test_bad_arguments_are_typed_errors(trace: Trace) -> None:
    with pytest.raises(RequestError, match="at least 1 node"):
        run(trace, nodes=0)
    with pytest.raises(RequestError, match="bandwidth"):
        run(trace, bandwidth_bytes_per_s=0.0)
    with pytest.raises(RequestError, match="rate"):
        run(trace, rate=0.0)
    with pytest.raises(ConfigError, match="did you mean 'llama-70b'"):
        run(trace, preset="llama-70")


def test_presets_agree_with_what_was_published() -> None:
    oss = get_preset("gpt-oss-120b").curve
    for tokens, published_ms in {2048: 70.6, 8192: 205.0, 16_384: 426.0, 32_768: 983.0, 49_152: 1695.0}.items():
        assert oss.time_ns(tokens, 0) == pytest.approx(published_ms * 1e6, rel=0.01)
    for preset in PRESETS.values():
        assert 0.1e9 < preset.b_star_bytes_per_s() < 20e9
