"""Many simulated runs over one trace: every policy at every bandwidth and request rate.

A cell is one (bandwidth, rate); within a cell all policies get the same requests, faults and links. The runs are
those of `router.simulation.simulate`; policies are watched from outside, which changes no decision.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

from kvpool.errors import RequestError
from kvpool.types import RequestId, WorkerId
from router.decide import Decision
from router.planning import Params
from router.policies import KVPoolPolicy, Policy, make_policy
from router.signals import RequestView, Snapshot
from router.simulation.cluster import Faults
from router.simulation.oracle import ORACLE
from router.simulation.presets import Preset
from router.simulation.report import SimReport
from router.simulation.simulate import simulate
from router.simulation.trace import Trace
from router.waiting import Hold

OURS = "kvpool"
TUNED = "kvpool-tuned"
"""Our policy with parameters other than its defaults."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """What to run.

    Attributes:
        bandwidths_bytes_per_s: of every node's link, each way.
        rates: factors on the trace's own request rate.
        policies: names; `TUNED` needs ``params``.
        routers: number of routers. They share one policy, which matters for those few that remember what they chose.
    """

    trace: Trace
    preset: Preset
    nodes: int
    bandwidths_bytes_per_s: tuple[float, ...]
    policies: tuple[str, ...]
    rates: tuple[float, ...] = (1.0,)
    seed: int = 0
    faults: Faults = field(default_factory=Faults)
    params: Params | None = None
    routers: int = 1

    @property
    def runs(self) -> int:
        """Number of simulations."""
        return len(self.bandwidths_bytes_per_s) * len(self.policies) * len(self.rates)

    def offered_rps(self, rate: float) -> float:
        """Mean requests per second that arrive at a rate factor."""
        return rate * len(self.trace) / max(1e-9, self.trace.duration_ns / 1e9)


@dataclass(frozen=True, slots=True)
class Run:
    """One policy in one cell.

    Attributes:
        offered_rps: mean requests per second that arrived.
        node_requests: requests routed to each node, busiest first; retries count again.
    """

    report: SimReport
    offered_rps: float
    node_requests: tuple[int, ...]

    @property
    def cell(self) -> tuple[float, float]:
        """Bandwidth in GB/s and rate factor."""
        return self.report.bandwidth_gbytes_per_s, self.report.rate

    def node_shares(self) -> list[float]:
        """Requests of each node against a fair share, which is 1."""
        total = sum(self.node_requests)
        return [count * len(self.node_requests) / total for count in self.node_requests] if total else []

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable form."""
        return {
            **self.report.to_dict(),
            "offered_rps": self.offered_rps,
            "node_requests": list(self.node_requests),
        }


class Watched:
    """A policy that is watched: which worker each request was last decided for, and ``on_decision`` is called with the
    number of requests that were decided so far."""

    def __init__(self, policy: Policy, on_decision: Callable[[int], None] | None = None) -> None:
        self._policy = policy
        self._on_decision = on_decision
        self._workers: dict[RequestId, WorkerId] = {}

    def workers(self) -> Counter[WorkerId]:
        """How many requests each worker got, but for those that got none."""
        return Counter(self._workers.values())

    @property
    def name(self) -> str:
        """Name of the policy."""
        return self._policy.name

    @property
    def hold(self) -> Hold:
        """That of the policy."""
        return self._policy.hold

    def choose(self, request: RequestView, snapshot: Snapshot, rng: Random) -> Decision:
        """The policy's choice, unchanged."""
        decision = self._policy.choose(request, snapshot, rng)
        self._workers[request.request_id] = decision.worker.worker_id
        if self._on_decision is not None:
            self._on_decision(len(self._workers))
        return decision


def make_named(name: str, params: Params | None) -> Policy:
    """A fresh policy by name, `TUNED` and `ORACLE` included.

    Raises:
        ConfigError: there is no such policy.
        RequestError: `TUNED` without parameters.
    """
    if name == ORACLE:
        return KVPoolPolicy(params or Params(), ORACLE)
    if name != TUNED:
        return make_policy(name)
    if params is None:
        raise RequestError(f"policy {TUNED!r} needs parameters; give --params FILE", field="params")
    return KVPoolPolicy(params, TUNED)


def check(sweep: Sweep) -> None:
    """Refuse what cannot run before anything does.

    Raises:
        RequestError: an empty list, or a number out of range.
        ConfigError: an unknown policy.
    """
    if sweep.nodes < 1:
        raise RequestError(f"a cluster needs at least 1 node, got {sweep.nodes}", field="nodes")
    if not sweep.trace.requests:
        raise RequestError("the trace holds no request", field="trace")
    for name, values in (("bandwidth", sweep.bandwidths_bytes_per_s), ("rate", sweep.rates)):
        if not values:
            raise RequestError(f"give at least one {name}", field=name)
        bad = next((value for value in values if not 0.0 < value < float("inf")), None)
        if bad is not None:
            raise RequestError(f"every {name} must be positive and finite, got {bad}", field=name)
    if not sweep.policies:
        raise RequestError("give at least one policy", field="policy")
    for policy in sweep.policies:
        make_named(policy, sweep.params)


