"""The host tier of simulated nodes, and loads from several holders at once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from kvpool.types import Tier, WorkerEpoch, WorkerId, WorkerKey
from router.decide import Decision
from router.estimators import LinkCurve
from router.policies import make_policy
from router.policies.base import AtOnce
from router.signals import Features, RequestView, Snapshot
from router.simulation.cache import NodeCache
from router.simulation.cluster import Cluster, Faults
from router.simulation.lagging_index import LaggingIndex
from router.simulation.oracle import TrueLinks
from router.simulation.presets import Preset, get_preset
from router.simulation.report import SimReport
from router.simulation.simulate import simulate
from router.simulation.trace import Trace, TraceRequest, load_trace

S = 1_000_000_000
CONVERSATION = Path(__file__).parents[2] / "examples" / "traces" / "mooncake_conversation.jsonl.xz"
CHAINS = tuple(tuple(base * 100 + i for i in range(12)) for base in range(1, 8))


@pytest.fixture(scope="module")
def trace() -> Trace:
    return load_trace(CONVERSATION).spread().head(400)


def tiered(host_blocks: int, **more: object) -> Preset:
    return replace(get_preset("llama-70b"), capacity_blocks=600, host_blocks=host_blocks, **more)  # type: ignore[arg-type]


def run(trace: Trace, host_blocks: int, policy: str = "kvpool", **more: object) -> SimReport:
    options: dict[str, object] = {"nodes": 3, "bandwidth_bytes_per_s": 5e9, "rate": 0.8, "seed": 2}
    return simulate(trace, policy=policy, preset=tiered(host_blocks), **{**options, **more})  # type: ignore[arg-type]


# ---- the cache


def check(cache: NodeCache, device: int, host: int, in_use: int) -> None:
    """A block is in one tier, tiers are bounded but for blocks in use, and both make prefixes."""
    tiers = [cache.tier(block) for chain in CHAINS for block in chain]
    assert tiers.count(Tier.DEVICE) == cache.in_device
    assert tiers.count(Tier.HOST) == cache.in_host
    assert len(cache) == cache.in_device + cache.in_host
    assert cache.in_device <= device + in_use
    assert cache.in_host <= host + in_use
    for chain in CHAINS:
        places = [cache.tier(block) for block in chain]
        order = {Tier.DEVICE: 0, Tier.HOST: 1, None: 2}
        assert places == sorted(places, key=order.__getitem__)  # device, then host, then nothing


@pytest.mark.parametrize("seed", range(20))
def test_a_block_is_in_one_tier_and_what_changed_is_told(seed: int) -> None:
    rng, told = Random(seed), {}
    device, host = rng.randrange(4, 30), rng.randrange(1, 30)
    cache = NodeCache(device, host_blocks=host)
    pinned: list[list[int]] = []
    for _ in range(300):
        if pinned and rng.random() < 0.5:
            change = cache.unpin(pinned.pop(rng.randrange(len(pinned))))
        else:
            chain = rng.choice(CHAINS)[: rng.randrange(1, 13)]
            used = list(chain[: cache.prefix(chain)])
            cache.pin(used)
            pinned.append(used)
            change = cache.insert(chain, cache.device_prefix(chain))
        told.update(dict.fromkeys(change.new, Tier.DEVICE))
        told.update(dict.fromkeys(change.demoted, Tier.HOST))
        told.update(dict.fromkeys(change.gone))
        assert all(told.get(block) == cache.tier(block) for chain in CHAINS for block in chain)
        check(cache, device, host, sum(map(len, pinned)))
    while pinned:
        cache.unpin(pinned.pop())
    check(cache, device, host, 0)
    assert cache.pinned == 0


def test_what_leaves_the_device_goes_to_the_host_and_what_leaves_the_host_is_gone() -> None:
    cache = NodeCache(3, host_blocks=2)
    cache.insert((1, 2, 3))
    assert cache.insert((7, 8)) == ([7, 8], [3, 2], [])
    assert (cache.prefix((1, 2, 3)), cache.device_prefix((1, 2, 3))) == (3, 1)
    assert cache.insert((1, 2), 1) == ([2], [8], [])  # comes back; the host is over its bound no longer than that
    assert cache.insert((20, 21)).gone == [3, 8]


def test_the_index_says_what_lies_in_a_tier_or_a_faster_one() -> None:
    keys = [WorkerKey(WorkerId(f"n{i}"), WorkerEpoch(1)) for i in range(3)]
    index = LaggingIndex(keys)
    index.add(0, (1, 2, 3, 4))
    index.add(1, (1, 2))
    index.demote(0, (3, 4))
    index.add(2, (1,))
    index.demote(2, (1,))
    chain = (1, 2, 3, 4, 5)
    assert index.prefixes(chain) == {  # type: ignore[arg-type]
        keys[0]: {Tier.DEVICE: 2, Tier.HOST: 4},
        keys[1]: {Tier.DEVICE: 2},
        keys[2]: {Tier.HOST: 1},
    }
    index.add(0, (3,))
    index.drop(0, (4,))
    index.drop(2, (1,))
    assert index.prefixes(chain) == {keys[0]: {Tier.DEVICE: 3}, keys[1]: {Tier.DEVICE: 2}}  # type: ignore[arg-type]


# ---- whole clusters


def test_more_host_blocks_mean_more_hits_and_an_earlier_first_token(trace: Trace) -> None:
    for policy in ("plain", "kvpool"):
        none, some, many = (run(trace, blocks, policy) for blocks in (0, 500, 5000))
        assert none.promoted_share == 0.0
        assert none.hit_share < some.hit_share < many.hit_share
        assert none.ttft_mean_ms > some.ttft_mean_ms > many.ttft_mean_ms
        assert none.ttft_mean_ms > 1.04 * many.ttft_mean_ms
        assert many.cached_share >= many.promoted_share > 0.02


def test_a_host_tier_is_reproducible_and_loses_no_request_under_faults(trace: Trace) -> None:
    faults = Faults(load_death=0.2, straggler=0.2, stale=0.2, outages=((20 * S, 10 * S, 1), (25 * S, 10 * S, 0)))
    first, second = (run(trace, 800, faults=faults) for _ in range(2))
    assert first.unfinished == 0
    assert first.ttft_ms == second.ttft_ms
    assert first.events == second.events


def test_nothing_stays_in_use_when_a_run_is_over(trace: Trace) -> None:
    cluster = Cluster(
        trace, tiered(500), nodes=3, bandwidth_bytes_per_s=5e9, policy=make_policy("kvpool"),
        faults=Faults(load_death=0.2, stale=0.1),
    )  # fmt: skip
    cluster.run()
    for node in cluster.nodes:
        assert node.cache.pinned == 0
        assert node.cache.in_device <= 600
        assert node.cache.in_host <= 500
        assert node.in_flight_bytes == pytest.approx(0.0, abs=1.0)


def one_after_the_other(*chains: tuple[int, ...]) -> Trace:
    requests = [TraceRequest(i * 60 * S, len(chain) * 512 + 1, 1, (*chain, -1 - i)) for i, chain in enumerate(chains)]
    return Trace("made", 512, tuple(requests))


def test_a_hit_in_the_host_costs_its_way_to_the_device_and_no_more() -> None:
    first, other = tuple(range(100, 110)), tuple(range(200, 215))
    made = one_after_the_other(first, other, first, first)
    preset = tiered(100, host_bytes_per_s=10e9, host_alpha_ns=5_000_000)
    preset = replace(preset, capacity_blocks=16)
    cluster = Cluster(made, preset, nodes=1, bandwidth_bytes_per_s=1e9, policy=make_policy("plain"))
    served = cluster.run()
    promoted = served[2].tokens_promoted // 512
    assert 0 < promoted <= served[2].tokens_cached // 512 == 10
    assert served[3].tokens_promoted == 0
    times = [item.ttft_ns for item in served]
    assert times[2] is not None
    assert times[3] is not None
    expected_ns = 5_000_000 + promoted * preset.block_bytes(512) / 10
    assert times[2] - times[3] == pytest.approx(expected_ns, rel=0.01)


# ---- several holders at once


BANDWIDTH = 30e9
"""Above B*."""


class Scripted(AtOnce):
    """Our policy, but with the node of each request given; the first two compute all of their prompts, and the links
    are known from the start."""

    name = "scripted"

    def __init__(self, nodes: list[int]) -> None:
        self._nodes = nodes
        self.pieces: list[int] = []

    def choose(self, request: RequestView, snapshot: Snapshot, rng: Random) -> Decision:
        node = self._nodes.pop(0)
        others = frozenset(view.key for i, view in enumerate(snapshot.workers) if i != node)
        if len(self.pieces) < 2:
            snapshot = snapshot._replace(features=Features(load=False))
        snapshot = snapshot._replace(links=TrueLinks(LinkCurve(1e6, 1e9 / BANDWIDTH), len(snapshot.workers)))
        decision = make_policy("kvpool").choose(request._replace(exclude=others), snapshot, rng)
        self.pieces.append(len({piece.holder for piece in decision.plan.loads}))
        return decision


def loads_of_the_third_node(
    stripes: int, *, split: bool = False, faults: Faults | None = None
) -> tuple[Cluster, Scripted]:
    """Two nodes compute a long prompt, a third one loads it."""
    chain = tuple(range(100, 200))
    policy = Scripted([0, 1, 2, 2])
    cluster = Cluster(
        one_after_the_other(chain, chain, chain, chain), get_preset("llama-70b"), nodes=3, policy=policy,
        bandwidth_bytes_per_s=BANDWIDTH, features=Features(load=True, split=split, stripes=stripes), faults=faults,
    )  # fmt: skip
    return cluster, policy


@pytest.mark.parametrize("split", [False, True])
def test_a_load_from_two_holders_brings_every_block_once(split: bool) -> None:
    cluster, policy = loads_of_the_third_node(4, split=split)
    third, fourth = cluster.run()[2:]
    assert policy.pieces[2] == 2
    assert third.tokens_loaded + third.tokens_redone == third.prompt_tokens
    assert third.tokens_loaded >= (50 if split else 100) * 512
    assert fourth.tokens_cached == 100 * 512
    assert cluster.bytes_moved <= 1.01 * get_preset("llama-70b").block_bytes(512) * 100


def test_both_ends_are_shared_so_a_second_holder_does_not_widen_the_reader() -> None:
    (single, _), (striped, _) = loads_of_the_third_node(1), loads_of_the_third_node(4)
    one, two = single.run()[2].ttft_ns, striped.run()[2].ttft_ns
    assert one is not None
    assert two is not None
    assert two >= 0.98 * one


def test_a_holder_that_dies_in_a_striped_load_costs_no_token() -> None:
    for seed in range(3):
        cluster, policy = loads_of_the_third_node(4, faults=Faults(load_death=1.0))
        cluster._rng.seed(seed)
        third = cluster.run()[2]
        assert policy.pieces[2] == 2
        assert third.load_failures >= 2
        assert third.tokens_loaded + third.tokens_redone == third.prompt_tokens
        assert third.finished_ns is not None
