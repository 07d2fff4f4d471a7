"""The gate: when a load in flight is waited for."""

from __future__ import annotations

import pytest

from kvpool.plan import Plan, PlanKind
from workers.gate import Gate, LoadView, Rest, Verdict

MS = 1_000_000
TOKENS = 4


def gate(token_ns: int | None = MS) -> Gate:
    made = Gate(TOKENS)
    if token_ns is not None:
        made.observe(10, 10 * token_ns)
    return made


def view(*, expected_ms: int = 10, deadline_ms: int = 1000, arrived: int = 0, tail_first: bool = False) -> LoadView:
    return LoadView(0, deadline_ms * MS, expected_ms * MS, 10, tail_first, arrived)


def test_a_load_on_its_way_is_waited_for_when_it_beats_the_redo() -> None:
    assert gate().rule(view(), Rest(10, 10), 5 * MS, idle=True).verdict is Verdict.WAIT


def test_a_slow_load_is_computed_in_chunks_of_half_its_rest() -> None:
    ruling = gate().rule(view(expected_ms=100), Rest(10, 10), 0, idle=True)
    assert (ruling.verdict, ruling.tokens) == (Verdict.COMPUTE, 48)


def test_a_chunk_is_at_least_one_block() -> None:
    assert gate(token_ns=100 * MS).rule(view(expected_ms=500), Rest(1, 10), 0, idle=True).tokens == 4


def test_a_silent_source_loses_patience_with_time() -> None:
    verdicts = [gate().rule(view(), Rest(10, 10), now * MS, idle=True).verdict for now in (1, 20, 40, 45, 100)]
    assert verdicts == [Verdict.WAIT] * 3 + [Verdict.COMPUTE] * 2


def test_what_arrived_tells_the_rest() -> None:
    assert view(arrived=5).rest_ns(5, 30 * MS) == 30 * MS
    assert view(arrived=9).rest_ns(1, 90 * MS) == 10 * MS
    assert view(arrived=10).rest_ns(0, 90 * MS) == 0


def test_a_split_computes_the_front_so_that_both_ends_meet() -> None:
    """40 tokens redone in 40 ms or loaded in 40 ms: half each. Loaded in 10 ms: a fifth of the way."""
    even = gate().rule(view(expected_ms=40, tail_first=True), Rest(10, 10), 0, idle=True)
    assert (even.verdict, even.tokens) == (Verdict.COMPUTE, 20)
    fast = gate().rule(view(expected_ms=10, tail_first=True), Rest(10, 10), 0, idle=True)
    assert (fast.verdict, fast.tokens) == (Verdict.COMPUTE, 8)
    almost = gate().rule(view(arrived=30, tail_first=True), Rest(1, 1), 30 * MS, idle=True)
    assert almost.verdict is Verdict.WAIT, "the last block arrives before it could be computed"


def test_a_busy_gpu_is_left_to_others_unless_the_load_is_slower_than_the_redo() -> None:
    split = view(expected_ms=40, tail_first=True)
    assert gate().rule(split, Rest(10, 10), 0, idle=True).verdict is Verdict.COMPUTE
    assert gate().rule(split, Rest(10, 10), 0, idle=False).verdict is Verdict.WAIT
    assert gate().rule(view(expected_ms=900), Rest(10, 10), 0, idle=False).verdict is Verdict.COMPUTE
    assert gate(None).rule(view(), Rest(10, 10), 100 * MS, idle=False).verdict is Verdict.WAIT


@pytest.mark.parametrize("idle", [True, False])
def test_the_deadline_ends_every_wait(idle: bool) -> None:
    assert gate().rule(view(), Rest(10, 10), 1000 * MS, idle=idle).verdict is Verdict.GIVE_UP


def test_without_a_learned_speed_only_a_late_load_is_computed() -> None:
    assert gate(None).rule(view(), Rest(10, 10), 10 * MS, idle=True).verdict is Verdict.WAIT
    assert gate(None).rule(view(), Rest(10, 10), 11 * MS, idle=True).verdict is Verdict.COMPUTE