def run_sweep(sweep: Sweep, on_progress: Callable[[str, int], None] | None = None) -> Iterator[Run]:
    """Run every cell, policies innermost; yields each run as it ends.

    Args:
        sweep: what to run.
        on_progress: called with a run's name and the number of requests decided in it, after each decision.

    Raises:
        RequestError, ConfigError: see `check`.
    """
    check(sweep)
    for bandwidth, rate, name in itertools.product(sweep.bandwidths_bytes_per_s, sweep.rates, sweep.policies):
        yield _run(sweep, bandwidth, rate, name, on_progress)


def _run(sweep: Sweep, bandwidth: float, rate: float, name: str, on_progress: Callable[[str, int], None] | None) -> Run:
    label = f"{name} at {bandwidth / 1e9:g} GB/s, rate ×{rate:g}"
    tell = None if on_progress is None else (lambda decided: on_progress(label, decided))
    policy = Watched(make_named(name, sweep.params), tell)
    report = simulate(
        sweep.trace,
        nodes=sweep.nodes,
        preset=sweep.preset,
        bandwidth_bytes_per_s=bandwidth,
        policy=policy,
        rate=rate,
        seed=sweep.seed,
        faults=sweep.faults,
        oracle=name == ORACLE,
        routers=sweep.routers,
    )
    routed = sorted(policy.workers().values(), reverse=True)
    idle = [0] * (sweep.nodes - len(routed))  # nodes that got nothing were never counted
    return Run(report, sweep.offered_rps(rate), (*routed, *idle))


@dataclass(frozen=True, slots=True)
class Measure:
    """What policies are compared by; ``sign`` −1 means the more the better."""

    title: str
    value: Callable[[SimReport], float]
    sign: int = 1


MEASURES = (
    Measure("mean TTFT", lambda report: report.ttft_mean_ms),
    Measure("p99 TTFT", lambda report: report.ttft_p99_ms),
    Measure("goodput", lambda report: report.goodput_rps, sign=-1),
)


@dataclass(frozen=True, slots=True)
class Loss:
    """A cell in which a run is behind the best other policy; ``behind`` is 0.02 for 2 % worse."""

    run: Run
    best: Run
    measure: Measure
    behind: float

    @property
    def text(self) -> str:
        """For a reader."""
        report = self.run.report
        return (
            f"{report.policy} is {self.behind:.1%} behind {self.best.report.policy} in {self.measure.title} at "
            f"{report.bandwidth_gbytes_per_s:g} GB/s, rate ×{report.rate:g}"
        )


def cells(runs: list[Run]) -> dict[tuple[float, float], list[Run]]:
    """Runs by cell, in order of appearance."""
    grouped: dict[tuple[float, float], list[Run]] = {}
    for run in runs:
        grouped.setdefault(run.cell, []).append(run)
    return grouped


def best_of(runs: list[Run]) -> Run:
    """The run of least mean TTFT, among those that left the fewest requests unanswered; the oracle is no rival."""
    return min(_rivals(runs), key=lambda run: (run.report.unfinished, run.report.ttft_mean_ms))


def regret(run: Run, rivals: list[Run]) -> float:
    """How much worse the mean TTFT is than that of the best policy of the same cell; 0 for the best."""
    best = best_of(rivals).report.ttft_mean_ms
    return max(0.0, run.report.ttft_mean_ms / max(1e-9, best) - 1.0)


def oracle_regrets(runs: list[Run], policy: str = OURS) -> dict[tuple[float, float], float]:
    """By cell, how much worse the policy's mean TTFT is than that of the oracle; empty without oracle runs."""
    found = {}
    for cell, group in cells(runs).items():
        means = {run.report.policy: run.report.ttft_mean_ms for run in group}
        if policy in means and ORACLE in means:
            found[cell] = means[policy] / max(1e-9, means[ORACLE]) - 1.0
    return found


def losses(runs: list[Run], policy: str = OURS, tolerance: float = 0.02) -> list[Loss]:
    """Where the policy is behind the best one of the cell by more than the tolerance, by any of `MEASURES`."""
    found = []
    for group in cells(runs).values():
        for run in (item for item in group if item.report.policy == policy):
            for measure in MEASURES:
                best = min(_rivals(group), key=lambda item: _rank(item, measure))
                behind = _behind(measure, run, best)
                if best is not run and behind > tolerance:
                    found.append(Loss(run, best, measure, behind))
    return found


def _rivals(runs: list[Run]) -> list[Run]:
    return [run for run in runs if run.report.policy != ORACLE] or runs


def _rank(run: Run, measure: Measure) -> tuple[int, float]:
    """Order by a measure; whoever leaves requests unanswered comes last."""
    return run.report.unfinished, measure.sign * measure.value(run.report)


def _behind(measure: Measure, run: Run, best: Run) -> float:
    mine, theirs = measure.value(run.report), measure.value(best.report)
    return mine / max(theirs, 1e-9) - 1.0 if measure.sign > 0 else 1.0 - mine / max(theirs, 1e-9)
