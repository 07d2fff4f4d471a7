"""What a simulated run shows: latencies, hits, plans, load shares.  (pure)"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from router.simulation.scenario import Served


@dataclass(frozen=True, slots=True)
class SimReport:
    """Summary of one run. Times in milliseconds, shares in [0, 1].

    Attributes:
        hit_share: prompt tokens not computed, cached or loaded.
        cached_share: those of them that were on the node, ``promoted_share`` in its host tier.
        largest_share: requests of the busiest node against a fair share.
        goodput_rps: finished requests per second that met both limits.
        ttft_ms: TTFT of every request that got a first token, in the order of the trace; for charts.
    """

    trace: str
    model: str
    policy: str
    nodes: int
    routers: int
    bandwidth_gbytes_per_s: float
    rate: float
    seed: int
    requests: int
    unfinished: int
    ttft_mean_ms: float
    ttft_p50_ms: float
    ttft_p90_ms: float
    ttft_p99_ms: float
    tpot_mean_ms: float
    tpot_p99_ms: float
    goodput_rps: float
    good_share: float
    hit_share: float
    cached_share: float
    promoted_share: float
    loaded_share: float
    plans: dict[str, int]
    largest_share: float
    load_failures: int
    gbytes_moved: float
    gpu_busy_share: float
    predicted_error: float
    simulated_s: float
    wall_s: float
    events: int
    ttft_ms: tuple[float, ...] = ()

    def to_dict(self, *, with_samples: bool = False) -> dict[str, Any]:
        """JSON-serialisable form; the samples only on request."""
        data = asdict(self)
        if not with_samples:
            del data["ttft_ms"]
        return data


def percentile(ordered: Sequence[float], share: float) -> float:
    """Value below which ``share`` of an ascending sequence lies; 0 for an empty one."""
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What the summary needs besides the requests."""

    trace: str
    model: str
    policy: str
    nodes: int
    routers: int
    bandwidth_bytes_per_s: float
    rate: float
    seed: int
    ttft_slo_ns: int
    tpot_slo_ns: int
    bytes_moved: float
    busy_ns: int
    ended_ns: int
    wall_s: float
    events: int


def summarise(served: Sequence[Served], facts: RunFacts) -> SimReport:
    """Work the summary out."""
    answered = [(item, item.ttft_ns) for item in served if item.ttft_ns is not None]
    ttft = sorted(value / 1e6 for _, value in answered)
    tpot = sorted(item.tpot_ns / 1e6 for item, _ in answered if item.output_tokens > 1)
    good = sum(
        1
        for item, value in answered
        if item.finished_ns is not None and value <= facts.ttft_slo_ns and item.tpot_ns <= facts.tpot_slo_ns
    )
    prompt = max(1, sum(item.prompt_tokens for item, _ in answered))
    redone = sum(item.tokens_redone for item, _ in answered)
    loaded = sum(item.tokens_loaded for item, _ in answered)
    cached = sum(item.tokens_cached for item, _ in answered)
    per_node = Counter(item.node for item, _ in answered)
    first_ns = served[0].arrival_ns if served else 0
    length_s = max(1, facts.ended_ns - first_ns) / 1e9
    errors = sorted(_error(item, value - item.waited_ns) for item, value in answered)
    return SimReport(
        trace=facts.trace,
        model=facts.model,
        policy=facts.policy,
        nodes=facts.nodes,
        routers=facts.routers,
        bandwidth_gbytes_per_s=facts.bandwidth_bytes_per_s / 1e9,
        rate=facts.rate,
        seed=facts.seed,
        requests=len(served),
        unfinished=len(served) - len(answered),
        ttft_mean_ms=sum(ttft) / max(1, len(ttft)),
        ttft_p50_ms=percentile(ttft, 0.5),
        ttft_p90_ms=percentile(ttft, 0.9),
        ttft_p99_ms=percentile(ttft, 0.99),
        tpot_mean_ms=sum(tpot) / max(1, len(tpot)),
        tpot_p99_ms=percentile(tpot, 0.99),
        goodput_rps=good / length_s,
        good_share=good / max(1, len(served)),
        hit_share=1.0 - redone / prompt,
        cached_share=cached / prompt,
        promoted_share=sum(item.tokens_promoted for item, _ in answered) / prompt,
        loaded_share=loaded / prompt,
        plans=dict(Counter(item.plan for item, _ in answered)),
        largest_share=max(per_node.values(), default=0) * facts.nodes / max(1, len(answered)),
        load_failures=sum(item.load_failures for item in served),
        gbytes_moved=facts.bytes_moved / 1e9,
        gpu_busy_share=facts.busy_ns / max(1, facts.nodes * (facts.ended_ns - first_ns)),
        predicted_error=percentile(errors, 0.5),
        simulated_s=length_s,
        wall_s=facts.wall_s,
        events=facts.events,
        ttft_ms=tuple(value / 1e6 for _, value in answered),
    )


def _error(item: Served, real_ns: int) -> float:
    """Relative error of what was expected of a request when it was decided."""
    return abs(item.predicted_ns - real_ns) / max(1, real_ns)