def test_the_speed_is_a_start_and_a_slope() -> None:
    learned = Gate(TOKENS)
    assert learned.prefill_ns(100) is None
    for tokens in (1, 512, 100, 1, 1, 1, 300):
        learned.observe(tokens, 50 * MS + tokens * 3 * MS)
    assert learned.prefill_ns(200) == pytest.approx(650 * MS, rel=0.01)
    assert learned.prefill_ns(1) == pytest.approx(53 * MS, rel=0.05), "one-token passes do not spoil the slope"


def test_passes_of_one_size_are_taken_as_proportional() -> None:
    learned = gate(MS)
    learned.observe(10, 10 * MS)
    assert learned.prefill_ns(100) == 100 * MS


def test_the_speed_never_predicts_less_for_more() -> None:
    learned = Gate(TOKENS)
    learned.observe(10, 100 * MS)
    learned.observe(100, 10 * MS)
    fit = [learned.prefill_ns(tokens) for tokens in (1, 10, 100)]
    assert fit == sorted(fit, key=lambda value: value or 0)
    assert fit[0] is not None
    assert fit[0] >= 0


def test_the_speed_follows_a_change() -> None:
    learned = gate(MS)
    for _ in range(100):
        learned.observe(10, 20 * MS)
    assert learned.prefill_ns(10) == pytest.approx(20 * MS, rel=0.01)


def test_a_plan_without_expectations_gets_a_bound_all_the_same() -> None:
    started = LoadView.starting(Plan(PlanKind.LOAD), 7, 5)
    assert started.deadline_ns > 7
    assert 0 < started.expected_ns < started.deadline_ns - 7
    planned = LoadView.starting(Plan(PlanKind.LOAD, load_deadline_ns=3000 * MS, predicted_ttft_ns=20 * MS), 0, 5)
    assert (planned.deadline_ns, planned.expected_ns) == (3000 * MS, 20 * MS)
    told = LoadView.starting(
        Plan(PlanKind.LOAD, load_deadline_ns=3000 * MS, predicted_ttft_ns=20 * MS, predicted_load_ns=70 * MS), 0, 5
    )
    assert told.expected_ns == 70 * MS


def test_a_waiting_sequence_is_looked_at_again_without_an_event() -> None:
    assert gate().review_ns(view(), 10, 2 * MS) == 4 * MS
    assert gate().review_ns(view(deadline_ms=3), 10, 2 * MS) == 3 * MS


def test_a_twin_is_judged_by_what_comes_before_its_last_block_and_by_what_it_would_compute_itself() -> None:
    """A load of ten blocks in 40 ms; two of them redone in 8 ms. They come first, or all others before them."""
    whole = view(expected_ms=40)
    assert gate().rule(whole, Rest(2, 2), 0, idle=True).verdict is Verdict.WAIT
    assert gate().rule(whole, Rest(2, 10), 0, idle=True).verdict is Verdict.COMPUTE
    half = view(expected_ms=40, arrived=5)
    assert gate().rule(half, Rest(2, 2), 20 * MS, idle=True).verdict is Verdict.WAIT
    assert gate().rule(half, Rest(2, 5), 20 * MS, idle=True).verdict is Verdict.COMPUTE
    assert gate().review_ns(whole, 2, 0) == 2 * MS, "a quarter of what its blocks should take"


def test_filling_in_blocks_beside_decodes_is_priced_by_the_time_of_a_pass() -> None:
    unknown = Gate(TOKENS)
    assert (unknown.fill_blocks(16), unknown.fill_tokens(3, 16)) == (4, 12), "as if they were computed"
    known = gate()
    assert known.fill_blocks(16) == 4
    known.fill_block_ns = MS // 10
    assert known.fill_blocks(16) == 160
    assert known.fill_tokens(160, 16) == 16
    assert known.fill_tokens(1, 16) == 1
    known.fill_block_ns = 100 * MS
    assert known.fill_blocks(16) == 4, "no dearer than computing them"
    assert known.fill_blocks(1) == 1, "somebody always gets on"
