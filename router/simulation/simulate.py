"""Run one simulation: the function behind ``kvpool simulate``."""

from __future__ import annotations

import time

from kvpool.config import MAX_ROUTERS
from kvpool.errors import RequestError
from router.policies import Policy, make_policy
from router.signals import Features
from router.simulation.cluster import Cluster, Faults, Timing
from router.simulation.presets import Preset, get_preset
from router.simulation.report import RunFacts, SimReport, summarise
from router.simulation.trace import Trace


def simulate(
    trace: Trace,
    *,
    nodes: int,
    preset: Preset | str,
    bandwidth_bytes_per_s: float,
    policy: Policy | str,
    rate: float = 1.0,
    seed: int = 0,
    faults: Faults | None = None,
    features: Features | None = None,
    timing: Timing | None = None,
    oracle: bool = False,
    routers: int = 1,
) -> SimReport:
    """Play a trace against a simulated cluster. The same arguments give the same report, but for ``wall_s``.

    Args:
        trace: what arrives.
        nodes: number of nodes, at least 1.
        preset: node and model, or its name.
        bandwidth_bytes_per_s: of every node's link, each way.
        policy: routing policy, or its name.
        rate: how many times as fast as in the trace requests arrive.
        seed: of faults and of policies that draw.
        oracle: show the policy the truth instead of what a router knows.
        routers: number of routers, at least 1.

    Raises:
        RequestError: a number is out of range.
        ConfigError: unknown preset or policy.
    """
    if nodes < 1:
        raise RequestError(f"a cluster needs at least 1 node, got {nodes}", field="nodes")
    if not 1 <= routers <= MAX_ROUTERS:
        raise RequestError(f"a cluster has 1 to {MAX_ROUTERS} routers, got {routers}", field="routers")
    if not bandwidth_bytes_per_s > 0:
        raise RequestError(f"bandwidth must be positive, got {bandwidth_bytes_per_s}", field="bandwidth")
    preset = get_preset(preset) if isinstance(preset, str) else preset
    policy = make_policy(policy) if isinstance(policy, str) else policy
    started = time.perf_counter()
    cluster = Cluster(
        trace.faster(rate),
        preset,
        nodes=nodes,
        bandwidth_bytes_per_s=bandwidth_bytes_per_s,
        policy=policy,
        features=features,
        faults=faults,
        timing=timing,
        seed=seed,
        oracle=oracle,
        routers=routers,
    )
    served = cluster.run()
    facts = RunFacts(
        trace=trace.name,
        model=preset.name,
        policy=policy.name,
        nodes=nodes,
        routers=routers,
        bandwidth_bytes_per_s=bandwidth_bytes_per_s,
        rate=rate,
        seed=seed,
        ttft_slo_ns=preset.ttft_slo_ns,
        tpot_slo_ns=preset.tpot_slo_ns,
        bytes_moved=cluster.bytes_moved,
        busy_ns=sum(node.engine.busy_ns for node in cluster.nodes),
        ended_ns=cluster.loop.now_ns,
        wall_s=time.perf_counter() - started,
        events=cluster.loop.processed,
    )
    return summarise(served, facts)
