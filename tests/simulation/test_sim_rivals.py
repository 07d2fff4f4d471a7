"""Ours against the rules of other routers, on a part of the conversation trace at the knee of its load."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from router.simulation.cluster import Faults
from router.simulation.report import SimReport
from router.simulation.simulate import simulate
from router.simulation.trace import Trace, load_trace

TRACES = Path(__file__).parents[2] / "examples" / "traces"
FAULTS = Faults(load_death=0.02, straggler=0.05, stale=0.01)


@cache
def conversation() -> Trace:
    return load_trace(TRACES / "mooncake_conversation.jsonl.xz").spread().head(2000)


@cache
def run(policy: str, rate: float = 7.0, faults: Faults | None = None) -> SimReport:
    return simulate(
        conversation(),
        nodes=16,
        preset="llama-70b",
        bandwidth_bytes_per_s=8e9,
        policy=policy,
        rate=rate,
        faults=faults,
        seed=3,
    )


def test_at_the_knee_ours_needs_four_fifths_of_the_time_of_rules_that_never_load() -> None:
    ours = run("kvpool")
    for rival in ("plain", "lmetric"):
        assert ours.ttft_mean_ms <= 0.8 * run(rival).ttft_mean_ms, rival


def test_at_the_knee_ours_beats_the_best_rule_that_loads() -> None:
    assert run("kvpool").ttft_mean_ms <= run("mooncake").ttft_mean_ms


def test_dying_and_slow_loads_and_a_stale_index_cost_at_most_a_tenth() -> None:
    clean, broken = run("kvpool", rate=6.5), run("kvpool", rate=6.5, faults=FAULTS)
    assert broken.unfinished == 0
    assert broken.ttft_mean_ms <= 1.1 * clean.ttft_mean_ms


def test_in_overload_ours_answers_sooner_and_well_more_often_than_the_best_rule_that_never_loads() -> None:
    ours, theirs = run("kvpool", rate=8.0), run("lmetric", rate=8.0)
    assert ours.ttft_mean_ms < theirs.ttft_mean_ms
    assert ours.goodput_rps > theirs.goodput_rps
